"""Chapter 14, the step of a pipeline whose ranks differ: exercise 14.1."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

import torch

from lib.check.exercise import Data, Exercise, Mistake, each_call, formula, whole

_NAME = "uneven_step"


def _cases_inputs(generator: torch.Generator, n: int) -> list[Data]:
    """The last rank is the slowest in each: only then is the sum exact. Sums that are hidden, and that are not."""

    def seconds(low: int, high: int) -> float:
        return whole(generator, low, high) / 1000

    cases = []
    for p, hides in ((4, True), (4, False), (6, True), (3, False), (1, False)):
        blocks = [whole(generator, 5, 9) for _ in range(p)]
        block, sums = seconds(10, 30), seconds(400, 900)
        head = round(block * (max(blocks) - blocks[-1] + 1) + seconds(1, 30), 3)
        hidden = round(sums * (1.4 if hides else 0.3), 3)
        cases.append((blocks, block, head, seconds(1, 6), whole(generator, 2, 5) * p, sums, hidden))
    return [{"cases": cases}]


def _step(
    pace: Callable[[list[float]], float] = max,
    fill: Callable[[list[float], int], float] = lambda stages, m: sum(stages) - max(stages),
    head_on: Callable[[int, int], bool] = lambda rank, p: rank == p - 1,
    messages: Callable[[int], int] = lambda p: 2 if p > 1 else 0,
    exposed: Callable[[float, float], float] = lambda sums, hidden: max(0.0, sums - hidden),
) -> Callable[..., float]:
    """The seconds, with a place for each mistake."""

    def of(
        blocks: list[int], block_s: float, head_s: float, message_s: float, m: int, sums_s: float, hidden_s: float
    ) -> float:
        p = len(blocks)
        stages = [
            count * block_s + head_s * head_on(rank, p) + messages(p) * message_s for rank, count in enumerate(blocks)
        ]
        return m * pace(stages) + fill(stages, m) + exposed(sums_s, hidden_s)

    return of


def _mistake(hint: str, **wrong: Callable) -> Mistake:
    return Mistake(hint, formula(_NAME, _step(**wrong)))


UNEVEN_STEP = Exercise(
    id="14.1",
    title=_NAME,
    points=2,
    body=each_call(_NAME),
    inputs=_cases_inputs,
    reference=formula(_NAME, _step()),
    ranks=(1,),
    mistakes=(
        _mistake(
            "You add the head to every rank. Only the last rank computes it; the others wait for that rank, which is "
            "how the head costs m times its seconds.",
            head_on=lambda rank, p: True,
        ),
        _mistake(
            "The head is missing. It belongs to the last rank, and makes it the slowest one here.",
            head_on=lambda rank, p: False,
        ),
        _mistake(
            "The m microbatches run at the mean pace of the ranks. Each microbatch passes every rank, so the slowest "
            "rank sets the pace, and the others wait for it.",
            pace=fmean,
        ),
        _mistake(
            "The bubble is missing: while the pipeline fills and drains, the slowest rank waits for the first "
            "microbatch to reach it, and the others finish the last one.",
            fill=lambda stages, m: 0.0,
        ),
        _mistake(
            "You fill the pipeline p - 1 times with the slowest rank. The first microbatch reaches the last rank "
            "through the other ranks, each with its own seconds.",
            fill=lambda stages, m: (len(stages) - 1) * max(stages),
        ),
        _mistake(
            "You fill the pipeline p - 1 times with the first rank. That is right where all ranks but the last are "
            "equal. Here each has its own number of blocks.",
            fill=lambda stages, m: (len(stages) - 1) * stages[0],
        ),
        _mistake(
            "The slowest rank is counted m + 1 times: m times for its microbatches, and again in the bubble. The "
            "bubble holds the other ranks only.",
            fill=lambda stages, m: sum(stages),
        ),
        _mistake(
            "Every rank counts m times, as if one microbatch had to leave the pipeline before the next one enters. "
            "Only the slowest rank counts m times; the others work at the same time.",
            fill=lambda stages, m: m * (sum(stages) - max(stages)),
        ),
        _mistake(
            "Messages are missing. A microbatch crosses each boundary twice: an activation forward, a gradient back.",
            messages=lambda p: 0,
        ),
        _mistake(
            "You count one message per microbatch. There is one forward and one back.",
            messages=lambda p: 1 if p > 1 else 0,
        ),
        _mistake(
            "A pipeline of a single rank sends no messages: p = 1 has no boundary.",
            messages=lambda p: 2,
        ),
        _mistake(
            "You add the whole sum of the gradients. Backward hides `hidden_s` of it.",
            exposed=lambda sums, hidden: sums,
        ),
        _mistake(
            "Where backward could hide more than there is, your step becomes shorter than its computation. Hidden "
            "seconds cannot fall below zero: max(0, sums - hidden).",
            exposed=lambda sums, hidden: sums - hidden,
        ),
        _mistake(
            "The sum of the gradients is missing where backward does not hide all of it.",
            exposed=lambda sums, hidden: 0.0,
        ),
    ),
)

EXERCISES = (UNEVEN_STEP,)
