"""Ranks on a mesh, and the groups along its axes.

The problem: with three kinds of parallelism, every collective needs to know *which* ranks it spans. Codebases that keep
the answer in module globals have dozens of them, and cannot hold two meshes.
The idea: a rank is a point in a box with named axes, dp x pp x tp. A `Group` is the line through this point along one
axis, or the plane along several. A layer gets the one `Group` it needs as an argument; a group of one rank *is* the
serial case.

Axes are given outermost first. Neighbours on the innermost axis have consecutive ranks, so they share a node and its
fast links: tp, which communicates in every layer, is innermost; dp, which communicates once per step, is outermost.

Only the members of a group make its process group. torch would name it by the number of groups that a process has, or
has ever made: as soon as two members made different groups before, each waits under a different name, forever. Here the
name follows from the ranks, the purpose, and a count of equal groups, which is the same on all members.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from math import prod
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from lib.runtime.calls import Call, Record
from lib.runtime.group import Group, check_group

timeout: timedelta | None = None  # of new process groups; torch's own without one
_made: Counter[str] = Counter()  # process groups of the same ranks and purpose


class MeshShape:
    """The arithmetic of a mesh, without processes: `MeshShape(dp=2, pp=2, tp=2)`.

    Rank numbers count along the last axis first: rank = (i_dp · p + i_pp) · t + i_tp.

    Args:
        sizes: ranks along each axis, outermost first.

    Raises:
        ValueError: a size is not an integer of at least 1.
    """

    def __init__(self, **sizes: int) -> None:
        for axis, n in sizes.items():
            if isinstance(n, bool) or not isinstance(n, int) or n < 1:
                raise ValueError(f"{axis}={n!r} must be a whole number of at least 1")
        self.sizes: Mapping[str, int] = dict(sizes)

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes, outermost first."""
        return tuple(self.sizes)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(self.sizes.values())

    def __repr__(self) -> str:
        return " x ".join(f"{axis}={n}" for axis, n in self.sizes.items()) or "one rank"

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinates of a global rank, by axis.

        Raises:
            ValueError: the mesh has no such rank.
        """
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not on a mesh of {self.size} ranks ({self})")
        here = {}
        for axis, n in reversed(self.sizes.items()):
            rank, here[axis] = divmod(rank, n)
        return {axis: here[axis] for axis in self.sizes}

    def rank(self, **coordinates: int) -> int:
        """The global rank at these coordinates; 0 on axes that are not given.

        Raises:
            ValueError: the mesh has no such axis, or no such coordinate on it.
        """
        self.check(coordinates)
        rank = 0
        for axis, n in self.sizes.items():
            i = coordinates.get(axis, 0)
            if not 0 <= i < n:
                raise ValueError(f"{axis}={i} is not on a mesh of {self}")
            rank = rank * n + i
        return rank

    def groups(self, *axes: str, among: Mapping[str, Sequence[int]] | None = None) -> list[tuple[int, ...]]:
        """All groups along these axes: ranks whose coordinates on all further axes are equal.

        Args:
            among: axis → the coordinates on it that belong to a group. Default: every rank is in a group.
        """
        among = among or {}
        self.check([*axes, *among])
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            here = self.coordinates(rank)
            if all(here[axis] in places for axis, places in among.items()):
                groups.setdefault(tuple(i for axis, i in here.items() if axis not in axes), []).append(rank)
        return [tuple(group) for group in groups.values()]

    def check(self, axes: Sequence[str] | Mapping[str, object]) -> None:
        """Raise ValueError for an axis that the mesh does not have."""
        for axis in axes:
            if axis not in self.sizes:
                raise ValueError(f"the mesh has no axis {axis!r}; it has {', '.join(self.sizes) or 'none'}")


class Mesh:
    """A mesh shape over the ranks of a run.

    The ranks of a group make it together, so ranks that build several meshes build them in the same order.

    Args:
        shape: how many ranks each axis has.
        world: the group of all ranks, from `run` or `init`.

    Raises:
        ValueError: the number of ranks in the shape differs from that in the world.

    Example:
        from lib.mesh import Mesh, MeshShape

        mesh = Mesh(MeshShape(dp=1, tp=2), world)
        tp = mesh.group("tp")
        assert (tp.size, tp.rank) == (2, world.rank) and mesh.group("dp").size == 1
    """

    def __init__(self, shape: MeshShape, world: Group) -> None:
        check_group(world)
        if shape.size != world.size:
            raise ValueError(f"{shape} needs {shape.size} ranks, but the run has {world.size}")
        if world.ranks != tuple(range(world.size)):
            raise ValueError(
                f"a mesh needs the group of all ranks, but got the ranks {world.ranks} along {world.axis}"
            )
        self.shape, self.world = shape, world
        self._made: dict[tuple[int, ...], Any] = {}  # ranks → their process group
        for axis in shape.axes:
            self.group(axis)

    def group(self, *axes: str, among: Mapping[str, Sequence[int]] | None = None) -> Group | None:
        """The group of this rank along one axis, or along several together.

        A group along several axes, or among some coordinates, is made at its first use, and all its ranks must call
        this.

        Args:
            among: as for `MeshShape.groups`. A rank with different coordinates gets None.

        Raises:
            ValueError: the mesh has no such axis.
        """
        me, groups = self.world.rank, self.shape.groups(*axes, among=among)
        long = [axis for axis in axes if self.shape.sizes[axis] > 1]
        name = "×".join(long or axes[:1])
        mine = next((ranks for ranks in groups if me in ranks), None)
        return mine and Group(name, mine, mine.index(me), self._process_group(mine, name))

    def group_of_some(self, *axes: str, among: Mapping[str, Sequence[int]] | None = None) -> Group | None:
        """As `group`, along those of these axes that the mesh has; this rank alone if it has none of them."""
        here = [axis for axis in axes if axis in self.shape.sizes]
        return self.group(*here, among=among) if here else Group("×".join(axes), (self.world.global_rank,))

    def fold(self, *axes: str, inner: int, names: tuple[str, str]) -> tuple[Group, Group]:
        """Two groups of this rank inside its group along these axes: its `inner` neighbours, and the ranks that have
        its place among theirs. So the same ranks are a plane of two axes more, for some layers alone.

        Args:
            names: the axes of the two groups, for traces.

        Raises:
            ValueError: the ranks along these axes are no multiple of `inner`.

        Source: Liu et al., 2025, arXiv 2504.14960 (parallel folding).
        """
        plane = self.group_of_some(*axes)
        if plane.size % inner:
            raise ValueError(f"{plane.size} ranks along {'×'.join(axes)} are no multiple of {inner}")
        first = plane.rank // inner * inner
        lines = plane.ranks[first : first + inner], plane.ranks[plane.rank % inner :: inner]
        places = plane.rank % inner, plane.rank // inner
        near, far = (
            Group(name, ranks, place, self._process_group(ranks, name))
            for name, ranks, place in zip(names, lines, places, strict=True)
        )
        return near, far

    def _process_group(self, ranks: tuple[int, ...], name: str) -> Any:
        """The process group of these ranks; equal groups share it under all names."""
        if len(ranks) in (1, self.world.size):
            return self.world.pg
        if ranks not in self._made:
            self._made[ranks] = process_group(ranks, name, f"{name} of {self.shape}")
        return self._made[ranks]


def second_lane(group: Group) -> Group:
    """The same ranks with a second process group: calls on the two lanes need no common order.

    Only the members call it, all of them.
    """
    pg = process_group(group.ranks, group.axis, f"a second lane of {group.axis}") if group.size > 1 else None
    return replace(group, pg=pg)


def process_group(ranks: tuple[int, ...], axis: str, purpose: str) -> dist.ProcessGroup:
    """A new process group of these global ranks, all of which call this, and no other rank.

    To make it is a call like others: the call table compares it, so ranks that make groups for different purposes in
    different orders get an error. `axis` is its name in traces.
    """
    me, n, channel = dist.get_rank(), len(ranks), new_group_of(ranks)
    what = f"{channel} for {purpose}"
    with Record(Call("new_group", None, axis, me, n, channel, ranks, what, ranks, what), time.perf_counter()).waiting:
        _made[what] += 1
        backend, store = c10d._world.pg_map[dist.group.WORLD]
        limit = timeout or c10d._get_default_timeout(dist.Backend(backend))
        more = backend, store, f"{what}, {_made[what]}"  # `dist.new_group` is this with a name of its own
        pg, _ = c10d._new_process_group_helper(n, ranks.index(me), [*ranks], *more, timeout=limit, group_desc=axis)
        c10d._world.pg_group_ranks[pg] = {rank: i for i, rank in enumerate(ranks)}
    return pg


def new_group_of(ranks: tuple[int, ...]) -> str:
    """The call that makes a process group, as the call table shows it."""
    return f"new_group(ranks {', '.join(map(str, ranks))})"
