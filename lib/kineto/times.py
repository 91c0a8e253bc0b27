"""Sets of times, as disjoint (start, end) in order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

Times = list[tuple[float, float]]


def union(times: Iterable[tuple[float, float]]) -> Times:
    """The times in which at least one (start, end) lies."""
    out: Times = []
    for start, end in sorted(times):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        elif end > start:
            out.append((start, end))
    return out


def length(times: Times) -> float:
    """How long they are together."""
    return sum(end - start for start, end in times)


def within(times: Times, start: float, end: float) -> Times:
    """The part of them between two moments."""
    first = max(0, bisect_right(times, (start, float("inf"))) - 1)
    found = []
    for one_start, one_end in times[first:]:
        if one_start >= end:
            break
        if min(one_end, end) > max(one_start, start):
            found.append((max(one_start, start), min(one_end, end)))
    return found


def gaps(times: Times, start: float, end: float) -> Times:
    """What is between two moments, and in none of them."""
    edges = [start, *(edge for one in within(times, start, end) for edge in one), end]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]
