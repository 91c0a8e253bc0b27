"""Curves and measured points over two logarithmic axes: what spans a message of one byte and one of a gigabyte."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lib import svg
from lib.svg import Figure, color

_CURVES = ("backward 2.4 none", "comm 2.4 9,5", "weight 2.4 2,4")  # colour, width, dash
Points = tuple[Sequence[float], Sequence[float]]


def log_log(
    curves: Mapping[str, Points],
    *,
    x: str,
    y: str,
    title: str,
    alt: str,
    caption: str = "",
    points: Points = ((), ()),
    height_range: tuple[float, float] | None = None,
    width: float = 680,
    height: float = 300,
) -> Figure:
    """Lines, each with its name at its right end, and circles where something was measured.

    Args:
        curves: name to (xs, ys), all above 0; at most three.
        points: (xs, ys) of what was measured.
        height_range: lowest and highest y of the axis; give it in an `Explorer` so that frames compare.
    """
    if not 1 <= len(curves) <= len(_CURVES):
        raise ValueError(f"{len(curves)} curves; draw 1 to {len(_CURVES)} in a figure")
    for name, (xs, ys) in {**curves, "points": points}.items():
        if len(xs) != len(ys) or not all(0 < v < math.inf for v in [*xs, *ys]):
            raise ValueError(f"{name}: {len(xs)} x and {len(ys)} y values; one y for each x, all finite and above 0")
    lines = [*curves.values(), points]
    all_x, all_y = ([v for line in lines for v in line[i]] for i in (0, 1))
    x_low, x_high = math.log10(min(all_x)), math.log10(max(all_x))
    y_low, y_high = (math.log10(v) for v in height_range or (min(all_y) / 1.3, max(all_y) * 1.3))
    left, right = 64, width - 44 - max(svg.text_width(name) for name in curves)
    top, bottom = 52, height - 44

    def at(a: float, b: float) -> tuple[float, float]:
        across, up = (math.log10(a) - x_low) / (x_high - x_low or 1), (math.log10(b) - y_low) / (y_high - y_low)
        return left + across * (right - left), bottom - up * (bottom - top)

    soft = {"fill": color("soft"), "font_size": svg.SMALLEST_PX}
    out = [svg.text(0, 15, title, font_weight=650), svg.text(0, 36, y, **soft)]
    for mark in _marks(y_low, y_high):
        level = at(1, mark)[1]
        out.append(f'<path d="M{svg.num(left)} {svg.num(level)}H{svg.num(right)}" stroke="{color("rule")}"/>')
        out.append(svg.text(left - 8, level + 4.5, _short(mark), "end", **soft))
    for mark in _marks(x_low, x_high):
        place = at(mark, 1)[0]
        out.append(f'<path d="M{svg.num(place)} {svg.num(bottom)}v4" stroke="{color("soft")}"/>')
        out.append(svg.text(place, bottom + 17, _short(mark), "middle", **soft))
    out.append(f'<path d="M{svg.num(left)} {svg.num(bottom)}H{svg.num(right)}" stroke="{color("soft")}"/>')
    out.append(svg.text(right, bottom + 36, x, "end", **soft))
    ends = [at(xs[-1], ys[-1])[1] for xs, ys in curves.values()]
    places = svg.spread(ends, 18)
    for (name, (xs, ys)), style, place in zip(curves.items(), _CURVES, places, strict=False):
        ink, thick, dash = style.split()
        path = "M" + "L".join(" ".join(map(svg.num, at(a, b))) for a, b in zip(xs, ys, strict=True))
        sample = f"M{svg.num(right + 12)} {svg.num(place)}h20"
        stroke = f'stroke="{color(ink)}" stroke-width="{thick}" stroke-dasharray="{dash}"'
        out.append(f'<path d="{path}{sample}" fill="none" {stroke} stroke-linejoin="round"/>')
        out.append(svg.text(right + 38, place + 4.5, name))
    out += [svg.dot(*at(a, b)) for a, b in zip(*points, strict=True)]
    return Figure(svg.document(out, width, height, alt), alt, caption)


def _marks(low: float, high: float) -> list[float]:
    """The powers of ten between two logarithms, and twice and five times them if there are few."""
    steps = (1, 2, 5) if high - low < 2.5 else (1,)
    marks = [step * 10.0**power for power in range(math.floor(low), math.floor(high) + 1) for step in steps]
    return [mark for mark in marks if low - 1e-9 <= math.log10(mark) <= high + 1e-9]


def _short(mark: float) -> str:
    """A mark as one writes it: 0.01, 100, 2 k, 10 M."""
    thousands = min(max(0, math.floor(math.log10(mark) / 3 + 1e-9)), 5)
    return f"{mark / 1000**thousands:g} {('', 'k', 'M', 'G', 'T', 'P')[thousands]}".rstrip()
