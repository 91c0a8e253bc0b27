"""09.2: how many microbatches a rank keeps, and their bytes."""

from __future__ import annotations

from functools import partial

import torch

from lib.check.exercise import Data, Exercise, Mistake, each_result, whole
from lib.pipeline.schedules.gpipe import gpipe
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.simulate import simulate

NAME = "kept"
COUNT, BYTES = "microbatches", "bytes"


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    """Schedule, rank, ranks, microbatches, layers of a stage, bytes that one saves, bytes of an input, recompute."""

    def case(schedule: str, rank: int, ranks: int, microbatches: int, recompute: bool) -> tuple:
        boundary = 1024 * whole(generator, 8, 100)
        layers, saved = whole(generator, 2, 9), boundary * whole(generator, 10, 30)
        return schedule, rank, ranks, microbatches, layers, saved, boundary, recompute

    cases = []
    for recompute in (False, True):
        ranks = whole(generator, 4, 12)
        inner = whole(generator, 1, ranks - 2)
        for microbatches in (whole(generator, 2 * ranks, 5 * ranks), whole(generator, 2, ranks)):
            cases += [case("GPipe", inner, ranks, microbatches, recompute)]
            cases += [case("1F1B", rank, ranks, microbatches, recompute) for rank in (0, inner, ranks - 1)]
    return [{"cases": cases}]


def kept(
    schedule,
    rank,
    ranks,
    m,
    layers,
    saved,
    boundary,
    recompute,
    gpipe=lambda rank, ranks, m: m,
    count=lambda rank, ranks, m: min(m, ranks - rank),
    again=lambda alive, layers, saved, boundary: (alive - 1) * boundary + layers * saved,
    plain=lambda alive, layers, saved: alive * layers * saved,
):
    """The answer, with a place for each mistake."""
    alive = gpipe(rank, ranks, m) if schedule == "GPipe" else count(rank, ranks, m)
    return alive, again(alive, layers, saved, boundary) if recompute else plain(alive, layers, saved)


def kept_by_simulating(schedule, rank, ranks, m, layers, saved, boundary, recompute):
    alive = simulate({"GPipe": gpipe, "1F1B": one_f_one_b}[schedule](ranks, m)).peak(rank)
    per_stage = layers * saved
    return [alive, torch.tensor(alive * boundary - boundary + per_stage if recompute else alive * per_stage)]


def counted(hint, count, **more):
    return Mistake(hint, partial(kept, count=count, **more), about=(COUNT,))


def weighed(hint, **wrong):
    return Mistake(hint, partial(kept, **wrong))


LESS = (
    "Under 1F1B with few microbatches you subtract the rank from the number of microbatches. A rank keeps the smaller "
    "of the two: p less its number, or all microbatches."
)
WARMUP = (
    "One too few under 1F1B: those are the forwards of the warmup. The first forward of the steady state is one more, "
    "and even the last rank keeps one."
)

EXERCISE = Exercise(
    id="09.2",
    title=NAME,
    points=1,
    body=each_result(NAME, COUNT, BYTES),
    inputs=inputs,
    ranks=(1,),
    right=(kept, kept_by_simulating),
    mistakes=(
        counted(
            "Under 1F1B every rank of yours keeps p. Only rank 0 does: it waits longest for the gradient of its first "
            "microbatch. How many does the last rank keep?",
            lambda rank, ranks, m: min(m, ranks),
        ),
        counted(
            "Under 1F1B you keep all microbatches, as under GPipe. A rank runs the first backward long before the last "
            "forward.",
            lambda rank, ranks, m: m,
        ),
        Mistake(
            "Under GPipe each rank keeps all microbatches: it runs backward only after all forwards, also the last "
            "rank.",
            partial(kept, gpipe=lambda rank, ranks, m: min(m, ranks - rank)),
            about=(COUNT,),
        ),
        counted(
            "You keep more microbatches than there are. With fewer microbatches than ranks, a rank keeps at most all "
            "of them.",
            lambda rank, ranks, m: ranks - rank,
        ),
        counted(
            "Under 1F1B with fewer microbatches than ranks, every rank of yours keeps all of them. The last rank still "
            "runs each backward right after its forward: the limit by the rank also holds.",
            lambda rank, ranks, m: m if m < ranks else ranks - rank,
        ),
        counted(LESS, lambda rank, ranks, m: min(m, ranks) - rank),
        counted(LESS, lambda rank, ranks, m: max(1, min(m, ranks) - rank)),
        counted(WARMUP, lambda rank, ranks, m: min(m, ranks - rank - 1)),
        counted(WARMUP, lambda rank, ranks, m: ranks - rank - 1),
        counted(
            "One too many under 1F1B. Ranks are counted from 0: the last rank is p - 1, and keeps one.",
            lambda rank, ranks, m: min(m, ranks - rank + 1),
        ),
        counted(
            "Under 1F1B you keep more the nearer a rank is to the loss. It is the other way round: the last rank runs "
            "each backward right after its forward.",
            lambda rank, ranks, m: min(m, rank + 1),
        ),
        weighed(
            "With recomputation you keep the saved tensors of every layer, for each microbatch. Only the stage input "
            "is kept for each; the rest is recomputed before its backward.",
            again=lambda alive, layers, saved, boundary: alive * layers * saved,
        ),
        weighed(
            "With recomputation you count the inputs alone. Before a backward its forward is computed again, and then "
            "all activations of its layers exist.",
            again=lambda alive, layers, saved, boundary: alive * boundary,
        ),
        weighed(
            "With recomputation you count one layer of the microbatch that runs backward. The full stage is recomputed "
            "first, so everything that its layers save exists.",
            again=lambda alive, layers, saved, boundary: (alive - 1) * boundary + saved,
        ),
        weighed(
            "With recomputation you keep the input of every layer. Here the full stage is recomputed from the stage "
            "input.",
            again=lambda alive, layers, saved, boundary: layers * ((alive - 1) * boundary + saved),
        ),
        weighed(
            "With recomputation you count an input twice. The input of the microbatch that runs backward is among the "
            "tensors that its first layer saves.",
            again=lambda alive, layers, saved, boundary: alive * boundary + layers * saved,
        ),
        weighed(
            "That is one layer. A stage has several, and each saves something of each microbatch.",
            plain=lambda alive, layers, saved: alive * saved,
        ),
    ),
)
