"""02.3: an all-gather in a ring that turns to the left."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch import distributed as dist

from course.check.exercise import AS_NEEDED, MORE, Data, Exercise, Mistake, random
from course.check.listen import Heard, listen
from lib import comm
from lib.mesh import Group

RESULT, SENT, UNFINISHED = "all parts", "what was sent", "calls that were not waited for"
COLLECTIVE, ELSEWHERE = "a collective", "a message to a rank that is not the left neighbour"


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    return [{"part": random(generator, 3)} for _ in range(n)]


def body(answer: Callable, group: Group, given: Data) -> Data:
    heard = listen()
    result = answer(given["part"].clone(), group)
    return {RESULT: result, SENT: sent(heard, group, given["part"].nbytes), UNFINISHED: heard.unfinished}


def sent(heard: Heard, group: Group, part_bytes: int) -> str:
    if heard.collectives:
        return COLLECTIVE
    if any(rank != (group.rank - 1) % group.size for rank, _ in heard.sent):
        return ELSEWHERE
    return AS_NEEDED if heard.sent_bytes(group.size) <= (group.size - 1) * part_bytes else MORE


def reference(given: list[Data]) -> list[Data]:
    return [{RESULT: torch.cat([g["part"] for g in given]), SENT: AS_NEEDED, UNFINISHED: 0}] * len(given)


# ---- programs -------------------------------------------------------------------------------------------------------


def in_order_of_ranks(parts: dict[int, Tensor], rank: int) -> list[Tensor]:
    return [parts[i] for i in range(len(parts))]


def gather(part, group, turn=-1, order=in_order_of_ranks, passes_on=True, times=1):
    """With a place for each mistake; `parts` is in the order of arrival."""
    n, r = group.size, group.rank
    dst, src = (r + turn) % n, (r - turn) % n
    parts, last = {r: part}, part
    for k in range(times * (n - 1)):
        got = comm.exchange({dst: last}, {src: part}, group).wait()[src]
        parts[(r - turn * (k + 1)) % n] = got
        last = got if passes_on else part
    return torch.cat(order(parts, r))


def gather_in_place(part, group):
    n, r = group.size, group.rank
    rows = torch.empty(n, *part.shape, dtype=part.dtype)
    rows[r] = part
    for k in range(n - 1):
        sending = dist.isend(rows[(r + k) % n], (r - 1) % n)
        dist.recv(rows[(r + k + 1) % n], (r + 1) % n)
        sending.wait()
    return rows.flatten()


def not_waited(part, group):
    n, r, last, parts = group.size, group.rank, part, {group.rank: part}
    for k in range(n - 1):
        dist.isend(last, (r - 1) % n)
        last = parts[(r + k + 1) % n] = torch.empty_like(part)
        dist.recv(last, (r + 1) % n)
    return torch.cat(in_order_of_ranks(parts, r))


EXERCISE = Exercise(
    id="02.3",
    title="left_all_gather",
    points=3,
    body=body,
    inputs=inputs,
    reference=reference,
    right=(gather, gather_in_place),
    mistakes=(
        Mistake(
            "The result is right, but your ring turns to the right. Send to rank r - 1, and receive from rank r + 1.",
            partial(gather, turn=1),
        ),
        Mistake(
            "You return all parts, but in the order in which they arrived: your own part first. Put the part of rank i "
            "in place i, on all ranks.",
            partial(gather, order=lambda parts, r: list(parts.values())),
        ),
        Mistake(
            "The parts are in the wrong order. In a ring that turns left, the second part that a rank holds is from "
            "rank r + 1, and the third is from rank r + 2.",
            partial(gather, order=lambda parts, r: [parts[(2 * r - i) % len(parts)] for i in range(len(parts))]),
        ),
        Mistake(
            "Each step receives the right neighbour's own part again, because each rank sends its own part in every "
            "step. Send the part that you received last.",
            partial(gather, passes_on=False),
        ),
        Mistake(
            "The result is right, and a collective did the work. Write it with send, recv and exchange.",
            lambda part, group: comm.all_gather(part, group),
        ),
        Mistake(
            "The result is right, and you send more than n - 1 parts. One part in each of n - 1 steps is enough.",
            partial(gather, times=2),
        ),
        Mistake(
            "A send or a receive was started and not waited for. Keep the handle, and call its wait() before you use "
            "or change the tensor.",
            not_waited,
            about=(UNFINISHED,),
        ),
    ),
)
