"""10.1: a step of 1F1B in raw torch.distributed, repaired from the report of its hang."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from torch import distributed as dist

from course.check.exercise import Data, Exercise, Mistake, random, whole
from course.check.listen import raw
from lib.mesh import Group
from lib.runtime import calls
from lib.runtime.calls import Listener

GRADIENT, ORDER, NUMBER = "gradient of this stage's weight", "order of work", "messages sent"
UNFINISHED = "{}s that were not waited for"


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    m = whole(generator, n + 1, n + 4)
    batch = [random(generator, 4, 3) for _ in range(m)]
    return [{"weight": random(generator, 4, 3), "batch": batch} for _ in range(n)]


@raw
def body(answer: Callable, group: Group, given: Data) -> Data:
    rank, last = group.rank, group.size - 1
    weight, batch, kept, order, counts = given["weight"], given["batch"], {}, [], Counter()
    gradient = torch.zeros_like(weight)

    def forward(k: int, x: torch.Tensor) -> torch.Tensor | None:
        order.append(f"F{k}")
        kept[k] = batch[k] if rank == 0 else x
        return None if rank == last else weight * kept[k]

    def backward(k: int, g: torch.Tensor) -> torch.Tensor | None:
        order.append(f"B{k}")
        x = kept.pop(k)
        g = weight * x if rank == last else g  # the loss is half the sum of squares
        gradient.add_(g * x)
        return None if rank == 0 else g * weight

    # Other answers share this list of listeners: these are in it only while this answer runs.
    heard = Listener(lambda call: counts.update([call.kind]), lambda call: counts.subtract([call.kind]))
    sent = Listener(lambda call: counts.update(["all"] * (call.kind == "send")), lambda call: None)
    calls.listeners.extend([heard, sent])
    try:
        answer(forward, backward, torch.empty_like(weight), len(batch))
    finally:
        calls.listeners.remove(heard)
        calls.listeners.remove(sent)
    unfinished = {UNFINISHED.format(kind): counts[kind] for kind in ("send", "recv")}
    return {ORDER: " ".join(order), GRADIENT: gradient, NUMBER: counts["all"], **unfinished}


def reference(given: list[Data]) -> list[Data]:
    n, batch = len(given), given[0]["batch"]
    weights = [g["weight"].clone().requires_grad_() for g in given]
    for x in batch:
        for weight in weights:
            x = weight * x
        (x.square().sum() / 2).backward()
    found = []
    for rank, weight in enumerate(weights):
        ahead = n - 1 - rank
        work = [f"F{k}" for k in range(ahead)]
        for k in range(ahead, len(batch) + ahead):
            work += [f"F{k}"] * (k < len(batch)) + [f"B{k - ahead}"]
        sent = len(batch) * ((rank > 0) + (rank < n - 1))
        waited = {UNFINISHED.format(kind): 0 for kind in ("send", "recv")}
        found.append({ORDER: " ".join(work), GRADIENT: weight.grad, NUMBER: sent, **waited})
    return found


# ---- programs -------------------------------------------------------------------------------------------------------


def step(
    forward,
    backward,
    like,
    m,
    ahead=lambda left, m: min(left, m),
    finish=True,
    receive=dist.recv,
    one_buffer=False,
    passes_on=False,
    cooldown=lambda ks: ks,
):
    """Sends that are started, and waited for at the end; with a place for each mistake."""
    rank, last, sends = dist.get_rank(), dist.get_world_size() - 1, []
    warmup, buffer = ahead(last - rank, m), torch.zeros_like(like)

    def come(src):
        x = buffer if one_buffer else torch.zeros_like(like)
        if 0 <= src <= last:
            receive(x, src=src)
        return x

    def go(x, dst):
        if 0 <= dst <= last:
            sends.append((dist.isend(x, dst=dst), x))

    def run_backward(k):
        g = come(rank + 1)
        of_x = backward(k, g)
        go(g if passes_on else of_x, rank - 1)

    for k in range(m):
        go(forward(k, come(rank - 1)), rank + 1)
        if k >= warmup:
            run_backward(k - warmup)
    for k in cooldown(range(m - warmup, m)):
        run_backward(k)
    for send, _ in sends if finish else ():
        send.wait()


def step_in_pairs(forward, backward, like, m):
    """As Megatron-LM: between the same two ranks, a send and a receive in one call."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    warmup, came = min(last - rank, m), {}

    def swap(peer, x, receives=True):
        if not 0 <= peer <= last:
            return
        calls = [] if x is None else [dist.P2POp(dist.isend, x, peer)]
        if receives:
            came[peer] = torch.empty_like(like)
            calls.append(dist.P2POp(dist.irecv, came[peer], peer))
        for work in dist.batch_isend_irecv(calls) if calls else ():
            work.wait()

    swap(rank - 1, None, receives=m > 0)
    for k in range(m + warmup):
        if k < m:
            y = forward(k, came.get(rank - 1))
            swap(rank + 1, y, receives=k >= warmup)
        else:
            swap(rank + 1, None)
        more = k + 1 < m
        if k < warmup:
            swap(rank - 1, None, receives=more)
        else:
            of_x = backward(k - warmup, came.get(rank + 1))
            swap(rank - 1, of_x, receives=more)


def step_by_turns(forward, backward, like, m):
    """Blocking calls alone: of two neighbours with something to send, the even one sends first."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    warmup = min(last - rank, m)

    def swap(peer, x, receives):
        def send():
            if x is not None:
                dist.send(x, dst=peer)

        def come():
            y = torch.empty_like(like)
            if receives:
                dist.recv(y, src=peer)
            return y

        if not 0 <= peer <= last:
            return None
        if rank % 2:
            y = come()
            send()
            return y
        send()
        return come()

    x = swap(rank - 1, None, m > 0)
    for k in range(m + warmup):
        y = forward(k, x) if k < m else None
        g = swap(rank + 1, y, k >= warmup)
        of_x = backward(k - warmup, g) if k >= warmup else None
        x = swap(rank - 1, of_x, k + 1 < m)


EXERCISE = Exercise(
    id="10.1",
    title="repaired_step",
    points=3,
    body=body,
    inputs=inputs,
    reference=reference,
    right=(step, step_in_pairs, step_by_turns),
    mistakes=(
        Mistake(
            "It no longer hangs, because all forwards now come before the first backward: that is GPipe, and each rank "
            "keeps all microbatches. Keep the order of 1F1B and change how messages are sent.",
            partial(step, ahead=lambda left, m: m),
        ),
        Mistake(
            "It no longer hangs, because one microbatch is in flight at a time. Keep the order of 1F1B and change how "
            "messages are sent.",
            partial(step, ahead=lambda left, m: 0),
        ),
        Mistake(
            "The warmup has one forward too many. The order of the program was right; its messages were not.",
            partial(step, ahead=lambda left, m: min(left + 1, m)),
        ),
        Mistake(
            "Not every send is waited for. isend returns a handle: keep it together with the tensor, and wait before "
            "the function returns.",
            partial(step, finish=False),
            about=(UNFINISHED.format("send"),),
        ),
        Mistake(
            "Not every receive is waited for. irecv returns immediately, and the tensor has its content only after "
            "wait(): here the next line computes with it.",
            partial(step, receive=dist.irecv),
            about=(UNFINISHED.format("recv"),),
        ),
        Mistake(
            "All activations are received into one tensor. The stage keeps each input until its backward, so the next "
            "receive overwrites an input that is still needed: allocate a tensor per message.",
            partial(step, one_buffer=True),
        ),
        Mistake(
            "You pass on the gradient that you received. The previous rank needs the result of backward.",
            partial(step, passes_on=True),
        ),
        Mistake(
            "In the cooldown the microbatches run backward in reverse order. Messages carry no number: the next rank "
            "sends the gradients of the earlier microbatches first.",
            partial(step, cooldown=reversed),
        ),
    ),
)
