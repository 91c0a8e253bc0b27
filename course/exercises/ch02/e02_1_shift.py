"""02.1: rank r's tensor to rank r + k, for any k, one message at a time and without a deadlock."""

from math import gcd

import torch
from torch import distributed as dist

from course.check.edits import exercise
from course.check.exercise import random
from course.check.listen import listen
from lib import comm

WAITED, AT_ONCE, BY = "waited for", "messages in flight at once", "sent by"
ALL, SOME = "every message", "not every message"
POINT_TO_POINT, COLLECTIVE = "point-to-point messages", "a collective"
FACTS = {WAITED: ALL, AT_ONCE: 1, BY: POINT_TO_POINT}


def inputs(generator, n):
    # Of six ranks, 1 makes one cycle, 2 makes two cycles of three ranks, and 3 makes three cycles of two.
    shifts = [1, -1, 3, 2, n, 1 - n, 0, n + 2, 2 - 3 * n]
    return [{"x": random(generator, 2, 3), "shifts": shifts} for _ in range(n)]


def body(answer, group, given):
    at_once, found = [0], {}
    heard = listen(on_wait=lambda call: at_once.append(1 + heard.unfinished))
    for k in given["shifts"]:
        before = len(heard.sent)
        found[f"shift(x, {k}, group)"] = answer(given["x"].clone(), k, group)
        found[f"ranks sent to with k = {k}"] = sorted({rank for rank, _ in heard.sent[before:]})
    found |= {WAITED: SOME if heard.unfinished else ALL, AT_ONCE: max(at_once)}
    return found | {BY: COLLECTIVE if heard.collectives else POINT_TO_POINT}


def reference(given):
    ranks = []
    for r, g in enumerate(given):
        n, moved = len(given), {f"shift(x, {k}, group)": given[r - k % len(given)]["x"] for k in g["shifts"]}
        to = {f"ranks sent to with k = {k}": [(r + k) % n] if k % n else [] for k in g["shifts"]}
        ranks.append(moved | to)
    return ranks


def shift(x, k, group):
    dst = (group.rank + k) % group.size
    src = (group.rank - k) % group.size
    if dst == group.rank:
        return x
    sends_first = dst > group.rank
    if sends_first:
        comm.send(x, group, dst).wait()
    received = comm.recv(x, group, src).wait()
    if not sends_first:
        comm.send(x, group, dst).wait()
    return received


def one_after_the_other(x, k, group):
    """All messages in the order of their senders, by `torch.distributed`."""
    dst, src = (group.rank + k) % group.size, (group.rank - k) % group.size
    got = x.clone()
    for sender in range(group.size if k % group.size else 0):
        if sender == group.rank:
            dist.send(x, dst)
        elif sender == src:
            dist.recv(got, src)
    return got


def these_first(count, into=torch.empty_like):
    """The ranks below `count(k, n)` send first, and the others receive first, into the tensor `into(x)`."""

    def program(x, k, group):
        if k % group.size == 0:
            return x
        rank, n, got = group.rank, group.size, into(x)
        for sends in (rank < count(k, n), rank >= count(k, n)):
            if sends:
                dist.send(x, (rank + k) % n)
            else:
                dist.recv(got, (rank - k) % n)
        return got

    return program


def in_steps(x, k, group):
    """One rank further, k times."""
    for _ in range(k % group.size):
        x = shift(x, 1, group)
    return x


def in_a_row(x, k, group):
    """As if no rank followed the last."""
    dst, src, ranks = group.rank + k, group.rank - k, range(group.size)
    if k and dst in ranks:
        comm.send(x, group, dst).wait()
    return comm.recv(x, group, src).wait() if k and src in ranks else x


# The most common mistake first: a program that hangs takes seconds to run.
MISTAKES = """
hangs
dst > group.rank => group.rank % 2 == 0
    Parity does not separate the ranks of every cycle. With k = 2 even ranks send to even ranks only, and all of them
    make the same call first; odd ranks likewise.
        Find what some ranks of every cycle have and some have not.
hangs
=> True
    All ranks wait in send, so no rank starts its receive.
        Some ranks of each cycle must receive first.
hangs
=> group.rank % 2 == 1
    Parity does not separate the ranks of every cycle. With k = 2 even ranks send to even ranks only, and all of them
    make the same call first; odd ranks likewise.
        Find what some ranks of every cycle have and some have not.
hangs
=> group.rank != 0
    Rank 0 receives first, which opens the cycle that it is part of. With k = 2 ranks 1, 3 and 5 form a separate cycle,
    and all of them send first.
        Each cycle needs a rank that receives first.
hangs
=> group.rank == 0
    Rank 0 sends first, which opens the cycle that it is part of. With k = 2 ranks 1, 3 and 5 form a separate cycle, and
    all of them receive first.
        Each cycle needs a rank that sends first.
hangs
=> False
    All ranks wait in recv, so no rank starts its send.
        Some ranks of each cycle must send first.
in waited for: comm.recv(x, group, src).wait() => comm.recv(x, group, src)
    You started a send or a receive and did not wait for it. Until its wait() returns, the sent tensor must not change
    and the received tensor must not be read.
        Wait for it before you start the next.
=> comm.exchange({dst: x}, {src: x}, group).wait()[src]
if sends_first: => if False:
if not sends_first: => if False:
    The result is right, with two messages of a rank in flight at once. Here only their order may prevent the deadlock.
        Wait for the first before you start the second.
in sent by, shift(:
lambda x, k, group: comm.all_gather(x[None], group)[(group.rank - k) % group.size]
    The result is right, and a collective moved the tensors. The task is to repair the order of a send
    and a receive.
        Use send and recv.
in shift(, k = 2, k = 3:
in_steps
    The result is right, and your tensor goes over the ranks between, one rank further in each message.
        Send it to rank r + k itself: one message for each rank.
in shift(, sent to:
lambda x, k, group: shift(x, -k, group)
    You shift in the opposite direction.
        Rank r sends to rank r + k, so it receives from rank r - k.
lambda x, k, group: shift(x, abs(k), group)
    A negative k shifts as a positive one does. It shifts in the opposite direction.
        Keep the sign of k: (r + k) % n is a rank for any k.
in_a_row
    Your ranks form a row: the last ones send nothing, and the first ones keep their own x.
        Ranks are counted modulo n, so rank 0 follows the last: (r + k) % n.
return x => return None
    Where k is a multiple of n you return None. A rank that would send to itself returns its x.
        Return x before you send.
return received => return x
    You send and receive, and each rank returns its own x.
        Return the received tensor: wait() of recv returns it.
lambda x, k, group: x
    Each rank returns its own x, and sends nothing.
        Send x to rank r + k, and return what you receive from rank r - k.
comm.recv(x, group, src).wait() => dist.recv(x, src); received = x
or these_first(gcd, into=lambda x: x)
or these_first(lambda k, n: n // 2, into=lambda x: x)
    Some ranks receive into x before they send it, and send on what they received.
        Receive into a new tensor, such as torch.empty_like(x).
lambda x, k, group: shift(x, 1, group)
or lambda x, k, group: shift(x, 1, group) if k % group.size else x
    You always send to the next rank.
        Send to rank r + k, and receive from rank r - k.
lambda x, k, group: shift(x, -1, group)
or lambda x, k, group: shift(x, -1, group) if k % group.size else x
    You always send to the previous rank: wrong direction, and k is not used.
        Send to rank r + k, receive from r - k.
"""

EXERCISE = exercise(
    globals(),
    points=2,
    right=(shift, one_after_the_other, these_first(gcd), these_first(lambda k, n: n // 2)),
    ranks=(6,),
    tolerances={"shift(": 0},
)
