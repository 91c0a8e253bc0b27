"""The lanes of a step: what each rank computes and sends, as bars over time, and the axis below them.

Hatching is idle time inside the step; behind its end is paper. A predicted bar is a thin track below the measured one.
Colour is never the only difference: bars carry words, idle time is hatched. The palette is in `book.figures.svg`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from book.figures.canvas import BARS, FRAMES, Canvas
from book.figures.svg import SMALLEST_PX, color, num, text_width
from lib.trace import Trace, stack

KINDS = {  # the kinds of bars: colour and name in the legend
    "forward": ("forward", "forward"),
    "backward": ("backward", "backward"),
    "input": ("backward", "input gradient"),
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
    "memory": ("soft", "memory of a GPU"),
}
IDLE = 42.0  # pixels to the right of an axis that the idle shares end at
COMPUTE, NETWORK = "compute", "network"  # a rank's lanes; idle time is hatched everywhere but on the network
_SECONDS = {"s": 1.0, "ms": 1e3, "µs": 1e6}
_TRACK = 5  # pixels of a predicted bar


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

    @property
    def is_numbered(self) -> bool:
        """Whether it is an action of a microbatch."""
        return self.lane != NETWORK and self.label[-1:].isdigit()


Rows = Trace | Iterable[tuple]


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


def _bars(rows: Rows | None, unit: str) -> list[Bar]:
    bars = bars_of(rows, unit) if isinstance(rows, Trace) else [Bar(*row) for row in rows or ()]
    for bar in bars:
        if bar.kind not in KINDS:
            raise ValueError(f"kind {bar.kind!r} of {bar} has no colour; use one of {', '.join(KINDS)}")
        if not (math.isfinite(bar.start) and bar.start <= bar.end < math.inf):
            raise ValueError(f"{bar} does not end after it starts; give start <= end, both finite")
    return sorted(bars, key=lambda bar: bar.start)


class Axis(NamedTuple):
    """Times from `low` to `high`, in `unit`, between two places of a picture."""

    left: float
    right: float
    low: float
    high: float
    unit: str

    def at(self, time: float) -> float:
        """The place of a time."""
        return self.left + self.long(time - self.low)

    def long(self, time: float) -> float:
        """Pixels of a duration."""
        return time * (self.right - self.left) / (self.high - self.low)

    def words(self, time: float, sign: str = "") -> str:
        """A time in three digits: `27 units`, `412 ms`; with `sign="+"`, as a difference."""
        unit = self.unit.removesuffix("s") if abs(time) == 1 and self.unit not in _SECONDS else self.unit
        digits = f"{time:{sign}.3g}" if abs(time) < 1000 else f"{time:{sign},.0f}".replace(",", "\u2009")
        return f"{digits} {unit}"


class _Lane(NamedTuple):
    """Where the bars of a lane are: at height `y`, each `height` high, rows of bars that overlap a `pitch` apart."""

    axis: Axis
    y: float
    height: float
    pitch: float

    def box(self, start: float, end: float, row: int) -> tuple[float, float, float]:
        """Place, top and length of a bar, cut where the axis ends."""
        start, end = max(start, self.axis.low), min(end, self.axis.high)
        return self.axis.at(start), self.y + row * self.pitch, self.axis.long(end - start)


class Step:
    """The bars of a step and those predicted for it, with its name where several are compared."""

    def __init__(self, rows: Rows, unit: str, predicted: Rows | None = None, name: str = "") -> None:
        self.name, self.bars, self.predicted = name, _bars(rows, unit), _bars(predicted, unit)
        self.both = self.bars + self.predicted
        self.begin = min([0.0, *(bar.start for bar in self.both)])
        self.end = max([bar.end for bar in self.bars or self.both], default=0.0)
        self.ranks = sorted({bar.rank for bar in self.both})
        self.lanes = sorted(dict.fromkeys(bar.lane for bar in self.both), key=NETWORK.__eq__)
        self.computes = self.lanes != [NETWORK]

    def idle(self, rank: int) -> float:
        """The share of the step in which the first lane of a rank has no bar, but for bars that say so."""
        busy, until = 0.0, -math.inf
        for bar in self.bars:
            if (bar.rank, bar.lane) == (rank, self.lanes[0]) and bar.kind != "idle":
                busy += max(bar.end - max(bar.start, until), 0)
                until = max(bar.end, until)
        return 1 - busy / (self.end - self.begin)

    def kinds(self) -> list[str]:
        """Those of its legend, in the order of `KINDS`."""
        found = {bar.kind for bar in self.both} | ({"idle"} if self.computes else set())
        return [kind for kind in KINDS if kind in found]

    def has_numbers(self, axis: Axis) -> bool:
        """Whether its numbered bars have room for their numbers: either all show one, or none does."""
        inside = (bar for bar in self.bars if axis.low <= bar.start and bar.end <= axis.high)
        return all(_fitting(bar, axis.long(bar.end - bar.start)) for bar in inside if bar.is_numbered)

    def draw(self, canvas: Canvas, axis: Axis, y: float, *, thin: bool = False, again: bool = False) -> float:
        """All lanes from height `y` on; the height below them. What leaves the axis is cut.

        Args:
            thin: low lanes without words: a step as a strip.
            again: pale bars behind its end: the next step begins.
        """
        numbers = not thin and self.has_numbers(axis)
        marks, short = defaultdict(list), defaultdict(list)  # lines, by ink and height
        for rank, name in [(rank, name) for rank in self.ranks for name in self.lanes]:
            here, there = ([b for b in part if b[:2] == (rank, name)] for part in (self.bars, self.predicted))
            row_of, row_of_predicted = (stack([(b.start, b.end) for b in part]) for part in (here, there))
            rows = 1 + max([0, *row_of, *row_of_predicted])
            height = 11 if thin else 9 if rows > 3 else 20 if name == NETWORK or there else 26
            lane = _Lane(axis, y, height, height + 2 + (_TRACK + 1 if there else 0))
            tall = rows * lane.pitch - 2
            if name != NETWORK:
                x, top, long = lane.box(self.begin, self.end, 0)
                canvas.rect(x, top, long, tall, radius=3, fill=canvas.hatched)
            if name == self.lanes[0]:
                words = f"rank {rank}"
                fits = text_width(words) <= axis.left - 9
                canvas.text(axis.left - 9, y + height / 2 + 4.5, words if fits else f"{rank}", "end")
                if self.computes and axis.low <= self.begin and self.end <= axis.high:
                    canvas.text(axis.right + IDLE, y + height / 2 + 4.5, f"{self.idle(rank):.0%}", "end")
            else:
                canvas.note(axis.left - 9, y + tall / 2 + 4.5, name, "end")
            _draw_bars(canvas, lane, [*zip(here, row_of, strict=True)], numbers, short, marks)
            for bar, row in zip(there, row_of_predicted, strict=True):
                x, top, long = lane.box(bar.start, bar.end, row)
                canvas.bars(KINDS[bar.kind][0]).rect(x, top + height + 1, long - 1, _TRACK, radius=1)
            if again and self.end < axis.high:
                for bar, row in zip(here, row_of, strict=True):
                    if (start := bar.start + self.end) < axis.high:
                        x, top, long = lane.box(start, bar.end + self.end, row)
                        pale = canvas.layer(BARS, fill=color(KINDS[bar.kind][0], True), fill_opacity=0.4)
                        pale.rect(x, top, long - 1, height)
            y += tall + 3 + (9 if name == self.lanes[-1] and (there or len(self.lanes) > 1) else 0)
        for (name, height), dashes in short.items():
            canvas.layer(BARS).dashes(dashes, stroke=color(name, True), stroke_width=height)
        for name, lines in marks.items() if not thin else ():
            canvas.layer(FRAMES + 1).dashes(lines, stroke=color(f"on-{name}"), stroke_width=1.6)
        return y


def _draw_bars(
    canvas: Canvas, lane: _Lane, bars: list[tuple[Bar, int]], numbers: bool, short: dict, marks: dict
) -> None:
    """The bars of a lane, each with its row; dashes for very short ones and lines below marked ones are collected."""
    axis, _, height, _ = lane
    for i, (bar, row) in enumerate(bars):
        x, top, long = lane.box(bar.start, bar.end, row)
        name, kind = KINDS[bar.kind]
        if long < 0 or bar.start >= axis.high:  # outside of an axis that shows a part
            continue
        if bar.kind == "idle":  # a line as long as the wait; its words may run on over the hatching
            room = axis.long((bars[i + 1][0].start if i + 1 < len(bars) else axis.high) - bar.start)
            canvas.layer(FRAMES, fill=color("text")).rect(x, top + height - 2.5, long, 2.5, radius=0)
            if text_width(bar.label, SMALLEST_PX) + 6 <= room:
                canvas.words_on(name).text(x + 5, top + height / 2 + 3.5, bar.label)
            continue
        fits = [] if height < 12 or bar.is_numbered > numbers else _fitting(bar, long)
        if fits:
            canvas.words_on(name).text(x + long / 2, top + height / 2 + 4.5, fits[0])
        if long < 6:
            short[name, height].append((x, top + height / 2, max(long - 1, 0.8)))
        else:
            tip = "" if fits else f"{bar.label or kind}: {bar.start:.4g} to {bar.end:.4g} {axis.unit}"
            canvas.bars(name).rect(x, top, long - 1, height, tip)
        if bar.marked:
            inset = min(2, long / 6)
            marks[name].append((x + inset, top + height - 3.2, long - 1 - 2 * inset))


def _fitting(bar: Bar, long: float) -> list[str]:
    """Words that a bar of so many pixels has room for, the best first."""
    name = KINDS[bar.kind][1]
    choices = [bar.label]
    if bar.label[-1:].isdigit():
        choices += [bar.label.split()[-1], bar.label.split()[-1].lstrip("IW")]
    choices = choices if bar.label else [name, name[0].upper()]
    return [words for words in choices if text_width(words, 12) + (3 if words.isdigit() else 7) <= long]


def draw_axis(canvas: Canvas, axis: Axis, y: float) -> float:
    """The line of an axis at height `y`, with its marks and its unit; the height that it takes."""
    from book.figures.plot import marks_across  # loads matplotlib

    left, right, low, high, unit = axis
    places = [(axis.at(mark), words) for mark, words in marks_across(low, high, right - left).items()]
    path = f"M{num(left)} {num(y)}H{num(right)}" + "".join(f"M{num(x)} {num(y)}v4" for x, _ in places)
    canvas.path(path, stroke=color("soft"))
    for x, words in places:
        edge = right + 8 - text_width(words, SMALLEST_PX) / 2  # of the picture
        canvas.note(min(x, edge), y + 17, words, "middle")
    x, words = places[-1]
    beside = x + text_width(words, SMALLEST_PX) / 2 + 10 <= right - text_width(unit, SMALLEST_PX)
    canvas.note(right, y + (17 if beside else 34), unit, "end")
    return 22 if beside else 39
