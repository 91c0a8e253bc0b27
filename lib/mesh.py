"""Who I am: ranks on a mesh, and the groups along its axes.

The problem: three kinds of parallelism at once need to know, at every line, *which* ranks a collective spans. Codebases
that keep the answer in module globals end with dozens of them, and cannot hold two meshes.
The idea: a rank is a point of a (dp, pp, tp) box. A `Group` is the line through that point along one axis. A layer gets
the one `Group` it needs as an argument; a group of one rank *is* the serial case.

The innermost axis is tp: its neighbours have consecutive ranks, so they share a node and its fast links; dp, which
speaks once a step, is outermost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

AXES = ("dp", "pp", "tp")


@dataclass(frozen=True)
class Group:
    """The ranks that one collective spans.

    Args:
        axis: mesh axis, or `"world"`.
        ranks: global ranks of the members, in group order.
        rank: my own place in `ranks`.
        pg: process group of torch.distributed; None is the default group, and a group of one needs none.
    """

    axis: str = "world"
    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    pg: Any = field(default=None, repr=False, compare=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def global_rank(self) -> int:
        return self.ranks[self.rank]


@dataclass(frozen=True)
class MeshShape:
    """The arithmetic of a mesh, without any process: rank = (dp · PP + pp) · TP + tp.

    Raises:
        ValueError: an axis is not a whole number of at least 1.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            n = getattr(self, axis)
            if isinstance(n, bool) or not isinstance(n, int) or n < 1:
                raise ValueError(f"{axis}={n!r} must be a whole number of at least 1")

    @property
    def size(self) -> int:
        return self.dp * self.pp * self.tp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a global rank stands on each axis."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not on a mesh of {self.size} ranks ({self})")
        outer, tp = divmod(rank, self.tp)
        dp, pp = divmod(outer, self.pp)
        return {"dp": dp, "pp": pp, "tp": tp}

    def rank(self, dp: int = 0, pp: int = 0, tp: int = 0) -> int:
        """The global rank at these coordinates."""
        for axis, i in zip(AXES, (dp, pp, tp), strict=True):
            if not 0 <= i < getattr(self, axis):
                raise ValueError(f"{axis}={i} is not on a mesh of {self}")
        return (dp * self.pp + pp) * self.tp + tp

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """All groups along an axis; together they hold each rank once."""
        _check_axis(axis)
        lines: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            here = self.coordinates(rank)
            lines.setdefault(tuple(here[a] for a in AXES if a != axis), []).append(rank)
        return [tuple(line) for line in lines.values()]


class Mesh:
    """A mesh shape over the ranks of a run.

    Every rank must build it, as making a process group is itself a call that all ranks share.

    Args:
        shape: how many ranks each axis has.
        world: the group of all ranks, as `run` and `init` hand it out.

    Raises:
        ValueError: the shape needs another number of ranks than the world has.
    """

    def __init__(self, shape: MeshShape, world: Group) -> None:
        if shape.size != world.size:
            raise ValueError(
                f"dp={shape.dp} x pp={shape.pp} x tp={shape.tp} needs {shape.size} ranks, but the run has {world.size}"
            )
        if world.ranks != tuple(range(world.size)):
            raise ValueError(
                f"a mesh needs the group of all ranks, but got the ranks {world.ranks} along {world.axis}"
            )
        self.shape, self.world = shape, world
        self._groups = {axis: self._build(axis) for axis in AXES}

    def _build(self, axis: str) -> Group:
        mine = None
        for ranks in self.shape.groups(axis):
            whole = len(ranks) == self.world.size
            pg = dist.new_group(list(ranks)) if 1 < len(ranks) and not whole else self.world.pg
            if self.world.rank in ranks:
                mine = Group(axis, ranks, ranks.index(self.world.rank), pg)
        assert mine is not None
        return mine

    def group(self, axis: str) -> Group:
        """My group along an axis.

        Raises:
            ValueError: the mesh has no such axis.
        """
        _check_axis(axis)
        return self._groups[axis]


def _check_axis(axis: str) -> None:
    if axis not in AXES:
        raise ValueError(f"the mesh has no axis {axis!r}; it has {', '.join(AXES)}")
