"""03.3: averages of gradients in buckets, sent while backward goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice

import torch
from torch import Tensor
from torch import distributed as dist

from course.check.exercise import Data, Exercise, Mistake, everywhere, random
from course.check.listen import listen
from lib import comm
from lib.mesh import Group

STREAM = ((4,), (2, 3), (3,), (5, 4), (4, 2), (2,), (3, 3), (2,))
ROOM = 12  # elements in a bucket

RIGHT = "each bucket as it fills"
ONE_EACH = "one message for each gradient"
AT_THE_END = "all messages after the last gradient"
WAITS = "a wait before the last gradient"
OVERRUN = "buckets that hold more than they may"
LATE = "buckets that leave later than they could"


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    return [{"gradients": [random(generator, *shape) for shape in STREAM]} for _ in range(n)]


def buckets(overrun: bool = False) -> list[tuple[int, int]]:
    """First gradient of each bucket, and the one after its last; with `overrun`, each takes one that does not fit."""
    found, start, held = [], 0, 0
    for i, shape in enumerate(STREAM):
        size = torch.Size(shape).numel()
        if i > start and held + size > ROOM and not overrun:
            found.append((start, i))
            start, held = i, 0
        held += size
        if held >= ROOM:
            found.append((start, i + 1))
            start, held = i + 1, 0
    return found + [(start, len(STREAM))] * (start < len(STREAM))


def body(answer: Callable, group: Group, given: Data) -> Data:
    made = 0  # gradients that backward made so far
    starts: list[int] = []  # at each start of a communication, how many were made
    waits: list[int] = []

    def backward() -> Iterator[Tensor]:
        nonlocal made
        for g in given["gradients"]:
            made += 1
            yield g.clone()
        made += 1  # the end

    listen(lambda: starts.append(made), lambda: waits.append(made))
    averages = answer(backward(), ROOM * 8, group)
    averages = None if averages is None else list(averages)
    return {"averages": averages, "what was sent when": describe(starts, waits)}


def describe(starts: list[int], waits: list[int]) -> str:
    end = len(STREAM) + 1
    if any(made < end for made in waits):
        return WAITS
    if len(starts) == len(STREAM):
        return ONE_EACH
    if all(made == end for made in starts):
        return AT_THE_END
    for some, name in ((buckets(), RIGHT), (buckets(overrun=True), OVERRUN)):
        # A bucket leaves with its last gradient, or when the next one turns out not to fit.
        if all_pairs(lambda made, bucket: bucket[1] <= made <= bucket[1] + 1, starts, some):
            return name
    if all_pairs(lambda made, bucket: made >= bucket[1], starts, buckets()):
        return LATE
    return f"{len(starts)} messages where {len(buckets())} do"


def all_pairs(holds: Callable, some: list, others: list) -> bool:
    return len(some) == len(others) and all(map(holds, some, others))


def reference(given: list[Data]) -> list[Data]:
    averages = [torch.stack(same).mean(0) for same in zip(*(g["gradients"] for g in given), strict=True)]
    return everywhere({"averages": averages, "what was sent when": RIGHT}, given)


# ---- programs -------------------------------------------------------------------------------------------------------


def overlapped(
    gradients: Iterable,
    bucket_bytes: float,
    group: Group,
    op: str = "mean",
    when: str = "full",
    waits: bool = False,
    last: str = "sent",
    start: Callable = comm.all_reduce_start,
) -> list[Tensor]:
    sent, bucket, held = [], [], 0

    def send() -> None:
        nonlocal bucket, held
        sent.append((bucket, start(torch.cat([g.flatten() for g in bucket]), group, op=op)))
        if waits:
            sent[-1][1].wait()
        bucket, held = [], 0

    for g in gradients:
        if bucket and held + g.nbytes > bucket_bytes and when != "overrun":
            send()
        bucket.append(g)
        held += g.nbytes
        if held >= bucket_bytes and when != "lazy":
            send()
    if bucket and last == "sent":
        send()
    averages = []
    for some, pending in sent:
        pieces = pending.wait().split([g.numel() for g in some])
        averages += [piece.view_as(g) for piece, g in zip(pieces, some, strict=True)]
    return averages + (bucket if last == "own" else [])


class Started:
    """An all-reduce of `torch.distributed`, waited for as one of ours."""

    def __init__(self, flat: Tensor, group: Group, op: str) -> None:
        self.flat, self.work = flat, dist.all_reduce(flat, async_op=True)

    def wait(self) -> Tensor:
        self.work.wait()
        return self.flat / dist.get_world_size()


def ahead(count: int | None) -> Callable:
    """The program, with an iterator that takes so many gradients more than it gives; all, if None."""

    def read(gradients: Iterator) -> Iterator[Tensor]:
        taken = list(islice(gradients, count))
        while taken:
            taken += islice(gradients, 1)
            yield taken.pop(0)

    return lambda gradients, bucket_bytes, group: overlapped(read(gradients), bucket_bytes, group)


EXERCISE = Exercise(
    id="03.3",
    title="overlapped",
    points=3,
    body=body,
    inputs=inputs,
    reference=reference,
    ranks=(3, 4, 5),
    right=(overlapped, partial(overlapped, when="lazy"), partial(overlapped, start=Started)),
    mistakes=(
        Mistake(
            "The averages are right, and no byte is sent during backward: you start every all-reduce after the last "
            "gradient. Do not collect the iterator into a list; start a bucket while you loop.",
            ahead(None),
        ),
        Mistake(
            "The averages are right, but you wait for an all-reduce before the last gradient exists, and backward "
            "stops meanwhile. Keep the return value of all_reduce_start, and wait after the loop.",
            partial(overlapped, waits=True),
        ),
        Mistake(
            "The averages are right, but each gradient is sent alone and pays its own latency. Put several into one "
            "flat tensor (torch.cat of the flattened gradients).",
            lambda gradients, bucket_bytes, group: overlapped(gradients, 1, group),
        ),
        Mistake(
            "The averages are right, but a bucket takes a gradient that no longer fits. Look at the size of the next "
            "gradient before you add it: if it does not fit, send the bucket first.",
            partial(overlapped, when="overrun"),
        ),
        Mistake(
            "The averages are right, but a full bucket waits while you take more gradients. Start its all-reduce "
            "before the loop takes the next gradient.",
            ahead(2),
        ),
        Mistake(
            "The last bucket was never sent: its gradients are missing. It is not full when the iterator ends: send it "
            "after the loop.",
            partial(overlapped, last="dropped"),
            about=("averages",),
        ),
        Mistake(
            "The last bucket was never sent: its gradients are still this rank's own. It is not full when the iterator "
            "ends: send it after the loop.",
            partial(overlapped, last="own"),
            about=("averages",),
        ),
        Mistake(
            'You summed and did not divide by the number of ranks. Use op="mean".',
            partial(overlapped, op="sum"),
            about=("averages",),
        ),
        Mistake(
            "The averages are right, but not in the order in which the gradients came.",
            lambda *given: overlapped(*given)[::-1],
            about=("averages",),
        ),
    ),
)
