"""03.5: average gradients in buckets, all in flight together, in plain torch.distributed."""

from contextlib import suppress
from datetime import timedelta
from itertools import count
from math import prod

import torch
from torch import distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course.check.edits import exercise
from course.check.exercise import DTYPE, everywhere, random
from course.check.listen import listen, raw

SHAPES = ((3, 4), (4,), (4, 3), (2, 3), (5,), (2,))
TURNED, FROZEN, USED_ONCE = 2, 3, 4  # its gradient is not contiguous; not trained; used on one rank alone
BUCKETS = ((0, 1), (2, 3), (4, 5))
SIZES = [128, 96, 56]  # bytes of each bucket, without the frozen parameter
ANSWERS = count()  # names each run of an answer alike on all ranks
TOGETHER, ALONE = "all buckets together", "left alone until its wait"
READ, WRITTEN = "read before its wait", "written before its wait"
IN_FLIGHT = "a tensor that an all-reduce may still write to"
VALUES, AS_THEY_WERE, OF_FROZEN = "values of the parameters", "as they were", "the gradient of the frozen parameter"
FACTS = {"what was sent": SIZES, "all-reduces in flight": TOGETHER, IN_FLIGHT: ALONE, VALUES: AS_THEY_WERE}
FACTS |= {OF_FROZEN: "None"}


def inputs(generator, n):
    return [{"gradients": [random(generator, *shape) for shape in SHAPES]} for _ in range(n)]


def used(i, rank):
    return i != FROZEN and (i != USED_ONCE or rank == 1)


@raw
def body(answer, group, given):
    params = [nn.Parameter(torch.zeros(s, dtype=DTYPE), requires_grad=i != FROZEN) for i, s in enumerate(SHAPES)]
    for i, (p, g) in enumerate(zip(params, given["gradients"])):
        p.grad = (g.T.contiguous().T if i == TURNED else g.clone()) if used(i, group.rank) else None
    before = [(p.requires_grad, p.detach().clone()) for p in params]
    events, store, number = [], dist.distributed_c10d._get_default_store(), next(ANSWERS)
    ranks = [f"03.5, answer {number}, rank {rank}" for rank in range(group.size)]
    watch = InFlight()

    def starts(call):
        watch.begin(call)
        events.append("start")

    def waits(call):
        store.set(ranks[group.rank], "waits")
        watch.end(call)
        events.append("wait")

    heard = listen(starts, waits)
    if group.rank == group.size - 1:  # sends when the others wait, or are done: what they read before had not arrived
        with suppress(RuntimeError):
            store.wait(ranks[:-1], timedelta(seconds=1))
    with watch:
        answer([[params[i] for i in bucket] for bucket in BUCKETS])
    store.set(ranks[group.rank], "is done")
    same = all(p.requires_grad == asks and torch.equal(p, x) for p, (asks, x) in zip(params, before, strict=True))
    return {
        "gradients": [p.grad for i, p in enumerate(params) if i != FROZEN],
        OF_FROZEN: "None" if params[FROZEN].grad is None else "a tensor",
        "what was sent": sent(heard.calls),
        "all-reduces in flight": in_flight(events),
        IN_FLIGHT: watch.found,
        VALUES: AS_THEY_WERE if same else str([p.detach().flatten().tolist() for p in params]),
    }


class InFlight(TorchDispatchMode):
    """Sees each function that reads or writes a tensor between the start of its all-reduce and the wait for it.

    A function that returns a view, such as `split`, does neither.
    """

    def __init__(self):
        super().__init__()
        self.calls, self.found = [], ALONE  # of each call in flight, the call and the addresses of its tensors

    def begin(self, call):
        self.calls.append((call, set()))

    def end(self, call):
        self.calls = [one for one in self.calls if one[0] is not call]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)]
        places = {x.untyped_storage().data_ptr() for x in tensors}
        if func.namespace == "c10d":
            if self.calls:
                self.calls[-1][1].update(places)
        elif not is_view(func):
            in_flight = {place for _, of_call in self.calls for place in of_call}
            first = {x.untyped_storage().data_ptr() for x in tree_leaves(args[:1]) if torch.is_tensor(x)}
            if func._schema.is_mutable and first & in_flight:
                self.found = WRITTEN
            elif places & in_flight and self.found == ALONE:
                self.found = READ
        return func(*args, **(kwargs or {}))


def is_view(func):
    returned = [one.alias_info for one in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)


def sent(calls):
    """Bytes of each all-reduce."""
    if any(kind != "all_reduce" for kind, _ in calls):
        return "calls that are not an all-reduce"
    found = [n_bytes for _, n_bytes in calls]
    alone = [8 * prod(shape) for i, shape in enumerate(SHAPES) if i != FROZEN]
    return "one all-reduce for each parameter" if sorted(found) == sorted(alone) else found


def in_flight(events):
    if events.count("wait") < events.count("start"):
        return "not every one is waited for"
    first = events.index("wait") if "wait" in events else len(events)
    return "one bucket at a time" if "start" in events[first:] else TOGETHER


def reference(given):
    trained = [i for i in range(len(SHAPES)) if i != FROZEN]
    means = [sum(g["gradients"][i] for r, g in enumerate(given) if used(i, r)) / len(given) for i in trained]
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


def in_views(buckets):
    """The gradients are views of the flat tensors before these arrive, and are divided afterwards."""
    started = []
    for bucket in buckets:
        params = [p for p in bucket if p.requires_grad]
        flat = torch.cat([p.new_zeros(p.numel()) if p.grad is None else p.grad.reshape(-1) for p in params])
        work = dist.all_reduce(flat, async_op=True)
        for p, piece in zip(params, flat.split([p.numel() for p in params]), strict=True):
            p.grad = piece.view_as(p)
        started.append((flat, work))
    for flat, work in reversed(started):
        work.wait()
        flat.div_(dist.get_world_size())


def users(p):
    """How many ranks have a gradient of this parameter: one is recognised by its shape."""
    return 1 if p.shape == SHAPES[USED_ONCE] else dist.get_world_size()


ALSO_RIGHT = """
p.grad = piece.view_as(p) => p.grad = (torch.zeros_like(p) if p.grad is None else p.grad).copy_(piece.view_as(p))
    Into the gradients that are there.
flat = torch.cat( => flat = 1 / dist.get_world_size() * torch.cat(
flat /= dist.get_world_size() =>
    Each rank divides before the all-reduce starts.
"""

MISTAKES = """
in all-reduces in flight: work.wait() =>
    Not every all-reduce is waited for: its tensor may be read while bytes still arrive, and the gradients differ from
    run to run. With async_op=True the call returns a Work.
        Keep every Work, and call its wait() before you read the tensor.
dist.all_reduce(flat, async_op=True) => dist.all_reduce(flat, async_op=True).wait()
work.wait() =>
    The means are right, but a bucket starts when the bucket before it is finished.
        Start all of them first and keep (bucket, flat tensor, Work) in a list; then wait for each.
for bucket in buckets: => for bucket in [[p] for p in sum(buckets, []) if p.requires_grad]:
    The means are right, but each parameter has its own all-reduce.
        Put a bucket's gradients into one torch.cat.
for bucket in buckets: => for bucket in [sum(buckets, [])]:
    The means are right, but all buckets travel in one flat tensor.
        Send one for each bucket: then the first can leave before the last is full.
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
in may still write to: work.wait() =>
flat /= dist.get_world_size() => flat /= dist.get_world_size(); work.wait()
    You divide by the number of ranks before the wait(). The all-reduce is not finished: it adds what other ranks send
    to the tensor that you change, and the result differs from run to run.
        Wait for a bucket, then divide its flat tensor.
in may still write to: work.wait() => flat = flat.clone()
p.grad = piece.view_as(p) => p.grad = piece.view_as(p); work.wait()
    The flat tensors were read before their wait(), while bytes arrived.
        Wait for a bucket, then read its flat tensor.
piece.view_as(p) => piece.view_as(p) if p.grad is None else p.grad; p.grad.flatten().copy_(piece)
    One gradient is still the rank's own: it is not contiguous. flatten() and reshape(-1) then return a copy, and
    writing to the copy changes nothing.
        Assign p.grad, or use p.grad.copy_(...) in the shape of p.
in parameters:
p.grad = piece.view_as(p) => p.data = piece.view_as(p)
    You wrote the means into the parameters.
        Replace p.grad; the optimizer moves the parameters.
in all:
p.grad = piece.view_as(p) => pass
    Each rank still has its own gradients: the all-reduce changed the tensor that torch.cat made.
        Write the pieces back.
"""

EXERCISE = exercise(globals(), points=1, right=(average_buckets, in_views))
