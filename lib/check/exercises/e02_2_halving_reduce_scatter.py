"""02.2: a reduce-scatter by recursive halving: the bytes of the ring, in log2 n rounds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch import distributed as dist

from lib import comm
from lib.check.exercise import Data, Exercise, Mistake, random
from lib.check.listen import listen
from lib.mesh import Group

RESULT, KEPT, BY = "chunk of the sum", "x afterwards", "sent by"
BYTES, MESSAGES, PEERS, UNFINISHED = "bytes sent", "messages sent", "ranks sent to", "calls that were not waited for"
SAME, CHANGED = "as before", "changed"
POINT_TO_POINT, COLLECTIVE = "point-to-point messages", "a collective"


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    return [{"x": random(generator, 3 * n)} for _ in range(n)]


def body(answer: Callable, group: Group, given: Data) -> Data:
    heard, x = listen(), given["x"].clone()
    return {
        RESULT: answer(x, group),
        BY: COLLECTIVE if heard.collectives else POINT_TO_POINT,
        BYTES: sum(n_bytes for _, n_bytes in heard.sent),
        MESSAGES: len(heard.sent),
        PEERS: len({rank for rank, _ in heard.sent}),  # tells apart mistakes, and is not part of the answer
        KEPT: SAME if torch.equal(x, given["x"]) else CHANGED,
        UNFINISHED: heard.unfinished,
    }


def reference(given: list[Data]) -> list[Data]:
    n = len(given)
    total = torch.stack([g["x"] for g in given]).sum(0)
    right = {BY: POINT_TO_POINT, BYTES: (n - 1) * total.nbytes // n, MESSAGES: n.bit_length() - 1}
    right |= {KEPT: SAME, UNFINISHED: 0}
    return [right | {RESULT: chunk} for chunk in total.chunk(n)]


# ---- programs -------------------------------------------------------------------------------------------------------


def exchange(x: Tensor, peer: int, group: Group) -> Tensor:
    return comm.exchange({peer: x}, {peer: x}, group).wait()[peer]


def in_chunks(x: Tensor, peer: int, group: Group) -> Tensor:
    return torch.cat([exchange(chunk, peer, group) for chunk in x.split(3)])


def not_waited(x: Tensor, peer: int, group: Group) -> Tensor:
    got = torch.empty_like(x)
    dist.isend(x, peer)
    dist.recv(got, peer)
    return got


def far_first(n: int) -> list[int]:
    return [2**k for k in reversed(range(n.bit_length() - 1))]


def halving(
    x,
    group,
    swap=exchange,
    distances=far_first,
    upper=lambda rank, d: rank & d,
    add=lambda mine, got, x: mine + got,
):
    """With a place for each mistake; `upper`: whether this rank keeps the upper half."""
    for d in distances(group.size):
        lower_half, upper_half = x.chunk(2)
        mine, sent = (upper_half, lower_half) if upper(group.rank, d) else (lower_half, upper_half)
        x = add(mine, swap(sent, group.rank ^ d, group), x)
    return x


def near_first(x, group):
    """Neighbours first: the half for the partner is every second chunk, every fourth, …"""
    n, r = group.size, group.rank
    held = dict(enumerate(x.chunk(n)))
    for d in reversed(far_first(n)):
        mine, theirs = ([j for j in held if (j ^ side) & d == 0] for side in (r, r ^ d))
        sent = torch.cat([held[j] for j in theirs])
        got = torch.empty_like(sent)
        coming = dist.irecv(got, r ^ d)
        dist.send(sent, r ^ d)
        coming.wait()
        held = {j: held[j] + part for j, part in zip(mine, got.chunk(len(mine)), strict=True)}
    return held[r]


def ring(x, group):
    n, r = group.size, group.rank
    chunks = x.chunk(n)
    total = chunks[r - 1]
    for k in range(n - 1):
        got = comm.exchange({(r + 1) % n: total}, {(r - 1) % n: total}, group).wait()
        total = got[(r - 1) % n] + chunks[(r - 2 - k) % n]
    return total


def directly(x, group):
    n, r = group.size, group.rank
    chunks, others = x.chunk(n), [j for j in range(n) if j != r]
    got = comm.exchange({j: chunks[j] for j in others}, {j: chunks[r] for j in others}, group).wait()
    return chunks[r] + sum(got.values())


def all_reduced(x, group):
    """Recursive doubling: in each round the full array."""
    for d in far_first(group.size):
        x = x + exchange(x, group.rank ^ d, group)
    return x


def sends_all_it_holds(x, group):
    for d in far_first(group.size):
        x = (x + exchange(x, group.rank ^ d, group)).chunk(2)[bool(group.rank & d)]
    return x


def in_place(x, group):
    return halving(x, group, add=lambda mine, got, x: mine.add_(got))


def by_collective(x, group):
    return comm.reduce_scatter(x, group)


EXERCISE = Exercise(
    id="02.2",
    title="halving_reduce_scatter",
    points=3,
    body=body,
    inputs=inputs,
    reference=reference,
    ranks=(4, 8),
    right=(halving, near_first),
    mistakes=(
        Mistake(
            "The result is right, and a collective computed it. Write it with send, recv and exchange.",
            by_collective,
            about=(BY,),
        ),
        Mistake(
            "A send or a receive was started and not waited for. Keep the handle, and call its wait() before you use "
            "or change the tensor.",
            partial(halving, swap=not_waited),
            about=(UNFINISHED,),
        ),
        Mistake(
            "The result is right, and you change x: a chunk is a view, and add_ or += writes into x. Add into a new "
            "tensor.",
            in_place,
        ),
        Mistake(
            "The result and the bytes are right, with a ring: n - 1 messages from each rank to its right neighbour. "
            "Halving needs log2 n messages: in each round, send one message to rank r ^ d.",
            ring,
        ),
        Mistake(
            "The result and the bytes are right, and each rank sends a message to each of the n - 1 others. Halving "
            "needs log2 n messages: in each round, send to one partner all chunks that its side owns.",
            directly,
        ),
        Mistake(
            "The result and the bytes are right, in too many messages: you send the chunks of a half one by one. A "
            "message costs its latency each time. Send the half as one tensor.",
            partial(halving, swap=in_chunks),
        ),
        Mistake(
            "The result is right, and you all-reduce before you cut: each round sends the full array, log2 n · S in "
            "total. Cut first: each round sends half of the sums that the rank still holds, (n-1)/n · S in total.",
            lambda x, group: all_reduced(x, group).chunk(group.size)[group.rank],
        ),
        Mistake(
            "The result is right, and each round sends everything that the rank holds, twice the bytes needed. The "
            "partner needs only the half that its side owns.",
            sends_all_it_holds,
        ),
        Mistake(
            "You return the full sum. A reduce-scatter leaves rank r with chunk r.",
            all_reduced,
            about=(RESULT,),
        ),
        Mistake(
            "The sums are complete, and rank r has chunk n - 1 - r: each rank keeps the half that it should send. The "
            "rank whose number contains d keeps the upper half.",
            partial(halving, upper=lambda rank, d: not rank & d),
            about=(RESULT,),
        ),
        Mistake(
            "The sums are complete, and on the wrong ranks: chunk 1 is on rank n/2. Your partners are at distance 1, "
            "2, 4, … while the halves are cut from the largest to the smallest. Begin at distance n/2.",
            partial(halving, distances=lambda n: far_first(n)[::-1]),
            about=(RESULT,),
        ),
        Mistake(
            "You return your own chunk of x, and nothing was added. Add each received half to the half that you keep.",
            partial(halving, add=lambda mine, got, x: mine),
            about=(RESULT,),
        ),
        Mistake(
            "The received half replaces yours. Add it: the other rank's sums do not contain your numbers.",
            partial(halving, add=lambda mine, got, x: got),
            about=(RESULT,),
        ),
        Mistake(
            "The last round is missing: each rank returns two chunks, with the numbers of every second rank. Continue "
            "down to distance 1.",
            partial(halving, distances=lambda n: far_first(n)[:-1]),
            about=(RESULT,),
        ),
    ),
)
