"""Chapter 11, several stages on each rank: exercise 11.1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lib.check.exercise import Data, Exercise, Mistake, call, whole
from lib.check.pipelines.written import KIND, STAGES, kind_text, made_by, misread, says, writes
from lib.pipeline.schedules.action import Action, Op, Schedule
from lib.pipeline.schedules.fault import Fault
from lib.pipeline.schedules.interleaved import interleaved, warmup
from lib.pipeline.schedules.one_f_one_b import in_turns
from lib.pipeline.simulate import Costs

_NAME = "interleaved"

Count = Callable[[int, int, int], int]  # of a rank, of ranks and of stages on each


def _orders_inputs(generator: torch.Generator, n: int) -> list[Data]:
    """With so many groups that each forward of the warmup is needed."""
    cases = [(2, 2 * whole(generator, 2, 4), 2)]
    cases += [(n, n * whole(generator, 3, 5), v) for n, v in ((3, 2), (4, 3))]
    half = whole(generator, 2, 5) / 2
    return [{"cases": cases, "costs": Costs(1, half, half, latency=0.25)}]


def _made(forwards: Count = warmup, group: Callable[[int, int], int] = lambda n, m: n) -> Callable:
    """With so many forwards first, of rank, ranks and stages each; in groups of so many, of ranks and microbatches."""

    def make(num_ranks: int, num_microbatches: int, v: int) -> Schedule:
        n, m = num_ranks, num_microbatches
        rows = []
        for rank in range(n):
            turns = in_turns(v * m, forwards(rank, n, v))
            rows.append(tuple(_action(rank, op, k, n, v, group(n, m)) for op, k in turns))
        return Schedule(_NAME, n * v, m, tuple(range(n)) * v, tuple(rows))

    return made_by(_NAME, make)


def _action(rank: int, op: Op, k: int, n: int, v: int, group: int) -> Action:
    """The k-th forward or backward of a rank."""
    groups, k = divmod(k, group * v)
    turn, place = divmod(k, group)
    return Action(rank + n * (turn if op == Op.F else v - 1 - turn), op, group * groups + place)


def _stages(rank_of: Callable[[int, int], list[int]]) -> Callable:
    """Who has which stage, of ranks and of stages on each."""

    def answers(given: list[Data], want: Any) -> list[Data]:
        return [{f"{call(_NAME, (n, m, v))}: {STAGES}": rank_of(n, v) for n, m, v in given[0]["cases"]}]

    return answers


INTERLEAVED = Exercise(
    id="11.1",
    title=_NAME,
    points=3,
    body=writes(_NAME, interleaved),
    inputs=_orders_inputs,
    reference=made_by(_NAME, interleaved),
    ranks=(1,),
    mistakes=(
        Mistake(
            "One stage lies behind the other on each of your ranks. Then a microbatch is done with a rank before the "
            "next rank sees it, and nothing is won. Rank r has stages r, r + P, r + 2P: a microbatch goes around.",
            _stages(lambda n, v: [stage // v for stage in range(n * v)]),
        ),
        Mistake(
            "Each rank has a single stage in yours. Here it has several: there are P times V of them.",
            _stages(lambda n, v: [*range(n)]),
        ),
        Mistake(
            "A backward comes before its own forward. Is the warmup too short? Before the first gradient can come "
            "back to its last stage, a rank has taken a whole group through all its other stages: that alone is "
            "(V-1)P forwards. If it is long enough: a turn begins with its forward, and a group comes back in the "
            "order in which it went.",
            says(_NAME, KIND, kind_text(Fault.TOO_EARLY, Op.B, Op.F)),
        ),
        Mistake(
            "Each microbatch goes through all stages of a rank before the next one starts, so a rank waits until it "
            "has been around. P of them travel together.",
            _made(group=lambda n, m: 1),
        ),
        Mistake(
            "Ranks wait for each other. Do your backwards take the rank's stages from the last one to the first? "
            "Gradients go around the other way. And the first rank has the longest warmup, not the last one.",
            says(_NAME, KIND, kind_text(Fault.CIRCLE)),
        ),
        Mistake(
            "If messages took no time, this would be as fast, and it keeps less: it is the one that the chapter tries, "
            "with half the way. Here a message takes a quarter of a stage's forward, and ranks wait for it again and "
            "again. With 2(P-r-1) forwards for the way there and back they have something else to do meanwhile.",
            _made(lambda rank, n, v: warmup(rank, n, v) - (n - rank - 1)),
        ),
        Mistake(
            "Your warmup is a whole group through all stages of the rank but the last one. The way to the last rank "
            "and back is missing, and it is longer the nearer a rank is to the first.",
            _made(lambda rank, n, v: (v - 1) * n),
        ),
        Mistake(
            "One forward too many before the first backward. It is as fast, and each rank keeps one more than it must. "
            "The forward of the first turn comes on top of the warmup.",
            _made(lambda rank, n, v: warmup(rank, n, v) + 1),
        ),
        Mistake(
            "You warm up with V groups. Through its last stage a rank takes the first group in turns already: it is "
            "V-1 in the warmup.",
            _made(lambda rank, n, v: warmup(rank, n, v) + n),
        ),
        Mistake(
            "Every rank has the warmup of rank 0. The nearer a rank is to the last one, the sooner its first gradient "
            "is there.",
            _made(lambda rank, n, v: warmup(0, n, v)),
        ),
        Mistake(
            "All forwards come before the first backward, so each rank keeps everything. Go back as soon as the first "
            "gradient can be there.",
            _made(lambda rank, n, v: 10**6),
        ),
        Mistake(
            "All forwards come before the first backward, and a stage takes all microbatches before the next one does: "
            "each rank keeps everything. Let P of them travel together, and go back as soon as the first gradient can "
            "be there.",
            _made(lambda rank, n, v: 10**6, group=lambda n, m: m),
        ),
        Mistake(
            "Backwards are missing: the cooldown. A rank that was ahead by some forwards is behind by as many "
            "backwards when the forwards are through.",
            says(_NAME, KIND, kind_text(Fault.MISSING, Op.B)),
        ),
        *misread(_NAME),
    ),
)

EXERCISES = (INTERLEAVED,)
