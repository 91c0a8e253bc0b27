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

from lib import svg
from lib.memory import KINDS, MemoryTracker
from lib.plot import KINDS as STYLES
from lib.svg import Figure, color

_UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}


def timeline(
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
    width, top, bottom = 680, 78, height - 38
    marks = svg.ticks(0, high, 6)
    left, right = 12 + max(svg.text_width(f"{t:g}", svg.SMALLEST_PX) for t in marks), width - 10
    across = [left + (right - left) * i / len(samples) for i in range(len(samples) + 1)]

    def level(n_bytes: float) -> float:
        return bottom - n_bytes / _UNITS[unit] / high * (bottom - top)

    kinds = [kind for kind in KINDS if any(usage[kind] for usage in samples)]
    out, _ = svg.head(title, [(color(STYLES[_style(k)][0], True), STYLES[_style(k)][1]) for k in kinds], left, width)
    out.append(svg.text(0, top - 10, unit, fill=color("soft"), font_size=svg.SMALLEST_PX))
    out += svg.levels(left, right, [(level(t * _UNITS[unit]), t) for t in marks])
    for phase in memory.phases:
        begin, end = (across[bisect_left(times, time_s)] for time_s in (phase.start_s, phase.end_s))
        out.append(f'<path d="M{svg.num(begin)} {top - 6}V{bottom}" fill="none" stroke="{color("text")}"/>')
        if svg.text_width(phase.name, svg.SMALLEST_PX) <= end - begin:
            out.append(svg.text((begin + end) / 2, top - 10, phase.name, "middle", font_size=svg.SMALLEST_PX))
    floor = [0] * len(samples)
    for kind in kinds:
        roof = [below + usage[kind] for below, usage in zip(floor, samples, strict=True)]
        there = "".join(f"V{svg.num(level(v))}H{svg.num(end)}" for v, _, end in _runs(roof, across))
        back = "".join(f"V{svg.num(level(v))}H{svg.num(begin)}" for v, begin, _ in _runs(floor, across)[::-1])
        out.append(
            f'<path d="M{svg.num(left)} {bottom}{there}{back}Z" fill="{color(STYLES[_style(kind)][0], True)}"/>'
        )
        floor = roof
    for name, n_bytes in predicted.items():
        y, words = level(n_bytes), f"{name} {n_bytes / _UNITS[unit]:.4g} {unit}"
        out.append(f'<path d="M{svg.num(left)} {svg.num(y)}H{svg.num(right)}" fill="none" {svg.OUTLINE}/>')
        out.append(svg.text(right, y - 5, words, "end", font_size=svg.SMALLEST_PX))
    axis, below = svg.axis(left, right, bottom, 0, len(samples), "changes of memory")
    return Figure(svg.document(out + axis, width, bottom + below, alt), alt, caption)


def totals(memory: MemoryTracker, unit: str = "MB") -> tuple[list[float], list[float]]:
    """(xs, ys) for `plot.curves`: all bytes alive, in `unit`, where phase k of the tracker fills x from k-1 to k.

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
