"""03.5: average gradients in buckets, all in flight together, in plain torch.distributed."""

from contextlib import suppress
from datetime import timedelta
from itertools import count

import torch
from torch import distributed as dist
from torch import nn

from course.check.edits import exercise
from course.check.exercise import DTYPE, everywhere, random
from course.check.listen import listen, raw

SHAPES = ((3, 4), (4,), (4, 3), (2, 3), (5,), (2,))
TURNED, FROZEN, USED_ONCE = 2, 3, 4  # its gradient is not contiguous; not trained; used on one rank alone
BUCKETS = ((0, 1), (2, 3), (4, 5))
SIZES = [128, 96, 56]  # bytes of each bucket, without the frozen parameter
ANSWERS = count()  # names each run of an answer alike on all ranks
TOGETHER, MINE = "all buckets together", "untouched until the first wait"
FACTS = {"what was sent": SIZES, "all-reduces in flight": TOGETHER}


def inputs(generator, n):
    return [{"gradients": [random(generator, *shape) for shape in SHAPES]} for _ in range(n)]


def used(i, rank):
    return i != FROZEN and (i != USED_ONCE or rank == 1)


@raw
def body(answer, group, given):
    params = [nn.Parameter(torch.zeros(s, dtype=DTYPE), requires_grad=i != FROZEN) for i, s in enumerate(SHAPES)]
    for i, (p, g) in enumerate(zip(params, given["gradients"])):
        p.grad = (g.T.contiguous().T if i == TURNED else g.clone()) if used(i, group.rank) else None
    kept = [p.grad for p in params]  # alive, so that no new tensor gets the id of one of them

    def state():
        """Which tensors the gradients are, and how often each was written to."""
        return [(id(p.grad), getattr(p.grad, "_version", 0)) for p in params]

    seen, events = [state()], []
    store, number = dist.distributed_c10d._get_default_store(), next(ANSWERS)
    ranks = [f"03.5, answer {number}, rank {rank}" for rank in range(group.size)]

    def waits(call):
        store.set(ranks[group.rank], "waits")
        seen.append(state())
        events.append("wait")

    heard = listen(lambda call: events.append("start"), waits)
    if group.rank == group.size - 1:  # sends when the others wait, or are done: what they read before had not arrived
        with suppress(RuntimeError):
            store.wait(ranks[:-1], timedelta(seconds=1))
    answer([[params[i] for i in bucket] for bucket in BUCKETS])
    store.set(ranks[group.rank], "is done")
    del kept
    return {
        "gradients": [p.grad for p in params],
        "what was sent": sent(heard.calls),
        "all-reduces in flight": in_flight(events),
        "gradients at the first wait": MINE if seen[:1] == seen[1:2] else "written before the first wait",
    }


def sent(calls):
    """Bytes of each all-reduce."""
    if any(kind != "all_reduce" for kind, _ in calls):
        return "calls that are not an all-reduce"
    return "one all-reduce for each parameter" if len(calls) == len(SHAPES) - 1 else [n_bytes for _, n_bytes in calls]


def in_flight(events):
    if events.count("wait") < events.count("start"):
        return "not every one is waited for"
    first = events.index("wait") if "wait" in events else len(events)
    return "one bucket at a time" if "start" in events[first:] else TOGETHER


def reference(given):
    some = [[g["gradients"][i] for r, g in enumerate(given) if used(i, r)] for i in range(len(SHAPES))]
    means = [sum(each) / len(given) if each else None for each in some]
    return everywhere({"gradients": means}, given)


def average_buckets(buckets):
    started = []
    for bucket in buckets:
        params = [p for p in bucket if p.requires_grad]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in params])
        started.append((params, flat, dist.all_reduce(flat, async_op=True)))
    for params, flat, work in started:
        work.wait()
        flat /= dist.get_world_size()
        pieces = flat.split([p.numel() for p in params])
        for p, piece in zip(params, pieces, strict=True):
            p.grad = piece.view_as(p)


def users(p):
    """How many ranks have a gradient of this parameter: one is recognised by its shape."""
    return 1 if p.shape == SHAPES[USED_ONCE] else dist.get_world_size()


ALSO_RIGHT = """
p.grad = piece.view_as(p) => p.grad = (torch.zeros_like(p) if p.grad is None else p.grad).copy_(piece.view_as(p))
    Into the gradients that are there.
"""

MISTAKES = """
in in flight: work.wait() =>
    No rank waits for its all-reduces: the gradients are read while bytes still arrive, and differ from run to run. With
    async_op=True the call returns a Work.
        Call its wait() before you read the tensor.
dist.all_reduce(flat, async_op=True) => dist.all_reduce(flat, async_op=True).wait()
work.wait() =>
    The means are right, but a bucket starts when the bucket before it is finished.
        Start all of them first and keep (bucket, flat tensor, Work) in a list; then wait for each.
for bucket in buckets: => for bucket in [[p] for p in sum(buckets, []) if p.requires_grad]:
    The means are right, but each parameter has its own all-reduce.
        Put a bucket's gradients into one torch.cat.
if p.requires_grad =>
    The frozen parameter was sent and now has a gradient.
        Leave out what does not require one (p.requires_grad).
p.grad = piece.view_as(p) => p.grad = None if p.grad is None else piece.view_as(p)
    The parameter used on one rank has its mean there, and None on the ranks that did not use it: its copies drift
    apart.
        Every rank sends zeros for a missing gradient, and every rank takes the mean.
flat /= dist.get_world_size() =>
piece.view_as(p) => piece.view_as(p) / users(p)
    You divided the gradient of the parameter used on one rank by 1.
        The others have gradient 0: the mean is over n.
flat /= dist.get_world_size() =>
    The gradients are n times too large: an all-reduce sums.
        Divide by dist.get_world_size().
in first wait: work.wait() => flat = flat.clone()
p.grad = piece.view_as(p) => p.grad = piece.view_as(p); work.wait()
    The gradients were read before the first wait(), while bytes arrived.
        Wait for a bucket, then read its flat tensor.
piece.view_as(p) => piece.view_as(p) if p.grad is None else p.grad; p.grad.flatten().copy_(piece)
    One gradient is still the rank's own: it is not contiguous. flatten() and reshape(-1) then return a copy, and
    writing to the copy changes nothing.
        Assign p.grad, or use p.grad.copy_(...) in the shape of p.
p.grad = piece.view_as(p) => pass
    Each rank still has its own gradients: the all-reduce changed the tensor that torch.cat made.
        Write the pieces back.
"""

EXERCISE = exercise(globals(), points=1, right=(average_buckets,))
