"""Chapter 09, 1F1B as somebody writes it: exercise 09.1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lib.check.exercise import Data, Exercise, Mistake, call
from lib.check.pipelines.schedules import cases_inputs
from lib.check.pipelines.written import KIND, SIZES, kind_text, made_by, misread, says, size, writes
from lib.pipeline.schedules.action import Action, Op, Schedule, one_stage_each
from lib.pipeline.schedules.fault import Fault
from lib.pipeline.schedules.gpipe import gpipe
from lib.pipeline.schedules.one_f_one_b import in_turns, one_f_one_b

_NAME = "one_f_one_b"


def _inputs(generator: torch.Generator, n: int) -> list[Data]:
    """And some in which there are fewer microbatches than a warmup would like."""
    (given,) = cases_inputs(generator, n)
    return [given | {"cases": [*given["cases"], (5, 2), (6, 3)]}]


def _warmed_up(forwards: Callable[[int, int], int]) -> Callable:
    """1F1B with so many forwards first, of the number of ranks and of this rank."""

    def make(num_ranks: int, num_microbatches: int) -> Schedule:
        ranks = range(num_ranks)
        orders = [in_turns(num_microbatches, forwards(num_ranks, rank)) for rank in ranks]
        rows = [[Action(rank, op, m) for op, m in orders[rank]] for rank in ranks]
        return one_stage_each(_NAME, num_microbatches, rows)

    return made_by(_NAME, make)


def _not_limited(what: str, value: Callable[[int], Any]) -> Callable:
    """Right, but for a fact, by the number of ranks, where they warm up with P-1 microbatches and there are fewer."""

    def answers(given: list[Data], want: Any = None) -> list[Data]:
        (right,) = made_by(_NAME, one_f_one_b)(given)
        for case in given[0]["cases"]:
            title = call(_NAME, case)
            if case[1] < case[0] - 1:
                right = {name: fact for name, fact in right.items() if not name.startswith(title)}
                right[f"{title}: {what}"] = value(case[0])
        return [right]

    return answers


_NOT_LIMITED = (
    "Where there are few microbatches, the warmup takes some that do not exist. It ends when there are none left."
)

_TOO_MANY = (
    "One forward too many before the first backward. It is as fast, and each rank keeps one microbatch more than it "
    "must. How long does it take until the first gradient reaches rank r, in forwards and in ranks behind it?"
)

TURNS = Exercise(
    id="09.1",
    title=_NAME,
    points=3,
    body=writes(_NAME, one_f_one_b),
    inputs=_inputs,
    reference=made_by(_NAME, one_f_one_b),
    ranks=(1,),
    mistakes=(
        Mistake(_TOO_MANY, _warmed_up(lambda n, rank: n - rank)),
        Mistake(_TOO_MANY, _warmed_up(lambda n, rank: n - rank if rank < n - 1 else 0)),
        Mistake(
            "One forward too few before the first backward. Nothing hangs, but it is slower: a rank stands still until "
            "the first gradient is there, and then again and again. There is one forward for each rank behind it.",
            _warmed_up(lambda n, rank: max(n - rank - 2, 0)),
        ),
        Mistake(
            "There is no warmup: each rank turns round after one forward, so all wait for each other's. That is the "
            "naive pipeline.",
            _warmed_up(lambda n, rank: 0),
        ),
        Mistake(
            "Every rank has the warmup of rank 0. The nearer a rank is to the loss, the sooner the first gradient is "
            "there, and the last rank has it at once.",
            _warmed_up(lambda n, rank: n - 1),
        ),
        Mistake(
            "Twice the forwards before the first backward: that is eager 1F1B, which keeps more so that late messages "
            "cost nothing. What is asked for here is the smallest warmup that makes nobody wait.",
            _warmed_up(lambda n, rank: 2 * (n - rank - 1)),
        ),
        Mistake(
            "That is GPipe: right and as fast, but each rank keeps all microbatches. Let a rank go back with the first "
            "as soon as it can.",
            made_by(_NAME, gpipe),
        ),
        Mistake(
            "The warmup grows with the rank, and ranks wait for each other. It is the first rank that has the longest "
            "way to the loss and back.",
            says(_NAME, KIND, kind_text(Fault.CIRCLE)),
        ),
        Mistake(_NOT_LIMITED, _not_limited(SIZES, lambda n: size(n, n - 1))),
        Mistake(_NOT_LIMITED, _not_limited(KIND, lambda n: kind_text(Fault.NO_ACTION))),
        Mistake(
            "Backwards are missing: the cooldown. A rank that was ahead by some forwards is behind by as many "
            "backwards when the forwards are through.",
            says(_NAME, KIND, kind_text(Fault.MISSING, Op.B)),
        ),
        Mistake(
            "A backward comes before its own forward. The last rank has no warmup, so its first pair begins with the "
            "forward.",
            says(_NAME, KIND, kind_text(Fault.TOO_EARLY, Op.B, Op.F)),
        ),
        *misread(_NAME),
    ),
)

EXERCISES = (TURNS,)
