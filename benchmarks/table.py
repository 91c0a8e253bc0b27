"""Paired measurements and the table they end in."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

from lib import comm
from lib.mesh import Group


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def paired(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Call each side once a round, in alternating order, so that drift of the machine hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(rounds):
        for name in list(sides)[:: 1 if i % 2 else -1]:
            times[name].append(sides[name]())
    return times


def between_barriers(world: Group, call: Callable[..., object], *args: object) -> float:
    """Seconds of a call from the moment when all ranks are there until all are done."""
    comm.barrier(world)
    began_s = time.perf_counter()
    call(*args)
    comm.barrier(world)
    return time.perf_counter() - began_s


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Quartiles of theirs / ours, round by round: above 1 means that ours is faster."""
    return quartiles([b / a for a, b in zip(ours, theirs, strict=True)])


def show(title: str, rows: list[tuple[str, ...]]) -> None:
    """Print rows as aligned columns; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    print(f"\n{title}")
    for row in rows:
        print(
            "  "
            + "  ".join(
                f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}"
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
        )


def three(values: tuple[float, float, float], form: str = "{:.2f}") -> str:
    """`median (lower–upper quartile)`."""
    low, middle, high = (form.format(v) for v in values)
    return f"{middle} ({low}–{high})"
