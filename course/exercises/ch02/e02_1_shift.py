"""02.1: rank r's tensor to rank r + k, for any k, one message at a time and without a deadlock."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import gcd

import torch
from torch import distributed as dist

from course.check.exercise import Data, Exercise, Mistake, random
from course.check.listen import listen
from lib import comm
from lib.mesh import Group

UNFINISHED, AT_ONCE, BY = "messages that were not waited for", "messages in flight at once", "sent by"
POINT_TO_POINT, COLLECTIVE = "point-to-point messages", "a collective"


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    # Of six ranks, 1 makes one cycle, 2 makes two cycles of three ranks, and 3 makes three cycles of two.
    return [{"x": random(generator, 3), "shifts": [1, -1, 3, 2, n, 1 - n]} for _ in range(n)]


def body(answer: Callable, group: Group, given: Data) -> Data:
    at_once = [0]
    heard = listen(on_wait=lambda: at_once.append(1 + heard.unfinished))
    found: Data = {f"shift(x, {k}, group)": answer(given["x"].clone(), k, group) for k in given["shifts"]}
    found |= {UNFINISHED: heard.unfinished, AT_ONCE: max(at_once)}
    return found | {BY: COLLECTIVE if heard.collectives else POINT_TO_POINT}


def reference(given: list[Data]) -> list[Data]:
    n, right = len(given), {UNFINISHED: 0, AT_ONCE: 1, BY: POINT_TO_POINT}
    return [
        right | {f"shift(x, {k}, group)": given[(rank - k) % n]["x"] for k in g["shifts"]}
        for rank, g in enumerate(given)
    ]


# ---- programs -------------------------------------------------------------------------------------------------------


def shift(x, k, group, swap, step=lambda k: k):
    """With a place for each mistake: how the two messages are made, and how far they go."""
    dst, src = (group.rank + step(k)) % group.size, (group.rank - step(k)) % group.size
    return x if k % group.size == 0 else swap(x, dst, src, group)


def in_order(sends_first: Callable) -> Callable:
    """One message, then the other; `sends_first(rank, dst, n)` says in which order."""

    def swap(x, dst, src, group):
        if sends_first(group.rank, dst, group.size):
            comm.send(x, group, dst).wait()
            return comm.recv(x, group, src).wait()
        got = comm.recv(x, group, src).wait()
        comm.send(x, group, dst).wait()
        return got

    return swap


upward = in_order(lambda rank, dst, n: dst > rank)  # each cycle has messages to higher and to lower ranks


def one_after_the_other(x, dst, src, group):
    """All messages in the order of their senders, by `torch.distributed`."""
    got = torch.empty_like(x)
    for sender in range(group.size):
        if sender == group.rank:
            dist.send(x, dst)
        elif sender == src:
            dist.recv(got, src)
    return got


def exchange(x, dst, src, group):
    return comm.exchange({dst: x}, {src: x}, group).wait()[src]


def without_waiting(x, dst, src, group):
    dist.isend(x, dst)
    got = torch.empty_like(x)
    dist.recv(got, src)
    return got


def all_gather(x, dst, src, group):
    return comm.all_gather(x[None], group)[src]


def ordered(sends_first: Callable) -> Callable:
    return partial(shift, swap=in_order(sends_first))


PARITY = (
    "Parity does not separate the ranks of every cycle. With k = 2 all messages of even ranks go to even ranks, and "
    "all of these ranks make the same call first and wait in it; odd ranks likewise. Find what some ranks of every "
    "cycle have and some have not."
)

EXERCISE = Exercise(
    id="02.1",
    title="shift",
    points=2,
    body=body,
    inputs=inputs,
    reference=reference,
    ranks=(6,),
    right=(
        partial(shift, swap=upward),
        partial(shift, swap=one_after_the_other),
        ordered(lambda rank, dst, n: rank < gcd(n, dst - rank)),  # each cycle has one such rank
        ordered(lambda rank, dst, n: rank < n // 2),  # a cycle has a rank of each half
    ),
    mistakes=(
        # The most common mistake first: a program that hangs takes seconds to run.
        Mistake(PARITY, ordered(lambda rank, dst, n: rank % 2 == 0), hangs=True),
        Mistake(
            "All ranks wait in send, so no rank starts its receive. Some ranks of each cycle must receive first.",
            ordered(lambda rank, dst, n: True),
            hangs=True,
        ),
        Mistake(PARITY, ordered(lambda rank, dst, n: rank % 2 == 1), hangs=True),
        Mistake(
            "Rank 0 receives first, which opens the cycle that it is part of. With k = 2 ranks 1, 3 and 5 form a "
            "separate cycle, and all of them send first. Each cycle needs a rank that receives first.",
            ordered(lambda rank, dst, n: rank != 0),
            hangs=True,
        ),
        Mistake(
            "Rank 0 sends first, which opens the cycle that it is part of. With k = 2 ranks 1, 3 and 5 form a "
            "separate cycle, and all of them receive first. Each cycle needs a rank that sends first.",
            ordered(lambda rank, dst, n: rank == 0),
            hangs=True,
        ),
        Mistake(
            "All ranks wait in recv, so no rank starts its send. Some ranks of each cycle must send first.",
            ordered(lambda rank, dst, n: False),
            hangs=True,
        ),
        Mistake(
            "You started a send or a receive and did not wait for it. Until its wait() returns, the sent tensor must "
            "not change and the received tensor must not be read. Wait for it before you start the next.",
            partial(shift, swap=without_waiting),
            about=(UNFINISHED,),
        ),
        Mistake(
            "The result is right, with two messages of a rank in flight at once. Here only their order may prevent the "
            "deadlock: wait for the first before you start the second.",
            partial(shift, swap=exchange),
        ),
        Mistake(
            "The result is right, and a collective sends every tensor to every rank. Each rank needs one: use send and "
            "recv.",
            partial(shift, swap=all_gather),
        ),
        Mistake(
            "You shift in the opposite direction: rank r sends to rank r + k, so it receives from rank r - k.",
            partial(shift, swap=upward, step=lambda k: -k),
        ),
        Mistake(
            "Each rank still has its own x. Return the received tensor: wait() of recv returns it.",
            lambda x, k, group: x,
        ),
        Mistake(
            "You always send to the next rank. Send to rank r + k, and receive from rank r - k.",
            partial(shift, swap=upward, step=lambda k: 1),
        ),
        Mistake(
            "Two mistakes: you always send to the previous rank, so the direction is wrong and k is not used. Send to "
            "rank r + k, and receive from rank r - k.",
            partial(shift, swap=upward, step=lambda k: -1),
        ),
    ),
)
