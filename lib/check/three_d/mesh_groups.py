"""Chapter 13, the groups of a mesh: exercise 13.1."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from lib.check.exercise import Data, Exercise, Mistake, but, call, formula, whole
from lib.mesh import Group, MeshShape

_NAME = "mesh_groups"
_ORDER, _ASCENDING, _MIXED = "ranks within each group", "ascending", "in another order"

Sizes = dict[str, int]


def _cases_inputs(generator: torch.Generator, n: int) -> list[Data]:
    """The chapter's eight ranks first, as the first that is wrong is shown."""
    eight, x, y = {"dp": 2, "pp": 2, "tp": 2}, whole(generator, 2, 4), whole(generator, 2, 5)
    cases: list[tuple[Sizes, tuple[str, ...]]] = [(eight, (axis,)) for axis in eight]
    cases += [({"pp": 3, "dp": x, "tp": 2}, ("dp",)), ({"dp": 2, "pp": 3, "tp": y}, ("pp",))]
    cases += [({"dp": 2, "pp": 3, "tp": y}, ("dp", "tp")), ({"tp": 2, "dp": 3, "pp": x}, ("pp", "dp"))]
    cases += [({"dp": 2, "cp": 3, "pp": 1, "tp": 2}, ("cp", "dp")), ({"dp": 3, "pp": 2}, ("dp", "pp"))]
    return [{"cases": cases}]


def ranks_in(written: Any) -> Any:
    """Ranks as whole numbers, in the order in which they were written; of a set, ascending."""
    try:
        ranks = sorted(written) if isinstance(written, (set, frozenset)) else written
        return [operator.index(rank) for rank in ranks]
    except TypeError:
        return type(written).__name__


def _mesh_groups(answer: Callable, group: Group, given: Data) -> Data:
    found: Data = {}
    ascend = True
    for sizes, axes in given["cases"]:
        written = answer(dict(sizes), axes)
        try:
            groups = [ranks_in(ranks) for ranks in written]
        except TypeError:
            groups = [type(written).__name__]
        ascend = ascend and all([*ranks] == sorted(ranks) for ranks in groups)
        found[call(_NAME, (sizes, axes))] = _text(groups)
    return found | {_ORDER: _ASCENDING if ascend else _MIXED}


def _text(groups: Sequence[Any]) -> str:
    """One form for groups that are written in any order."""
    texts = [ranks if isinstance(ranks, str) else str(sorted(ranks)) for ranks in groups]
    return " ".join(sorted(texts, key=lambda text: (len(text), text)))


def _as(of: Callable[[Sizes, tuple[str, ...]], Sequence]) -> Callable:
    return formula(_NAME, lambda sizes, axes: _text(of(sizes, axes)))


def _right(sizes: Sizes, axes: Sequence[str]) -> list[tuple[int, ...]]:
    return MeshShape(**sizes).groups(*axes)


def _first_axis_fastest(sizes: Sizes, axes: Sequence[str]) -> list[tuple[int, ...]]:
    return _right(dict(reversed(sizes.items())), axes)


def _members(sizes: Sizes, axes: Sequence[str]) -> int:
    return prod(sizes[axis] for axis in axes)


def _neighbours(sizes: Sizes, axes: Sequence[str]) -> list[range]:
    n, world = _members(sizes, axes), prod(sizes.values())
    return [range(first, first + n) for first in range(0, world, n)]


def _as_if_outermost(sizes: Sizes, axes: Sequence[str]) -> list[range]:
    world = prod(sizes.values())
    groups = world // _members(sizes, axes)
    return [range(first, world, groups) for first in range(groups)]


def _reference(given: list[Data]) -> list[Data]:
    return [{**found, _ORDER: _ASCENDING} for found in _as(_right)(given)]


MESH_GROUPS = Exercise(
    id="13.1",
    title=_NAME,
    points=2,
    body=_mesh_groups,
    inputs=_cases_inputs,
    reference=_reference,
    ranks=(1,),
    mistakes=(
        Mistake(
            "You count along the first axis first. Here the last axis is the innermost: rank + 1 is the next place on "
            "it, so tp, named last, has consecutive ranks and stays on one node.",
            _as(_first_axis_fastest),
        ),
        Mistake(
            "Every group of yours has consecutive ranks. That holds for the innermost axis only. On any other axis, "
            "neighbours are as far apart as all axes to the right of it have ranks together.",
            _as(_neighbours),
        ),
        Mistake(
            "You treat every axis as the outermost: the members of each group are world/n ranks apart. Between two "
            "neighbours on an axis are only the ranks of the axes to the right of it.",
            _as(_as_if_outermost),
        ),
        Mistake(
            "You return the group of rank 0 alone. Making a process group is a call that all ranks share, for all "
            "groups: each rank needs the list of all of them.",
            _as(lambda sizes, axes: _right(sizes, axes)[:1]),
        ),
        Mistake(
            "Each group appears as often as it has members: you made one for every rank. Ranks that differ only along "
            "the axes asked for share one group.",
            _as(lambda sizes, axes: [ranks for ranks in _right(sizes, axes) for _ in ranks]),
        ),
        Mistake(
            "You made the groups of everything but the axes asked for. Along an axis, the coordinate on that axis "
            "differs, and all others agree.",
            _as(lambda sizes, axes: _right(sizes, [axis for axis in sizes if axis not in axes])),
        ),
        *(
            Mistake(
                "Of several axes you take only one. A joint group is a plane: it holds every combination of "
                "coordinates on the axes asked for, n₁ · n₂ ranks.",
                _as(lambda sizes, axes, one=one: _right(sizes, [axes[one]])),
            )
            for one in (0, -1)
        ),
        Mistake(
            "For several axes your groups overlap: you return the lines along each axis. A gradient that is summed "
            "over dp×tp needs one group with all n₁ · n₂ ranks, and each rank is in exactly one.",
            _as(lambda sizes, axes: [ranks for axis in axes for ranks in _right(sizes, [axis])]),
        ),
        Mistake(
            "The groups are right, but within a joint group the ranks do not ascend. The place in that list is the "
            "rank within the group: if it depends on the order in which the axes are named, dp×tp and tp×dp cut a "
            "tensor differently.",
            but(**{_ORDER: _MIXED}),
        ),
    ),
)

EXERCISES = (MESH_GROUPS,)
