"""Rows travel to the ranks of their experts, and home.

The problem: a rank has some tokens and some experts, and its tokens chose the experts of all ranks. How many rows go
where is known only after the router has spoken, and differs in each layer and step.

The idea: sort the rows by expert. Neighbouring experts are on one rank, so the rows for a rank lie side by side, and
one all-to-all sends them. Two things must be known before: how many rows come, and of which experts. Both are in one
table, the load of each expert on each rank, which the ranks gather: n · E numbers. At the other end rows arrive by
sender; sorted once more, those of an expert are together. The way home is the same table, read the other way.

Source: Lepikhin et al. (GShard), 2020, arXiv 2006.16668, section 3.2; Gale et al. (MegaBlocks), 2022, arXiv
2211.15841, for rows of unequal numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lib import comm
from lib.conjugate import rows_to_ranks
from lib.cost.experts import experts_of_rank
from lib.mesh import Group

Table = list[list[int]]  # rows that rank i sends to rank j


@dataclass(frozen=True)
class Dispatch:
    """Where the rows of a layer go. All ranks of the group make it together.

    Args:
        loads: [n, E], rows for each expert, of each rank.
        group: the ranks that share the experts.
    """

    loads: Tensor
    group: Group

    @classmethod
    def of(cls, load_E: Tensor, group: Group) -> Dispatch:
        """From the rows of this rank for each expert: an all-gather of E numbers."""
        with comm.label("loads"):
            return cls(comm.all_gather(load_E[None], group), group)

    @cached_property
    def rows(self) -> Table:
        """Rows that each rank sends to each."""
        n, num_experts = self.group.size, self.loads.shape[1]
        of_ranks = [experts_of_rank(num_experts, n, rank) for rank in range(n)]
        columns = [self.loads[:, mine.start : mine.stop].sum(1) for mine in of_ranks]
        return torch.stack(columns, 1).tolist()

    @cached_property
    def arriving_ne(self) -> Tensor:
        """Rows that come from each rank for each expert of this rank; [n, e]."""
        mine = experts_of_rank(self.loads.shape[1], self.group.size, self.group.rank)
        return self.loads[:, mine.start : mine.stop]

    def there(self, rows_RD: Tensor) -> Tensor:
        """Rows sorted by expert, of all experts → rows from all ranks, sorted by expert, of the experts here.

        forward: one all-to-all of rows. backward: the same on the way back.
        """
        with comm.label("dispatch"):
            return rows_to_ranks(rows_RD, self.rows, self.group)[self._order()]

    def home(self, rows_RD: Tensor) -> Tensor:
        """The reverse of `there`, which is also its transpose."""
        with comm.label("combine"):
            back = [list(column) for column in zip(*self.rows, strict=True)]
            return rows_to_ranks(rows_RD[self._order().argsort()], back, self.group)

    def _order(self) -> Tensor:
        """Of the rows as they arrive, by rank: the numbers of those of the first expert, then of the second."""
        n, e = self.arriving_ne.shape
        experts = torch.arange(e, device=self.loads.device).repeat(n)
        return experts.repeat_interleave(self.arriving_ne.flatten()).argsort(stable=True)
