"""09.2: how many microbatches a rank keeps, and their bytes."""

from __future__ import annotations

from functools import partial

import torch

from course.check.exercise import Data, Exercise, Mistake, each_result, whole
from lib.pipeline.schedules.gpipe import gpipe
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.simulate import simulate

NAME = "kept"
COUNT, BYTES = "microbatches", "bytes"


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    """Schedule, rank, ranks, microbatches, layers of a stage, bytes that one saves, of an input, layers recomputed."""
    cases = []
    for recomputed in ("none", "few", "most", "all"):
        ranks = whole(generator, 4, 12)
        inner = whole(generator, 1, ranks - 2)
        for microbatches in (whole(generator, 2 * ranks, 5 * ranks), whole(generator, 2, ranks)):
            for schedule, rank in (("GPipe", inner), *(("1F1B", r) for r in (0, inner, ranks - 1))):
                boundary = 1024 * whole(generator, 8, 100)
                layers, saved = whole(generator, 4, 10), boundary * whole(generator, 10, 30)
                half = layers // 2
                few, most = whole(generator, 2, half + 1), whole(generator, half + 1, layers)
                first = {"none": 0, "few": few, "most": most, "all": layers}[recomputed]
                cases.append((schedule, rank, ranks, microbatches, layers, saved, boundary, first))
    return [{"cases": cases}]


def kept(
    schedule,
    rank,
    ranks,
    m,
    layers,
    saved,
    boundary,
    recomputed,
    gpipe=lambda rank, ranks, m: m,
    count=lambda rank, ranks, m: min(m, ranks - rank),
    waits=lambda first, later, boundary: boundary + later,
    works=lambda first, later, boundary: max(boundary + later, first),
    again=lambda recomputed, layers: recomputed,
    plain=lambda alive, layers, saved: alive * layers * saved,
):
    """The answer, with a place for each mistake: `waits` and `works` are of one microbatch, by its layers' bytes."""
    alive = gpipe(rank, ranks, m) if schedule == "GPipe" else count(rank, ranks, m)
    if not recomputed:
        return alive, plain(alive, layers, saved)
    of = again(recomputed, layers) * saved, (layers - again(recomputed, layers)) * saved, boundary
    return alive, (alive - 1) * waits(*of) + works(*of)


def kept_layer_by_layer(schedule, rank, ranks, m, layers, saved, boundary, recomputed):
    alive = simulate({"GPipe": gpipe, "1F1B": one_f_one_b}[schedule](ranks, m)).peak(rank)
    peak = now = alive * ((layers - recomputed) * saved + (boundary if recomputed else 0))
    for layer in range(layers, 0, -1):
        if layer == recomputed:
            now += recomputed * saved - boundary
            peak = max(peak, now)
        now -= saved
    return [alive, torch.tensor(peak)]


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
    points=2,
    body=each_result(NAME, COUNT, BYTES),
    inputs=inputs,
    ranks=(1,),
    right=(kept, kept_layer_by_layer),
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
            "With recomputation you keep the saved tensors of every layer, for each microbatch. Of the layers that "
            "are recomputed, only the stage input is kept for each.",
            waits=lambda first, later, boundary: first + later,
            works=lambda first, later, boundary: first + later,
        ),
        weighed(
            "With recomputation you count only what waits. Before the backward of the first layers their forward is "
            "computed again, and then all that they save exists for one microbatch.",
            works=lambda first, later, boundary: boundary + later,
        ),
        weighed(
            "You add both halves of the microbatch that runs backward. When its first layers are recomputed, its "
            "later layers have run backward, and their tensors are freed: the peak is the larger of two moments.",
            works=lambda first, later, boundary: first + later,
        ),
        weighed(
            "You count the moment of the recomputation alone. If few layers are recomputed, the peak is earlier: right "
            "before backward, when all later layers of the microbatch still have their tensors.",
            works=lambda first, later, boundary: first,
        ),
        weighed(
            "With recomputation you recompute all layers of the stage. Only the first ones are; the later layers keep "
            "their tensors.",
            again=lambda recomputed, layers: layers,
        ),
        weighed(
            "You recompute the last layers of the stage, and keep the first. It is the other way round, and the number "
            "is that of the layers that are recomputed.",
            again=lambda recomputed, layers: layers - recomputed,
        ),
        weighed(
            "The stage input of a waiting microbatch is missing: without it nothing can be recomputed.",
            waits=lambda first, later, boundary: later,
            works=lambda first, later, boundary: max(later, first),
        ),
        weighed(
            "With recomputation you count an input twice. The input of the microbatch that runs backward is among the "
            "tensors that its first layer saves.",
            works=lambda first, later, boundary: boundary + max(later, first),
        ),
        weighed(
            "That is one layer. A stage has several, and each saves something of each microbatch.",
            plain=lambda alive, layers, saved: alive * saved,
        ),
    ),
)
