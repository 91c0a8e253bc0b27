"""Chapter 08, GPipe as somebody writes it: exercise 08.3."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from lib.check.exercise import Data, Exercise, Mistake, whole
from lib.check.pipelines.written import KIND, ORDERS, UNLIKE, Make, kind_text, made_by, misread, says, writes
from lib.pipeline.schedules.action import Op, Schedule
from lib.pipeline.schedules.fault import Fault
from lib.pipeline.schedules.gpipe import gpipe, naive
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.simulate import Costs

_NAME = "gpipe"


def cases_inputs(generator: torch.Generator, n: int) -> list[Data]:
    """Small ones first, as they are shown when they are wrong."""
    several = [(ranks, whole(generator, *range_)) for ranks, range_ in ((2, (2, 5)), (3, (4, 7)), (4, (6, 10)))]
    half = whole(generator, 2, 5) / 2
    return [{"cases": [*several, (1, 3)], "costs": Costs(1, half, half)}]


def _other_way_round(num_ranks: int, num_microbatches: int) -> Schedule:
    right = gpipe(num_ranks, num_microbatches)
    return replace(right, rank_of=right.rank_of[::-1], actions=right.actions[::-1])


def _made(make: Make) -> Callable:
    return made_by(_NAME, make)


GPIPE = Exercise(
    id="08.3",
    title=_NAME,
    points=2,
    body=writes(_NAME, gpipe),
    inputs=cases_inputs,
    reference=_made(gpipe),
    ranks=(1,),
    mistakes=(
        Mistake(
            "A rank lacks a backward. Each stage has weights that want a gradient, so each microbatch goes back "
            "through all of them.",
            says(_NAME, KIND, kind_text(Fault.MISSING, Op.B)),
        ),
        Mistake(
            "Nothing goes backward: that is an evaluation. Behind its forwards each rank has as many backwards.",
            _made(lambda *case: gpipe(*case).forward_only()),
        ),
        Mistake(
            "That is 1F1B: right, as fast, and it keeps less. GPipe begins to go back only when all microbatches have "
            "gone forward. It is what you are asked to write here; 1F1B is chapter 9.",
            _made(one_f_one_b),
        ),
        Mistake(
            "A microbatch comes back before the next one goes forward. That is right and slow: look how the ranks wait "
            "for each other. Let all go forward first.",
            _made(naive),
        ),
        Mistake(
            "Ranks go back in different orders. Nothing is wrong with any of the orders, but a rank can only go back "
            "with what the rank behind it has done: one and the same order makes nobody wait.",
            says(_NAME, ORDERS, UNLIKE),
        ),
        Mistake(
            "One microbatch is missing. There are M of them, and the last one is number M - 1.",
            _made(lambda ranks, microbatches: gpipe(ranks, microbatches - 1)),
        ),
        Mistake(
            "There is one microbatch too many. There are M of them, and the first one is number 0.",
            _made(lambda ranks, microbatches: gpipe(ranks, microbatches + 1)),
        ),
        Mistake(
            "A backward comes before its own forward. It uses what forward has left behind.",
            says(_NAME, KIND, kind_text(Fault.TOO_EARLY, Op.B, Op.F)),
        ),
        Mistake(
            "The stages are the other way round. Rank 0 has the first one, where the rows come in.",
            _made(_other_way_round),
        ),
        *misread(_NAME),
    ),
)

EXERCISES = (GPIPE,)
