"""Chapter 13, over which ranks a gradient is a sum: exercise 13.2."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from lib.check.exercise import Data, Exercise, Mistake, call, formula, whole
from lib.check.three_d.mesh_groups import Sizes, ranks_in
from lib.mesh import Group, MeshShape

_NAME = "ranks_to_sum"
CUT = ("column weight", "column bias", "row weight")
REPLICATED = ("norm", "row bias", "positions")
TIED = "embedding"


def _cases_inputs(generator: torch.Generator, n: int) -> list[Data]:
    """Each kind with and without sequence parallelism; the chapter's eight ranks first, then one stage alone."""
    meshes: list[Sizes] = [{"dp": 2, "pp": 2, "tp": 2}, {"dp": 2, "pp": 4, "tp": 2}, {"pp": 3, "tp": 3, "dp": 2}]
    cases = [
        (sizes, _a_rank(generator, sizes, kind), kind, slices)
        for sizes in meshes
        for kind in (*CUT, *REPLICATED, TIED)
        for slices in (False, True)
    ]
    alone = {"dp": 3, "pp": 1, "tp": 2}
    return [{"cases": [*cases, (alone, _a_rank(generator, alone, TIED), TIED, True)]}]


def _a_rank(generator: torch.Generator, sizes: Sizes, kind: str) -> int:
    """One whose stage has such a parameter."""
    here = {axis: whole(generator, 0, size) for axis, size in sizes.items()}
    last = sizes["pp"] - 1
    here["pp"] = {"positions": 0, TIED: last * whole(generator, 0, 2)}.get(kind, here["pp"])
    return MeshShape(**sizes).rank(**here)


def _ranks_to_sum(answer: Callable, group: Group, given: Data) -> Data:
    found: Data = {}
    for sizes, *case in given["cases"]:
        ranks = ranks_in(answer(dict(sizes), *case))
        found[call(_NAME, (sizes, *case))] = str(sorted(ranks)) if isinstance(ranks, list) else ranks
    return found


def _sums(
    along: Callable[[str, bool], Collection[str]],
    stages: Callable[[str, int], Collection[int]] | None = None,
    order: Callable[[Sizes], Sizes] = dict,
) -> Callable[..., list[int]]:
    """A rule: the axes along which a kind of parameter is summed, with or without sequence parallelism.

    Args:
        stages: of a tied embedding, those that share it, from the number of all.
        order: of the axes.
    """

    def of(sizes: Sizes, rank: int, kind: str, slices: bool) -> list[int]:
        shape, axes = MeshShape(**order(sizes)), along(kind, slices)
        here = shape.coordinates(rank)
        places = {axis: range(n) if axis in axes else [here[axis]] for axis, n in sizes.items()}
        if kind == TIED and "pp" not in axes:
            places["pp"] = (stages or _ends)(sizes["pp"], here["pp"])
        ranks = range(shape.size)
        return [r for r in ranks if all(i in places[axis] for axis, i in shape.coordinates(r).items())]

    return of


def _ends(num_stages: int, stage: int) -> Collection[int]:
    return {0, num_stages - 1}


def _along(kind: str, slices: bool) -> Collection[str]:
    return ("dp", "tp") if slices and kind in REPLICATED else ("dp",)


def _with_tp(kinds: Collection[str], always: bool = False) -> Callable[[str, bool], Collection[str]]:
    """dp for all, and tp as well for these kinds."""
    return lambda kind, slices: ("dp", "tp") if (slices or always) and kind in kinds else ("dp",)


def _in_place_of_dp(kind: str, slices: bool) -> Collection[str]:
    return {"tp" if axis == "dp" else axis for axis in _along(kind, slices)}


def _as(of: Callable) -> Callable[[list[Data], Any], list[Data]]:
    return formula(_NAME, lambda *case: str(of(*case)))


RANKS_TO_SUM = Exercise(
    id="13.2",
    title=_NAME,
    points=2,
    body=_ranks_to_sum,
    inputs=_cases_inputs,
    reference=_as(_sums(_along)),
    ranks=(1,),
    mistakes=(
        Mistake(
            "With sequence parallelism you sum norms, row biases and positions over dp alone. Each tp rank applied "
            "them to its own tokens, so each has a partial gradient: dp×tp.",
            _as(_sums(_with_tp(()))),
        ),
        Mistake(
            "Norms are right, but with sequence parallelism row biases and positions are added to a slice of the "
            "tokens as well: their gradients are also partial on each tp rank.",
            _as(_sums(_with_tp(["norm"]))),
        ),
        Mistake(
            "Positions are missing: with sequence parallelism a tp rank looks up the positions of its own slice only, "
            "so the table's gradient is a sum over tp as well.",
            _as(_sums(_with_tp(["norm", "row bias"]))),
        ),
        Mistake(
            "You add tp without sequence parallelism. Then all tp ranks see all tokens, and each has the whole "
            "gradient of a norm already: a sum over tp makes it t times too large.",
            _as(_sums(_with_tp(REPLICATED, always=True))),
        ),
        Mistake(
            "With sequence parallelism you sum everything over tp. A cut matrix has different elements on each tp "
            "rank: gradients of different weights must not be added.",
            _as(_sums(_with_tp((*CUT, *REPLICATED, TIED)))),
        ),
        Mistake(
            "You treat every bias as replicated. A column layer's bias belongs to its output features, which are cut "
            "over tp: each rank has its own elements. Only the row layer's bias is whole on all.",
            _as(_sums(_with_tp((*REPLICATED, "column bias")))),
        ),
        Mistake(
            "The embedding is tied: the first stage looks tokens up in it, the last one multiplies with it. You sum "
            "over the replicas of one of these uses. Its gradient is the sum over both stages.",
            _as(_sums(_along, stages=lambda num_stages, stage: {stage})),
        ),
        Mistake(
            "You sum the tied embedding over all stages. Only the first and the last one use it; the stages between "
            "hold no copy, and nothing to add.",
            _as(_sums(_along, stages=lambda num_stages, stage: range(num_stages))),
        ),
        Mistake(
            "The tied embedding is summed over its two stages, but not over dp. Its replicas saw other rows of the "
            "batch, like those of any parameter.",
            _as(_sums(lambda kind, slices: () if kind == TIED else _along(kind, slices))),
        ),
        Mistake(
            "You sum over the whole world. Ranks of different stages hold different layers, and ranks along tp "
            "different parts of a matrix: an all-reduce would add gradients of unrelated weights.",
            _as(_sums(lambda kind, slices: ("dp", "pp", "tp"))),
        ),
        Mistake(
            "You sum over dp and pp. A pipeline's stages hold different layers: apart from the tied embedding, "
            "there is nothing to add along pp.",
            _as(_sums(lambda kind, slices: (*_along(kind, slices), "pp"))),
        ),
        Mistake(
            "You sum along the wrong axis: tp where it should be dp. Replicas, which saw other rows of the batch, "
            "differ in their dp coordinate.",
            _as(_sums(_in_place_of_dp)),
        ),
        Mistake(
            "Right as long as the axes are dp, pp, tp. `sizes` names them from the outermost to the innermost, and "
            "the ranks are counted in that order.",
            _as(_sums(_along, order=lambda sizes: {axis: sizes[axis] for axis in ("dp", "pp", "tp")})),
        ),
    ),
)

EXERCISES = (RANKS_TO_SUM,)
