"""14.5: two constants of an unknown stack, from six of its runs."""

from collections import namedtuple
from dataclasses import replace
from functools import cache
from statistics import fmean

import numpy as np
import torch

from course.check.compare import SEEN
from course.check.edits import exercise
from course.check.exercise import several, whole
from lib.planner import Cluster, Layout4D, Stack, Training, step_s
from lib.planner.training import GPUS, PRESET_MODELS, SHARES

NEAR, NOISE, STACKS = 0.02, 0.01, 3
FOUND, HOLDS, NO_PAIR = "what the other runs say", "all are met", "no pair"

Run = namedtuple("Run", "model context global_batch layout")
SHOWN = (
    Run("llama-7b", 4096, 32, Layout4D(1, 1, 1, 8)),
    Run("llama-13b", 4096, 256, Layout4D(1, 1, 4, 8)),
    Run("llama-13b", 2048, 64, Layout4D(4, 1, 1, 4, sequence_parallel=True)),
    Run("llama-7b", 2048, 64, Layout4D(8, 1, 1, 1, zero=0, sequence_parallel=True)),
    Run("llama-70b", 4096, 1024, Layout4D(2, 1, 8, 4, sequence_parallel=True)),
    Run("gpt-175b", 2048, 1536, Layout4D(2, 1, 16, 4, sequence_parallel=True)),
)
KEPT_BACK = (
    Run("llama-13b", 2048, 128, Layout4D(1, 1, 2, 8)),
    Run("llama-13b", 2048, 32, Layout4D(8, 1, 1, 2, sequence_parallel=True)),
    Run("llama-70b", 4096, 512, Layout4D(8, 1, 4, 2, sequence_parallel=True)),
    Run("gpt-175b", 2048, 512, Layout4D(8, 1, 8, 4, sequence_parallel=True)),
    Run("llama-405b", 4096, 1024, Layout4D(4, 1, 18, 8, sequence_parallel=True)),
)


@cache
def parts_of(run):
    """Seconds of a run's step: its matmuls at the peak, its tp sums if nothing hides them, and the rest.

    All three with their part of the bubble. The step is matmuls ÷ share + exposed · tp + rest.
    """
    shape = replace(PRESET_MODELS[run.model], context=run.context)
    cluster = Cluster(GPUS["a100"], run.layout.gpus)

    def seconds(share, exposed):
        stack = Stack(share, SHARES["a100"][1], exposed_tp=exposed)
        return step_s(Training(shape, cluster, stack, run.global_batch), run.layout).total

    matmuls = seconds(0.5, 0) - seconds(1, 0)
    return {"matmuls": matmuls, "tp": seconds(1, 1) - seconds(1, 0), "rest": seconds(1, 0) - matmuls}


def predicted(row, share, exposed):
    return row["matmuls"] / share + exposed * row["tp"] + row["rest"]


def inputs(generator, n):
    # Two answers that are known by their numbers: least squares that are not relative, and those without the rest.
    stacks, in_seconds, no_rest = [], *(EXERCISE.mistakes[i].wrong.load() for i in (2, 3))
    while len(stacks) < STACKS:
        share, exposed = whole(generator, 450, 850) / 1000, whole(generator, 300, 900) / 1000
        noise = 1 + NOISE * (2 * torch.rand(len(SHOWN), generator=generator, dtype=torch.float64) - 1)
        parts = map(parts_of, SHOWN)
        rows = [p | {"measured": predicted(p, share, exposed) * x} for p, x in zip(parts, noise.tolist())]
        stack = {"rows": rows, "share": share, "exposed": exposed}
        stack |= {"in seconds": in_seconds(rows), "no rest": no_rest(rows)}
        stacks += [stack] * (tells_apart(stack) and abs(share - SHARES["a100"][0]) > NEAR)
    return [{"stacks": stacks}]


def tells_apart(stack):
    """Whether all wrong pairs miss the runs that are kept back, each in its own way."""
    _, *mistakes = EXERCISE.mistakes  # the first returns no pair
    found = [judged(stack, *mistake.wrong.load()(stack["rows"])) for mistake in mistakes]
    return HOLDS not in found and len({*found}) == len(found)


def body(answer, group, given):
    for number, stack in enumerate(given["stacks"], 1):
        result = answer([dict(row) for row in stack["rows"]])
        try:
            share, exposed = map(float, several(result, 2))
        except (TypeError, ValueError):
            return {FOUND: NO_PAIR}
        if not share > 0 or exposed != exposed:
            return {FOUND: NO_PAIR}
        found = judged(stack, share, exposed)
        if found != HOLDS:
            return {FOUND: found, SEEN: figures(number, stack, share, exposed)}
    return {FOUND: HOLDS}


def judged(stack, share, exposed):
    """By the first that holds."""

    def is_pair(name):
        return all(abs(a - b) <= 2e-3 for a, b in zip((share, exposed), stack[name], strict=True))

    alone = [run for run in KEPT_BACK if run.layout.tp == 1]
    whys = {
        HOLDS: worst(stack, KEPT_BACK, share, exposed) <= NEAR,
        "swapped": exposed > 0 and worst(stack, KEPT_BACK, exposed, share) <= NEAR,
        "the hidden fraction": worst(stack, KEPT_BACK, share, 1 - exposed) <= NEAR,
        "fitted in seconds": is_pair("in seconds"),
        "without the rest": is_pair("no rest"),
        "over the peak": share > 1,
        "more than all sums": not 0 <= exposed <= 1,
        "the book's": abs(share - SHARES["a100"][0]) < 1e-3,
        "all hidden": exposed == 0,
        "all exposed": exposed == 1,
        "the share": worst(stack, alone, share, exposed) > NEAR,
    }
    return next((why for why, holds in whys.items() if holds), "the sums")


def errors(stack, runs, share, exposed):
    """Relative, on runs that the answer has not seen."""
    rows = [parts_of(run) for run in runs]
    return [predicted(r, share, exposed) / predicted(r, stack["share"], stack["exposed"]) - 1 for r in rows]


def worst(*given):
    return max(map(abs, errors(*given)))


def figures(number, stack, share, exposed):
    lines = [f"Stack {number}, share {share:.3f}, exposed {exposed:.3f}; errors on runs that were kept back:"]
    for (model, _, _, layout), error in zip(KEPT_BACK, errors(stack, KEPT_BACK, share, exposed), strict=True):
        lines.append(f"  {model:<11} tp {layout.tp} · pp {layout.pp} · dp {layout.dp:<3}{error:>+7.1%}")
    return "\n".join(lines)


def calibrate(rows):
    measured = np.array([row["measured"] for row in rows])
    known = np.array([row["rest"] for row in rows])
    parts = np.array([(row["matmuls"], row["tp"]) for row in rows])
    slowdown, exposed = np.linalg.lstsq(parts / measured[:, None], (measured - known) / measured)[0]
    return 1 / slowdown, exposed


def one_after_the_other(rows):
    """The share where there are no sums; then the fraction where there are most."""
    alone = [row for row in rows if row["tp"] == 0]
    most = sorted(rows, key=lambda row: row["tp"] / row["measured"])[-2:]
    slowdown = fmean((row["measured"] - row["rest"]) / row["matmuls"] for row in alone)
    left = [(row["measured"] - row["rest"] - slowdown * row["matmuls"]) / row["tp"] for row in most]
    return [1 / slowdown, fmean(left)]


def by_trying(rows):
    """A grid, by the largest relative error."""
    pairs = ((i / 200, j / 50) for i in range(80, 181) for j in range(51))
    return np.array(
        min(pairs, key=lambda pair: max(abs(predicted(row, *pair) / row["measured"] - 1) for row in rows))
    )


def share_alone(rows, exposed):
    left = [(row["measured"] - row["rest"] - exposed * row["tp"]) / row["matmuls"] for row in rows]
    return 1 / fmean(left), exposed


MISTAKES = """
returns None
    Return two numbers: the share of the peak, above 0, and the exposed fraction of the sums.
1 / slowdown, exposed => exposed, 1 / slowdown
    The right numbers in the wrong order: first the share of the peak, then the fraction.
parts / measured[:, None], (measured - known) / measured => parts, measured - known
    You minimise seconds, so runs of 200 s, with hardly any tp sums, outweigh runs of 3 s.
        Minimise relative errors.
=> parts / measured[:, None], measured / measured
    You divide the whole step among matmuls and sums. `rest` is a part of it, and it is known.
        Subtract `rest` from the measured seconds first.
1 / slowdown, exposed => 1 / slowdown, 1 - exposed
    That is the fraction of the sums that computation hides.
        Return the fraction that it does not hide.
=> slowdown, exposed
    A share above 1 is faster than the GPU's peak.
        Seconds at the peak are divided by the share, which is below 1.
=> 1 / slowdown, 100 * exposed
    Your exposed fraction is not between 0 and 1.
        At 0 all sums are hidden, at 1 none is.
=> SHARES["a100"][0], 0.0
    That is the book's share, of a different stack, with other kernels.
        Calibrate a stack on its own runs.
lambda rows: share_alone(rows, 0)
    You assume that all tp sums are hidden, and the share makes up for them.
        It then depends on how much tp the calibrated runs have, and runs with more tp are predicted too fast.
lambda rows: share_alone(rows, 1)
    You assume that no tp sum is hidden, and the share makes up for it.
        Runs with more tp are then predicted too slow.
1 / slowdown, exposed => 0.9 / slowdown, exposed
    Even runs without tensor parallelism are off, so the share is wrong. There the sums are 0 s: those runs determine
    the share alone.
        Use more than one run: each is off by up to 1%.
=> 1 / slowdown, 0.3 * exposed
    Runs without tensor parallelism are predicted well, the others are not: the exposed fraction is wrong.
        Runs with much tp determine it best; in the long ones 1% of noise is more than all of their sums.
"""

EQUIVALENT = """
lambda rows: calibrate(rows[1:])
or lambda rows: calibrate(rows[:-1])
    Five runs determine both constants as well, within what the noise allows.
"""

EXERCISE = exercise(
    globals(),
    points=3,
    right=(calibrate, one_after_the_other, by_trying),
    reference=lambda given: [{FOUND: HOLDS}],
    ranks=(1,),
)
