"""03.3: averages of gradients in buckets, sent while backward goes on."""

from itertools import islice

import torch
from torch import distributed as dist

from course.check.edits import exercise
from course.check.exercise import everywhere, random
from course.check.listen import listen
from lib import comm

STREAM = ((4,), (2, 3), (3,), (3, 3), (5, 4), (4, 2), (3, 5), (7,), (5,), (6,), (2,))
ROOM = 12  # elements in a bucket
# How many gradients there are when each bucket leaves: those of FULL are full then, or hold one that is larger. Any
# other leaves when the next gradient turns out not to fit, the last one at the end.
ENDS, FULL = (2, 4, 5, 6, 7, 9, 11), (4, 5, 7, 9)
TOO_FULL = (3, 5, 7, 9, 11)  # if a bucket takes the gradient that does not fit
RIGHT, ALL = "each bucket as it fills", "all"
WHEN, WAITED = "what was sent when", "all-reduces that were waited for"
FACTS = {WHEN: RIGHT, WAITED: ALL}


def inputs(generator, n):
    return [{"gradients": [random(generator, *shape) for shape in STREAM]} for _ in range(n)]


def body(answer, group, given):
    made = 0  # gradients that backward made so far
    starts, waits = [], []  # how many were made at each start of a communication, and at each wait

    def backward():
        nonlocal made
        for g in given["gradients"]:
            made += 1
            yield g.clone()
        made += 1  # the end

    heard = listen(lambda call: starts.append(made), lambda call: waits.append(made))
    averages = answer(backward(), ROOM * 8, group)
    waited = ALL if heard.unfinished <= 0 else "not every one"
    return {"averages": averages, WHEN: describe(starts, waits), WAITED: waited}


def describe(starts, waits):
    end = len(STREAM) + 1
    if any(made < end for made in waits):
        return "a wait before the iterator ended"
    if len(starts) == len(STREAM):
        return "one message for each gradient"
    if all(made == end for made in starts):
        return f"all {len(starts)} messages after the last gradient"
    for ends, full, most, name in (
        (ENDS, FULL, 1, RIGHT),
        (ENDS, (), 1, "a full bucket leaves one gradient later than it could"),
        (TOO_FULL, TOO_FULL, 1, "buckets that take a gradient that does not fit"),
        (ENDS, (), end, "buckets that leave later than they could"),
    ):
        late = [made - e for made, e in zip(starts, ends)]
        if len(starts) == len(ends) and all(0 <= x <= most * (e not in full) for x, e in zip(late, ends)):
            return name
    return f"{len(starts)} messages where {len(ENDS)} do, after {', '.join(map(str, starts))} gradients"


def reference(given):
    averages = [sum(same) / len(given) for same in zip(*(g["gradients"] for g in given))]
    return everywhere({"averages": averages}, given)


def overlapped(gradients, bucket_bytes, group):
    under_way = []  # (gradients of the bucket, its all-reduce)
    bucket, held_bytes = [], 0

    def send():
        nonlocal bucket, held_bytes
        flat = torch.cat([g.flatten() for g in bucket])
        pending = comm.all_reduce_start(flat, group, op="mean")
        under_way.append((bucket, pending))
        bucket, held_bytes = [], 0

    for g in gradients:
        size_bytes = g.numel() * g.element_size()
        if bucket and held_bytes + size_bytes > bucket_bytes:
            send()
        bucket.append(g)
        held_bytes += size_bytes
        if held_bytes >= bucket_bytes:
            send()
    if bucket:
        send()

    averages = []
    for sent, all_reduce in under_way:
        pieces = all_reduce.wait().split([g.numel() for g in sent])
        averages += [piece.view_as(g) for piece, g in zip(pieces, sent)]
    return averages


def by_torch_distributed(gradients, bucket_bytes, group):
    bucket, started, averages = [], [], []

    def leave():
        if bucket:
            flat = torch.cat([x.flatten() for x in bucket])
            started.append((bucket[:], flat, dist.all_reduce(flat, async_op=True)))
            bucket.clear()

    for g in gradients:
        if sum(x.nbytes for x in [*bucket, g]) > bucket_bytes:
            leave()
        bucket.append(g)
        if sum(x.nbytes for x in bucket) >= bucket_bytes:
            leave()
    leave()
    for some, flat, work in started:
        work.wait()
        pieces = flat.div(dist.get_world_size()).split([g.numel() for g in some])
        averages += [piece.view_as(g) for piece, g in zip(pieces, some)]
    return averages


def two_ahead(gradients):
    taken = list(islice(gradients, 2))
    while taken:
        taken += islice(gradients, 1)
        yield taken.pop(0)


MISTAKES = """
for g in gradients: => for g in list(gradients):
    The averages are right, and no byte is sent during backward: you start every all-reduce after the last gradient.
        Do not collect the iterator into a list; start a bucket while you loop.
comm.all_reduce_start(flat, group, op="mean") => comm.all_reduce(flat, group, op="mean")
all_reduce.wait() => all_reduce
    The averages are right, but you wait for an all-reduce before the iterator ends, and backward stops meanwhile.
        Keep the return value of all_reduce_start, and wait after the loop.
if held_bytes >= bucket_bytes: => if True:
    The averages are right, but each gradient is sent alone and pays its own latency.
        Put several into one torch.cat.
size_bytes = g.numel() * g.element_size() => size_bytes = g.numel()
    The averages are right, but no bucket is ever full: all gradients leave in one message, after the last of them.
        Compare bytes with bucket_bytes, numel() times element_size(), and start a bucket while you loop.
size_bytes = g.numel() * g.element_size() => size_bytes = g.numel() * 4
    The averages are right, but your buckets are twice as large as they may be: you count 4 bytes for each element.
        An element has element_size() bytes, here 8.
if held_bytes >= bucket_bytes: => if False:
    The averages are right, but a full bucket waits until backward has made one more gradient.
        After you add a gradient, look whether the bucket is full, and start it before you take the next.
> bucket_bytes => >= bucket_bytes
    The averages are right, but a gradient that fills the bucket exactly begins a new one.
        It fits: a bucket may hold bucket_bytes. Send the bucket first only if it would hold more.
held_bytes + size_bytes > bucket_bytes => size_bytes <= bucket_bytes < held_bytes + size_bytes
if held_bytes >= bucket_bytes: => if held_bytes == bucket_bytes:
    The averages are right, but a gradient larger than a bucket does not travel alone.
        Send what the bucket holds before it, and start it by itself, before the next gradient.
if bucket and held_bytes + size_bytes > bucket_bytes: => if False:
    The averages are right, but a bucket takes a gradient that no longer fits.
        Look at the size of the next gradient before you add it: if it does not fit, send the bucket first.
for g in gradients: => for g in two_ahead(gradients):
    The averages are right, but buckets leave late: you take further gradients before you start what is ready.
        Start the all-reduce of a full bucket before you take the next gradient.
returns result[::-1]
    The averages are right, but not in the order in which the gradients came.
        Go through the buckets in the order in which you sent them.
in waited for:
comm.all_reduce_start(flat, group, op="mean") => dist.all_reduce(flat, async_op=True) and flat
all_reduce.wait() => all_reduce
    Not every all-reduce is waited for: its tensor may be read while bytes still arrive.
        After the loop call wait() of each, and read its tensor then.
in averages:
piece.view_as(g) => piece
    The averages are right, but flat.
        Give each the shape of its gradient: view_as.
if bucket: => if False:
    The last bucket was never sent: its gradients are missing. It is not full at the end.
        Send it after the loop.
if bucket: => if False:
return averages => return averages + bucket
    The last bucket was never sent: its gradients are this rank's. It is not full at the end.
        Send it after the loop.
op="mean" => op="sum"
    You summed and did not divide by the number of ranks.
        Use op="mean".
"""

EXERCISE = exercise(globals(), points=3, right=(overlapped, by_torch_distributed), ranks=(3, 4, 5))
