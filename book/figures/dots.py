"""A table of yes and no: a row for each name, and a dot in a column where something is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from book.figures.canvas import BARS, FRAMES, Canvas
from book.figures.svg import SMALLEST_PX, WIDE, WRONG, Figure, color, drawn_twice, lines_of, text_width

NOTHING, DOT, RING, BAD = "", "dot", "ring", "bad"  # what a place has


@drawn_twice
def draw_dots(
    rows: Mapping[str, Sequence[str]],
    columns: Sequence[str],
    *,
    title: str,
    alt: str,
    legend: Mapping[str, str],
    caption: str = "",
    width: float = WIDE,
) -> Figure:
    """A dot for what is there, a ring for a no, a dot in a red frame for what is wrong; a point where nothing is.

    Args:
        rows: name → of each column, one of `NOTHING`, `DOT`, `RING` and `BAD`.
        columns: the words above each column, or empty.
        legend: kind of place → its meaning.
    """
    canvas = Canvas(alt)
    y = canvas.title(title, width) + 28
    x, farthest = 0.0, max(map(text_width, lines_of(title, width)))
    for kind, words in legend.items():
        step = 20 + text_width(words) + 12
        if x and x + step > width:
            x, y = 0.0, y + 20
        _put(canvas, kind, x + 9, y + 6, 5)
        canvas.text(x + 20, y + 11, words)
        x += step
        farthest = max(farthest, x - 12)
    y += 40
    named = max(text_width(name, SMALLEST_PX) for name in rows) + 10
    edge = 6  # the words above the last column are wider than it
    across = min(30.0, (width - named - edge) / len(columns))
    for k, words in enumerate(columns):
        canvas.note(named + (k + 0.5) * across, y, words, "middle")
    y += 8
    high = min(20.0, max(17.0, across))
    for name, places in rows.items():
        canvas.note(0, y + high / 2 + 4.5, name)
        canvas.rect(named, y + high - 0.4, across * len(columns), 0.8, radius=0, fill=color("rule"))
        for k, kind in enumerate(places):
            _put(canvas, kind, named + (k + 0.5) * across, y + high / 2, min(5.0, across / 2 - 1.2))
        y += high
    return canvas.figure(max(named + across * len(columns) + edge, farthest), y + 4, caption)


def _put(canvas: Canvas, kind: str, x: float, y: float, radius: float) -> None:
    """What a place has, around a point."""
    if kind == NOTHING:
        canvas.layer(BARS, fill=color("soft")).rect(x - 0.8, y - 0.8, 1.6, 1.6, radius=0.8)
        return
    ink = {"fill": "none", "stroke": color("soft"), "stroke_width": 1.4} if kind == RING else {"fill": color("text")}
    canvas.layer(BARS, **ink).rect(x - radius, y - radius, 2 * radius, 2 * radius, radius=radius)
    if kind == BAD:
        around = radius + 2.2
        canvas.layer(FRAMES, fill="none", **WRONG).rect(x - around, y - around, 2 * around, 2 * around, radius=2)
