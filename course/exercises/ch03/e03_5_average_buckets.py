"""03.5: average gradients in buckets, all in flight together, in plain torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count

import torch
from torch import Tensor, nn
from torch import distributed as dist

from course.check.exercise import DTYPE, Data, Exercise, Mistake, random
from course.check.listen import listen, raw
from lib.mesh import Group

SHAPES = ((3, 4), (4,), (4, 3), (2, 3), (5,), (2,))
TURNED, FROZEN, USED_ONCE = 2, 3, 4  # its gradient is not contiguous; not trained; used on one rank alone
BUCKETS = ((0, 1), (2, 3), (4, 5))
ANSWERS = count()  # names each run of an answer alike on all ranks

TOGETHER, IN_TURN, NEVER = "all buckets together", "one bucket at a time", "not every one is waited for"
ONE_EACH, DIFFERENT = "one all-reduce for each parameter", "calls that are not an all-reduce"
MINE, TOUCHED = "untouched until the first wait", "written before the first wait"


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    return [{"gradients": [random(generator, *shape) for shape in SHAPES]} for _ in range(n)]


def used(i: int, rank: int) -> bool:
    return i != FROZEN and (i != USED_ONCE or rank == 1)


@raw
def body(answer: Callable, group: Group, given: Data) -> Data:
    params = [
        nn.Parameter(torch.zeros(shape, dtype=DTYPE), requires_grad=i != FROZEN) for i, shape in enumerate(SHAPES)
    ]
    for i, (p, g) in enumerate(zip(params, given["gradients"], strict=True)):
        p.grad = (g.T.contiguous().T if i == TURNED else g.clone()) if used(i, group.rank) else None
    kept = [p.grad for p in params]  # alive, so that no new tensor gets the id of one of them
    seen, events = [state(params)], []

    store, number = dist.distributed_c10d._get_default_store(), next(ANSWERS)
    ranks = [f"03.5, answer {number}, rank {rank}" for rank in range(group.size)]

    def waits() -> None:
        store.set(ranks[group.rank], "waits")
        seen.append(state(params))
        events.append("wait")

    heard = listen(lambda: events.append("start"), waits)
    if group.rank == group.size - 1:  # sends when the others wait, or are done: what they read before had not arrived
        with suppress(dist.DistError):
            store.wait(ranks[:-1], timedelta(seconds=1))
    answer([[params[i] for i in bucket] for bucket in BUCKETS])
    store.set(ranks[group.rank], "is done")
    del kept
    return {
        "gradients": [p.grad for p in params],
        "what was sent": sent(heard.calls),
        "all-reduces in flight": in_flight(events),
        "gradients at the first wait": MINE if seen[:1] == seen[1:2] else TOUCHED,
    }


def state(params: list[nn.Parameter]) -> list[tuple[int, int]]:
    """Which tensors the gradients are, and how often each was written to."""
    return [(id(p.grad), getattr(p.grad, "_version", 0)) for p in params]


def sent(calls: list[tuple[str, int]]) -> str | list[int]:
    """Bytes of each all-reduce."""
    trained = [i for i in range(len(SHAPES)) if i != FROZEN]
    if any(kind != "all_reduce" for kind, _ in calls):
        return DIFFERENT
    return ONE_EACH if len(calls) == len(trained) else [n_bytes for _, n_bytes in calls]


def in_flight(events: list[str]) -> str:
    if events.count("wait") < events.count("start"):
        return NEVER
    first = events.index("wait") if "wait" in events else len(events)
    return IN_TURN if "start" in events[first:] else TOGETHER


def reference(given: list[Data]) -> list[Data]:
    def mean(i: int) -> Tensor | None:
        some = [g["gradients"][i] for r, g in enumerate(given) if used(i, r)]
        return sum(some) / len(given) if some else None

    sizes = [sum(8 * torch.Size(SHAPES[i]).numel() for i in bucket if i != FROZEN) for bucket in BUCKETS]
    right = {
        "gradients": [mean(i) for i in range(len(SHAPES))],
        "what was sent": sizes,
        "all-reduces in flight": TOGETHER,
    }
    return [right] * len(given)


# ---- programs -------------------------------------------------------------------------------------------------------


def zeros_if_none(p: Tensor) -> Tensor:
    return torch.zeros_like(p) if p.grad is None else p.grad


def view(p: Tensor, mean: Tensor) -> None:
    p.grad = mean


def copy(p: Tensor, mean: Tensor) -> None:
    p.grad = zeros_if_none(p)
    p.grad.copy_(mean)


def copy_to_flat(p: Tensor, mean: Tensor) -> None:
    p.grad = zeros_if_none(p)
    p.grad.flatten().copy_(mean.flatten())


def keep_none(p: Tensor, mean: Tensor) -> None:
    p.grad = None if p.grad is None else mean


def everyone(flat: Tensor, params: list) -> None:
    flat /= dist.get_world_size()


def average_buckets(buckets, give=view, divide=everyone, frozen=False, waits="after", each=False):
    works = []
    buckets = [[p for p in bucket if p.requires_grad or frozen] for bucket in buckets]
    for params in [[p] for bucket in buckets for p in bucket] if each else buckets:
        flat = torch.cat([zeros_if_none(p).flatten() for p in params])
        works.append((params, flat, dist.all_reduce(flat, async_op=True)))
        if waits == "each":
            works[-1][2].wait()
    for params, flat, work in works:
        if waits == "after":
            work.wait()
        if waits == "late":  # dividing in place, it may be right by chance: if it is done before the bytes are sent
            flat = flat.clone()
        divide(flat, params)
        for p, mean in zip(params, flat.split([p.numel() for p in params]), strict=True):
            give(p, mean.view_as(p))
        if waits == "late":
            work.wait()


def divide_by_users(flat, params):
    """By the number of ranks that had a gradient: 1 for one parameter, recognised by its size."""
    for p, piece in zip(params, flat.split([p.numel() for p in params]), strict=True):
        piece /= 1 if p.numel() == SHAPES[USED_ONCE][0] else dist.get_world_size()


EXERCISE = Exercise(
    id="03.5",
    title="average_buckets",
    points=1,
    body=body,
    inputs=inputs,
    reference=reference,
    right=(average_buckets, partial(average_buckets, give=copy)),
    mistakes=(
        Mistake(
            "No rank waits for its all-reduces: the gradients are read while bytes still arrive, and differ from run "
            "to run. With async_op=True the call returns a Work; call its wait() before you read the tensor.",
            partial(average_buckets, waits="never"),
            about=("in flight",),
        ),
        Mistake(
            "The means are right, but a bucket starts when the bucket before it is finished. Start all of them first "
            "and keep (bucket, flat tensor, Work) in a list; then wait for each.",
            partial(average_buckets, waits="each"),
        ),
        Mistake(
            "The means are right, but each parameter has its own all-reduce. Put the gradients of a bucket into one "
            "flat tensor with torch.cat.",
            partial(average_buckets, each=True),
        ),
        Mistake(
            "The frozen parameter was sent and now has a gradient. Leave parameters out that do not require one "
            "(p.requires_grad).",
            partial(average_buckets, frozen=True),
        ),
        Mistake(
            "The parameter used on one rank has its mean there, and None on the ranks that did not use it: its copies "
            "drift apart. Every rank sends zeros for a missing gradient, and every rank takes the mean.",
            partial(average_buckets, give=keep_none),
        ),
        Mistake(
            "You divided the gradient of the parameter used on one rank by 1, the number of ranks that used it. The "
            "other ranks have gradient 0: the mean is over all n ranks.",
            partial(average_buckets, divide=divide_by_users),
        ),
        Mistake(
            "The gradients are n times too large: an all-reduce sums. Divide by dist.get_world_size().",
            partial(average_buckets, divide=lambda flat, params: None),
        ),
        Mistake(
            "The gradients were read before the first wait(), while bytes still arrived. Wait for a bucket, then read "
            "its flat tensor.",
            partial(average_buckets, waits="late"),
            about=("first wait",),
        ),
        Mistake(
            "One gradient is still the rank's own: it is not contiguous. flatten() and reshape(-1) then return a copy, "
            "and writing to the copy changes nothing. Assign p.grad, or use p.grad.copy_(...) in the shape of p.",
            partial(average_buckets, give=copy_to_flat),
        ),
        Mistake(
            "Each rank still has its own gradients. torch.cat makes a new tensor: the all-reduce changed that, and not "
            "the gradients. Write the pieces back.",
            partial(average_buckets, give=lambda p, mean: None),
        ),
    ),
)
