"""02.3: an all-gather in a ring that turns to the left."""

import torch
from torch import distributed as dist

from course.check.edits import exercise
from course.check.exercise import AS_NEEDED, everywhere, random
from course.check.listen import listen
from lib import comm

RESULT, TO, BY, BYTES, MESSAGES = "all parts", "steps to the left", "sent by", "bytes sent", "messages sent"
WAITED, ALL, SOME = "waited for", "every call", "not every call"
POINT_TO_POINT, COLLECTIVE = "point-to-point messages", "a collective"
IN_EACH_STEP, IN_PIECES = "one in each of n - 1 steps", "more"
FACTS = {TO: [1], BY: POINT_TO_POINT, BYTES: AS_NEEDED, MESSAGES: IN_EACH_STEP, WAITED: ALL}


def inputs(generator, n):
    return [{"part": random(generator, 3)} for _ in range(n)]


def body(answer, group, given):
    heard, n = listen(), group.size
    return {
        RESULT: answer(given["part"].clone(), group),
        TO: sorted({(group.rank - rank) % n for rank, _ in heard.sent}),  # from this rank to the receiver
        BY: COLLECTIVE if heard.collectives else POINT_TO_POINT,
        BYTES: heard.amount(n, (n - 1) * given["part"].nbytes),
        MESSAGES: IN_PIECES if len(heard.sent) >= n else IN_EACH_STEP,
        WAITED: SOME if heard.unfinished else ALL,
    }


def reference(given):
    return everywhere({RESULT: torch.cat([g["part"] for g in given])}, given)


def left_all_gather(part, group):
    n, r = group.size, group.rank
    right, left = (r + 1) % n, (r - 1) % n
    parts = {r: part}
    for k in range(n - 1):
        sent = parts[(r + k) % n]
        got = comm.exchange({left: sent}, {right: part}, group).wait()
        parts[(r + k + 1) % n] = got[right]
    return torch.cat([parts[i] for i in range(n)])


def gather_in_place(part, group):
    n, r = group.size, group.rank
    rows = part.repeat(n, 1)
    for k in range(n - 1):
        sending = dist.isend(rows[(r + k) % n], (r - 1) % n)
        dist.recv(rows[(r + k + 1) % n], (r + 1) % n)
        sending.wait()
    return rows.flatten()


def directly(part, group):
    others = [rank for rank in range(group.size) if rank != group.rank]
    parts = comm.exchange(dict.fromkeys(others, part), dict.fromkeys(others, part), group).wait()
    parts[group.rank] = part
    return torch.cat([parts[i] for i in range(group.size)])


def all_that_it_has(part, group):
    n, r = group.size, group.rank
    has = part
    for _ in range(n - 1):
        got = comm.exchange({(r - 1) % n: has}, {(r + 1) % n: has}, group).wait()[(r + 1) % n]
        has = torch.cat([part, got])
    return has.roll(r * len(part))


def into_one_tensor(part, group):
    """Right, but for what it keeps: all that arrives is one tensor."""
    n, r = group.size, group.rank
    sent, got, parts = part.clone(), torch.empty_like(part), [part] * n
    for k in range(n - 1):
        sending = dist.isend(sent, (r - 1) % n)
        dist.recv(got, (r + 1) % n)
        sending.wait()
        sent.copy_(got)
        parts[(r + k + 1) % n] = got
    return torch.cat(parts)


def in_pieces(part, left, right, group):
    """Exchanges the numbers of a part one by one."""
    return {right: torch.cat([comm.exchange({left: x}, {right: x}, group).wait()[right] for x in part.split(1)])}


MISTAKES = """
right, left = (r + 1) % n, (r - 1) % n => left, right = (r + 1) % n, (r - 1) % n
parts[(r + k) % n] => parts[(r - k) % n]
parts[(r + k + 1) % n] => parts[(r - k - 1) % n]
    The result is right, but your ring turns to the right.
        Send to rank r - 1, and receive from rank r + 1.
[parts[i] for i in range(n)] => list(parts.values())
    You return all parts in the order in which they arrived, your own first.
        Put the part of rank i in place i.
parts[(r + k) % n] => parts[(r - k) % n]
parts[(r + k + 1) % n] => parts[(r - k - 1) % n]
    The parts are in the wrong order.
        In a ring that turns left, the second is from rank r + 1, the third from r + 2.
parts[(r + k) % n] => part
    Each step receives the right neighbour's own part again: each rank sends its own.
        Send the part received last.
into_one_tensor
    You keep one tensor for all parts that arrive, and each receive overwrites it.
        Receive each part into a tensor of its own.
torch.cat([parts[i] for i in range(n)]) => [parts[i] for i in range(n)]
or torch.cat([parts[i] for i in range(n)]) => torch.stack([parts[i] for i in range(n)])
    All parts are there and in order, but not as one flat tensor.
        Join them with torch.cat.
return torch.cat => return None if r else torch.cat
    Rank 0 alone returns all parts. Every rank needs them.
        Return them on each rank.
in all parts, sent by: comm.all_gather
    The result is right, and a collective did the work.
        Write it with send, recv and exchange.
in all:
directly
    The result is right, and there is no ring: each rank sends its part to every other rank itself.
        Send to rank r - 1 only, and pass on what you received.
all_that_it_has
    The result is right, and each step sends all that a rank has: part after part travels again.
        Send one part in each step, the one received last.
comm.exchange({left: sent}, {right: part}, group).wait() => in_pieces(sent, left, right, group)
    The result and the bytes are right, in too many messages: a part travels in pieces.
        Send one part in each of n - 1 steps, as one message.
range(n - 1) => range(2 * (n - 1))
    The result is right, and you send more than n - 1 parts.
        One part in each of n - 1 steps is enough.
in waited for: parts[(r + k) % n] => comm.send(parts[(r + k) % n], group, left)
{left: sent} => {}
    A send or a receive was started and not waited for.
        Keep the handle, and wait() before you use or change the tensor.
"""

EXERCISE = exercise(globals(), points=3, right=(left_all_gather, gather_in_place), tolerances={RESULT: 0})
