"""The messages of an all-reduce, step by step, as plain data.

The problem: the program of one rank hides the algorithm of all ranks: the peers appear only as `send` and `recv`. The
idea: list the moves of all ranks. From one list follow the picture, the bytes of each rank and the number of steps;
`lib.collectives` is the same algorithm written for one rank, and the tests compare the two.

An array is split into n chunks, and a move lists the chunks that it carries; in naive and tree it carries all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Move(NamedTuple):
    """One message of a step: `src` sends `chunks` to `dst`, which adds them to its own chunks, or replaces its own."""

    src: int
    dst: int
    chunks: tuple[int, ...]
    adds: bool


Step = list[Move]  # moves that can run at the same time


def naive_steps(n: int) -> list[Step]:
    """All ranks send to rank 0, one at a time because it has one link; it sends the sum to each."""
    whole = tuple(range(n))
    collect = [[Move(rank, 0, whole, True)] for rank in range(1, n)]
    return collect + [[Move(0, rank, whole, False)] for rank in range(1, n)]


def tree_steps(n: int) -> list[Step]:
    """Pairs, then pairs of pairs, until rank 0 has the sum; then the same moves in reverse."""
    whole = tuple(range(n))
    distances = [2**k for k in range((n - 1).bit_length())]
    up = [[Move(r + d, r, whole, True) for r in range(0, n - d, 2 * d)] for d in distances]
    return up + [[Move(dst, src, whole, False) for src, dst, *_ in step] for step in reversed(up)]


def ring_steps(n: int) -> list[Step]:
    """A chunk to the right per step: n - 1 steps add, n - 1 replace."""

    def step(first: int, k: int, adds: bool) -> Step:
        chunk = [((rank + first - k) % n,) for rank in range(n)]
        return [Move(r, (r + 1) % n, chunk[r], adds) for r in range(n)]

    scatter = [step(-1, k, adds=True) for k in range(n - 1)]
    gather = [step(0, k, adds=False) for k in range(n - 1)]
    return scatter + gather


ALL_REDUCE = {"naive": naive_steps, "tree": tree_steps, "ring": ring_steps}


def after(steps: list[Step], n: int) -> list[list[frozenset[int]]]:
    """For each rank and chunk, the ranks whose values are in the sum that it holds after these steps."""
    held = [[frozenset([rank])] * n for rank in range(n)]
    for step in steps:
        before = [list(chunks) for chunks in held]  # a step sends the chunks that ranks held at its start
        for src, dst, chunks, adds in step:
            for c in chunks:
                held[dst][c] = before[src][c] | held[dst][c] if adds else before[src][c]
    return held


def chunks_sent(steps: list[Step], n: int) -> list[int]:
    """How many chunks, of n that make up the array, each rank sends."""
    return [sum(len(m.chunks) for step in steps for m in step if m.src == rank) for rank in range(n)]


# The number of steps; then, as multiples of the array, bytes on a link in all steps, and bytes that the busiest rank
# sends.
_COST = {
    "naive": lambda n: (2 * (n - 1), 2 * (n - 1), n - 1),
    "tree": lambda n: (2 * _rounds(n), 2 * _rounds(n), _rounds(n)),
    "ring": lambda n: (2 * (n - 1), 2 * (n - 1) / n, 2 * (n - 1) / n),
}


def _rounds(n: int) -> int:
    """How often n ranks can be halved until one is left: log₂ n, rounded up."""
    return (n - 1).bit_length()


def all_reduce_bytes(algorithm: str, payload_bytes: float, n: int) -> tuple[float, float]:
    """Bytes that the busiest rank sends, and all of them together: the latter are 2(n−1) · S in each algorithm.

    Args:
        algorithm: a key of `ALL_REDUCE`.
    """
    return _known(algorithm)(n)[2] * payload_bytes, 2 * (n - 1) * payload_bytes


def all_reduce_s(algorithm: str, payload_bytes: float, n: int, alpha_s: float, bandwidth_Bps: float) -> float:
    """Seconds in the alpha-beta model: a latency for each step, and the bytes that one link carries in all of them.

    naive: 2(n−1) · (alpha + S/B); tree: 2⌈log₂ n⌉ · (alpha + S/B); ring: 2(n−1) · alpha + 2(n−1)/n · S/B.

    Source: Thakur, Rabenseifner & Gropp, IJHPCA 19(1), 2005.
    """
    messages, arrays, _ = _known(algorithm)(n)
    return messages * alpha_s + arrays * payload_bytes / bandwidth_Bps


def _known(algorithm: str) -> Callable:
    if algorithm not in _COST:
        raise ValueError(f"unknown algorithm {algorithm!r}; known are {', '.join(_COST)}")
    return _COST[algorithm]
