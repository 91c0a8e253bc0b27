"""10.3: two reports of a hang; in each, one action is missing from one rank's list."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lib.check.exercise import Data, Exercise, Mistake, kind, several
from lib.mesh import Group

REPORTS = ("the first report", "the second report")
RIGHT = ("1SEND_F3", "3RECV_F2")


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    return [{}]


def body(answer: Callable, group: Group, given: Data) -> Data:
    result = answer()
    found: Data = {"what was returned": kind(result)}
    for report, action in zip(REPORTS, several(result, 2), strict=True):
        found[f"{report}: the missing action"] = str(action).strip().upper()
    return found


def instead(report: int, hint: str, *actions: str) -> list[Mistake]:
    """Mistakes that take one of these actions for the one that is missing."""
    answers = [tuple(action if i == report else RIGHT[i] for i in (0, 1)) for action in actions]
    return [Mistake(hint, lambda answer=answer: answer, about=(REPORTS[report],)) for answer in answers]


MADE = "A rank waits in this call, so the call was made. Which call should meet it on the peer?"
LATER = (
    "This action comes later in the list of its rank, which has not reached it. Find the call in which that rank waits "
    "now, and the call that should meet it."
)
NUMBER = "Microbatches are numbered from 0: a message of 16 · (k + 1) elements belongs to microbatch k."
DIRECTION = (
    "F is the direction of activations, from rank 0 to rank 3; B is the direction of gradients, back to rank 0."
)

EXERCISE = Exercise(
    id="10.3",
    title="missing_calls",
    points=2,
    body=body,
    inputs=inputs,
    ranks=(1,),
    parts=REPORTS,
    right=(lambda: RIGHT, lambda: [action.lower() for action in RIGHT]),
    mistakes=(
        *instead(0, MADE, "0RECV_B2", "1RECV_B2", "2RECV_F3", "3SEND_B2"),
        *instead(0, LATER, "1SEND_B2", "2SEND_B2", "2RECV_B2"),
        *instead(0, NUMBER, "1SEND_F4", "1SEND_F2"),
        *instead(0, DIRECTION, "1SEND_B3"),
        *instead(1, MADE, "0RECV_B1", "1RECV_B1", "2SEND_F2", "3SEND_B2"),
        *instead(1, LATER, "1SEND_B1", "2SEND_B1", "2RECV_B2"),
        *instead(1, NUMBER, "3RECV_F3"),
        *instead(1, DIRECTION, "3RECV_B2"),
    ),
)
