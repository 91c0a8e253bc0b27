"""11.2: how many stages on each rank, for given times, messages and memory."""

import torch

from course.check.edits import exercise
from course.check.exercise import each_result, whole
from lib.pipeline.schedules.action import Op
from lib.pipeline.schedules.interleaved import interleaved
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.simulate import Costs, simulate


def inputs(generator, n):
    """Ranks, microbatches, layers of a rank, times of a layer and of a message, bytes of a layer, bytes for all."""
    found = []
    for ranks, m, layers, T_F, T_B, T_message, room in (
        (4, 8, 12, 1, 2, 0.5, 70),  # neither the fewest nor the most stages
        (4, 8, 12, 1, 2, 0.5, 52),  # 2 to 6 do not fit
        (2, 8, 6, 1, 2, 1, 16),
        (4, 8, 7, 1, 2, 1.35, 60),  # a message takes longer than a forward of one layer
        (3, 6, 10, 1, 3, 1, 31),  # only 1F1B fits
        (8, 16, 6, 2, 3, 1, 62),  # 3 fit to the byte
    ):
        scale, saved = whole(generator, 5, 40) / 10, 1024 * whole(generator, 100, 900)
        times = (round(scale * time, 6) for time in (T_F, T_B, T_message))
        found.append((ranks, m, layers, *times, saved, room * saved))
    return [{"cases": found}]


def choose_stages(ranks, microbatches, layers, T_F, T_B, T_message, saved, room):
    found = []
    for v in range(1, layers + 1):
        if layers % v:
            continue
        schedule = one_f_one_b(ranks, microbatches)
        if v > 1:
            schedule = interleaved(ranks, microbatches, v)
        n = layers / v  # in a stage
        costs = Costs.of(n * T_F, n * T_B, latency=T_message)
        seen = simulate(schedule, costs)
        kept = seen.peak(0) * n * saved
        if kept <= room:
            found.append((seen.makespan, v, kept))
    step, v, kept = min(found)
    return v, step, kept


def by_hand(ranks, m, layers, T_F, T_B, T_message, saved, room):
    """The times of all actions, rank by rank, until nothing changes."""
    found = []
    for v in (v for v in range(1, layers + 1) if layers % v == 0):
        rows = (interleaved(ranks, m, v) if v > 1 else one_f_one_b(ranks, m)).actions
        ends, last = {}, ranks * v - 1
        while sum(map(len, rows)) > len(ends):
            for row in rows:
                now = 0
                for stage, op, k in row:
                    if (stage, op, k) not in ends:
                        before = (stage - 1, op, k) if op == Op.F else (stage + 1, op, k)
                        late = T_message if ranks > 1 else 0
                        if 0 <= before[0] <= last and before not in ends:
                            break
                        begin = max(now, ends[before] + late if before in ends else 0)
                        ends[stage, op, k] = begin + layers / v * (T_F if op == Op.F else T_B)
                    now = ends[stage, op, k]
        started = m if v == 1 else v * m
        kept = min(started, ranks if v == 1 else 2 * (ranks - 1) + (v - 1) * ranks + 1) * layers // v * saved
        if kept <= room:
            found.append((max(ends.values()), v, kept))
    time, v, kept = min(found)
    return [v, torch.tensor(time), float(kept)]


def by_formula(ranks, m, v, T_F, T_B, T_message):
    if v == 1:
        return (m + ranks - 1) * (T_F + T_B) + (2 * (ranks - 2) + 2 * m * (ranks - 1) / ranks) * T_message
    return interleaved_formula(ranks, m, v, T_F, T_B, T_message)


def interleaved_formula(ranks, m, v, T_F, T_B, T_message):
    return (m + (ranks - 1) / v) * (T_F + T_B) + 2 * (ranks * v - 1) * T_message


MISTAKES = """
in what was returned:
returns result[0]
    Return three numbers: the stages on each rank, the time of a step, and the bytes of rank 0.
in time of a step, bytes that rank 0 keeps, stages on each rank:
returns (result[1], result[0], result[2])
    Your three numbers are in another order. First comes the number of stages, then the time, then the bytes.
n = layers / v => n = layers / v / ranks
    `layers` is the number of layers of each rank. You divide it by the ranks as well.
        A stage has layers / v of them.
in time of a step:
Costs.of(n * T_F, n * T_B, => Costs(n * T_F, n * T_B, n * T_B,
    Each backward takes twice as long in your time: `Costs` has the times of its two halves.
        `Costs.of` takes the time of a whole backward.
Costs.of(n * T_F, n * T_B, latency=T_message) => Costs.of(T_F, T_B, latency=T_message)
    You took the times of a layer for the times of a stage.
        A stage has several layers.

in stages on each rank:
n * T_F, n * T_B, latency => layers * T_F, layers * T_B, latency
    You chose v = 1 everywhere.
        A stage has 1/v of the layers of its rank: did you divide times and bytes?

in bytes that rank 0 keeps:
seen.peak(0) => ranks * v
    You count the microbatches that 1F1B keeps, p in all layers.
        The longer warmup of the interleaved order keeps more.
=> (ranks - 1 if v == 1 else 2 * (ranks - 1) + (v - 1) * ranks)
    You count the forwards of the warmup.
        The first forward of the steady state is one more.
seen.peak(0) * n * saved => seen.peak(0) * saved
    You count short stages, and not their layers.
        Each keeps `saved` bytes for each of its layers.

in time of a step, stages on each rank:
seen.makespan => by_formula(ranks, microbatches, v, layers * T_F, layers * T_B, T_message)
or
=> interleaved_formula(ranks, microbatches, v, layers * T_F, layers * T_B, T_message)
    Your times are from the formula with 2(pv - 1) latencies.
        It holds while a message is shorter than the forward of a stage: with short stages and longer messages a rank
        waits again and again. Simulate.

in stages on each rank:
seen.makespan => by_formula(ranks, microbatches, v, layers * T_F, layers * T_B, T_message=0)
    You chose the largest v that fits, as if messages took no time. Each stage adds one to the path.
        Compare with them.
range(1, layers + 1) => range(2, layers + 1)
min(found) => min(found, default=(0, 0, 0))
    You left out v = 1.
        1F1B keeps less than any interleaved schedule, and waits less for long messages.
if layers % v: => if False:
    A stage of yours would have a fraction of a layer, or not as many as the others.
        v must divide the number of layers of a rank.
if kept <= room: => if True:
    The choice ignores memory.
        The fastest v does not always fit.
=> if kept < room:
    You refused a schedule that needs exactly the available bytes.
        It fits: compare with <=.
"""

EQUIVALENT = """
range(1, layers + 1) => range(1, (2 * (layers + 1)))
or range(1, layers + 1) => range(1, (100 * (layers + 1)))
    A number above `layers` does not divide them.
"""

EXERCISE = exercise(
    globals(),
    points=2,
    right=(choose_stages, by_hand),
    body=each_result("choose_stages", "stages on each rank", "time of a step", "bytes that rank 0 keeps"),
    ranks=(1,),
)
