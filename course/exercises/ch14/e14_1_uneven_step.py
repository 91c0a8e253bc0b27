"""14.1: the step of a pipeline whose ranks differ."""

from __future__ import annotations

from functools import partial
from statistics import fmean

import numpy as np
import torch

from course.check.exercise import Data, Exercise, Mistake, each_call, whole


def inputs(generator: torch.Generator, n: int) -> list[Data]:
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


# ---- right programs -------------------------------------------------------------------------------------------------


def by_the_last_rank(blocks, block_s, head_s, message_s, m, sums_s, hidden_s):
    crossings = 2 * message_s if blocks[1:] else 0
    *others, last = (n * block_s + crossings for n in blocks)
    return (last + head_s) * m + sum(others) + (sums_s > hidden_s) * (sums_s - hidden_s)


def by_a_walk(blocks, block_s, head_s, message_s, m, sums_s, hidden_s):
    """The first microbatch passes all ranks, each later one adds the slowest; a number of numpy's."""
    stages = np.array(blocks) * block_s
    stages[-1] += head_s
    if len(blocks) > 1:
        stages += 2 * message_s
    seconds = stages.sum() + (m - 1) * stages.max()
    return seconds if hidden_s > sums_s else seconds + sums_s - hidden_s


def step(
    blocks,
    block_s,
    head_s,
    message_s,
    m,
    sums_s,
    hidden_s,
    heads=lambda p: [0] * (p - 1) + [1],
    messages=lambda p: 2 * (p > 1),
    pace=max,
    fill=lambda stages, m: sum(stages) - max(stages),
    exposed=lambda sums, hidden: max(0.0, sums - hidden),
):
    """With a place for each mistake."""
    p = len(blocks)
    stages = [b * block_s + n * head_s + messages(p) * message_s for b, n in zip(blocks, heads(p), strict=True)]
    return m * pace(stages) + fill(stages, m) + exposed(sums_s, hidden_s)


EXERCISE = Exercise(
    id="14.1",
    title="uneven_step",
    points=2,
    body=each_call("uneven_step"),
    inputs=inputs,
    ranks=(1,),
    right=(by_the_last_rank, by_a_walk, step),
    mistakes=(
        Mistake(
            "You add the head to every rank. Only the last rank computes it; the others wait for that rank, so the "
            "head costs m times its seconds.",
            partial(step, heads=lambda p: [1] * p),
        ),
        Mistake(
            "The head is missing. It belongs to the last rank, and makes it the slowest rank here.",
            partial(step, heads=lambda p: [0] * p),
        ),
        Mistake(
            "The m microbatches run at the mean pace of the ranks. Each microbatch passes every rank, so the slowest "
            "rank sets the pace, and the others wait for it.",
            partial(step, pace=fmean),
        ),
        Mistake(
            "The bubble is missing: while the pipeline fills and drains, the slowest rank waits for the first "
            "microbatch to reach it, and the others finish the last microbatch.",
            partial(step, fill=lambda stages, m: 0),
        ),
        Mistake(
            "You fill the pipeline p - 1 times with the slowest rank. The first microbatch reaches the last rank "
            "through the other ranks, each with its own seconds.",
            partial(step, fill=lambda stages, m: (len(stages) - 1) * max(stages)),
        ),
        Mistake(
            "You fill the pipeline p - 1 times with the first rank. This would be right if all ranks but the last were "
            "equal. Here each has its own number of blocks.",
            partial(step, fill=lambda stages, m: (len(stages) - 1) * stages[0]),
        ),
        Mistake(
            "The slowest rank is counted m + 1 times: m times for its microbatches, and again in the bubble. The "
            "bubble holds only the other ranks.",
            partial(step, fill=lambda stages, m: sum(stages)),
        ),
        Mistake(
            "Every rank counts m times, as if one microbatch had to leave the pipeline before the next one enters. "
            "Only the slowest rank counts m times; the others work at the same time.",
            partial(step, fill=lambda stages, m: m * (sum(stages) - max(stages))),
        ),
        Mistake(
            "Messages are missing. A microbatch crosses each boundary twice: an activation forward, a gradient back.",
            partial(step, messages=lambda p: 0),
        ),
        Mistake(
            "You count one message per microbatch. There is one forward and one back.",
            partial(step, messages=lambda p: p > 1),
        ),
        Mistake(
            "A pipeline of a single rank sends no messages: p = 1 has no boundary.",
            partial(step, messages=lambda p: 2),
        ),
        Mistake(
            "You add the whole sum of the gradients. Backward hides `hidden_s` of it.",
            partial(step, exposed=lambda sums, hidden: sums),
        ),
        Mistake(
            "Where backward could hide more than there is, your step becomes shorter than its computation. Hidden "
            "seconds cannot fall below zero: max(0, sums - hidden).",
            partial(step, exposed=lambda sums, hidden: sums - hidden),
        ),
        Mistake(
            "The sum of the gradients is missing where backward does not hide all of it.",
            partial(step, exposed=lambda sums, hidden: 0),
        ),
    ),
)
