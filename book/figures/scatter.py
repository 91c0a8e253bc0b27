"""Dots over two axes: many things of a few groups, each with a name that the mouse finds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from book.figures.canvas import FRAMES, WORDS
from book.figures.svg import DASHED, INK, Figure, color, drawn_twice, num, text_width

# A colour, a shape and a size for each group: a reader for whom two colours look alike has two shapes.
_MARKS = (
    *(("series-0", "o", 9), ("rank-1", "s", 8), ("rank-0", "^", 10), ("series-3", "D", 8)),
    *(("rank-2", "s", 8), ("series-1", "o", 9), ("rank-3", "D", 8), ("series-2", "^", 10)),
)


class Dot(NamedTuple):
    """One thing: its place, its name, and the address of a text on it."""

    x: float
    y: float
    tip: str = ""
    href: str = ""


@drawn_twice
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
    muted: str = "",
    notes: Mapping[str, tuple[float, float]] | None = None,
    best: Dot | None = None,
    width: float = 620,
    height: float = 380,
) -> Figure:
    """Dots of up to eight groups.

    Args:
        groups: name → dots; a later group is in front.
        x, y: names of the axes with their units.
        log: both axes are logarithmic.
        equal: draw the line on which x and y are the same.
        limit: words and place of a vertical line: everything to the right of it is too much.
        muted: the name of a group that is drawn pale, behind all others.
        notes: words → the place at which they end, such as the name of a band of dots.
        best: a dot with a ring around it, named by the first of the notes, to which a line leads. A `Guess` on the
            figure hides the notes and the ring until it is made.
    """
    dots = [dot for group in groups.values() for dot in group]
    if not dots or len(groups) > len(_MARKS):
        raise ValueError(
            f"{len(groups)} groups of {len(dots)} dots; draw at least a dot, in at most {len(_MARKS)} groups"
        )
    places = [v for dot in dots for v in dot[:2]]
    if not all(math.isfinite(v) and (v > 0 or not log) for v in places):
        raise ValueError("dots are at finite numbers" + (" above 0" if log else ""))
    xs, ys = [dot.x for dot in dots], [dot.y for dot in dots]
    if equal:
        xs = ys = [*xs, *ys]
    from book.figures.plot import Plot  # loads matplotlib

    names = [f"{name} ({len(group)})" for name, group in groups.items()]
    across, up, above = _range(xs, log), _range(ys, log), 16 if limit else 0
    plot = Plot(title, alt, (width, height), across, up, (x, y), right=width - 8, legend=names, above=above, log=log)
    if equal:
        plot.axes.plot(across, up, **DASHED)
    if limit:
        plot.axes.axvline(limit[1], **DASHED)
        plot.canvas.note(plot.at(limit[1], ys[0])[0], plot.top - 6, limit[0], "middle")
    for (key, group), name, (ink, shape, size) in zip(groups.items(), names, _MARKS, strict=False):
        pale = key == muted
        paint = {"color": INK["soft" if pale else ink], "edgecolor": INK["panel"], "linewidth": 0.8}
        paint |= {"alpha": 0.3 if pale else 0.8, "zorder": 2 if pale else 3}
        at, urls = ([dot.x for dot in group], [dot.y for dot in group]), [f"{dot.href} {dot.tip}" for dot in group]
        plot.axes.scatter(*at, size**2, marker=shape, label=name, urls=urls, **paint)
    if best:
        words, place = next(iter(notes.items()))
        (to_x, to_y), (dot_x, dot_y) = plot.at(*place), plot.at(*best[:2])
        paint = {"fill": "none", "stroke": color("text"), "stroke_width": 1.8}
        ring = plot.canvas.layer(FRAMES, data_answer="", **paint)
        ring.rect(dot_x - 7, dot_y - 7, 14, 14, radius=7)
        words_x = to_x - 0.85 * text_width(words)  # which is rather too wide, and the line would end short of them
        ring.path(f"M{num(dot_x + 3)} {num(dot_y - 6)}L{num(words_x)} {num(to_y - 2)}")
    for words, place in (notes or {}).items():
        x, y = plot.at(*place)
        plot.canvas.layer(WORDS, font_weight=650, text_anchor="end", data_answer="").text(x, y, words)
    return plot.figure(caption)


def _range(values: Sequence[float], log: bool) -> tuple[float, float]:
    """All values, with some room at both ends."""
    low, high = min(values), max(values)
    room = 0.05 * (high - low) or 1.0
    return (low / 1.25, high * 1.25) if log else (low - room, high + room)
