"""The timeline of a step: the actions of every rank, and their times.

Every chapter draws this picture: ranks from top to bottom, time to the right, measured times filled, predicted times in
outline, both on one axis. Colour is never the only difference: bars carry words, idle time is hatched, curves differ in
width and dash. The palette is in `book.figures.svg`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from book.figures.canvas import BARS, FRAMES, Canvas
from book.figures.svg import OUTLINE, SMALLEST_PX, Figure, color, drawn_twice, num, text_width
from lib.trace import Trace, stack

KINDS = {  # the kinds of bars: colour and name in the legend
    "forward": ("forward", "forward"),
    "backward": ("backward", "backward"),
    "weight": ("weight", "weight gradient"),
    "optimizer": ("opt", "optimizer"),
    "compute": ("soft", "compute"),
    "comm": ("comm", "communication"),
    "idle": ("idle", "idle"),
    "parameter": ("param", "parameters"),
    "gradient": ("gradient", "gradients"),
    "optimizer state": ("opt", "optimizer states"),
    "activation": ("activation", "activations"),
    "other": ("soft", "other"),
}
COMPUTE, NETWORK = "compute", "network"  # a rank's lanes; idle time is hatched everywhere but on the network
_SECONDS = {"s": 1.0, "ms": 1e3, "µs": 1e6}


class Bar(NamedTuple):
    """One rectangle of a timeline; `start` and `end` in the unit of its axis, `kind` a key of `KINDS`.

    A `marked` bar has a line at its foot, which a caption explains.
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


def legend(kinds: Iterable[str], predicted: bool) -> list[tuple[str, str]]:
    """(colour, name) of each kind that a figure has, and of the outlines."""
    return [KINDS[kind] for kind in kinds] + ([("outline", "predicted")] if predicted else [])


@drawn_twice
def draw_timeline(
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
    """The timeline of a step: a lane of compute and a lane of network for each rank, time to the right.

    Args:
        rows: a `Trace` (counted from its first span or event), or `Bar`s: (rank, lane, kind, label, start, end) with
            times already in `unit`. Bars of one lane that overlap are stacked. A bar of kind `idle` adds a line and
            its words ("waits 3 ms") to the hatching.
        unit: of the axis: `s`, `ms`, `µs`, or with bars any word ("forwards").
        outline: one more timeline on the same axis, drawn as outlines: the prediction, when `rows` is measured.
        end: where the axis ends, in `unit`; give it in an `Explorer` so that frames compare. Default: last end.
        width: of the drawing in pixels; a phone has its own width.
    """
    bars, predicted = (sorted(_bars(part, unit), key=lambda b: b.start) for part in (rows, outline))
    both = bars + predicted
    last = max((b.end for b in both), default=0.0)
    high = last if end is None else end
    if last <= 0 or not last * (1 - 1e-9) <= high < math.inf:
        raise ValueError(f"end={end}: {len(both)} bars, the last ends at {last:g} {unit}; the axis must reach it")
    low = min(0.0, *(b.start for b in both))
    ranks, lanes = sorted({b.rank for b in both}), list(dict.fromkeys(b.lane for b in both))
    lanes.sort(key=lambda lane: lane == NETWORK)
    left = 12 + max(text_width(words, SMALLEST_PX) for words in [*lanes[1:], *(f"rank {r}" for r in ranks)])
    right = width - 10
    scale = (right - left) / (high - low)
    kinds = [k for k in KINDS if any(b.kind == k for b in both) or (k == "idle" and lanes != [NETWORK])]
    canvas, marks, short = Canvas(alt), defaultdict(list), defaultdict(list)
    y = canvas.head(title, legend(kinds, bool(predicted)), left, width)
    for rank, lane in [(rank, lane) for rank in ranks for lane in lanes]:
        here, there = ([b for b in part if b[:2] == (rank, lane)] for part in (bars, predicted))
        row_of, row_of_predicted = (stack([(b.start, b.end) for b in part]) for part in (here, there))
        rows_high = 1 + max([0, *row_of, *row_of_predicted])
        height = (20 if lane == NETWORK else 26) if rows_high < 4 else 9
        tall = rows_high * (height + 2) - 2
        if lane == lanes[0]:
            canvas.text(left - 9, y + 18, f"rank {rank}", "end")
        else:
            canvas.note(left - 9, y + tall / 2 + 4.5, lane, "end")
        if lane != NETWORK:
            canvas.rect(left, y, right - left, tall, radius=3, fill=canvas.hatched)
        for i, (bar, row) in enumerate(zip(here, row_of, strict=True)):
            x, top, long = left + (bar.start - low) * scale, y + row * (height + 2), (bar.end - bar.start) * scale
            name, kind = KINDS[bar.kind]
            if bar.kind == "idle":  # a line as long as the wait; its words may run on over the hatching
                room = scale * ((here[i + 1].start if i + 1 < len(here) else high) - bar.start)
                canvas.layer(FRAMES, fill=color("text")).rect(x, top + height - 2.5, long, 2.5, radius=0)
                if text_width(bar.label, SMALLEST_PX) + 6 <= room:
                    canvas.words_on(name).text(x + 5, top + height / 2 + 3.5, bar.label)
                continue
            choices = [bar.label, *bar.label.split()[-1:]] if bar.label[-1:].isdigit() else [bar.label]
            choices = choices if bar.label else [kind, kind[0].upper()]
            fits = [c for c in choices if height > 12 and text_width(c, 12) + 1 <= long]
            if fits:
                canvas.words_on(name).text(x + long / 2, top + height / 2 + 4.5, fits[0])
            if long < 6:
                short[name, height].append((x, top + height / 2, max(long - 1, 0.8)))
            else:
                tip = "" if fits else f"{bar.label or kind}: {bar.start:.4g} to {bar.end:.4g} {unit}"
                canvas.bars(name).rect(x, top, long - 1, height, tip)
            if bar.marked:
                inset = min(2, long / 6)
                marks[name].append((x + inset, top + height - 3.2, long - 1 - 2 * inset))
        frames = canvas.layer(FRAMES, fill="none", **OUTLINE) if there else None
        for bar, row in zip(there, row_of_predicted, strict=True):
            x, top, long = left + (bar.start - low) * scale, y + row * (height + 2), (bar.end - bar.start) * scale
            frames.rect(x, top - 3, long - 1, height + 6, radius=3)
        y += tall + (9 if predicted else 3) + (9 if lane == lanes[-1] else 0)
    for (name, height), dashes in short.items():
        canvas.layer(BARS).dashes(dashes, stroke=color(name, True), stroke_width=height)
    for name, lines in marks.items():
        canvas.layer(FRAMES + 1).dashes(lines, stroke=color(f"on-{name}"), stroke_width=1.6)
    below = draw_axis(canvas, left, right, y - 4, low, high, unit)
    return canvas.figure(width, y - 4 + below, caption)


def draw_axis(canvas: Canvas, left: float, right: float, y: float, low: float, high: float, name: str) -> float:
    """A horizontal axis at height `y` from `low` to `high`, with its name and unit; the height that it takes."""
    from book.figures.plot import marks_across  # loads matplotlib

    scale = (right - left) / (high - low)
    places = [(left + (mark - low) * scale, words) for mark, words in marks_across(low, high, right - left).items()]
    path = f"M{num(left)} {num(y)}H{num(right)}" + "".join(f"M{num(x)} {num(y)}v4" for x, _ in places)
    canvas.path(path, stroke=color("soft"))
    for x, words in places:
        edge = right + 10 - text_width(words, SMALLEST_PX) / 2  # of the picture
        canvas.note(min(x, edge), y + 17, words, "middle")
    x, words = places[-1]
    beside = x + text_width(words, SMALLEST_PX) / 2 + 10 <= right - text_width(name, SMALLEST_PX)
    canvas.note(right, y + (17 if beside else 34), name, "end")
    return 22 if beside else 39
