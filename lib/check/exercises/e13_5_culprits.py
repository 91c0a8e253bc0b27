"""13.5: the rank at fault in two reports of a hang, and the call that it failed to make."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lib.check.exercise import Data, Exercise, Mistake, kind, several, word
from lib.mesh import Group

REPORTS = FIRST, SECOND = ("the first report", "the second report")


def body(answer: Callable, group: Group, given: Data) -> Data:
    result = answer()
    found: Data = {"what was returned": kind(result)}
    for report, pair in zip(REPORTS, several(result, 2), strict=True):
        rank, axis = several(pair, 2)
        found |= {f"{report}: the rank": rank, f"{report}: the axis": word(axis)}
    return found


def culprits():
    return (6, "tp"), (5, "dp")


def culprits_in_lists():
    return [[torch.tensor(6), "TP"], [5.0, "Dp"]]


def blames(report: str, *pair: object) -> Callable:
    """This pair for a report, and the right pair for the second."""
    return lambda: [pair if r == report else right for r, right in zip(REPORTS, culprits(), strict=True)]


def ranks(hint: str, report: str, *wrong: int) -> list[Mistake]:
    """One of these ranks is named for a report."""
    return [Mistake(hint, blames(report, rank, "tp"), about=(f"{report}: the rank",)) for rank in wrong]


def axes(hint: str, report: str, rank: int, *wrong: str) -> list[Mistake]:
    """The right rank is named, with one of these axes."""
    return [Mistake(hint, blames(report, rank, axis), about=(report,)) for axis in wrong]


EXERCISE = Exercise(
    id="13.5",
    title="culprits",
    points=2,
    body=body,
    inputs=lambda generator, n: [{}],
    ranks=(1,),
    right=(culprits, culprits_in_lists),
    mistakes=(
        *ranks(
            "First report: rank 7 made the call that it waits in. It is the first of the program's three, of 8 "
            "elements, so rank 7 is where it should be. Which rank did not make that call?",
            FIRST,
            7,
        ),
        *ranks(
            "First report: rank 3 waits in the second call for rank 7, but rank 7 is also held up. Which rank does "
            "rank 7 wait for?",
            FIRST,
            3,
        ),
        *ranks(
            "First report: that rank waits in the last call of the step, over all ranks, and made every call before. "
            "Most of the ranks in a report are victims: begin at the call that is earliest in the program.",
            FIRST,
            *(0, 1, 2, 4, 5),
        ),
        *axes(
            "First report: rank 6 it is. The call that it left out is the one that rank 7 waits in: of 8 elements, in "
            "a group of ranks 6 and 7. Neighbours differ along the innermost axis, tp.",
            FIRST,
            6,
            *("dp", "pp", "world"),
        ),
        *ranks(
            "Second report: it looks like the first, but rank 5 waits with 64 elements: in the second call, not the "
            "first. That call goes over dp, and rank 4 is not in rank 5's dp group. Rank 4 has left out nothing.",
            SECOND,
            4,
        ),
        *ranks(
            "Second report: rank 1 waits in the second call for rank 5, its peer on dp, and rightly so. Rank 5 is in a "
            "call as well: with which rank?",
            SECOND,
            1,
        ),
        *ranks(
            "Second report: that rank waits in the last call of the step. The mistake is earlier.",
            SECOND,
            *(0, 2, 3, 6, 7),
        ),
        *axes(
            "Second report: rank 5 it is. It waits for rank 4, so it called along tp: that call is too many. The one "
            "that is missing is the one that rank 1 waits in: ranks 1 and 5 differ along dp.",
            SECOND,
            5,
            *("tp", "pp", "world"),
        ),
    ),
)
