"""09.2: how many microbatches a rank keeps, and their bytes."""

import torch

from course.check.edits import exercise
from course.check.exercise import each_result, whole
from lib.pipeline.schedules.gpipe import gpipe
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.simulate import simulate


def inputs(generator, n):
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
        cases.append(("1F1B", inner, ranks, 1, *cases[-1][4:7], cases[-1][4] if recomputed == "all" else first))
    return [{"cases": cases}]


def kept(schedule, rank, num_ranks, num_microbatches, layers, saved, boundary, recomputed):
    count = num_microbatches
    if schedule == "1F1B":
        count = min(count, num_ranks - rank)
    if not recomputed:
        return count, count * layers * saved
    waiting = boundary + (layers - recomputed) * saved
    in_work = max(waiting, recomputed * saved)
    return count, (count - 1) * waiting + in_work


def kept_layer_by_layer(schedule, rank, ranks, m, layers, saved, boundary, recomputed):
    alive = simulate({"GPipe": gpipe, "1F1B": one_f_one_b}[schedule](ranks, m)).peak(rank)
    peak = now = alive * ((layers - recomputed) * saved + (boundary if recomputed else 0))
    for layer in range(layers, 0, -1):
        if layer == recomputed:
            now += recomputed * saved - boundary
            peak = max(peak, now)
        now -= saved
    return [alive, torch.tensor(peak)]


MISTAKES = """
in microbatches:
min(count, num_ranks - rank) => min(count, num_ranks)
    Under 1F1B every rank of yours keeps p.
        Only rank 0 waits so long for a gradient. How many does the last keep?
=> count
    Under 1F1B you keep all microbatches, as under GPipe.
        A rank runs the first backward long before the last forward.
if schedule == "1F1B": => if True:
or
count = num_microbatches => count = min(num_microbatches, num_ranks)
    Under GPipe some rank of yours keeps fewer than all microbatches.
        A rank runs backward only after all forwards, also the last rank.
min(count, num_ranks - rank) => num_ranks - rank
    You keep more microbatches than there are.
        With fewer microbatches than ranks, a rank keeps at most all of them.
=> count if count < num_ranks else num_ranks - rank
    Under 1F1B with fewer microbatches than ranks, every rank of yours keeps all of them.
        The last rank still runs each backward right after its forward: the limit by the rank also holds.
=> min(count, num_ranks) - rank
or
=> max(1, min(count, num_ranks) - rank)
    Under 1F1B with few microbatches you subtract the rank from these.
        A rank keeps min(p less its number, m).
=> min(count, num_ranks - rank - 1)
or
=> num_ranks - rank - 1
    One too few under 1F1B: that is the warmup.
        The steady state begins with one more, and even the last rank keeps one.
=> min(count, num_ranks - rank + 1)
    One too many under 1F1B.
        Ranks are counted from 0: the last rank is p - 1, and keeps one.
=> min(count, rank + 1)
    Under 1F1B you keep more near the loss.
        It is the other way round: the last rank runs each backward at once.

in all:
returns result[::-1]
    You return the bytes first.
        Return the microbatches, then the bytes.
boundary + (layers - recomputed) * saved => layers * saved
    With recomputation you keep what every layer saves.
        Of recomputed layers only the stage input waits.
if not recomputed: => if False:
    Where nothing is recomputed you count the stage input twice.
        It is among what the first layer saves: only a recomputed layer leaves it to be kept by itself.
max(waiting, recomputed * saved) => waiting
    With recomputation you count only what waits.
        Before the backward of the first layers their forward is computed again, and then all that they save exists for
        one microbatch.
=> layers * saved
    You add both halves of the microbatch that runs backward.
        When its first layers are recomputed, its later layers have run backward, and their tensors are freed: the peak
        is the larger of two moments.
=> recomputed * saved
    You count the moment of the recomputation alone.
        If few layers are recomputed, the peak is earlier: right before backward, when all later layers of the
        microbatch still have their tensors.
boundary + (layers - recomputed) * saved => boundary
max(waiting, recomputed * saved) => layers * saved
    With recomputation you recompute all layers of the stage.
        Only the first ones are; later layers keep theirs.
(layers - recomputed) * saved => recomputed * saved
max(waiting, recomputed * saved) => max(waiting, (layers - recomputed) * saved)
    You recompute the last layers, and keep the first.
        It is the other way round: the number is of the first layers.
boundary + (layers - recomputed) * saved => (layers - recomputed) * saved
    The stage input of a waiting microbatch is missing.
        Without it nothing can be recomputed: it is kept until the backward.
max(waiting, recomputed * saved) => max(waiting, boundary + recomputed * saved)
    With recomputation you count an input twice.
        The running microbatch's input is among what its first layer saves.
count * layers * saved => count * saved
    That is one layer.
        A stage has several, and each saves something of each microbatch.
"""

EXERCISE = exercise(
    globals(),
    points=2,
    right=(kept, kept_layer_by_layer),
    body=each_result("kept", "microbatches", "bytes"),
    ranks=(1,),
)
