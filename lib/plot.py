"""Figures of the book: timelines, curves, bars, all in one drawing style.

Who does what and when is one picture that every chapter draws again: ranks from top to bottom, time to the right,
what was measured filled, what was predicted in outline, both on one axis. Nothing is told by colour alone: bars carry
words, idle time is hatched, curves differ in width and dash. Palette and pen are in `lib.svg`.

`python -m lib.plot` prints the palette as CSS.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from lib import svg
from lib.svg import PALETTE, Figure, color, contrast, css, variables
from lib.trace import Trace

__all__ = ["KINDS", "PALETTE", "Bar", "Figure", "bars", "color", "contrast", "css", "curves", "timeline", "variables"]

KINDS = {  # what a bar can be: its colour and its name in the legend
    "forward": ("forward", "forward"),
    "backward": ("backward", "backward"),
    "weight": ("weight", "weight gradient"),
    "optimizer": ("opt", "optimizer"),
    "compute": ("soft", "compute"),
    "comm": ("comm", "communication"),
    "idle": ("idle", "idle"),
    "parameter": ("param", "parameters"),
    "gradient": ("comm", "gradients"),
    "optimizer state": ("opt", "optimizer states"),
    "activation": ("forward", "activations"),
    "other": ("soft", "other"),
}
COMPUTE, NETWORK = "compute", "network"  # a rank's lanes; idle time is hatched everywhere but on the network
_SECONDS = {"s": 1.0, "ms": 1e3, "µs": 1e6}
_CURVES = ("comm 7 none", "backward 3.4 none", "text 1.5 2,4", "weight 1.5 9,5", "opt 1.5 1,7")  # colour, width, dash


class Bar(NamedTuple):
    """One rectangle of a timeline; `start` and `end` in the unit of its axis, `kind` a key of `KINDS`.

    One that is `marked` has a line at its foot, for what a caption says.
    """

    rank: int
    lane: str
    kind: str
    label: str
    start: float
    end: float
    marked: bool = False


def bars_of(trace: Trace, unit: str = "ms") -> list[Bar]:
    """The spans (lane `compute`) and events (lane `network`) of a trace, counted from its first, in `unit`."""
    if unit not in _SECONDS:
        raise ValueError(f"unit={unit!r} cannot show a Trace, whose times are seconds; use one of {list(_SECONDS)}")
    zero = min((x.start_s for x in [*trace.spans, *trace.events]), default=0.0)

    def times(item: object) -> tuple[float, float]:
        return (item.start_s - zero) * _SECONDS[unit], (item.end_s - zero) * _SECONDS[unit]

    compute = [Bar(s.rank, COMPUTE, s.kind, s.label, *times(s)) for s in trace.spans]
    names = [(e, e.label or e.kind.replace("_", "-")) for e in trace.events]
    return compute + [Bar(e.rank, NETWORK, "comm", name, *times(e)) for e, name in names]


def _bars(rows: Trace | Iterable[tuple] | None, unit: str) -> list[Bar]:
    bars = bars_of(rows, unit) if isinstance(rows, Trace) else [Bar(*row) for row in rows or ()]
    for bar in bars:
        if bar.kind not in KINDS:
            raise ValueError(f"kind {bar.kind!r} of {bar} has no colour; use one of {', '.join(KINDS)}")
        if not (math.isfinite(bar.start) and bar.start <= bar.end < math.inf):
            raise ValueError(f"{bar} does not end after it starts; give start <= end, both finite")
    return bars


def _legend(kinds: Iterable[str], predicted: bool) -> list[tuple[str, str]]:
    entries = [(svg.HATCHED if k == "idle" else color(KINDS[k][0], True), KINDS[k][1]) for k in kinds]
    return entries + ([("outline", "predicted")] if predicted else [])


def timeline(
    rows: Trace | Iterable[tuple],
    *,
    title: str,
    alt: str,
    caption: str = "",
    unit: str = "ms",
    outline: Trace | Iterable[tuple] | None = None,
    end: float | None = None,
    width: float = 680,
) -> Figure:
    """Who does what, and when: a lane of compute and a lane of network for each rank, time to the right.

    Args:
        rows: a `Trace` (counted from its first span or event), or `Bar`s: (rank, lane, kind, label, start, end) with
            times already in `unit`. Bars of one lane that overlap are stacked. A bar of kind `idle` adds a line and
            its words ("waits 3 ms") to the hatching.
        unit: of the axis: `s`, `ms`, `µs`, or with bars any word ("forwards").
        outline: a second timeline on the same axis, drawn as outlines: the predicted one, when `rows` is measured.
        end: where the axis ends, in `unit`; give it in an `Explorer` so that frames compare. Default: last end.
        width: of the drawing in pixels; narrower screens scroll.
    """
    bars, predicted = (sorted(_bars(part, unit), key=lambda b: b.start) for part in (rows, outline))
    both = bars + predicted
    last = max((b.end for b in both), default=0.0)
    high = last if end is None else end
    if last <= 0 or high < last * (1 - 1e-9):
        raise ValueError(f"end={end}: {len(both)} bars, the last ends at {last:g} {unit}; the axis must reach it")
    low = min(0.0, *(b.start for b in both))
    ranks, lanes = sorted({b.rank for b in both}), list(dict.fromkeys(b.lane for b in both))
    lanes.sort(key=lambda lane: lane == NETWORK)
    left = 12 + max(svg.text_width(words, svg.SMALLEST_PX) for words in [*lanes[1:], *(f"rank {r}" for r in ranks)])
    right = width - 10
    scale = (right - left) / (high - low)
    kinds = [k for k in KINDS if any(b.kind == k for b in both) or (k == "idle" and lanes != [NETWORK])]
    out, y = svg.head(title, _legend(kinds, bool(predicted)), left, width)
    out.insert(0, svg.hatch())
    shapes: dict[str, list[str]] = {}
    words: dict[str, list[str]] = {}
    marks: dict[str, list[str]] = {}
    frames = []
    for rank, lane in [(rank, lane) for rank in ranks for lane in lanes]:
        here, there = ([b for b in part if b[:2] == (rank, lane)] for part in (bars, predicted))
        row_of, row_of_predicted = (svg.stack([(b.start, b.end) for b in part]) for part in (here, there))
        rows_high = 1 + max([0, *row_of, *row_of_predicted])
        height = (20 if lane == NETWORK else 26) if rows_high < 4 else 9
        tall = rows_high * (height + 2) - 2
        if lane == lanes[0]:
            out.append(svg.text(left - 9, y + 18, f"rank {rank}", "end"))
        else:
            style = {"fill": color("soft"), "font_size": svg.SMALLEST_PX}
            out.append(svg.text(left - 9, y + tall / 2 + 4.5, lane, "end", **style))
        if lane != NETWORK:
            out.append(svg.rect(left, y, right - left, tall, svg.HATCHED, radius=3))
        for i, (bar, row) in enumerate(zip(here, row_of, strict=True)):
            x, top, long = left + (bar.start - low) * scale, y + row * (height + 2), (bar.end - bar.start) * scale
            name, kind = KINDS[bar.kind]
            if bar.kind == "idle":  # a line as long as the wait; its words may run on over the hatching
                room = scale * ((here[i + 1].start if i + 1 < len(here) else high) - bar.start)
                shapes.setdefault("text", []).append(svg.rect(x, top + height - 2.5, long, 2.5, radius=0))
                if svg.text_width(bar.label, svg.SMALLEST_PX) + 6 <= room:
                    words.setdefault(name, []).append(svg.text(x + 5, top + height / 2 + 3.5, bar.label))
                continue
            choices = [bar.label, *bar.label.split()[-1:]] if bar.label[-1:].isdigit() else [bar.label]
            choices = choices if bar.label else [kind, kind[0].upper()]
            fits = [c for c in choices if height > 12 and svg.text_width(c, 12) + 1 <= long]
            if fits:
                words.setdefault(name, []).append(svg.text(x + long / 2, top + height / 2 + 4.5, fits[0]))
            tip = "" if fits or long < 6 else f"{bar.label or kind}: {bar.start:.4g} to {bar.end:.4g} {unit}"
            shapes.setdefault(name, []).append(svg.rect(x, top, long - 1, height, tip=tip))
            if bar.marked and long > 5:
                marks.setdefault(name, []).append(svg.rect(x + 2, top + height - 4, long - 5, 1.6, radius=0))
        for bar, row in zip(there, row_of_predicted, strict=True):
            x, top, long = left + (bar.start - low) * scale, y + row * (height + 2), (bar.end - bar.start) * scale
            frames.append(svg.rect(x, top - 3, long - 1, height + 6, radius=3))
        y += tall + (9 if predicted else 3) + (9 if lane == lanes[-1] else 0)
    out += [f'<g fill="{color(name, name != "text")}">{"".join(group)}</g>' for name, group in shapes.items()]
    out += [f'<g fill="none" {svg.OUTLINE}>{"".join(frames)}</g>'] if frames else []
    out += [f'<g fill="{color(f"on-{name}")}">{"".join(group)}</g>' for name, group in marks.items()]
    out += [svg.words_on(name, group) for name, group in words.items()]
    axis, below = svg.axis(left, right, y - 4, low, high, unit)
    return Figure(svg.document(out + axis, width, y - 4 + below, alt), alt, caption)


def curves(
    series: Mapping[str, Sequence],
    *,
    x: str | Sequence[str],
    y: str,
    title: str,
    alt: str,
    caption: str = "",
    reference: Mapping[str, float] | None = None,
    points: tuple[Sequence, Sequence] = ((), ()),
    width: float = 680,
    height: float = 300,
) -> Figure:
    """Lines over one axis, the first wide, the next ones narrower on top of it: if they coincide, all stay seen.

    Args:
        series: name to its values at x = 0, 1, 2, ..., or to a pair (xs, ys). At most five; nan breaks a line.
        x, y: names of the axes with their units ("step", "loss (nats per token)"). Several names for x stand for the
            stretches from 0 to 1, from 1 to 2 and so on ("forward", "backward"), and there are no numbers.
        reference: name to the height of a horizontal line ("unigram entropy": 4.17).
        points: (xs, ys) of what was measured, drawn as circles.
        width, height: of the drawing in pixels.
    """
    if not 1 <= len(series) <= len(_CURVES):
        raise ValueError(f"{len(series)} curves; draw 1 to {len(_CURVES)} in a figure")
    lines = {name: _points(name, values) for name, values in series.items()}
    dots = list(zip(*points, strict=True))
    seen = [p for line in [*lines.values(), dots] for p in line if math.isfinite(p[1])]
    heights = [v for _, v in seen] + list((reference or {}).values())
    if not seen:
        raise ValueError("no finite point to draw")
    x_low, x_high = (0, len(x)) if not isinstance(x, str) else (min(p[0] for p in seen), max(p[0] for p in seen))
    margin = 0.06 * (max(heights) - min(heights)) or 0.05 * abs(heights[0]) or 1.0
    y_low, y_high = min(heights) - margin, max(heights) + margin
    marks = svg.ticks(y_low, y_high, 7)
    left = 12 + max(svg.text_width(f"{t:g}", svg.SMALLEST_PX) for t in marks)
    right = width - 44 - max(svg.text_width(name) for name in lines)
    top, bottom = 52, height - 38

    def at(px: float, py: float) -> tuple[float, float]:
        share = (px - x_low) / (x_high - x_low or 1)
        return left + share * (right - left), bottom - (py - y_low) / (y_high - y_low) * (bottom - top)

    out = [svg.text(0, 15, title, font_weight=650), svg.text(0, 36, y, fill=color("soft"), font_size=svg.SMALLEST_PX)]
    out += svg.levels(left, right, [(at(x_low, t)[1], t) for t in marks])
    for name, value in (reference or {}).items():
        level = at(x_low, value)[1]
        path = f'<path d="M{svg.num(left)} {svg.num(level)}H{svg.num(right)}" fill="none" stroke="{color("soft")}" '
        out.append(path + 'stroke-width="1.5" stroke-dasharray="7 4"/>')
        starts, ends = (min(abs(line[i][1] - value) for line in lines.values()) for i in (0, -1))
        place, anchor = (left + 6, "start") if starts > ends else (right - 4, "end")  # away from the curves
        words = f"{name} {value:.4g}"
        out.append(svg.text(place, level - 6, words, anchor, fill=color("soft"), font_size=svg.SMALLEST_PX))
    last = {name: at(*[p for p in line if math.isfinite(p[1])][-1]) for name, line in lines.items()}
    places = svg.spread([level for _, level in last.values()], 18)
    for (name, line), style, place in zip(lines.items(), _CURVES, places, strict=False):
        ink, thick, dash = style.split()
        path, pen = "", "M"
        for px, py in line:
            if math.isfinite(py):
                path, pen = path + pen + " ".join(map(svg.num, at(px, py))), "L"
            else:
                pen = "M"
        sample = f"M{svg.num(right + 12)} {svg.num(place)}h20"
        stroke = f'stroke="{color(ink)}" stroke-width="{thick}" stroke-dasharray="{dash}"'
        out.append(f'<path d="{path}{sample}" fill="none" {stroke} stroke-linejoin="round"/>')
        out.append(svg.text(right + 38, place + 4.5, name))
    for dot in dots:
        out.append(svg.dot(*at(*dot)))
    if isinstance(x, str):
        axis, below = svg.axis(left, right, bottom, x_low, x_high if x_high > x_low else x_low + 1, x)
    else:
        axis, below = svg.stretches(left, right, bottom, top, x)
    return Figure(svg.document(out + axis, width, bottom + below, alt), alt, caption)


def _points(name: str, values: Sequence) -> list[tuple[float, float]]:
    """A series as (x, y) pairs."""
    pair = len(values) == 2 and hasattr(values[0], "__len__")
    xs, ys = values if pair else (range(len(values)), values)
    if len(xs) != len(ys) or len(ys) == 0:
        raise ValueError(f"{name}: {len(xs)} x values and {len(ys)} y values; give one y for each x, at least one")
    return [(float(a), float(b)) for a, b in zip(xs, ys, strict=True)]


def bars(
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
    left = 12 + max(svg.text_width(name) for name in rows)
    scale = (width - left - 12 - max(svg.text_width(words) for words in beside.values())) / high
    out, y = svg.head(title, _legend(kinds, bool(outline)), left, width)
    if "idle" in kinds:
        out.insert(0, svg.hatch())
    words: dict[str, list[str]] = {}
    for name, parts in rows.items():
        out.append(svg.text(left - 10, y + 17.5, name, "end"))
        at = left
        for kind in [k for k in kinds if parts.get(k)]:
            ink, long, inside = KINDS[kind][0], values[name, kind] * scale, form.format(values[name, kind])
            fits = svg.text_width(inside, svg.SMALLEST_PX) + 4 <= long and len(parts) > 1
            if fits:
                words.setdefault(ink, []).append(svg.text(at + long / 2, y + 17.5, inside))
            tip = "" if fits else f"{KINDS[kind][1]}: {inside} {unit}"
            fill = svg.HATCHED if kind == "idle" else color(ink, True)
            out.append(svg.rect(at, y, long - 1, 26, fill, tip))
            at += long
        if name in (outline or {}):
            frame = svg.rect(left - 3, y - 3, outline[name] * scale + 5, 32, "none", radius=4)
            out.append(f"<g {svg.OUTLINE}>{frame}</g>")
        end_of_row = left + max(total[name], (outline or {}).get(name, 0)) * scale
        out.append(svg.text(end_of_row + 9, y + 17.5, beside[name], font_weight=650))
        y += 40 if outline else 36
    out += [svg.words_on(ink, group) for ink, group in words.items()]
    return Figure(svg.document(out, width, y, alt), alt, caption)


if __name__ == "__main__":
    print(css(), end="")
