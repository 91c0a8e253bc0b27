"""Between the parallel layers: a slice of the sequence for each rank, instead of the same work on all.

The problem: tensor parallelism cuts what happens inside attention and the MLP. Norms, dropout and residual sums stand
between them, on whole activations, and so every rank computes and keeps the same: 10 of the 34 bytes that a layer
keeps for each number of its input.

The idea: they treat each token by itself. So between the parallel layers let each rank have some of the tokens. The
all-reduce after a row layer is a reduce-scatter and an all-gather: do the first half there, and the second half where
the next column layer needs all tokens. What stands between the two halves is done on slices. The same bytes travel.

    whole        norm → column … row → all-reduce → dropout → + → norm → column …
    in slices    norm → all-gather → column … row → reduce-scatter → dropout → + → norm → all-gather → column …

Two things change for what stands between. A norm's weight sees only this rank's tokens, so its gradient is a term of a
sum (`partial_gradients`). And dropout must be drawn for each rank by itself, where before it had to be equal
(`each_rank_its_own`).

Source: Korthikanti et al., 2022, arXiv 2205.05198, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lib.mesh import Group
from lib.placement import split_size


@contextmanager
def each_rank_its_own(group: Group) -> Iterator[None]:
    """Inside, random numbers differ among ranks; outside, all is as before.

    Outside, ranks that began with the same seed must draw the same, as they do the same work. Inside, the seed is drawn
    outside and the rank is added to it. So all randomness follows from torch's own state: what saves and restores that,
    as an activation checkpoint does, gets the same numbers again.
    """
    seed = int(torch.randint(2**62, ()))
    with torch.random.fork_rng():
        torch.manual_seed(seed + group.rank)
        yield


class ShardedDropout(nn.Dropout):
    """Dropout of a tensor of which each rank has a part: other numbers on each rank."""

    def __init__(self, p: float, group: Group) -> None:
        super().__init__(p)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        with each_rank_its_own(self.group):
            return super().forward(x)


def dropout(p: float, group: Group, sequence_parallel: bool) -> nn.Dropout:
    """Dropout of what is whole on every rank, equal on all; or of slices, different on each."""
    return ShardedDropout(p, group) if sequence_parallel else nn.Dropout(p)


def see_slices(module: nn.Module) -> None:
    """A module that treats each token by itself sees some of them: its gradients are terms of a sum.

    It says so in `partial_gradients`.
    """
    module.partial_gradients = tuple(name for name, _ in module.named_parameters(recurse=False))


def slice_of_rank(length: int, group: Group) -> slice:
    """The tokens of a sequence that are this rank's.

    Raises:
        ValueError: the sequence cannot be cut evenly.
    """
    part = split_size(length, group, "sequence")
    return slice(group.rank * part, (group.rank + 1) * part)
