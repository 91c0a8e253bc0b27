"""02.1: rank r's tensor to rank r + k, for any k, without a deadlock."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import gcd

import torch
from torch import Tensor
from torch import distributed as dist

from lib import comm
from lib.check.exercise import Data, Exercise, Mistake, random
from lib.check.listen import listen
from lib.mesh import Group

UNFINISHED, BY = "sends and receives that were not waited for", "sent by"
POINT_TO_POINT, COLLECTIVE = "point-to-point messages", "a collective"


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    # Of six ranks, 1 makes one cycle, 2 makes two cycles of three ranks, and 3 makes three cycles of two.
    return [{"x": random(generator, 3), "shifts": [1, -1, 3, 2, n, 1 - n]} for _ in range(n)]


def body(answer: Callable, group: Group, given: Data) -> Data:
    heard = listen()
    found: Data = {f"shift(x, {k}, group)": answer(given["x"].clone(), k, group) for k in given["shifts"]}
    return found | {UNFINISHED: heard.unfinished, BY: COLLECTIVE if heard.collectives else POINT_TO_POINT}


def reference(given: list[Data]) -> list[Data]:
    n, right = len(given), {UNFINISHED: 0, BY: POINT_TO_POINT}
    return [
        right | {f"shift(x, {k}, group)": given[(rank - k) % n]["x"] for k in g["shifts"]}
        for rank, g in enumerate(given)
    ]


# ---- programs -------------------------------------------------------------------------------------------------------


def exchange(x: Tensor, dst: int, src: int, group: Group) -> Tensor:
    return comm.exchange({dst: x}, {src: x}, group).wait()[src]


def shift(x, k, group, swap=exchange, step=lambda k: k):
    """With a place for each mistake: how the two messages are made, and how far they go."""
    dst, src = (group.rank + step(k)) % group.size, (group.rank - step(k)) % group.size
    return x if k % group.size == 0 else swap(x, dst, src, group)


def receive_started_first(x, dst, src, group):
    coming = comm.recv(x, group, src)
    comm.send(x, group, dst).wait()
    return coming.wait()


def batch(x, dst, src, group):
    got = torch.empty_like(x)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, got, src), dist.P2POp(dist.isend, x, dst)]):
        work.wait()
    return got


def without_waiting(x, dst, src, group):
    dist.isend(x, dst)
    got = torch.empty_like(x)
    dist.recv(got, src)
    return got


def all_gather(x, dst, src, group):
    return comm.all_gather(x[None], group)[src]


def blocking(sends_first):
    """First one message, then the second; `sends_first(rank, dst, n)` says in which order."""

    def swap(x, dst, src, group):
        if sends_first(group.rank, dst, group.size):
            comm.send(x, group, dst).wait()
        got = comm.recv(x, group, src).wait()
        if not sends_first(group.rank, dst, group.size):
            comm.send(x, group, dst).wait()
        return got

    return partial(shift, swap=swap)


PARITY = (
    "Parity does not separate the ranks of every cycle. With k = 2 all messages of even ranks go to even ranks, and "
    "all of these ranks make the same call first and wait in it; odd ranks likewise. Start the send and the receive, "
    "then wait for both."
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
        shift,
        partial(shift, swap=receive_started_first),
        partial(shift, swap=batch),
        blocking(lambda rank, dst, n: rank < gcd(n, dst - rank)),  # each cycle has one such rank
    ),
    mistakes=(
        # The most common mistake first: a program that hangs takes seconds to run.
        Mistake(PARITY, blocking(lambda rank, dst, n: rank % 2 == 0), hangs=True),
        Mistake(
            "All ranks wait in send, so no rank starts its receive. Start the send and the receive, then wait for "
            "both.",
            blocking(lambda rank, dst, n: True),
            hangs=True,
        ),
        Mistake(PARITY, blocking(lambda rank, dst, n: rank % 2 == 1), hangs=True),
        Mistake(
            "Rank 0 receives first, which opens the cycle that it is part of. With k = 2 ranks 1, 3 and 5 form a "
            "separate cycle, and all of them send first. Start the send and the receive, then wait for both.",
            blocking(lambda rank, dst, n: rank != 0),
            hangs=True,
        ),
        Mistake(
            "You started a send or a receive and did not wait for it. Until its wait() returns, the sent tensor must "
            "not change and the received tensor must not be read. Keep the handle, and wait before you return.",
            partial(shift, swap=without_waiting),
            about=(UNFINISHED,),
        ),
        Mistake(
            "The result is right, and a collective sends every tensor to every rank. Each rank needs one: use send, "
            "recv and exchange.",
            partial(shift, swap=all_gather),
        ),
        Mistake(
            "You shift in the opposite direction: rank r sends to rank r + k, so it receives from rank r - k.",
            partial(shift, step=lambda k: -k),
        ),
        Mistake(
            "Each rank still has its own x. Return the received tensor: wait() of recv and of exchange returns it.",
            lambda x, k, group: x,
        ),
        Mistake(
            "You always send to the next rank. Send to rank r + k, and receive from rank r - k.",
            partial(shift, step=lambda k: 1),
        ),
        Mistake(
            "Two mistakes: you always send to the previous rank, so the direction is wrong and k is not used. Send to "
            "rank r + k, and receive from rank r - k.",
            partial(shift, step=lambda k: -1),
        ),
    ),
)
