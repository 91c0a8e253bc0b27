"""A step of a pipeline, drawn so that steps compare: equally wide and high for any ranks and microbatches.

The problem: 8 ranks with 16 microbatches are 256 blocks, and on a phone a block is four pixels wide. Numbers on some of
them look like an accident, and drawings with different clocks and heights show no ratio. The idea: the width is the
step and the height all ranks, so that the bubble's fraction of the area is its fraction of the time. Either all
blocks have their number, or none has, and each row of blocks says which microbatches it holds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from book.figures.canvas import BARS, FRAMES, Canvas
from book.figures.lanes import KINDS, Axis, draw_axis
from book.figures.svg import NARROW, SMALLEST_PX, Figure, color, drawn_twice, num, text_width
from book.figures.timeline import legend
from lib.pipeline.gantt import KIND
from lib.pipeline.simulate import Slot, Timeline

HIGH, GAP = 168.0, 3.0  # pixels that all ranks have together, and between two of them
AXIS = 39.0  # below them, with the unit in a separate line or not


@drawn_twice
def draw_bubble(timeline: Timeline, *, title: str, alt: str, caption: str = "", width: float = 680) -> Figure:
    """A step, and below it which fraction of all ranks' time is bubble."""
    canvas, left, right = Canvas(alt), _beside_names(width), width - 10
    top = canvas.head(title, legend([*_kinds(timeline), "idle"], False), left, width)
    rows = _Rows(timeline, left, right, top)
    rows.draw(canvas)
    rows.number(canvas)
    draw_axis(canvas, Axis(left, right, 0, timeline.makespan, "units"), top + HIGH)
    y = top + HIGH + AXIS + 22
    canvas.text(left, y, f"computing {1 - timeline.bubble:.0%}")
    canvas.text(right, y, f"bubble {timeline.bubble:.0%}", "end", font_weight=650)
    canvas.rect(left, y + 7, right - left, 18, fill=canvas.hatched)
    canvas.bars("soft").rect(left, y + 7, (1 - timeline.bubble) * (right - left), 18)
    draw_axis(canvas, Axis(left, right, 0, 100, "% of all ranks' time"), y + 29)
    return canvas.figure(width, y + 29 + AXIS, caption)


@drawn_twice
def draw_kept(
    timelines: Sequence[Timeline], *, title: str, alt: str, most: int, caption: str = "", width: float = 680
) -> Figure:
    """Schedules on one clock, from top to bottom, and for each rank the most microbatches that it keeps.

    A line follows microbatch 0 down the ranks and back.

    Args:
        most: microbatches for which there is room; give it in an `Explorer` so that frames compare.
    """
    canvas, left = Canvas(alt), _beside_names(width)
    item, beside = (8.0, 14.0) if width > NARROW else (5.0, 8.0)
    tray = width - 6 - text_width(f"{most}") - item * most
    end = max(timeline.makespan for timeline in timelines)
    kinds = legend([*_kinds(timelines[0]), "idle"], False)
    y = canvas.head(title, [*kinds, ("text", "microbatch 0"), ("activation", "kept")], left, width)
    for timeline in timelines:
        rows = _Rows(timeline, left, left + (tray - beside - left) * timeline.makespan / end, y + 20)
        canvas.text(left, y + 12, timeline.schedule.name.partition(",")[0], font_weight=650)
        canvas.text(tray - beside, y + 12, f"bubble {timeline.bubble:.0%}", "end")
        canvas.text(tray + item * most / 2, y + 12, "kept", "middle")
        rows.draw(canvas)
        rows.follow(canvas)
        trays = canvas.layer(BARS, stroke=color("activation", True), stroke_width=num(rows.pitch - GAP))
        for rank in range(timeline.schedule.num_ranks):
            kept = timeline.peak(rank)
            trays.path(f"M{num(tray)} {num(rows.middle(rank))}" + f"h{num(item - 1)}m1 0" * kept)
            canvas.text(tray + item * kept + 4, rows.middle(rank) + 4.5, f"{kept}", font_weight=650)
        y += 20 + HIGH + 10
    draw_axis(canvas, Axis(left, tray - beside, 0, end, "units"), y - 10)
    return canvas.figure(width, y - 10 + AXIS, caption)


@drawn_twice
def draw_dilution(
    bubbles: Mapping[int, float], at: int, *, title: str, alt: str, caption: str = "", width: float = 680
) -> Figure:
    """The bubble over the number of microbatches, with lines at 20 and 5 percent.

    Args:
        bubbles: microbatches, each twice as many as the one before → the fraction of the time that is bubble.
        at: so many have a dot.
    """
    canvas, left, right, bottom = Canvas(alt), 48.0, width - 14, 250.0
    top = 30 + canvas.title(title, width)
    counts = list(bubbles)

    def place(m: int) -> tuple[float, float]:
        return left + (right - left) * math.log(m, counts[-1]), bottom - (bottom - top) * bubbles[m]

    canvas.path(f"M{num(left)} {num(bottom)}H{num(right)}", stroke=color("soft"))
    for share in (0.05, 0.2, 0.5, 1):
        y, is_limit = bottom - (bottom - top) * share, share in (0.05, 0.2)
        paint = {"stroke": color("soft"), "stroke_dasharray": "5 3"} if is_limit else {"stroke": color("rule")}
        canvas.path(f"M{num(left)} {num(y)}H{num(right)}", **paint)
        canvas.note(left - 8, y + 4.5, f"{share:.0%}", "end")
    for m in counts:
        canvas.note(place(m)[0], bottom + 18, f"{m}", "middle")
    canvas.note(right, bottom + 36, "microbatches", "end")
    curve = "L".join(f"{num(x)} {num(y)}" for x, y in map(place, counts))
    canvas.layer(BARS, stroke=color("series-0", True), stroke_width=3, stroke_linejoin="round").path(f"M{curve}")
    x, y = place(at)
    words = f"{bubbles[at]:.1%}"
    is_left = x + 16 + text_width(words) > right
    canvas.layer(FRAMES, fill=color("text")).rect(x - 6, y - 6, 12, 12, radius=6)
    canvas.text(x - 12 if is_left else x + 10, y - 8, words, "end" if is_left else "", font_weight=650)
    return canvas.figure(width, bottom + 42, caption)


def _beside_names(width: float) -> float:
    """Where time begins: on a phone a rank's name is its number."""
    return 58.0 if width > NARROW else 16.0


def _kinds(timeline: Timeline) -> list[str]:
    return [*dict.fromkeys(KIND[slot.action.op] for slot in timeline.compute)]


class _Rows(NamedTuple):
    """The places of the blocks of each rank."""

    timeline: Timeline
    left: float
    right: float
    top: float

    @property
    def pitch(self) -> float:
        return HIGH / self.timeline.schedule.num_ranks

    def middle(self, rank: int) -> float:
        """The height of the middle of a row."""
        return self.top + rank * self.pitch + (self.pitch - GAP) / 2

    def span(self, first: Slot, last: Slot) -> tuple[float, float]:
        """From the beginning of `first` to the end of `last`."""
        unit = (self.right - self.left) / self.timeline.makespan
        return self.left + first.start * unit, self.left + last.end * unit

    def draw(self, canvas: Canvas) -> None:
        """Blocks of a kind are one path: there are hundreds of them."""
        paths = dict.fromkeys(_kinds(self.timeline), "")
        for rank in range(self.timeline.schedule.num_ranks):
            name = f"rank {rank}" if text_width(f"rank {rank}") <= self.left - 6 else f"{rank}"
            canvas.text(self.left - 6, self.middle(rank) + 4.5, name, "end")
            top, wide = self.top + rank * self.pitch, self.right - self.left
            canvas.rect(self.left, top, wide, self.pitch - GAP, fill=canvas.hatched)
        for slot in self.timeline.compute:
            begin, end = self.span(slot, slot)
            paths[KIND[slot.action.op]] += f"M{num(begin)} {num(self.middle(slot.rank))}H{num(end - 1)}"
        for kind, path in paths.items():
            ink = color(KINDS[kind][0], True)
            canvas.layer(BARS, stroke=ink, stroke_width=num(self.pitch - GAP)).path(path)

    def number(self, canvas: Canvas) -> None:
        """The microbatch on each block; if one has no room for it, the first and the last on each row of blocks."""
        slots = sorted(self.timeline.compute, key=lambda slot: (slot.rank, slot.start))
        rows = [[slot] for slot in slots]
        if not all(self._has_room(row) for row in rows):
            rows = [list(row) for _, row in itertools.groupby(slots, key=lambda slot: (slot.rank, slot.action.op))]
        for row in rows:
            words = canvas.words_on(KINDS[KIND[row[0].action.op]][0])
            words.text(sum(self.span(row[0], row[-1])) / 2, self.middle(row[0].rank) + 4.5, _numbers(row))

    def _has_room(self, row: list[Slot]) -> bool:
        begin, end = self.span(row[0], row[-1])
        return text_width(_numbers(row), SMALLEST_PX) + 1 <= end - begin

    def follow(self, canvas: Canvas) -> None:
        """A line through all blocks of microbatch 0."""
        slots = [slot for slot in self.timeline.compute if slot.action.microbatch == 0]
        places = [(sum(self.span(slot, slot)) / 2, self.middle(slot.rank)) for slot in slots]
        path = "M" + "L".join(f"{num(x)} {num(y)}" for x, y in places)
        canvas.layer(FRAMES, stroke=color("text"), stroke_width=2.4, stroke_linejoin="round").path(path)


def _numbers(row: list[Slot]) -> str:
    """Of the first microbatch of a row of blocks, and of the last."""
    return "–".join(f"{m}" for m in dict.fromkeys((row[0].action.microbatch, row[-1].action.microbatch)))
