"""02.5: bytes that one rank sends in the tree all-reduce, for any rank and any number of ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from course.check.exercise import Data, Exercise, Mistake, each_call, formula, whole
from lib.cost import steps


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    """In each size: rank 0, the last rank, an odd rank, and even ranks, some without all of their children."""
    cases = []
    for ranks in (2, 8, 11, whole(generator, 17, 31)):
        some = {0, ranks - 1, 1, *range(2, ranks, 2)}
        cases += [(rank, whole(generator, 10**3, 10**6), ranks) for rank in sorted(some)]
    return [{"cases": cases}]


def from_the_moves(rank: int, payload_bytes: int, n: int) -> float:
    return steps.chunks_sent(steps.tree_steps(n), n)[rank] / n * payload_bytes


# ---- programs -------------------------------------------------------------------------------------------------------


def distances(rank: int, n: int) -> list[int]:
    """To the children that the rank would have in a tree that is complete."""
    powers = [2**k for k in range((n - 1).bit_length())]
    return [d for d in powers if rank % (2 * d) == 0]


def children(rank: int, n: int) -> int:
    return sum(rank + d < n for d in distances(rank, n))


def messages(count: Callable[[int, int], float]) -> Callable:
    """An answer: this number of messages, each with all bytes."""
    return lambda rank, payload_bytes, n: count(rank, n) * payload_bytes


def by_running_the_program(rank, payload_bytes, n):
    """The program of the page, with counts instead of messages."""
    sent, distance = 0, 1
    while distance < n and rank % (2 * distance) == 0:
        distance *= 2
    if rank != 0:
        sent += payload_bytes
    while distance > 1:
        distance //= 2
        if rank + distance < n:
            sent += payload_bytes
    return sent


def descendants(rank: int, n: int) -> int:
    """How many ranks get the sum through this one."""
    return sum(1 + descendants(rank + d, n) for d in distances(rank, n) if rank + d < n)


def above_its_highest_bit(rank: int, n: int) -> int:
    return sum(2**k > rank and rank + 2**k < n for k in range(n.bit_length()))


EXERCISE = Exercise(
    id="02.5",
    title="tree_bytes",
    points=2,
    body=each_call("tree_bytes"),
    inputs=inputs,
    reference=formula("tree_bytes", from_the_moves),
    ranks=(1,),
    right=(messages(lambda rank, n: children(rank, n) + (rank > 0)), by_running_the_program),
    mistakes=(
        Mistake(
            "⌈log₂ n⌉·S are the bytes that rank 0 sends, the busiest rank. Count the messages of this rank: one to its "
            "parent, and one to each child.",
            messages(lambda rank, n: (n - 1).bit_length()),
        ),
        Mistake(
            "You give every rank the mean of all ranks, 2(n-1)/n · S. In a tree the ranks send different amounts: "
            "count the messages of this rank.",
            messages(lambda rank, n: 2 * (n - 1) / n),
        ),
        Mistake(
            "You count only the messages to the children. Before that, every rank except rank 0 also sends its partial "
            "sum to its parent.",
            messages(children),
        ),
        Mistake(
            "You count only the message to the parent. After that, a rank sends the sum to each of its children.",
            messages(lambda rank, n: rank > 0),
        ),
        Mistake(
            "Rank 0 has no parent, so it sends no partial sum. It sends S to each child, and nothing more.",
            messages(lambda rank, n: children(rank, n) + 1),
        ),
        Mistake(
            "You also count the bytes that the rank receives. Count only the bytes that it sends: S to its parent, and "
            "S to each child.",
            messages(lambda rank, n: 2 * (children(rank, n) + (rank > 0))),
        ),
        Mistake(
            "You count children that do not exist. If n is not a power of two, rank r has a child at distance d only "
            "if r + d < n.",
            messages(lambda rank, n: len(distances(rank, n)) + (rank > 0)),
        ),
        Mistake(
            "You count a message of the full sum for each rank below this one. A rank sends the sum to its children, "
            "and they send it on.",
            messages(lambda rank, n: descendants(rank, n) + (rank > 0)),
        ),
        Mistake(
            "These are the children in a different tree, at distances above the highest bit of r. Here round d pairs "
            "ranks r and r + d where r is a multiple of 2d.",
            messages(lambda rank, n: above_its_highest_bit(rank, n) + (rank > 0)),
        ),
        Mistake(
            "You return the number of messages. Each carries the full array: multiply by S.",
            lambda rank, payload_bytes, n: children(rank, n) + (rank > 0),
        ),
    ),
)
