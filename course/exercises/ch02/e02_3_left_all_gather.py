"""02.3: an all-gather in a ring that turns to the left."""

import torch
from torch import distributed as dist

from course.check.edits import exercise
from course.check.exercise import AS_NEEDED, everywhere, random
from course.check.listen import listen
from lib import comm

RESULT, SENT, UNFINISHED = "all parts", "what was sent", "calls that were not waited for"
COLLECTIVE, ELSEWHERE = "a collective", "a message to a rank that is not the left neighbour"


def inputs(generator, n):
    return [{"part": random(generator, 3)} for _ in range(n)]


def body(answer, group, given):
    heard, n = listen(), group.size
    result = answer(given["part"].clone(), group)
    sent = heard.amount(n, (n - 1) * given["part"].nbytes)
    if any(rank != (group.rank - 1) % n for rank, _ in heard.sent):
        sent = ELSEWHERE
    return {RESULT: result, SENT: COLLECTIVE if heard.collectives else sent, UNFINISHED: heard.unfinished}


def reference(given):
    return everywhere({RESULT: torch.cat([g["part"] for g in given]), SENT: AS_NEEDED, UNFINISHED: 0}, given)


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
comm.all_gather
    The result is right, and a collective did the work.
        Write it with send, recv and exchange.
range(n - 1) => range(2 * (n - 1))
    The result is right, and you send more than n - 1 parts.
        One part in each of n - 1 steps is enough.
in calls that were not waited for: parts[(r + k) % n] => comm.send(parts[(r + k) % n], group, left)
{left: sent} => {}
    A send or a receive was started and not waited for.
        Keep the handle, and wait() before you use or change the tensor.
"""

EXERCISE = exercise(globals(), points=3, right=(left_all_gather, gather_in_place))
