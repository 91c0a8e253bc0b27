"""10.1: a step of 1F1B in raw torch.distributed, repaired from the report of its hang."""

import inspect
import math
from collections import Counter
from dataclasses import replace
from functools import partial

import torch
from torch import distributed as dist

from course.check.edits import Edited, exercise
from course.check.exercise import random, whole, with_variants
from course.check.listen import raw
from course.exercises.ch10.other_direction import (
    ALSO_RIGHT_OF_ROW,
    IN_LIST,
    MISTAKES_OF_ROW,
    TASK_OF_ROW,
    changed,
    in_words,
    mirrored,
    wrong_step,  # noqa: F401 a program in the list of the row
)
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.runtime import calls
from lib.runtime.calls import Listener

GRADIENT, ORDER, NUMBER = "gradient of this stage's weight", "order of work", "messages sent"
UNFINISHED = "{}s that were not waited for"


def inputs(generator, n):
    m = whole(generator, n + 1, n + 4)
    batch = [random(generator, 4, 3) for _ in range(m)]
    return [{"weight": random(generator, 4, 3), "batch": batch} for _ in range(n)]


@raw
def body(answer, group, given):
    return of_step(answer, group, given, group.rank, unneeded=lambda like: None)


@raw
def body_of_row(answer, group, given):
    torch.use_deterministic_algorithms(True)  # memory that nobody has written is NaN, and so the same in each run
    try:
        return of_step(answer, group, given, group.size - 1 - group.rank, unneeded=torch.zeros_like)
    finally:
        torch.use_deterministic_algorithms(False)


def of_step(answer, group, given, stage, unneeded):
    """The results of the rank with this stage; `unneeded` makes what the ends of the pipeline return."""
    last = group.size - 1
    weight, batch, kept, order, counts = given["weight"], given["batch"], {}, [], Counter()
    gradient = torch.zeros_like(weight)

    def forward(k, x):
        order.append(f"F{k}")
        kept[k] = batch[k] if stage == 0 else x
        return unneeded(weight) if stage == last else weight * kept[k]

    def backward(k, g):
        order.append(f"B{k}")
        x = kept.pop(k)
        g = weight * x if stage == last else g  # the loss is half the sum of squares
        gradient.add_(g * x)
        return unneeded(weight) if stage == 0 else g * weight

    calls.listeners.append(
        Listener(lambda c: counts.update([c.kind, "all " + c.kind]), lambda c: counts.subtract([c.kind]))
    )
    answer(forward, backward, torch.empty_like(weight), len(batch))
    unfinished = {UNFINISHED.format(kind): counts[kind] for kind in ("send", "recv")}
    return {ORDER: " ".join(order), GRADIENT: gradient, NUMBER: counts["all send"], **unfinished}


def reference(given):
    n, batch = len(given), given[0]["batch"]
    weights = [g["weight"].clone().requires_grad_() for g in given]
    for x in batch:
        (math.prod([x, *weights]).square().sum() / 2).backward()
    return [
        {
            ORDER: " ".join(f"{action.op.value}{action.microbatch}" for action in row),
            GRADIENT: weight.grad,
            NUMBER: len(batch) * ((rank > 0) + (rank < n - 1)),
            **{UNFINISHED.format(kind): 0 for kind in ("send", "recv")},
        }
        for rank, (weight, row) in enumerate(zip(weights, one_f_one_b(n, len(batch)).actions, strict=True))
    ]


def reference_of_row(given):
    return reference(given[::-1])[::-1]


def repaired_step(forward, backward, like, m):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    warmup, sends = min(last - rank, m), []

    def run_forward(k):
        x = torch.empty_like(like)
        if rank > 0:
            dist.recv(x, src=rank - 1)
        y = forward(k, x)
        if rank < last:
            sends.append((dist.isend(y, dst=rank + 1), y))

    def run_backward(k):
        g = torch.empty_like(like)
        if rank < last:
            dist.recv(g, src=rank + 1)
        g = backward(k, g)
        if rank > 0:
            sends.append((dist.isend(g, dst=rank - 1), g))

    for k in range(warmup):
        run_forward(k)
    for k in range(warmup, m):
        run_forward(k)
        run_backward(k - warmup)
    for k in range(m - warmup, m):
        run_backward(k)
    for send, _ in sends:
        send.wait()


def by_swaps(swap, forward, backward, like, m):
    """Between the same two ranks, what is sent and what is received next belong together."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    warmup = min(last - rank, m)

    def swapped(peer, x, receives):
        y = torch.empty_like(like) if receives else None
        if 0 <= peer <= last:
            swap(peer, x, y)
        return y

    x = swapped(rank - 1, None, m > 0)
    for k in range(m + warmup):
        y = forward(k, x) if k < m else None
        g = swapped(rank + 1, y, k >= warmup)
        of_x = backward(k - warmup, g) if k >= warmup else None
        x = swapped(rank - 1, of_x, k + 1 < m)


def in_one_call(peer, x, y):
    """As Megatron-LM."""
    both = [dist.P2POp(start, z, peer) for start, z in ((dist.isend, x), (dist.irecv, y)) if z is not None]
    for work in dist.batch_isend_irecv(both) if both else ():
        work.wait()


def by_turns(peer, x, y):
    """Blocking calls alone: of two neighbours with something to send, the even one sends first."""
    both = [(dist.send, x), (dist.recv, y)]
    for transfer, z in reversed(both) if dist.get_rank() % 2 else both:
        if z is not None:
            transfer(z, peer)


MISTAKES = """
sends.append((dist.isend(y, dst=rank + 1), y)) => dist.send(y, dst=rank + 1)
sends.append((dist.isend(g, dst=rank - 1), g)) => dist.send(g, dst=rank - 1)
hangs
    It hangs in the calls in which the program of the task hangs: neighbours send to each other, and neither receives.
        Start the sends, with dist.isend, and wait for them at the end.
min(last - rank, m) => m
    It no longer hangs, because all forwards now come before the first backward: that is GPipe, and each rank keeps all
    microbatches.
        Keep the order of 1F1B and change how messages are sent.
=> 0
    It no longer hangs, because one microbatch is in flight.
        Keep the order of 1F1B and change how messages are sent.
=> min(last - rank + 1, m)
    The warmup has one forward too many.
        The order of the program was right; its messages were not.

in sends that were not waited for:
send.wait() => pass
    Not every send is waited for. isend returns a handle.
        Keep it with the tensor, and wait before you return.

in recvs that were not waited for:
dist.recv(x, src=rank - 1) => dist.irecv(x, src=rank - 1)
dist.recv(g, src=rank + 1) => dist.irecv(g, src=rank + 1)
    Not every receive is waited for.
        After irecv the tensor has its content only once wait() returns.

in all:
x = torch.empty_like(like) => x = like
or
x = torch.empty_like(like) => x = like
g = torch.empty_like(like) => g = like
    All activations are received into one tensor. The stage keeps each input until its backward, so the next receive
    overwrites an input that is still needed.
        Allocate a tensor per message.
g = torch.empty_like(like) => g = torch.zeros_like(like)
g = backward(k, g) => backward(k, g)
    You pass on the gradient that you received.
        The previous rank needs the result of backward.
range(m - warmup, m) => reversed(range(m - warmup, m))
    In the cooldown you run backward in reverse.
        Messages have no number: earlier microbatches' gradients come first.
"""


def row_a():
    """The pipeline runs the other way, and the program is silently wrong."""
    of_row = {"body": body_of_row, "reference": reference_of_row, "ALSO_RIGHT": ALSO_RIGHT_OF_ROW}
    of_row["MISTAKES"] = MISTAKES_OF_ROW + changed(MISTAKES, IN_LIST)
    made = exercise(globals() | of_row, points=3, right=(repaired_step,))
    swaps = inspect.getsource(by_swaps)
    right = (
        Edited(__name__, inspect.getsource(repaired_step), "repaired_step"),
        Edited(__name__, swaps, "partial(by_swaps, in_one_call)"),
        Edited(__name__, swaps, "partial(by_swaps, by_turns)"),
        *made.right[1:],
    )
    return replace(
        made,
        right=tuple(map(mirrored, right)),
        mistakes=tuple(replace(in_words(one), wrong=mirrored(one.wrong)) for one in made.mistakes),
        solution=mirrored(right[0]),
        ranks=(4, 5),  # with three, two tensors in turn are enough
        task=TASK_OF_ROW,
    )


BOOK = exercise(
    globals(), points=3, right=(repaired_step, partial(by_swaps, in_one_call), partial(by_swaps, by_turns))
)
EXERCISE = with_variants(BOOK, row_a())
