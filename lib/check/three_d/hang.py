"""Chapter 13, two reports of hangs on eight ranks: exercise 13.5."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lib.check.exercise import Data, Exercise, Mistake, kind, several
from lib.mesh import Group

_NAME = "culprits"
_REPORTS = ("the first report", "the second report")
_RIGHT = ((6, "tp"), (5, "dp"))


def _nothing(generator: torch.Generator, n: int) -> list[Data]:
    return [{}]


def _culprits(answer: Callable, group: Group, given: Data) -> Data:
    result = answer()
    found: Data = {"what was returned": kind(result)}
    for report, pair in zip(_REPORTS, several(result, 2), strict=True):
        rank, axis = several(pair, 2)
        found |= {f"{report}: the rank": rank, f"{report}: the axis": axis.lower() if isinstance(axis, str) else axis}
    return found


def _reference(given: list[Data]) -> list[Data]:
    pairs = zip(_REPORTS, _RIGHT, strict=True)
    right: Data = {"what was returned": "2 results"}
    for report, (rank, axis) in pairs:
        right |= {f"{report}: the rank": rank, f"{report}: the axis": axis}
    return [right]


def _rank(report: int, *ranks: int) -> list[Callable]:
    return [lambda given, want, rank=rank: [{f"{_REPORTS[report]}: the rank": rank}] for rank in ranks]


def _axis(report: int, *axes: str) -> list[Callable]:
    """The right rank with one of these axes."""
    name, (rank, _) = _REPORTS[report], _RIGHT[report]
    return [lambda given, want, axis=axis: [{f"{name}: the rank": rank, f"{name}: the axis": axis}] for axis in axes]


def _mistakes(hint: str, answers: list[Callable]) -> list[Mistake]:
    return [Mistake(hint, answer) for answer in answers]


CULPRITS = Exercise(
    id="13.5",
    title=_NAME,
    points=2,
    body=_culprits,
    inputs=_nothing,
    reference=_reference,
    ranks=(1,),
    mistakes=(
        *_mistakes(
            "First report: rank 7 made the call that it waits in. It is the first of the program's three, of 8 "
            "elements, so rank 7 is where it should be. Who did not come?",
            _rank(0, 7),
        ),
        *_mistakes(
            "First report: rank 3 waits in the second call for rank 7, but rank 7 is also held up. Which rank does "
            "rank 7 wait for?",
            _rank(0, 3),
        ),
        *_mistakes(
            "First report: that rank waits in the last call of the step, over all ranks, and has made every call "
            "before. Most of the ranks in a report are victims: begin at the call that is earliest in the program.",
            _rank(0, 0, 1, 2, 4, 5),
        ),
        *_mistakes(
            "First report: rank 6 it is. The call that it left out is the one that rank 7 waits in: of 8 elements, in "
            "a group of ranks 6 and 7. Neighbours differ along the innermost axis, tp.",
            _axis(0, "dp", "pp", "world"),
        ),
        *_mistakes(
            "Second report: it looks like the first, but rank 5 waits with 64 elements: in the second call, not the "
            "first. That one goes over dp, and rank 4 is not on rank 5's dp group. Rank 4 has left out nothing.",
            _rank(1, 4),
        ),
        *_mistakes(
            "Second report: rank 1 waits in the second call for rank 5, its peer on dp, and rightly so. Rank 5 is in a "
            "call as well: with whom?",
            _rank(1, 1),
        ),
        *_mistakes(
            "Second report: that rank waits in the last call of the step. The mistake is earlier.",
            _rank(1, 0, 2, 3, 6, 7),
        ),
        *_mistakes(
            "Second report: rank 5 it is. It waits for rank 4, so it called along tp: that call is too many. The one "
            "that is missing is the one that rank 1 waits in: ranks 1 and 5 differ along dp.",
            _axis(1, "tp", "pp", "world"),
        ),
    ),
)

EXERCISES = (CULPRITS,)
