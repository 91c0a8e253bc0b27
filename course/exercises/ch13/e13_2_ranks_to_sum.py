"""13.2: the ranks over which a parameter's gradient is a sum."""

from __future__ import annotations

from collections.abc import Callable

import torch

from course.check.exercise import Data, Exercise, Mistake, call, ranks_in, whole
from lib.mesh import Group, MeshShape

CUT = ("column weight", "column bias", "row weight")
REPLICATED = ("norm", "row bias", "positions")
TIED = "embedding"


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    """Each kind with and without sequence parallelism; the eight ranks of the chapter first, then one stage."""

    def case(sizes: dict[str, int], kind: str, slices: bool) -> tuple:
        """For a rank whose stage has such a parameter."""
        here = {axis: whole(generator, 0, size) for axis, size in sizes.items()}
        ends = {"positions": 0, TIED: (sizes["pp"] - 1) * whole(generator, 0, 2)}
        return sizes, MeshShape(**sizes).rank(**here | {"pp": ends.get(kind, here["pp"])}), kind, slices

    meshes = ({"dp": 2, "pp": 2, "tp": 2}, {"dp": 2, "pp": 4, "tp": 2}, {"pp": 3, "tp": 3, "dp": 2})
    kinds = (*CUT, *REPLICATED, TIED)
    cases = [case(sizes, kind, slices) for sizes in meshes for kind in kinds for slices in (False, True)]
    return [{"cases": [*cases, case({"dp": 3, "pp": 1, "tp": 2}, TIED, True)]}]


def body(answer: Callable, group: Group, given: Data) -> Data:
    found: Data = {}
    for sizes, *case in given["cases"]:
        ranks = ranks_in(answer(dict(sizes), *case))
        found[call("ranks_to_sum", (sizes, *case))] = str(sorted(ranks)) if isinstance(ranks, list) else ranks
    return found


# ---- right programs -------------------------------------------------------------------------------------------------


def axes_of(kind, slices):
    return ("dp", "tp") if slices and kind in REPLICATED else ("dp",)


def from_groups(sizes, rank, kind, slices):
    """A tensor, descending."""
    axes, among = axes_of(kind, slices), None
    if kind == TIED:
        axes, among = ("dp", "pp"), {"pp": (0, sizes["pp"] - 1)}
    groups = MeshShape(**sizes).groups(*axes, among=among)
    return torch.tensor(next(ranks for ranks in groups if rank in ranks)[::-1])


def by_differences(sizes, rank, kind, slices):
    """A set of ranks."""
    shape, found = MeshShape(**sizes), set()
    here = shape.coordinates(rank)
    for r in range(shape.size):
        there = shape.coordinates(r)
        tied = {"pp"} if kind == TIED and there["pp"] in (0, sizes["pp"] - 1) else set()
        if {axis for axis in there if there[axis] != here[axis]} <= {*axes_of(kind, slices)} | tied:
            found.add(r)
    return found


def along(axes_of=axes_of, stages=lambda pp, mine: (0, pp - 1), order=dict):
    """A program that sums along these axes, and a tied embedding over these stages."""

    def program(sizes, rank, kind, slices):
        shape, axes = MeshShape(**order(sizes)), axes_of(kind, slices)
        here = shape.coordinates(rank)
        places = {axis: range(n) if axis in axes else [here[axis]] for axis, n in sizes.items()}
        if kind == TIED and "pp" not in axes:
            places["pp"] = stages(sizes["pp"], here["pp"])
        ranks = range(shape.size)
        return [r for r in ranks if all(i in places[axis] for axis, i in shape.coordinates(r).items())]

    return program


# ---- wrong programs -------------------------------------------------------------------------------------------------


def with_tp(*kinds, always=False):
    """dp for all, and tp as well for these kinds."""
    return along(lambda kind, slices: ("dp", "tp") if (slices or always) and kind in kinds else ("dp",))


EXERCISE = Exercise(
    id="13.2",
    title="ranks_to_sum",
    points=2,
    body=body,
    inputs=inputs,
    ranks=(1,),
    right=(from_groups, by_differences, along()),
    mistakes=(
        Mistake(
            "With sequence parallelism you sum norms, row biases and positions over dp alone. Each tp rank applied "
            "them to its own tokens, so each has a partial gradient: dp×tp.",
            with_tp(),
        ),
        Mistake(
            "Norms are right, but with sequence parallelism row biases and positions are added to a slice of the "
            "tokens as well: their gradients are also partial on each tp rank.",
            with_tp("norm"),
        ),
        Mistake(
            "Positions are missing: with sequence parallelism a tp rank looks up only the positions of its slice, so "
            "the table's gradient is a sum over tp as well.",
            with_tp("norm", "row bias"),
        ),
        Mistake(
            "You add tp without sequence parallelism. Then all tp ranks process all tokens, and each has the full "
            "gradient of a norm already: a sum over tp makes it t times too large.",
            with_tp(*REPLICATED, always=True),
        ),
        Mistake(
            "With sequence parallelism you sum everything over tp. A cut matrix has different elements on each tp "
            "rank: gradients of different weights must not be added.",
            with_tp(*CUT, *REPLICATED, TIED),
        ),
        Mistake(
            "You treat every bias as replicated. The bias of a column layer belongs to its output features, and they "
            "are cut over tp: each rank has its own elements. Only the bias of a row layer is replicated.",
            with_tp(*REPLICATED, "column bias"),
        ),
        Mistake(
            "The embedding is tied: the first stage looks tokens up in it, the last stage multiplies with it. You sum "
            "over the replicas of one of these uses. Its gradient is the sum over both stages.",
            along(stages=lambda pp, mine: {mine}),
        ),
        Mistake(
            "You sum the tied embedding over all stages. Only the first and the last stage use it; the stages between "
            "hold no copy, and nothing to add.",
            along(stages=lambda pp, mine: range(pp)),
        ),
        Mistake(
            "The tied embedding is summed over its two stages, but not over dp. Its replicas processed different "
            "sequences, like the replicas of any parameter.",
            along(lambda kind, slices: () if kind == TIED else axes_of(kind, slices)),
        ),
        Mistake(
            "You sum over the whole world. Ranks of different stages hold different layers, and ranks along tp "
            "different shards of a matrix: an all-reduce would add gradients of unrelated weights.",
            along(lambda kind, slices: ("dp", "pp", "tp")),
        ),
        Mistake(
            "You sum over dp and pp. A pipeline's stages hold different layers: apart from the tied embedding, "
            "there is nothing to add along pp.",
            along(lambda kind, slices: (*axes_of(kind, slices), "pp")),
        ),
        Mistake(
            "You sum along the wrong axis: tp where it should be dp. Replicas, which processed different sequences, "
            "differ in their dp coordinate.",
            along(lambda kind, slices: ("tp",)),
        ),
        Mistake(
            "Right as long as the axes are dp, pp, tp. `sizes` names them from the outermost to the innermost, and "
            "the ranks are counted in that order.",
            along(order=lambda sizes: {axis: sizes[axis] for axis in ("dp", "pp", "tp")}),
        ),
    ),
)
