"""Curves over axes, and bars of one total: what grows, and what it is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lib.figures.axes import Axes, Scale
from lib.figures.canvas import FRAMES, Canvas
from lib.figures.svg import OUTLINE, SMALLEST_PX, Figure, color, num, text_width
from lib.figures.timeline import KINDS, legend

# Colour, width and dash of each curve. The first is wide and the next ones narrower on top of it: if they coincide, all
# stay seen.
_STACKED = ("comm 7 none", "backward 3.4 none", "text 1.5 2,4", "weight 1.5 9,5", "opt 1.5 1,7")
_BESIDE = ("backward 2.4 none", "comm 2.4 9,5", "weight 2.4 2,4")
Points = tuple[Sequence[float], Sequence[float]]


def draw_curves(
    series: Mapping[str, Sequence],
    *,
    x: str | Sequence[str],
    y: str,
    title: str,
    alt: str,
    caption: str = "",
    reference: Mapping[str, float] | None = None,
    points: Points = ((), ()),
    width: float = 680,
    height: float = 300,
) -> Figure:
    """Lines over one axis, the first wide, the next ones narrower on top of it.

    Args:
        series: name to its values at x = 0, 1, 2, ..., or to a pair (xs, ys). At most five; nan breaks a line.
        x, y: names of the axes with their units ("step", "loss (nats per token)"). Several names for x stand for the
            stretches from 0 to 1, from 1 to 2 and so on ("forward", "backward"), and there are no numbers.
        reference: name to the height of a horizontal line ("unigram entropy": 4.17).
        points: (xs, ys) of what was measured, drawn as circles.
        width, height: of the drawing in pixels.
    """
    _check_count(series, _STACKED)
    lines = {name: _points(name, values) for name, values in series.items()}
    dots = list(zip(*points, strict=True))
    seen = [p for line in [*lines.values(), dots] for p in line if math.isfinite(p[1])]
    heights = [v for _, v in seen] + list((reference or {}).values())
    if not seen:
        raise ValueError("no finite point to draw")
    low, high = (0, len(x)) if not isinstance(x, str) else (min(p[0] for p in seen), max(p[0] for p in seen))
    margin = 0.06 * (max(heights) - min(heights)) or 0.05 * abs(heights[0]) or 1.0
    across = Scale(low, high if high > low else low + 1)
    canvas, right = Canvas(alt), width - 44 - max(text_width(name) for name in lines)
    up = Scale(min(heights) - margin, max(heights) + margin)
    axes = Axes(canvas, across, up, right=right, top=46, bottom=height - 38)
    canvas.title(title)
    below = axes.draw(x, y)
    for name, value in (reference or {}).items():
        level = axes.at(low, value)[1]
        dashed = {"stroke": color("soft"), "stroke_width": 1.5, "stroke_dasharray": "7 4"}
        canvas.path(f"M{num(axes.left)} {num(level)}H{num(right)}", **dashed)
        starts, ends = (min(abs(line[i][1] - value) for line in lines.values()) for i in (0, -1))
        place, anchor = (axes.left + 6, "start") if starts > ends else (right - 4, "end")  # away from the curves
        canvas.note(place, level - 6, f"{name} {value:.4g}", anchor)
    _draw_lines(axes, lines, _STACKED)
    for dot in dots:
        canvas.dot(*axes.at(*dot))
    return canvas.figure(width, height - 38 + below, caption)


def draw_log_log(
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
    """Lines over two logarithmic axes, and circles where something was measured.

    Args:
        curves: name to (xs, ys), all above 0; at most three.
        points: (xs, ys) of what was measured.
        height_range: lowest and highest y of the axis; give it in an `Explorer` so that frames compare.
    """
    _check_count(curves, _BESIDE)
    for name, (xs, ys) in {**curves, "points": points}.items():
        if len(xs) != len(ys) or not all(0 < v < math.inf for v in [*xs, *ys]):
            raise ValueError(f"{name}: {len(xs)} x and {len(ys)} y values; one y for each x, all finite and above 0")
    all_x, all_y = ([v for line in [*curves.values(), points] for v in line[i]] for i in (0, 1))
    across = Scale(min(all_x), max(all_x), log=True)
    up = Scale(*(height_range or (min(all_y) / 1.3, max(all_y) * 1.3)), log=True)
    canvas, right = Canvas(alt), width - 44 - max(text_width(name) for name in curves)
    axes = Axes(canvas, across, up, right=right, top=46, bottom=height - 38)
    canvas.title(title)
    below = axes.draw(x, y)
    _draw_lines(axes, {name: _points(name, pair) for name, pair in curves.items()}, _BESIDE)
    for dot in zip(*points, strict=True):
        canvas.dot(*axes.at(*dot))
    return canvas.figure(width, height - 38 + below, caption)


def _check_count(curves: Mapping, styles: Sequence[str]) -> None:
    if not 1 <= len(curves) <= len(styles):
        raise ValueError(f"{len(curves)} curves; draw 1 to {len(styles)} in a figure")


def _draw_lines(axes: Axes, lines: Mapping[str, list[tuple[float, float]]], styles: Sequence[str]) -> None:
    """Each line, with a sample of it and its name at the right, as near as can be to its end."""
    ends = [axes.at(*[p for p in line if math.isfinite(p[1])][-1])[1] for line in lines.values()]
    for (name, line), style, place in zip(lines.items(), styles, spread(ends, 18), strict=False):
        ink, thick, dash = style.split()
        sample = f"M{num(axes.right + 12)} {num(place)}h20"
        stroke = {"stroke": color(ink), "stroke_width": thick, "stroke_dasharray": dash}
        axes.canvas.path(axes.line(line) + sample, **stroke, stroke_linejoin="round")
        axes.canvas.text(axes.right + 38, place + 4.5, name)


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Places for labels, at least `gap` apart and as near as can be to the `wanted` ones, in the same order."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    groups: list[list[float]] = []  # each group: [sum of (wanted - its offset), members]
    for i in order:
        groups.append([wanted[i], 1])
        while len(groups) > 1 and groups[-1][0] / groups[-1][1] < groups[-2][0] / groups[-2][1] + gap * groups[-2][1]:
            total, members = groups.pop()
            groups[-1] = [groups[-1][0] + total - gap * groups[-1][1] * members, groups[-1][1] + members]
    places = [total / members + gap * k for total, members in groups for k in range(int(members))]
    return [place for _, place in sorted(zip(order, places, strict=True))]


def _points(name: str, values: Sequence) -> list[tuple[float, float]]:
    """A series as (x, y) pairs."""
    pair = len(values) == 2 and hasattr(values[0], "__len__")
    xs, ys = values if pair else (range(len(values)), values)
    if len(xs) != len(ys) or len(ys) == 0:
        raise ValueError(f"{name}: {len(xs)} x values and {len(ys)} y values; give one y for each x, at least one")
    return [(float(a), float(b)) for a, b in zip(xs, ys, strict=True)]


def draw_bars(
    rows: Mapping[str, Mapping[str, float]],
    *,
    unit: str,
    title: str,
    alt: str,
    caption: str = "",
    outline: Mapping[str, float] | None = None,
    end: float | None = None,
    form: str = "{:.4g}",
    width: float = 680,
) -> Figure:
    """Horizontal stacked bars, a row each, with the total beside it: memory by kind, traffic by technique.

    Args:
        rows: row name to its parts, kind to value: `{"ZeRO-1": {"parameter": 2, "gradient": 2}}`; kinds: `KINDS`.
        unit: of the values, written after the totals ("MB", "bytes per parameter").
        outline: row name to its predicted total, drawn as an outline around the measured bar.
        end: value at the right end of the axis; give it in an `Explorer` so that frames can be compared.
        form: how a value is written.
    """
    if not rows or not all(rows.values()):
        raise ValueError(f"{len(rows)} rows, of which some have no parts; every row needs at least one")
    kinds = [k for k in KINDS if any(k in parts for parts in rows.values())]
    values = {(name, k): float(v) for name, parts in rows.items() for k, v in parts.items()}
    wrong = [f"{name}: {k} = {v:g}" for (name, k), v in values.items() if k not in KINDS or not 0 <= v < math.inf]
    wrong += [f"{name}: predicted, not measured" for name in outline or () if name not in rows]
    if wrong:
        raise ValueError(f"cannot draw {'; '.join(wrong)}: values are finite, >= 0, of kinds {', '.join(KINDS)}")
    total = {name: sum(values[name, k] for k in parts) for name, parts in rows.items()}
    longest = [*total.values(), *(outline or {}).values()]
    high = end or max(longest) or 1.0
    if max(longest) > high * (1 + 1e-9):
        raise ValueError(f"end={end:g} {unit} is shorter than the longest bar, {max(longest):g} {unit}")
    beside = {name: f"{form.format(t)} {unit}" for name, t in total.items()}
    left = 12 + max(text_width(name) for name in rows)
    scale = (width - left - 12 - max(text_width(words) for words in beside.values())) / high
    canvas = Canvas(alt)
    y = canvas.head(title, legend(kinds, bool(outline)), left, width)
    for name, parts in rows.items():
        canvas.text(left - 10, y + 17.5, name, "end")
        at = left
        for kind in [k for k in kinds if parts.get(k)]:
            ink, long, inside = KINDS[kind][0], values[name, kind] * scale, form.format(values[name, kind])
            fits = text_width(inside, SMALLEST_PX) + 4 <= long and len(parts) > 1
            if fits:
                canvas.words_on(ink).text(at + long / 2, y + 17.5, inside)
            tip = "" if fits else f"{KINDS[kind][1]}: {inside} {unit}"
            canvas.rect(at, y, long - 1, 26, tip, fill=canvas.hatched if kind == "idle" else color(ink, True))
            at += long
        if name in (outline or {}):
            canvas.layer(FRAMES, fill="none", **OUTLINE).rect(
                left - 3, y - 3, outline[name] * scale + 5, 32, radius=4
            )
        end_of_row = left + max(total[name], (outline or {}).get(name, 0)) * scale
        canvas.text(end_of_row + 9, y + 17.5, beside[name], font_weight=650)
        y += 40 if outline else 36
    return canvas.figure(width, y, caption)
