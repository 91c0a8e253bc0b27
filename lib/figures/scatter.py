"""Dots over two axes: many things of a few groups, each with a name that the mouse finds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lib.figures.axes import Axes, Scale
from lib.figures.canvas import Canvas
from lib.figures.svg import Figure, color, num, text_width

# A colour and a shape for each group: who cannot tell two colours apart still sees two shapes.
_MARKS = (
    *(("backward", "circle"), ("comm", "square"), ("weight", "triangle"), ("opt", "diamond")),
    *(("text", "square"), ("forward", "circle"), ("bad", "diamond"), ("soft", "triangle")),
)


class Dot(NamedTuple):
    """One thing: where it lies, what it is, and where one can read of it."""

    x: float
    y: float
    tip: str = ""
    href: str = ""


def draw_scatter(
    groups: Mapping[str, Sequence[Dot]],
    *,
    x: str,
    y: str,
    title: str,
    alt: str,
    caption: str = "",
    log: bool = False,
    equal: bool = False,
    limit: tuple[str, float] | None = None,
    width: float = 620,
    height: float = 380,
) -> Figure:
    """Dots of up to eight groups.

    Args:
        groups: name → dots; a later one lies in front.
        x, y: names of the axes with their units.
        log: both axes are logarithmic.
        equal: draw the line on which x and y are the same.
        limit: words and place of a vertical line: what lies to the right of it is too much.
    """
    dots = [dot for group in groups.values() for dot in group]
    if not dots or len(groups) > len(_MARKS):
        raise ValueError(
            f"{len(groups)} groups of {len(dots)} dots; draw at least a dot, in at most {len(_MARKS)} groups"
        )
    places = [v for dot in dots for v in dot[:2]]
    if not all(math.isfinite(v) and (v > 0 or not log) for v in places):
        raise ValueError("dots lie at finite numbers" + (" above 0" if log else ""))
    xs, ys = [dot.x for dot in dots], [dot.y for dot in dots]
    if equal:
        xs = ys = [*xs, *ys]
    canvas, top = Canvas(alt), 52.0
    canvas.title(title)
    at = 0.0
    for (name, group), (ink, shape) in zip(groups.items(), _MARKS, strict=False):
        words = f"{name} ({len(group)})"
        if at + 18 + text_width(words) > width and at:
            at, top = 0.0, top + 19
        canvas.mark(at + 6, top - 22, shape, ink)
        canvas.text(at + 16, top - 18, words)
        at += 30 + text_width(words)
    axes = Axes(canvas, _scale(xs, log), _scale(ys, log), right=width - 8, top=top + 22, bottom=height - 38)
    below = axes.draw(x, y)
    dashed = {"stroke": color("soft"), "stroke_width": 1.5, "stroke_dasharray": "7 4"}
    if equal:
        (x0, y0), (x1, y1) = axes.at(axes.x.low, axes.y.low), axes.at(axes.x.high, axes.y.high)
        canvas.path(f"M{num(x0)} {num(y0)}L{num(x1)} {num(y1)}", **dashed)
    if limit:
        words, value = limit
        place = axes.at(value, axes.y.low)[0]
        canvas.path(f"M{num(place)} {num(axes.bottom)}V{num(axes.top)}", **dashed)
        canvas.note(place - 6, axes.top + 12, words, "end")
    for group, (ink, shape) in zip(groups.values(), _MARKS, strict=False):
        for dot in group:
            canvas.mark(*axes.at(dot.x, dot.y), shape, ink, dot.tip, dot.href)
    return canvas.figure(width, height - 38 + below, caption)


def _scale(values: Sequence[float], log: bool) -> Scale:
    """All values, with some room at both ends."""
    low, high = min(values), max(values)
    if log:
        return Scale(low / 1.25, high * 1.25, log=True)
    room = 0.05 * (high - low) or 1.0
    return Scale(low - room, high + room)
