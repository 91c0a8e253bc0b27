"""02.5: bytes that one rank sends in the tree all-reduce, for any rank and any number of ranks."""

from course.check.edits import exercise
from course.check.exercise import whole
from lib.cost import steps


def inputs(generator, n):
    """In each size: rank 0, the last rank, an odd rank, and even ranks, some without all of their children."""
    cases = []
    for ranks in (2, 8, 11, whole(generator, 17, 31)):
        some = {0, ranks - 1, 1, *range(2, ranks, 2)}
        cases += [(rank, whole(generator, 10**3, 10**6), ranks) for rank in sorted(some)]
    return [{"cases": cases}]


def from_the_moves(rank, payload_bytes, n):
    return steps.chunks_sent(steps.tree_steps(n), n)[rank] / n * payload_bytes


def tree_bytes(rank, payload_bytes, n):
    messages = 0 if rank == 0 else 1  # the partial sum, to the parent
    distance = 1
    while distance < n and rank % (2 * distance) == 0:
        messages += rank + distance < n  # the result, to a child
        distance *= 2
    return messages * payload_bytes


ALSO_RIGHT = """
rank % (2 * distance) == 0 => not rank & distance
messages += rank + distance < n => messages += min(1, len(range(rank + distance, n)))
returns float(result)
    By the bits of the rank.
"""

MISTAKES = """
returns (n - 1).bit_length() * payload_bytes
    ⌈log₂ n⌉·S are the bytes of rank 0, the busiest.
        Count this rank's messages: one to its parent, one to each child.
returns 2 * (n - 1).bit_length() * payload_bytes
    2⌈log₂ n⌉·S is a message in every round, up and down. The tree has that many rounds, and no rank sends in all of
    them.
        Count this rank's messages: one to its parent, one to each child.
returns 2 * (n - 1) * payload_bytes
    2(n-1)·S are the bytes of all ranks together.
        Count this one's messages: one to its parent, one to each child.
returns 2 * payload_bytes
or returns payload_bytes * (2 if rank else (n - 1).bit_length())
    2S is one message up and one down, which is right for a rank with one child. Others have more, or none.
        Rank r + d is a child if 2d divides r, and if r + d < n.
returns payload_bytes * (1 if rank else (n - 1).bit_length())
    Only rank 0 sends the result in your count. It has no messages for the children of others.
        A rank that received the sum sends it to each of its own children.
returns 2 * (n - 1) / n * payload_bytes
    You give every rank the mean of all, 2(n-1)/n · S. Tree ranks send different amounts.
        Count this one's messages.
0 if rank == 0 else 1 => 0
    You count only the messages to the children.
        Before, every rank except 0 also sends its partial sum to its parent.
messages += rank + distance < n =>
    You count only the message to the parent.
        After that, a rank sends the sum to each of its children.
0 if rank == 0 else 1 => 1
    Rank 0 has no parent, so it sends no partial sum.
        It sends S to each child, and nothing more.
returns 2 * result
    Each number is twice what the rank sends. Two messages go between a rank and its parent or child, one in each
    direction, and it sends one of them.
        Count only what it sends: S to its parent, and S to each child.
rank + distance < n => 1
    You count children that do not exist.
        If n is no power of two, rank r has a child at distance d only if r + d < n.
rank + distance < n => len(range(rank + distance, min(rank + 2 * distance, n)))
    You count a message for each rank below this one.
        A rank sends the sum to its children, and they send it on.
and rank % (2 * distance) == 0 =>
rank + distance < n => rank < distance < n - rank
    These are children in another tree, at distances above r's highest bit.
        Here r and r + d pair where 2d divides r.
messages * payload_bytes => messages
    You return the number of messages. Each carries the full array.
        Multiply by S.
"""

EXERCISE = exercise(globals(), points=2, right=(tree_bytes,), same_as=from_the_moves)
