"""05.3: the all-gather of the next unit is in flight while this unit computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch import distributed as dist

from course.check.exercise import ANYTHING, Data, Exercise, Mistake, random, shards_of
from course.check.listen import listen
from lib import comm
from lib.mesh import Group

UNITS, WIDTH = 5, 4
AHEAD = "each while the one before it computes"
NOT_AHEAD, NO_OVERLAP = "each just before it computes", "ahead, and waited for immediately"
ALL_FIRST, TOO_FAR = "all at the beginning", "more than one ahead"
NOT_THERE, TOO_MANY = "one that has not arrived computes", "one more than there are"


class GivenUnit:
    """What the learner is given: `shard`, a flat tensor, and `compute(whole, x)`."""

    def __init__(self, shard: Tensor, note: Callable[[], None]) -> None:
        self.shard, self._note = shard, note

    def compute(self, whole: Tensor, x: Tensor) -> Tensor:
        """The output of the unit for the input x."""
        self._note()
        return compute(whole, x)


def compute(whole: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ whole[: WIDTH * WIDTH].view(WIDTH, WIDTH))


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    units = [shards_of(random(generator, WIDTH * WIDTH), n) for _ in range(UNITS)]
    return [{"x": random(generator, 2, WIDTH), "shards": [u[r] for u in units]} for r in range(n)]


def body(answer: Callable, group: Group, given: Data) -> Data:
    starts: list[int] = []
    waits: list[int] = []
    computes: list[tuple[int, int]] = []  # at each compute, how many gathers were started, and waited for
    listen(lambda: starts.append(1), lambda: waits.append(1))
    units = [GivenUnit(s.clone(), lambda: computes.append((len(starts), len(waits)))) for s in given["shards"]]
    y = answer(given["x"].clone(), units, group)
    return {"y": y, "when units were gathered": order(computes, len(starts))}


def order(computes: list[tuple[int, int]], started: int) -> str:
    """In words; unit i is the (i+1)-th to be gathered."""
    ahead = [started - i - 1 for i, (started, _) in enumerate(computes)]
    arrived = [waited - i - 1 for i, (_, waited) in enumerate(computes)]
    if any(a < 0 for a in arrived):
        return NOT_THERE
    if started > UNITS:
        return TOO_MANY
    if ahead and ahead[0] == UNITS - 1:
        return ALL_FIRST
    if any(a > 1 for a in ahead):
        return TOO_FAR
    if not all(ahead[: UNITS - 1]):
        return NOT_AHEAD
    return NO_OVERLAP if any(arrived) else AHEAD


def reference(given: list[Data]) -> list[Data]:
    found = []
    for g in given:
        y = g["x"]
        for shards in zip(*(g["shards"] for g in given), strict=True):
            y = compute(torch.cat(shards), y)
        found.append({"y": y, "when units were gathered": AHEAD})
    return found


# ---- right programs -------------------------------------------------------------------------------------------------


def prefetched(x, units, group, ahead=1, waits=False, around=False):
    coming = {}
    for i, unit in enumerate(units):
        for j in range(i, i + ahead + 1):
            if j not in coming and (j < len(units) or around):
                coming[j] = comm.all_gather_start(units[j % len(units)].shard, group)
                if waits:
                    coming[j].wait()
        x = unit.compute(coming[i].wait(), x)
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


# ---- wrong programs -------------------------------------------------------------------------------------------------


def computes_too_early(x, units, group):
    coming = []
    for unit in units:
        buffer = torch.zeros(group.size * len(unit.shard), dtype=x.dtype)
        coming.append(comm.all_gather_start(unit.shard, group, out=buffer))
        unit.compute(buffer, x)
    for pending in coming:
        pending.wait()
    return ANYTHING


def forgets_the_last(x, units, group):
    coming = comm.all_gather_start(units[0].shard, group)
    for unit, following in zip(units, units[1:], strict=False):
        whole, coming = coming.wait(), comm.all_gather_start(following.shard, group)
        x = unit.compute(whole, x)
    coming.wait()
    return x


EXERCISE = Exercise(
    id="05.3",
    title="prefetched",
    points=2,
    body=body,
    inputs=inputs,
    reference=reference,
    right=(prefetched, prefetched_into_two_buffers),
    mistakes=(
        Mistake(
            "The output is right, and nothing overlaps: you start the all-gather of a unit when the unit is about to "
            "compute. Start the next all-gather first, and compute while it is in flight.",
            partial(prefetched, ahead=0),
        ),
        Mistake(
            "You start the next all-gather in time, and wait for it before this unit computes. Keep the result of "
            "all_gather_start, and call wait() when the next unit is about to compute.",
            partial(prefetched, waits=True),
        ),
        Mistake(
            "You start all all-gathers at the beginning. Each takes memory from its start, so the full model is in "
            "memory. Start one at a time.",
            partial(prefetched, ahead=UNITS - 1),
        ),
        Mistake(
            "You start more than the next all-gather. At most two units may be in memory: the unit that computes and "
            "the unit that arrives.",
            partial(prefetched, ahead=2),
        ),
        Mistake(
            "A unit computes before its parameters arrive, with arbitrary values in its buffer. Call wait() before "
            "compute.",
            computes_too_early,
        ),
        Mistake(
            "The output is right, but you start one all-gather too many: after the last unit there is none to "
            "prefetch.",
            partial(prefetched, around=True),
        ),
        Mistake(
            "The last unit has not computed. A loop over pairs of neighbours ends one unit too early: the last "
            "all-gather is still in flight when the loop ends.",
            forgets_the_last,
        ),
    ),
)
