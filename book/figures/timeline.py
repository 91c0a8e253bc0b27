"""The timeline of a step: the actions of every rank, and their times; or of several steps on one axis, and the gain.

Every chapter draws this picture: ranks from top to bottom, time to the right. Hatching is idle time inside the step;
behind its end is paper. Where steps are compared they share one axis, a bracket says how much sooner than the first one
each of the others ends, and each rank has its idle share at the right. A predicted bar is a thin track below the
measured one. Colour is never the only difference: bars carry words, idle time is hatched. The palette is in
`book.figures.svg`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from book.figures.canvas import BARS, FRAMES, Canvas
from book.figures.svg import SMALLEST_PX, Figure, color, drawn_twice, num, text_width
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
_TRACK = 5  # pixels of a predicted bar
_GAIN = 17  # pixels of the words in a bracket


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


def legend(kinds: Iterable[str], outline: bool) -> list[tuple[str, str]]:
    """(colour, name) of each kind that a figure has, and of the outlines."""
    return [KINDS[kind] for kind in kinds] + ([("outline", "predicted")] if outline else [])


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
        self._numbered = [bar for bar in self.bars if bar.label[-1:].isdigit() and bar.lane != NETWORK]

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
        inside = [bar for bar in self._numbered if axis.low <= bar.start and bar.end <= axis.high]
        return all(_fitting(bar, axis.long(bar.end - bar.start)) for bar in inside)

    def draw(self, canvas: Canvas, axis: Axis, y: float, *, thin: bool = False, again: bool = False) -> float:
        """All lanes from height `y` on; the height below them. What leaves the axis is cut.

        Args:
            thin: low lanes without words: a step as a strip.
            again: pale bars behind its end: the next step begins.
        """
        silent = [] if not thin and self.has_numbers(axis) else self._numbered
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
            _draw_bars(canvas, lane, [*zip(here, row_of, strict=True)], silent, short, marks)
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
    canvas: Canvas, lane: _Lane, bars: list[tuple[Bar, int]], silent: list[Bar], short: dict, marks: dict
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
        fits = [] if height < 12 or bar in silent else _fitting(bar, long)
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
    choices = [bar.label, *bar.label.split()[-1:]] if bar.label[-1:].isdigit() else [bar.label]
    choices = choices if bar.label else [name, name[0].upper()]
    return [words for words in choices if text_width(words, 12) + 3 <= long]


@drawn_twice
def draw_timeline(
    rows: Rows | Mapping[str, Rows],
    *,
    title: str,
    alt: str,
    caption: str = "",
    unit: str = "ms",
    predicted: Rows | None = None,
    end: float | None = None,
    again: bool = False,
    width: float = 680,
) -> Figure:
    """The timeline of a step, or of several, one below the other on one axis.

    A rank has a lane of compute and one of network. Hatching is idle time inside the step, and its share stands at the
    right; behind the end of a step is paper. How much sooner or later than the first the other steps end is written
    into a bracket.

    Args:
        rows: a `Trace` (counted from its first span or event), or `Bar`s: (rank, lane, kind, label, start, end) with
            times already in `unit`; or steps to compare, name to one of these. Bars of one lane that overlap are
            stacked. A bar of kind `idle` adds a line and its words ("waits 3 ms") to the hatching.
        unit: of the axis: `s`, `ms`, `µs`, or with bars any word ("forwards").
        predicted: of the one step, when `rows` is measured: thin tracks below the bars.
        end: where the axis ends, in `unit`; give it in an `Explorer` so that frames compare. Default: last end.
        again: where a step ends before the axis, the next one begins there, pale.
        width: of the drawing in pixels; a phone has its own width.
    """
    named = rows if isinstance(rows, Mapping) else {"": rows}
    steps = [Step(rows, unit, predicted, name) for name, rows in named.items()]
    last = max((bar.end for step in steps for bar in step.both), default=0.0)
    high = last if end is None else end
    if last <= 0 or not last * (1 - 1e-9) <= high < math.inf:
        count = sum(len(step.both) for step in steps)
        raise ValueError(f"end={end}: {count} bars, the last ends at {last:g} {unit}; the axis must reach it")
    axis = axis_beside(steps, width, high, unit)
    canvas = Canvas(alt)
    y = canvas.head(title, legend_of(steps, axis), axis.left, width)
    below = draw_steps(canvas, steps, axis, y, again=again)[-1][1]
    below += draw_axis(canvas, axis, below)
    return canvas.figure(width, below, caption)


IDLE = 42.0  # pixels to the right of an axis that the idle shares end at


def axis_beside(steps: list[Step], width: float, high: float, unit: str) -> Axis:
    """The axis of these steps, between the names of their lanes and their idle shares."""
    names = [name for step in steps for name in [*step.lanes[1:], *(f"rank {rank}" for rank in step.ranks)]]
    left = 12 + max(text_width(words, SMALLEST_PX) for words in names)
    right = width - 10 - (IDLE - 6 if any(step.computes for step in steps) else 0)
    return Axis(left, right, min(step.begin for step in steps), high, unit)


def legend_of(steps: list[Step], axis: Axis) -> list[tuple[str, str]]:
    """Of all steps together; where bars have no room for their numbers it says so."""
    found = {kind for step in steps for kind in step.kinds()}
    written = legend([kind for kind in KINDS if kind in found], False)
    written += [("track", "predicted")] if any(step.predicted for step in steps) else []
    return written + ([("", "too narrow for numbers")] if not all(step.has_numbers(axis) for step in steps) else [])


def draw_steps(
    canvas: Canvas, steps: list[Step], axis: Axis, y: float, *, thin: bool = False, again: bool = False
) -> list[tuple[float, float]]:
    """Steps from height `y` on, each with its end, compared with the first; the top and bottom of each."""
    first, places = steps[0], []
    for step in steps:
        y += 18 if step.computes else 0
        below = step.draw(canvas, axis, y, thin=thin, again=again)
        if step.computes:
            _draw_heading(canvas, step, first, axis, y, below, again)
            at = num(axis.at(step.end))
            canvas.layer(FRAMES, stroke=color("text"), stroke_width=2).path(f"M{at} {num(y - 4)}V{num(below + 1)}")
        places.append((y, below))
        y = below + 8
    if len(steps) > 1:  # where the first one ends, down to the axis
        line = {"stroke": color("text"), "stroke_width": 1.2, "stroke_dasharray": "3 3"}
        canvas.layer(FRAMES, **line).path(f"M{num(axis.at(first.end))} {num(places[0][0] - 4)}V{num(below)}")
    return places


def _draw_heading(canvas: Canvas, step: Step, first: Step, axis: Axis, y: float, below: float, again: bool) -> None:
    """Above a step its name and when it ends; between there and the end of the first step, the difference."""
    x, right, end = axis.left, axis.right, axis.words(step.end)
    if step.name:
        canvas.text(x, y - 6, step.name, font_weight=650)
        x += text_width(step.name) + 12
    canvas.note(axis.right + IDLE, y - 6, "idle", "end")
    choices, change = [f"ends at {end}", end], step.end - first.end
    if abs(change) > 1e-3 * first.end:
        gain, share = (
            f"{text}".replace("-", "−") for text in (axis.words(change, "+"), f"{change / first.end:+.0%}")
        )
        ends, on_paper = sorted((axis.at(step.end), axis.at(first.end))), change < 0 and not again
        if not _draw_gain(canvas, ends, y, below, change < 0, *((gain, share) if on_paper else ("", ""))):
            choices = [f"ends at {end}: {gain}, {share}", f"{end}: {gain}, {share}", f"{end}: {share}", share]
            right = right if on_paper else ends[0]
    fits = [words for words in choices if x + text_width(words, SMALLEST_PX) <= right]
    if fits:
        canvas.note(x, y - 6, fits[0])


def _draw_gain(
    canvas: Canvas, places: list[float], y: float, below: float, wins: bool, gain: str, share: str
) -> bool:
    """A bracket between two ends, on paper, with its words if there is room for them; whether there was."""
    (begin, end), ink, middle = places, color("ok" if wins else "bad"), (y + below) / 2
    if gain:
        canvas.rect(begin, y - 4, end - begin, below - y + 4, radius=0, fill=ink, fill_opacity=0.12)
    fits = gain and text_width(gain, _GAIN) + 6 <= end - begin and below - y > 50
    if fits:
        canvas.text((begin + end) / 2, middle - 7, gain, "middle", font_size=_GAIN, font_weight=650, fill=ink)
        canvas.text((begin + end) / 2, middle + 21, share, "middle", font_weight=650, fill=ink)
    elif not gain:
        middle = y - 10
    tips = f"m-5 -4l5 4l-5 4M{num(begin + 8)} {num(middle - 4)}l-5 4l5 4" if end - begin > 20 else ""
    canvas.layer(FRAMES, stroke=ink, stroke_width=1.8).path(f"M{num(begin + 3)} {num(middle)}H{num(end - 3)}{tips}")
    return bool(fits)


def draw_axis(canvas: Canvas, axis: Axis, y: float) -> float:
    """The line of an axis at height `y`, with its marks and its unit; the height that it takes."""
    from book.figures.plot import marks_across  # loads matplotlib

    left, right, low, high, unit = axis
    places = [(axis.at(mark), words) for mark, words in marks_across(low, high, right - left).items()]
    path = f"M{num(left)} {num(y)}H{num(right)}" + "".join(f"M{num(x)} {num(y)}v4" for x, _ in places)
    canvas.path(path, stroke=color("soft"))
    for x, words in places:
        edge = right + 10 - text_width(words, SMALLEST_PX) / 2  # of the picture
        canvas.note(min(x, edge), y + 17, words, "middle")
    x, words = places[-1]
    beside = x + text_width(words, SMALLEST_PX) / 2 + 10 <= right - text_width(unit, SMALLEST_PX)
    canvas.note(right, y + (17 if beside else 34), unit, "end")
    return 22 if beside else 39
