"""Which of several ways is the fastest for how many bytes: their curves, on a ground that shows the lowest curve.

The problem: curves that cross on two logarithmic axes have to be read twice, for the lowest curve and for the value of
a place on the axis. The idea: the ground has the colour of the lowest curve there, each change its number of bytes, and
the axes round numbers: 1 MB, 1 ms. No library has to choose these, so an `Explorer` draws its frames in little time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import NamedTuple

from book.figures.canvas import BARS, FRAMES, Canvas
from book.figures.curves import Points, spread
from book.figures.svg import Figure, color, drawn_twice, num, text_width

_PAINT = (  # of each curve; its colour is also on the ground where it is the lowest
    {"stroke": "series-0"},
    {"stroke": "series-1", "stroke_dasharray": "9 5"},
    {"stroke": "series-2", "stroke_dasharray": "2 3"},
)
_BYTES = {1e3: "1 kB", 1e6: "1 MB", 1e9: "1 GB"}
_SECONDS = {1e-5: "10 µs", 1e-3: "1 ms", 0.1: "0.1 s", 10: "10 s", 1e3: "17 min"}


class Change(NamedTuple):
    """From so many bytes on, which take so long, this is the fastest."""

    name: str
    n_bytes: float
    seconds: float


def fastest(curves: Mapping[str, Points]) -> list[Change]:
    """The lowest curve, from the smallest number of bytes to the largest.

    Args:
        curves: name to (bytes, seconds), all over the same bytes.
    """
    xs = next(iter(curves.values()))[0]
    rows = [dict(zip(curves, ys, strict=True)) for ys in zip(*(ys for _, ys in curves.values()), strict=True)]
    best = min(rows[0], key=rows[0].get)
    found = [Change(best, xs[0], rows[0][best])]
    for (x, row), (next_x, next_row) in pairwise(zip(xs, rows, strict=True)):
        old, new = found[-1].name, min(next_row, key=next_row.get)
        if next_row[new] < next_row[old]:  # they cross in between, where the logarithm of their ratio is 0
            ahead, behind = math.log(row[new] / row[old]), math.log(next_row[old] / next_row[new])
            part = ahead / (ahead + behind)
            found.append(Change(new, x * (next_x / x) ** part, row[new] * (next_row[new] / row[new]) ** part))
    return found


@drawn_twice
def draw_fastest(
    curves: Mapping[str, Points],
    *,
    seconds: tuple[float, float],
    title: str,
    alt: str,
    caption: str = "",
    width: float = 680,
    height: float = 330,
) -> Figure:
    """Seconds over bytes, both logarithmic.

    Args:
        curves: name to (bytes, seconds), at most three, all over the same bytes.
        seconds: lowest and highest of the axis; the same in all frames of an `Explorer`.
    """
    if not 1 <= len(curves) <= len(_PAINT):
        raise ValueError(f"{len(curves)} curves; draw 1 to {len(_PAINT)} in a figure")
    canvas, xs = Canvas(alt), next(iter(curves.values()))[0]
    top, bottom = 30 + canvas.title(title, width), height - 40
    left, right = 62.0, width - 36 - max(map(text_width, curves))

    def across(n_bytes: float) -> float:
        return left + (right - left) * math.log(n_bytes / xs[0], xs[-1] / xs[0])

    def up(value: float) -> float:
        return bottom - (bottom - top) * math.log(value / seconds[0], seconds[1] / seconds[0])

    canvas.note(left - 8, top + 4, "time", "end")
    _draw_axes(canvas, left, right, bottom, across, up)
    paints = {name: {**x, "stroke": color(x["stroke"], True)} for name, x in zip(curves, _PAINT, strict=False)}
    changes = fastest(curves)
    for change, following in pairwise([*changes, Change("", xs[-1], 0)]):
        begin, end = across(change.n_bytes), across(following.n_bytes)
        ground = {"fill": paints[change.name]["stroke"], "fill_opacity": 0.2}
        canvas.rect(begin, top, end - begin, bottom - top, radius=0, **ground)
        canvas.text((begin + end) / 2, top + 16, change.name, "middle", font_weight=650)
    for _, n_bytes, value in changes[1:]:
        x, words = across(n_bytes), bytes_text(n_bytes)
        canvas.path(f"M{num(x)} {num(top)}V{num(bottom)}", stroke=color("text"))
        circle = canvas.layer(FRAMES, fill=color("panel"), stroke=color("text"), stroke_width=1.6)
        circle.rect(x - 4, up(value) - 4, 8, 8, radius=4)
        beside, anchor = (x + 6, "") if x + 12 + text_width(words) < right else (x - 6, "end")
        canvas.text(beside, top + 36, words, anchor, font_weight=650)
    places = spread([up(ys[-1]) for _, ys in curves.values()], 17)
    for (name, (_, ys)), place in zip(curves.items(), places, strict=True):
        line = "L".join(f"{num(across(x))} {num(up(y))}" for x, y in zip(xs, ys, strict=True))
        canvas.layer(BARS, stroke_width=2.4, **paints[name]).path(f"M{line}M{num(right + 6)} {num(place)}h18")
        canvas.text(right + 29, place + 4.5, name)
    return canvas.figure(width, height, caption)


def _draw_axes(
    canvas: Canvas, left: float, right: float, bottom: float, across: Callable[[float], float], up: Callable
) -> None:
    for mark, words in _SECONDS.items():
        canvas.path(f"M{num(left)} {num(up(mark))}H{num(right)}", stroke=color("rule"))
        canvas.note(left - 8, up(mark) + 4.5, words, "end")
    for mark, words in _BYTES.items():
        canvas.path(f"M{num(across(mark))} {num(bottom)}v4", stroke=color("soft"))
        canvas.note(across(mark), bottom + 17, words, "middle")
    canvas.path(f"M{num(left)} {num(bottom)}H{num(right)}", stroke=color("soft"))
    canvas.note(right, bottom + 35, "size of the array", "end")


def bytes_text(n_bytes: float) -> str:
    """As people say it, in two or three figures: 2.8 MB."""
    return _in_units(n_bytes, {1: "bytes", 1e3: "kB", 1e6: "MB", 1e9: "GB"})


def seconds_text(seconds: float) -> str:
    """As people say it, in two or three figures: 11 ms."""
    return _in_units(seconds, {1e-6: "µs", 1e-3: "ms", 1: "s", 60: "minutes", 3600: "hours"})


def _in_units(value: float, units: Mapping[float, str]) -> str:
    unit = max((unit for unit in units if unit <= 1.0001 * value), default=min(units))
    return f"{value / unit:.{1 if value / unit < 9.95 else 0}f} {units[unit]}"
