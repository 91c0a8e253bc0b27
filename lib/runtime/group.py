"""The ranks that one collective spans; `lib.mesh` makes them along the axes of a mesh."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class Group:
    """The ranks that one collective spans.

    Args:
        axis: mesh axis, several axes joined by ×, or `"world"`.
        ranks: global ranks of the members, in group order.
        rank: this rank's index in `ranks`.
        pg: process group of torch.distributed; None is the default group, or a group of one rank.
    """

    axis: str = "world"
    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    pg: Any = field(default=None, repr=False, compare=False)

    @property
    def size(self) -> int:
        """The number of its ranks, n."""
        return len(self.ranks)

    @property
    def global_rank(self) -> int:
        """This rank's number among all ranks of the run."""
        return self.ranks[self.rank]

    @cached_property
    def channel(self) -> str:
        """The name of its process group in torch: the same on all its ranks, and unique.

        Raises:
            RuntimeError: outside of a run.
        """
        pg = self.pg or dist.group.WORLD
        if pg is None:
            raise RuntimeError(
                "no process groups here: start ranks with run() or init(), and destroy the groups last"
            )
        return pg.group_name


def check_group(group: object) -> None:
    """Raise TypeError for what is no `Group`, such as a process group of torch, or None."""
    if isinstance(group, Group):
        return
    given = "a process group of torch" if isinstance(group, dist.ProcessGroup) else f"{group!r}"
    raise TypeError(
        f"group must be a Group of mesh.py, but got {given}: pass `world`, which run() and init() give, a group of a "
        'Mesh such as mesh.group("dp"), or Group() for one rank'
    )


def check_rank(rank: int, group: Group, name: str, other: bool = False) -> None:
    """Raise ValueError for what is no rank of the group, or, where a message goes to a different one, this rank."""
    check_group(group)
    if not 0 <= rank < group.size:
        raise ValueError(f"{name}={rank} is not in this group of {group.size} ranks, counted from 0 inside the group")
    if other and rank == group.rank:
        raise ValueError(f"{name}={rank} is this rank itself; a message goes to a different rank of the group")
