"""Memory through a step: the samples of a `MemoryTracker`, stacked by kind.

The problem: a peak is one number; it does not show the kinds in it, nor its time. The idea: all kinds stacked, after
each change. Changes are counted, not timed: under the tracker an operation on a small tensor takes as long as an
operation on a large tensor, and the figure shows which bytes are alive, not for how long.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping

from book.figures.lanes import KINDS as STYLES
from book.figures.svg import INK, NARROW, SMALLEST_PX, Figure, drawn_twice, text_width
from lib.memory import KINDS, MemoryTracker

UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}


@drawn_twice
def draw_memory(
    memory: MemoryTracker,
    *,
    title: str,
    alt: str,
    caption: str = "",
    unit: str = "MB",
    predicted: Mapping[str, float] | None = None,
    at_peak: str = "",
    width: float = 680,
    height: float = 300,
) -> Figure:
    """Bytes alive, by kind, from the tracker's first sample to its last; its phases are marked where they begin,
    and named where there is room.

    Args:
        memory: a tracker that has been entered.
        unit: of the axis, decimal: `B`, `kB`, `MB` or `GB`.
        predicted: name to a number of bytes, drawn as a dashed line ("predicted peak": 3_500_000).
        at_peak: written above the highest sample, with an arrow to it.
        width, height: of the drawing in pixels.
    """
    if unit not in UNITS:
        raise ValueError(f"unit={unit!r} must be one of {', '.join(UNITS)}")
    if not memory.timeline:
        raise ValueError("the tracker has seen nothing: run the step inside `with MemoryTracker(model) as memory`")
    predicted = predicted or {}
    times, samples = zip(*memory.timeline, strict=True)
    high = 1.12 * max([usage["total"] for usage in samples] + list(predicted.values())) / UNITS[unit] or 1.0
    if not math.isfinite(high):
        raise ValueError(f"predicted={predicted} is not finite")
    from book.figures.plot import Plot  # loads matplotlib

    names = ("changes of memory", unit)
    kinds = {kind: STYLES[_style(kind)] for kind in KINDS if any(usage[kind] for usage in samples)}
    labels = [words for _, words in kinds.values()]
    levels = {name: n_bytes / UNITS[unit] for name, n_bytes in predicted.items()}
    limits = {f"{name} {level:.4g} {unit}": level for name, level in levels.items()}
    in_legend = list(limits) if width <= NARROW else []
    scales = (0, len(samples)), (0, high)
    plot = Plot(title, alt, (width, height), *scales, names, right=width - 10, legend=labels + in_legend)
    if kinds:
        alive = [[usage[kind] / UNITS[unit] for usage in [*samples, samples[-1]]] for kind in kinds]
        colors = [INK[ink] for ink, _ in kinds.values()]
        plot.axes.stackplot(range(len(samples) + 1), *alive, colors=colors, labels=labels, step="post", linewidth=0)
    for phase in memory.phases:
        begin, end = (bisect_left(times, time_s) for time_s in (phase.start_s, phase.end_s))
        plot.axes.axvline(begin, color=INK["text"], linewidth=1, zorder=0.9)  # below the areas
        (left, _), (right, _) = plot.at(begin, 0), plot.at(end, 0)
        if text_width(phase.name, SMALLEST_PX) <= right - left:
            plot.canvas.text((left + right) / 2, plot.top - 10, phase.name, "middle", font_size=SMALLEST_PX)
    for words, level in limits.items():
        label = words if in_legend else None
        plot.axes.axhline(level, label=label, color=INK["text"], linewidth=1.4, linestyle=(0, (3.6, 1.8)))
        if not in_legend:
            plot.canvas.text(plot.right - 8, plot.at(0, level)[1] - 5, words, "end", font_size=SMALLEST_PX)
    if at_peak:
        totals = [usage["total"] for usage in samples]
        x, y = plot.at(totals.index(max(totals)) + 0.5, max([max(totals) / UNITS[unit], *levels.values()]))
        plot.canvas.text(x, y - 5, "↓", "middle", font_size=SMALLEST_PX)
        plot.canvas.text(x - 7, y - 5, at_peak, "end", font_size=SMALLEST_PX)
    return plot.figure(caption)


def memory_totals(memory: MemoryTracker, unit: str = "MB") -> tuple[list[float], list[float]]:
    """(xs, ys) for `draw_curves`: all bytes alive, in `unit`, where phase k of the tracker fills x from k-1 to k.

    So steps of several techniques share one axis, though each has its own number of changes.
    """
    xs, ys = [], []
    for k, phase in enumerate(memory.phases):
        inside = [usage["total"] for time_s, usage in memory.timeline if phase.start_s <= time_s <= phase.end_s]
        xs += [k + (i + 0.5) / len(inside) for i in range(len(inside))]
        ys += [total / UNITS[unit] for total in inside]
    return xs, ys


def _style(kind: str) -> str:
    """The tracker's kind, with the name that all figures use: there `optimizer` is the time of its step."""
    return "optimizer state" if kind == "optimizer" else kind
