"""04.6: three runs of a ZeRO-2 program that one rank ran with a changed line: which rank, and which change?"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lib.check.exercise import Data, Exercise, Mistake, kind, several, word
from lib.mesh import Group

RIGHT = {"A": (2, "b"), "B": (1, "d"), "C": (3, "e")}
WHATS = RANK, CHANGE = "the rank", "the change"


def body(answer: Callable, group: Group, given: Data) -> Data:
    result = answer()
    found: Data = {"what was returned": kind(result)}
    for run, pair in zip(RIGHT, several(result, len(RIGHT)), strict=True):
        rank, change = several(pair, 2)
        found |= {f"run {run}: {RANK}": rank, f"run {run}: {CHANGE}": word(change)}
    return found


def find_changes():
    return [*RIGHT.values()]


def find_changes_in_other_types():
    return tuple((torch.tensor(rank), change.upper()) for rank, change in RIGHT.values())


def ranks(run: str, hint: str, *wrong: int) -> list[Mistake]:
    """One of these ranks is named for a run."""
    return [named(run, RANK, (rank, RIGHT[run][1]), hint) for rank in wrong]


def changes(run: str, hint: str, letters: str) -> list[Mistake]:
    """One of these changes is named for a run."""
    return [named(run, CHANGE, (RIGHT[run][0], letter), hint) for letter in letters]


def named(run: str, what: str, pair: tuple[int, str], hint: str) -> Mistake:
    return Mistake(f"Run {run}: {hint}", lambda: [*(RIGHT | {run: pair}).values()], about=(f"run {run}: {what}",))


EQUAL_MODELS = "with that change one rank would keep its first weights, and its model would differ from the others."

EXERCISE = Exercise(
    id="04.6",
    title="find_changes",
    points=2,
    body=body,
    inputs=lambda generator, n: [{}],
    ranks=(1,),
    right=(find_changes, find_changes_in_other_types),
    mistakes=(
        *ranks("A", "rank 0 owns the first 13 weights, all of up.weight. No weight of up.weight differs.", 0),
        *ranks(
            "A",
            "rank 1 owns 11 weights of up.weight and the first 2 of up.bias. In up.bias 4 of 6 differ, and in "
            "up.weight none.",
            1,
        ),
        *ranks(
            "A",
            "rank 3 owns half of down.weight, all of down.bias, and the padding. Nothing in down.bias differs, and 4 "
            "weights of up.bias do.",
            3,
        ),
        *changes(
            "A", "with that change step 2 would add to the gradients of step 1. The norm of step 2 is right.", "a"
        ),
        *changes(
            "A",
            "that change is in the gradient of a rank before it is reduced. All gradients are right in both steps.",
            "cdh",
        ),
        *changes(
            "A",
            "step 1 is right, and its norm is above 0.5: it was clipped. A wrong factor would be seen there.",
            "e",
        ),
        *changes("A", "with that change no rank gets the new shard in step 1. All weights of step 1 are right.", "f"),
        *changes("A", EQUAL_MODELS, "g"),
        *ranks(
            "B",
            "the gradients of that rank are right in step 1. In step 2 they differ because all weights do. Look for "
            "the first number that differs.",
            *(0, 2, 3),
        ),
        *changes(
            "B",
            "with that change both gradients of step 1 would be twice as large: both losses are not divided. The first "
            "gradient is right.",
            "c",
        ),
        *changes("B", "with that change both gradients of step 1 would come from rank 2. The first is its own.", "h"),
        *changes(
            "B",
            "that change acts on a shard, after the reduce-scatter. Here a gradient is wrong before it is sent, in "
            "step 1.",
            "abef",
        ),
        *changes("B", EQUAL_MODELS, "g"),
        *ranks(
            "C",
            "no weight in the shard of that rank differs after step 1. Count along the flat parameter: each rank owns "
            "13 elements.",
            *(0, 1, 2),
        ),
        *changes(
            "C",
            "that change makes no difference in step 1: sums begin with zeros there, and the momentum is empty. Step "
            "1 is wrong.",
            "ab",
        ),
        *changes(
            "C",
            "that change is in the gradient of a rank before it is reduced. All gradients of step 1 are right, and "
            "so is their norm.",
            "cdh",
        ),
        *changes(
            "C",
            "with that change the 12 weights of the shard would be the old ones. Step 1 changed all 51 weights.",
            "f",
        ),
        *changes("C", EQUAL_MODELS, "g"),
    ),
)
