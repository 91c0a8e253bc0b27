"""05.3: the all-gather of the next unit is in flight while this unit computes."""

import weakref
from functools import partial
from types import SimpleNamespace

import torch
from torch import distributed as dist

from course.check.compare import ANYTHING
from course.check.edits import exercise
from course.check.exercise import random, shards_of
from course.check.listen import listen
from course.exercises.ch05.e05_2_recomputed_unit import soon
from lib import comm
from lib.memory import MemoryTracker

UNITS, WIDTH = 6, 12
AHEAD = "each while the one before it computes"
WHEN, STAYS = "when units were gathered", "what stays there while a unit computes"
TWO, DONE, MANY = "this unit, and the next", "units that have computed, too", "room for four units or more"
MOST = 3.6  # units: this one in parts and joined, the next one, and what else is in memory
FACTS = {WHEN: AHEAD, STAYS: TWO}


def compute(whole, x):
    return torch.tanh(x @ whole[: WIDTH * WIDTH].view(WIDTH, WIDTH))


def inputs(generator, n):
    units = [shards_of(random(generator, WIDTH * WIDTH), n) for _ in range(UNITS)]
    return [{"x": random(generator, 2, WIDTH), "shards": [u[r] for u in units]} for r in range(n)]


def body(answer, group, given):
    starts, waits, storages, memory = [], [], [], MemoryTracker()
    computes = []  # at each compute, how many gathers were started, and waited for
    listen(lambda call: starts.append(1), lambda call: waits.append(1))
    stays, room = TWO, MOST * group.size * given["shards"][0].nbytes

    def noted(whole, x):
        nonlocal stays
        computes.append((len(starts), len(waits)))
        this = whole.untyped_storage()
        # With two buffers, the next unit may arrive in that of the unit before: only the others must be free.
        others = [one for one in storages[:-1] if one() is not this and one() is not storages[-1]()]
        if stays == TWO and not soon(lambda: all(one() is None for one in others)):
            stays = DONE
        elif stays == TWO and not soon(lambda: memory.live["activation"] <= room):
            stays = MANY
        storages.append(weakref.ref(this))
        return compute(whole, x)

    units = [SimpleNamespace(shard=shard.clone(), compute=noted) for shard in given["shards"]]
    memory.count_as("parameter", *(unit.shard for unit in units))
    with memory:
        y = answer(given["x"].clone(), units, group)
    return {"y": y, WHEN: order(computes, len(starts)), STAYS: stays}


def order(computes, started):
    """In words; unit i is the (i+1)-th to be gathered."""
    ahead = [started - i - 1 for i, (started, _) in enumerate(computes)]
    arrived = [waited - i - 1 for i, (_, waited) in enumerate(computes)]
    if any(a < 0 for a in arrived):
        return "one that has not arrived computes"
    if started > UNITS:
        return "one more than there are"
    if ahead and ahead[0] == UNITS - 1:
        return "all at the beginning"
    if any(a > 1 for a in ahead):
        return "more than one ahead"
    if not all(ahead[: UNITS - 1]):
        return "each just before it computes"
    return "ahead, and waited for immediately" if any(arrived) else AHEAD


def reference(given):
    ys = [g["x"] for g in given]
    for shards in zip(*(g["shards"] for g in given), strict=True):
        ys = [compute(torch.cat(shards), y) for y in ys]
    return [{"y": y} for y in ys]


def prefetched(x, units, group):
    coming = comm.all_gather_start(units[0].shard, group)
    for i, unit in enumerate(units):
        whole = coming.wait()
        if i + 1 < len(units):
            coming = comm.all_gather_start(units[i + 1].shard, group)
        x = unit.compute(whole, x)
    return x


def prefetched_into_two_buffers(x, units, group):
    buffers = [torch.empty(group.size * len(units[0].shard), dtype=x.dtype) for _ in "12"]
    places = [list(buffer.chunk(group.size)) for buffer in buffers]
    works = [dist.all_gather(places[0], units[0].shard, async_op=True)]
    for i, unit in enumerate(units):
        works[i].wait()
        if i + 1 < len(units):
            works.append(dist.all_gather(places[1 - i % 2], units[i + 1].shard, async_op=True))
        x = unit.compute(buffers[i % 2], x)
    return x


def several_ahead(x, units, group, ahead):
    coming = []
    for i, unit in enumerate(units):
        coming += [comm.all_gather_start(u.shard, group) for u in units[len(coming) : i + 1 + ahead]]
        x = unit.compute(coming[i].wait(), x)
    return x


def in_parts(x, units, group, keep):
    """As in torch.distributed: a list of parts for each unit, of which the last `keep` stay."""
    coming = []

    def start(unit):
        parts = [torch.empty_like(unit.shard) for _ in range(group.size)]
        coming.append((parts, dist.all_gather(parts, unit.shard, async_op=True)))

    start(units[0])
    for i, unit in enumerate(units):
        parts, work = coming[-1]
        work.wait()
        whole = torch.cat(parts)
        del coming[:-keep], work
        if i + 1 < len(units):
            start(units[i + 1])
        x = unit.compute(whole, x)
    return x


MISTAKES = """
coming = comm.all_gather_start(units[0].shard, group) => kept, coming = [], comm.all_gather_start(units[0].shard, group)
whole = coming.wait() => whole = coming.wait(); kept.append(whole)
    The output is right, and each unit comes at the right time, but units that have computed stay in memory: at the end
    the full model.
        Hold a gathered tensor, and its handle, in one name that the next one takes over, not in a list.
partial(in_parts, keep=UNITS)
    The output is right, and each unit comes at the right time, but four times the memory of a unit, or more, is in use
    while one computes.
        Use the memory of a unit that has computed for another one: no buffers for all units, and no list of the parts
        of each.
in y, when:
whole = coming.wait() => x = unit.compute(coming.wait(), x)
x = unit.compute(whole, x) =>
    The output is right, and nothing overlaps: you start the all-gather of a unit when the unit is about to compute.
        Start the next all-gather first, and compute while it is in flight.
x = unit.compute(whole, x) => coming.wait(); x = unit.compute(whole, x)
    You start the next all-gather in time, and wait for it before this unit computes.
        Keep the result of all_gather_start, and call wait() when the next unit is about to compute.
partial(several_ahead, ahead=UNITS - 1)
    You start all all-gathers at the beginning. Each takes memory from then on: the full model.
        Start one at a time.
partial(several_ahead, ahead=2)
    You start more than the next all-gather.
        At most two units may be in memory: the one that computes and the next.
whole = coming.wait() => unit.compute(unit.shard.repeat(group.size), x); coming.wait()
x = unit.compute(whole, x) =>
returns ANYTHING
    A unit computes before its parameters arrive, with arbitrary values in its buffer.
        Call wait() before compute.
if i + 1 < len(units): => if True:
units[i + 1] => units[(i + 1) % len(units)]
    The output is right, but you start one all-gather too many.
        After the last unit there is none to prefetch.
enumerate(units) => enumerate(units[:-1])
    The last unit has not computed.
        A loop over pairs of neighbours ends one unit early, its all-gather still in flight.
"""

EXERCISE = exercise(globals(), points=2, right=(prefetched, prefetched_into_two_buffers, partial(in_parts, keep=1)))
