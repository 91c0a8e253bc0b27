"""Memory through a step: what a `MemoryTracker` saw, stacked by kind.

The problem: a peak is one number and does not say what it is made of, nor when it comes. The idea: all kinds on top
of each other, moment by moment. Moments are counted, not timed: under the tracker an operation on a small tensor takes
as long as one on a large one, and the question is what is alive, not for how long.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import groupby

from lib.figures.axes import Axes, Scale
from lib.figures.canvas import Canvas
from lib.figures.svg import OUTLINE, SMALLEST_PX, Figure, color, num, text_width
from lib.figures.timeline import KINDS as STYLES
from lib.memory import KINDS, MemoryTracker

_UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}


def draw_memory(
    memory: MemoryTracker,
    *,
    title: str,
    alt: str,
    caption: str = "",
    unit: str = "MB",
    predicted: Mapping[str, float] | None = None,
    height: float = 300,
) -> Figure:
    """Bytes alive, by kind, from the tracker's first sample to its last; its phases are marked where they begin,
    and named where there is room.

    Args:
        memory: a tracker that has been entered.
        unit: of the axis, decimal: `B`, `kB`, `MB` or `GB`.
        predicted: name to a number of bytes, drawn as a dashed line ("predicted peak": 3_500_000).
        height: of the drawing in pixels.
    """
    if unit not in _UNITS:
        raise ValueError(f"unit={unit!r} must be one of {', '.join(_UNITS)}")
    if not memory.timeline:
        raise ValueError("the tracker has seen nothing: run the step inside `with MemoryTracker(model) as memory`")
    predicted = predicted or {}
    times, samples = zip(*memory.timeline, strict=True)
    high = 1.12 * max([usage["total"] for usage in samples] + list(predicted.values())) / _UNITS[unit] or 1.0
    if not math.isfinite(high):
        raise ValueError(f"predicted={predicted} is not finite")
    width, size = 680, _UNITS[unit]
    canvas = Canvas(alt)
    scales = Scale(0, len(samples)), Scale(0, high)
    axes = Axes(canvas, *scales, right=width - 10, top=78, bottom=height - 38)
    kinds = [kind for kind in KINDS if any(usage[kind] for usage in samples)]
    canvas.head(title, [STYLES[_style(kind)] for kind in kinds], axes.left, width)
    below = axes.draw("changes of memory", unit)
    across = [axes.at(i, 0)[0] for i in range(len(samples) + 1)]

    def level(n_bytes: float) -> str:
        return num(axes.at(0, n_bytes / size)[1])

    for phase in memory.phases:
        begin, end = (across[bisect_left(times, time_s)] for time_s in (phase.start_s, phase.end_s))
        canvas.path(f"M{num(begin)} {axes.top - 6}V{axes.bottom}", stroke=color("text"))
        if text_width(phase.name, SMALLEST_PX) <= end - begin:
            canvas.text((begin + end) / 2, axes.top - 10, phase.name, "middle", font_size=SMALLEST_PX)
    floor = [0] * len(samples)
    for kind in kinds:
        roof = [below_it + usage[kind] for below_it, usage in zip(floor, samples, strict=True)]
        there = "".join(f"V{level(v)}H{num(end)}" for v, _, end in _runs(roof, across))
        back = "".join(f"V{level(v)}H{num(begin)}" for v, begin, _ in _runs(floor, across)[::-1])
        canvas.path(f"M{num(axes.left)} {axes.bottom}{there}{back}Z", color(STYLES[_style(kind)][0], True))
        floor = roof
    for name, n_bytes in predicted.items():
        canvas.path(f"M{num(axes.left)} {level(n_bytes)}H{num(axes.right)}", **OUTLINE)
        words = f"{name} {n_bytes / size:.4g} {unit}"
        canvas.text(axes.right, axes.at(0, n_bytes / size)[1] - 5, words, "end", font_size=SMALLEST_PX)
    return canvas.figure(width, axes.bottom + below, caption)


def memory_totals(memory: MemoryTracker, unit: str = "MB") -> tuple[list[float], list[float]]:
    """(xs, ys) for `draw_curves`: all bytes alive, in `unit`, where phase k of the tracker fills x from k-1 to k.

    So steps of several techniques lie on one axis, though each has another number of changes.
    """
    xs, ys = [], []
    for k, phase in enumerate(memory.phases):
        inside = [usage["total"] for time_s, usage in memory.timeline if phase.start_s <= time_s <= phase.end_s]
        xs += [k + (i + 0.5) / len(inside) for i in range(len(inside))]
        ys += [total / _UNITS[unit] for total in inside]
    return xs, ys


def _style(kind: str) -> str:
    """The tracker's name of a kind, as the other figures call it: there `optimizer` is the time of its step."""
    return "optimizer state" if kind == "optimizer" else kind


def _runs(values: Sequence[float], across: Sequence[float]) -> list[tuple[float, float, float]]:
    """(value, where it begins, where it ends) for each stretch over which a value stays the same."""
    stretches = [list(group) for _, group in groupby(range(len(values)), key=values.__getitem__)]
    return [(values[s[0]], across[s[0]], across[s[-1] + 1]) for s in stretches]
