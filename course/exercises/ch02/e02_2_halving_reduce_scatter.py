"""02.2: a reduce-scatter by recursive halving: the bytes of the ring, in log2 n rounds."""

import torch
from torch import distributed as dist

from course.check.edits import exercise
from course.check.exercise import random
from course.check.listen import listen
from lib import comm

RESULT, KEPT, BY = "chunk of the sum", "x afterwards", "sent by"
BYTES, MESSAGES, PEERS, WAITED = "bytes sent", "messages sent", "ranks sent to", "waited for"
ALL, SOME = "every call", "not every call"
SAME, CHANGED = "as before", "changed"
POINT_TO_POINT, COLLECTIVE = "point-to-point messages", "a collective"
FACTS = {BY: POINT_TO_POINT, KEPT: SAME, WAITED: ALL}


def inputs(generator, n):
    return [{"x": random(generator, 3 * n)} for _ in range(n)]


def body(answer, group, given):
    heard, x = listen(), given["x"].clone()
    return {
        RESULT: answer(x, group),
        BY: COLLECTIVE if heard.collectives else POINT_TO_POINT,
        BYTES: sum(n_bytes for _, n_bytes in heard.sent),
        MESSAGES: len(heard.sent),
        PEERS: len({rank for rank, _ in heard.sent}),  # tells apart mistakes, and is not part of the answer
        KEPT: SAME if torch.equal(x, given["x"]) else CHANGED,
        WAITED: SOME if heard.unfinished else ALL,
    }


def reference(given):
    n, total = len(given), sum(g["x"] for g in given)
    sent = {BYTES: (n - 1) * total.nbytes // n, MESSAGES: n.bit_length() - 1}
    return [sent | {RESULT: chunk} for chunk in total.chunk(n)]


def halving_reduce_scatter(x, group):
    distance = group.size // 2
    while distance:
        lower, upper = x.chunk(2)
        in_upper_side = group.rank & distance
        mine, theirs = (upper, lower) if in_upper_side else (lower, upper)
        peer = group.rank ^ distance
        got = comm.exchange({peer: theirs}, {peer: mine}, group).wait()[peer]
        x = mine + got
        distance //= 2
    return x


def near_first(x, group):
    """Neighbours first: the half for the partner is every second chunk, every fourth, …"""
    n, r = group.size, group.rank
    held = dict(enumerate(x.chunk(n)))
    for d in (2**k for k in range(n.bit_length() - 1)):
        mine, theirs = ([j for j in held if (j ^ side) & d == 0] for side in (r, r ^ d))
        sent = torch.cat([held[j] for j in theirs])
        got = torch.empty_like(sent)
        coming = dist.irecv(got, r ^ d)
        dist.send(sent, r ^ d)
        coming.wait()
        held = {j: held[j] + part for j, part in zip(mine, got.chunk(len(mine)), strict=True)}
    return held[r]


def round_the_circle(x, group):
    """To rank r + d, from rank r - d: what goes at least d ranks further, for d = n/2, …, 2, 1."""
    n, r = group.size, group.rank
    held = {(j - r) % n: chunk for j, chunk in enumerate(x.chunk(n))}  # by how far it goes
    for d in (n >> k for k in range(1, n.bit_length())):
        sent = torch.cat([held.pop(d + i) for i in range(d)])
        got = comm.exchange({(r + d) % n: sent}, {(r - d) % n: sent}, group).wait()[(r - d) % n]
        held = {i: held[i] + part for i, part in enumerate(got.chunk(d))}
    return held[0]


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


def in_chunks(x, peer, group):
    """Exchanges them one by one."""
    return torch.cat([comm.exchange({peer: chunk}, {peer: chunk}, group).wait()[peer] for chunk in x.split(3)])


MISTAKES = """
in sent by, chunk of the sum: comm.reduce_scatter
    The result is right, and a collective computed it.
        Write it with send, recv and exchange.
in waited for:
peer = group.rank ^ distance => sending = comm.send(theirs, group, group.rank ^ distance)
comm.exchange({peer: theirs}, {peer: mine}, group).wait()[peer] => comm.recv(mine, group, group.rank ^ distance).wait()
    A send or a receive was started and not waited for.
        Keep the handle, and wait() before you use or change the tensor.
in all:
x = mine + got => x = mine.add_(got)
    The result is right, and x has changed. x.chunk(2) gives views: add_, += or a receive into one writes into x.
        Add into a new tensor.
distance = group.size // 2 => x = x.float(); distance = group.size // 2
or distance = group.size // 2 => x = x.float(); distance = group.size // 2
return x => return x.double()
or {peer: theirs}, {peer: mine}, group => {peer: theirs.float()}, {peer: mine.float()}, group
    You send in float32: half of the bytes, and half of the digits.
        Keep the dtype of x: a new tensor is float32 unless it is told its dtype.
ring
    The result and the bytes are right, with a ring: n - 1 messages from each rank to one neighbour.
        Halving needs log2 n messages: in each round, send one message to rank r ^ d.
directly
    The result and the bytes are right, and each rank sends a message to each of the n - 1 others.
        Halving needs log2 n messages: in each round, send to one partner all chunks that its side owns.
got = comm.exchange({peer: theirs}, {peer: mine}, group).wait()[peer] => got = in_chunks(theirs, peer, group)
    The result and the bytes are right, in too many messages: you send the chunks of a half one by one. A message costs
    its latency each time.
        Send the half as one tensor.
lower, upper = x.chunk(2) =>
mine, theirs = (upper, lower) if in_upper_side else (lower, upper) => mine = theirs = x
return x => return x.chunk(group.size)[group.rank]
    The result is right, and you all-reduce before you cut: each round sends the full array, log2 n · S in total.
        Cut first: each round sends half of the sums that the rank still holds, (n-1)/n · S in total.
lower, upper = x.chunk(2) =>
mine, theirs = (upper, lower) if in_upper_side else (lower, upper) => mine = theirs = x
x = mine + got => x = (mine + got).chunk(2)[bool(in_upper_side)]
    The result is right, and each round sends all that the rank holds.
        The partner needs the half that its side owns.
in chunk of the sum:
lower, upper = x.chunk(2) =>
mine, theirs = (upper, lower) if in_upper_side else (lower, upper) => mine = theirs = x
    You return the full sum.
        A reduce-scatter leaves rank r with chunk r.
(upper, lower) if in_upper_side else (lower, upper) => (lower, upper) if in_upper_side else (upper, lower)
    The sums are complete, and rank r has chunk n - 1 - r: each rank keeps the half that it should send.
        The rank whose number contains d keeps the upper half.
distance = group.size // 2 => distance = 1
while distance: => while distance < group.size:
distance //= 2 => distance *= 2
    The sums are complete, and on the wrong ranks: chunk 1 is on rank n/2. Your partners are at distance 1, 2, 4, …
    while the halves are cut from the largest to the smallest.
        Begin at distance n/2.
{peer: theirs} => {peer: mine}
    Each rank sends the half that it keeps. The numbers that its partner needs are in the other half.
        Send the half that the partner's side takes over.
x = mine + got => x = mine
    You return your own chunk of x, and nothing was added.
        Add each received half to the half that you keep.
x = mine + got => x = got
    The received half replaces yours.
        Add it: the other rank's sums do not contain your numbers.
while distance: => while distance > 1:
    The last round is missing: each rank returns two chunks, with the numbers of every second rank.
        Go on to distance 1.
"""

EXERCISE = exercise(globals(), points=3, right=(halving_reduce_scatter, near_first, round_the_circle), ranks=(4, 8))
