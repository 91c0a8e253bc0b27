"""Curves over axes, and stacked bars: how a quantity grows, and of which kinds it consists.

matplotlib draws curves (`plot.py`). Bars have no axis, because every value is written on its bar, and an `Explorer`
draws sixty of them: written by hand a picture takes 0.2 ms, and with matplotlib 16 ms and no fewer lines of code.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from book.figures.canvas import FRAMES, Canvas
from book.figures.lanes import KINDS
from book.figures.svg import DASHED, INK, NARROW, OUTLINE, SMALLEST_PX, Figure, color, drawn_twice, text_width
from book.figures.timeline import legend

# Colour, width and dash of each curve. The first is wide and the next ones narrower on top of it: if they coincide, all
# stay visible.
_STACKED = (("series-1", 7, "-"), ("series-0", 3.4, "-"), ("series-2", 1.8, (0, (1.4, 2.6))))
_STACKED += (("series-3", 1.8, (0, (6, 3.4))), ("series-4", 1.8, (0, (0.8, 4.6))))
_BESIDE = (("series-0", 2.4, "-"), ("series-1", 2.4, (0, (3.8, 2))), ("series-2", 2.4, (0, (0.9, 1.7))))
Points = tuple[Sequence[float], Sequence[float]]


@drawn_twice
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
        x, y: names of the axes with their units ("step", "loss (nats per token)"). Several names for x name the
            stretches from 0 to 1, from 1 to 2 and so on ("forward", "backward"), and there are no numbers.
        reference: name to the height of a horizontal line ("unigram entropy": 4.17).
        points: (xs, ys) of measured values, drawn as circles.
        width, height: of the drawing in pixels.
    """
    lines = _lines(series, len(_STACKED))
    seen = [p for line in [*lines.values(), zip(*points, strict=True)] for p in line if math.isfinite(p[1])]
    if not seen:
        raise ValueError("no finite point to draw")
    heights = [v for _, v in seen] + list((reference or {}).values())
    low, high = (0, len(x)) if not isinstance(x, str) else (min(p[0] for p in seen), max(p[0] for p in seen))
    margin = 0.06 * (max(heights) - min(heights)) or 0.05 * abs(heights[0]) or 1.0
    scales = (low, high if high > low else low + 1), (min(heights) - margin, max(heights) + margin)
    limits = {f"{name} {value:.4g}": value for name, value in (reference or {}).items()}
    return _plot(title, alt, (width, height), scales, (x, y), lines, _STACKED, points, limits).figure(caption)


@drawn_twice
def draw_log_log(
    curves: Mapping[str, Points],
    *,
    x: str,
    y: str,
    title: str,
    alt: str,
    caption: str = "",
    reference: Mapping[str, float] | None = None,
    points: Points = ((), ()),
    height_range: tuple[float, float] | None = None,
    width: float = 680,
    height: float = 300,
) -> Figure:
    """Lines over two logarithmic axes, and circles where something was measured.

    Args:
        curves: name to (xs, ys), all above 0; at most three.
        reference: name to the height of a horizontal line.
        points: (xs, ys) of measured values.
        height_range: lowest and highest y of the axis; give it in an `Explorer` so that frames compare.
    """
    for name, (xs, ys) in {**curves, "points": points}.items():
        if len(xs) != len(ys) or not all(0 < v < math.inf for v in [*xs, *ys]):
            raise ValueError(f"{name}: {len(xs)} x and {len(ys)} y values; one y for each x, all finite and above 0")
    lines = _lines(curves, len(_BESIDE))
    low, high = (f(v for xs, _ in [*curves.values(), points] for v in xs) for f in (min, max))
    limits = {f"{name} {value:.4g}": value for name, value in (reference or {}).items()}
    heights = [v for _, ys in [*curves.values(), points] for v in ys] + [*limits.values()]
    scales = (low, high if high > low else 2 * low), height_range or (min(heights) / 1.3, max(heights) * 1.3)
    plot = _plot(title, alt, (width, height), scales, (x, y), lines, _BESIDE, points, limits, log=True)
    return plot.figure(caption)


def _lines(series: Mapping[str, Sequence], most: int) -> dict[str, list[tuple[float, float]]]:
    """Each series as (x, y) pairs."""
    if not 1 <= len(series) <= most:
        raise ValueError(f"{len(series)} curves; draw 1 to {most} in a figure")
    lines = {}
    for name, values in series.items():
        pair = len(values) == 2 and hasattr(values[0], "__len__")
        xs, ys = values if pair else (range(len(values)), values)
        if len(xs) != len(ys) or len(ys) == 0:
            raise ValueError(
                f"{name}: {len(xs)} x values and {len(ys)} y values; give one y for each x, at least one"
            )
        lines[name] = [(float(a), float(b)) for a, b in zip(xs, ys, strict=True)]
    return lines


def _plot(title, alt, size, scales, names, lines, styles, points, limits=None, log=False):
    """Lines, limits and circles. A name is next to its line; on a phone all names are in a legend."""
    from book.figures.plot import Plot  # loads matplotlib

    limits, is_narrow = limits or {}, size[0] <= NARROW
    right = size[0] - (10 if is_narrow else 52 + max(map(text_width, lines)))
    legend = [*lines, *limits] if is_narrow else ()
    plot = Plot(title, alt, size, *scales, names, right=right, legend=legend, sample=24, log=log)
    paints = [{"color": INK[ink], "linewidth": thick, "linestyle": dash} for ink, thick, dash in styles]
    for (name, line), paint in zip(lines.items(), paints, strict=False):
        plot.axes.plot(*zip(*line, strict=True), label=name, **paint)
    if not is_narrow:
        _name_ends(plot, lines, paints)
    if len(points[0]):
        plot.axes.plot(*points, "o", ms=8, mfc=INK["panel"], mec=INK["text"], mew=1.6, clip_on=False)
    for words, value in limits.items():
        if not is_narrow:
            plot.canvas.note(*plot.clear_place(value, text_width(words, SMALLEST_PX)), words)
        plot.axes.axhline(value, zorder=1.5, label=words, **DASHED)
    return plot


def _name_ends(plot, lines: Mapping, paints: Sequence[Mapping]) -> None:
    """A sample of each line and its name at the right, as near as can be to its end."""
    ends = [plot.at(*[p for p in line if math.isfinite(p[1])][-1])[1] for line in lines.values()]
    for name, paint, place in zip(lines, paints, spread(ends, 18), strict=False):
        level = plot.size[1] - place
        plot.axes.plot((plot.right + 12, plot.right + 32), (level, level), transform=None, clip_on=False, **paint)
        plot.canvas.text(plot.right + 38, place + 4.5, name)


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Places for labels, at least `gap` apart and as near as can be to the `wanted` ones, in the same order."""
    places, order = list(wanted), sorted(range(len(wanted)), key=lambda i: wanted[i])
    for _ in range(99):  # any two that are too near give way by half; few labels soon stop moving
        for low, high in itertools.pairwise(order):
            push = max(0, gap - places[high] + places[low]) / 2
            places[low], places[high] = places[low] - push, places[high] + push
    return places


@drawn_twice
def draw_bars(
    rows: Mapping[str, Mapping[str, float]],
    *,
    unit: str,
    title: str,
    alt: str,
    caption: str = "",
    outline: Mapping[str, float] | None = None,
    end: float | None = None,
    form: str | None = None,
    names: Mapping[str, str] | None = None,
    width: float = 680,
) -> Figure:
    """Horizontal stacked bars, a row each, then the total: memory by kind, traffic by technique.

    Args:
        rows: row name to its parts, kind to value: `{"ZeRO-1": {"parameter": 2, "gradient": 2}}`; kinds: `KINDS`.
        unit: of the values, written after the totals ("MB", "bytes per parameter").
        outline: row name to its predicted total, drawn as an outline around the measured bar.
        end: value at the right end of the axis; give it in an `Explorer` so that frames can be compared.
        form: how a value is written. Default: three digits, and thousands in groups.
        names: kind to its words in the legend, where a picture shows something else in two colours.
    """
    if not rows or not all(rows.values()):
        raise ValueError(f"{len(rows)} rows, and some have no parts; every row needs at least one")
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

    def written(value: float) -> str:
        return form.format(value) if form else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"

    beside = {name: f"{written(t)} {unit}" for name, t in total.items()}
    left = 12 + max(text_width(name) for name in rows)
    scale = (width - left - 12 - max(text_width(words) for words in beside.values())) / high
    canvas = Canvas(alt)
    said = {KINDS[kind]: (KINDS[kind][0], words) for kind, words in (names or {}).items()}
    y = canvas.head(title, [said.get(one, one) for one in legend(kinds, bool(outline))], left, width)
    for name, parts in rows.items():
        canvas.text(left - 10, y + 17.5, name, "end")
        at, shown = left, [k for k in kinds if parts.get(k)]
        for kind in shown:
            ink, long, inside = KINDS[kind][0], values[name, kind] * scale, written(values[name, kind])
            fits = text_width(inside, SMALLEST_PX) + 12 <= long and len(shown) > 1
            if fits:
                canvas.words_on(ink).text(at + long / 2, y + 17.5, inside)
            tip = "" if fits else f"{KINDS[kind][1]}: {inside} {unit}"
            canvas.rect(at, y, long - 1, 26, tip, fill=canvas.hatched if kind == "idle" else color(ink, True))
            at += long
        if name in (outline or {}):
            frames = canvas.layer(FRAMES, fill="none", **OUTLINE)
            frames.rect(left - 3, y - 3, outline[name] * scale + 5, 32, radius=4)
        end_of_row = left + max(total[name], (outline or {}).get(name, 0)) * scale
        canvas.text(end_of_row + 9, y + 17.5, beside[name], font_weight=650)
        y += 40 if outline else 36
    return canvas.figure(width, y, caption)
