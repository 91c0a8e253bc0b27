"""A road: memory and seconds at each of its stops, up to the one that has been reached.

The problem: a run improves a little in every chapter, by turns in memory and in time, and bars of two chapters show
neither what was won before nor how far it is from fitting. The idea: two lanes over the same stops. Memory is
logarithmic, from 25 GB to 2 TB, and crosses the line of what a GPU has; seconds are zoomed to what the stops differ by.
A filled stop fits. A bracket has the difference from one stop to the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from book.figures.canvas import Canvas
from book.figures.svg import NARROW, SMALLEST_PX, color, num, text_width

MOST_GB, LEAST_GB = 2000, 25  # the ends of the lane of memory
LEAST_S, MOST_S = 46.0, 78.0  # the ends of the lane of seconds
TICKS_S = 50, 60, 70
MEMORY_PX, SECONDS_PX = 84.0, 60.0  # the heights of the lanes
OFF_S = 600.0  # a longer step is drawn above its lane, with a broken line to it


class Milestone(NamedTuple):
    """What a run needs after a chapter, and whether a GPU has that much memory."""

    name: str
    gigabytes: float
    seconds: float
    fits: bool


class Lane(NamedTuple):
    """One quantity of the stops that are reached: its values, and where they are drawn."""

    unit: str
    decimals: int  # that are shown
    values: dict[int, float]  # by chapter
    y: Callable[[float], float]  # of a value, in pixels from the top of the picture

    def height(self, chapter: int) -> float:
        return self.y(self.values[chapter])

    def words(self, chapter: int) -> str:
        return f"{self.values[chapter]:,.{self.decimals}f}"

    def before(self, chapter: int) -> int | None:
        return max((one for one in self.values if one < chapter), default=None)

    def change(self, was: int, now: int) -> str:
        """From one stop to the next, of the numbers that are shown; as a factor where it is large."""
        before, after = (round(self.values[one], self.decimals) for one in (was, now))
        if max(before / after, after / before) < 2:
            return f"{'+' if after > before else '−'}{abs(after - before):,.{self.decimals}f} {self.unit}"
        return f"÷ {before / after:.2g}" if before > after else f"× {after / before:.2g}"


@dataclass(frozen=True)
class Road:
    """Two lanes over the same stops; those after the last one that is reached are only numbered.

    Args:
        stops: by number of the chapter.
        after: the last one that is reached.
        since: an earlier one, from which brackets lead to the last; or none.
        limit_gb: what an H100 has.
        top: pixels from the top of the picture.
    """

    canvas: Canvas
    stops: dict[int, Milestone]
    after: int
    since: int | None
    limit_gb: float
    width: float
    top: float

    def draw(self) -> float:
        """Returns the height of the picture."""
        self._draw_memory()
        self._draw_seconds()
        y = self.top + MEMORY_PX + SECONDS_PX + 120
        self.canvas.note(0, y, "chapter")
        for chapter, stop in self.stops.items():
            is_now = chapter == self.after
            ink = {"font_weight": 650} if is_now else {"fill": color("soft"), "font_size": SMALLEST_PX}
            self.canvas.text(self._x(chapter), y, f"{chapter}", "middle", **ink)
            if is_now or (chapter < self.after and not self._is_narrow):
                half = text_width(stop.name) / 2  # the last name on a phone ends at the edge of the picture
                self.canvas.text(min(self._x(chapter), self.width - half), y + 17, stop.name, "middle", **ink)
        return y + 26

    @property
    def _is_narrow(self) -> bool:
        return self.width <= NARROW

    @property
    def _left(self) -> float:
        return 44.0 if self._is_narrow else 56.0

    def _x(self, chapter: int) -> float:
        first, last = self._left + 18, self.width - 68  # the last bracket and its words need the rest
        return first + (last - first) * [*self.stops].index(chapter) / (len(self.stops) - 1)

    def _draw_memory(self) -> None:
        top = self.top + 26

        def y(gigabytes: float) -> float:
            return top + MEMORY_PX * math.log(MOST_GB / gigabytes) / math.log(MOST_GB / LEAST_GB)

        limit, wide = y(self.limit_gb), self.width - self._left
        self.canvas.rect(self._left, top - 18, wide, limit - top + 18, fill=color("bad"), opacity=0.08)
        self._level(limit, self._left, stroke=color("bad"), stroke_width=1.5)
        self._name(
            top - 26,
            f"GB on the fullest GPU; an H100 has {self.limit_gb:.0f}",
            {y(1000): "1,000", limit: f"{self.limit_gb:.0f}"},
        )
        lane = Lane("GB", 0, self._reached(lambda stop: stop.gigabytes), y)
        self._draw_bracket(lane)
        self._draw_line([*lane.values], lane)
        for chapter in lane.values:
            self._draw_stop(chapter, lane, "ok" if self.stops[chapter].fits else "bad")
        for chapter in self._said(lane):
            self._number(chapter, lane, 20 if self.stops[chapter].fits else -10)

    def _draw_seconds(self) -> None:
        top = self.top + MEMORY_PX + 90

        def y(seconds: float) -> float:
            return top - 14 if seconds > OFF_S else top + SECONDS_PX * (MOST_S - seconds) / (MOST_S - LEAST_S)

        for tick in TICKS_S:
            self._level(y(tick), self._left, stroke=color("rule"))
        self._name(top - 30, "seconds of a step", {y(tick): f"{tick}" for tick in TICKS_S})
        lane = Lane("s", 1, self._reached(lambda stop: stop.seconds), y)
        first, *rest = lane.values
        self._draw_bracket(lane)
        self._draw_line([first, *rest[:1]], lane, stroke_dasharray="3 4")
        self._draw_line(rest, lane)
        for chapter in lane.values:
            self._draw_stop(chapter, lane, "text")
        for chapter in self._said(lane):
            if lane.values[chapter] > OFF_S:
                words = f"{lane.values[chapter] / 60:.0f} min"
                self.canvas.text(self._x(chapter) + 11, lane.height(chapter) + 4, words)
            else:
                self._number(chapter, lane, 20 if self._comes_from_above(chapter, lane) else -10)

    def _reached(self, value: Callable[[Milestone], float]) -> dict[int, float]:
        return {chapter: value(stop) for chapter, stop in self.stops.items() if chapter <= self.after}

    def _comes_from_above(self, chapter: int, lane: Lane) -> bool:
        """Whether a line would run through a number above the stop: a steep one, or one that leads to the bracket."""
        before = lane.before(chapter)
        if before is not None and lane.values[before] > OFF_S:
            return True
        is_compared = chapter == self.after and self.since is not None
        return is_compared and 3 < lane.height(chapter) - lane.height(self.since) < 28

    def _name(self, y: float, name: str, ticks: dict[float, str]) -> None:
        self.canvas.text(0, y, name)
        for height, words in ticks.items():
            self.canvas.note(self._left - 7, height + 4, words, "end")

    def _level(self, y: float, start: float, end: float | None = None, **paint: object) -> None:
        self.canvas.path(f"M{num(start)} {num(y)}l{num((end or self.width) - start)} 0", **paint)

    def _draw_line(self, chapters: list[int], lane: Lane, **paint: object) -> None:
        for one, after in pairwise(chapters):
            x, y = self._x(one), lane.height(one)
            path = f"M{num(x)} {num(y)}l{num(self._x(after) - x)} {num(lane.height(after) - y)}"
            self.canvas.path(path, stroke=color("soft"), stroke_width=1.5, **paint)

    def _draw_stop(self, chapter: int, lane: Lane, ink: str) -> None:
        half = 6.0 if chapter == self.after else 4.2
        fill = color(ink) if self.stops[chapter].fits else color("panel", True)
        place = self._x(chapter) - half, lane.height(chapter) - half, 2 * half, 2 * half
        self.canvas.rect(*place, radius=half, fill=fill, stroke=color(ink), stroke_width=2)

    def _number(self, chapter: int, lane: Lane, down: float) -> None:
        paint = {"font_weight": 650} if chapter == self.after else {"font_size": SMALLEST_PX}
        self.canvas.text(self._x(chapter), lane.height(chapter) + down, lane.words(chapter), "middle", **paint)

    def _said(self, lane: Lane) -> list[int]:
        """The last stop, the one compared with it, and those that differ from the one before.

        On a phone, of all but the last the one before alone, if it is far.
        """
        words = {chapter: lane.words(chapter) for chapter in lane.values}
        others = [one for one in words if one == self.since or words[one] != words.get(lane.before(one))]
        others = [one for one in others if one != self.after]
        if self._is_narrow:
            others = [one for one in others[-1:] if abs(lane.height(one) - lane.height(self.after)) > 14]
        return [*others, self.after]

    def _draw_bracket(self, lane: Lane) -> None:
        """Right of the last stop, from the height of the earlier one; none where their numbers are the same."""
        if self.since is None or lane.words(self.since) == lane.words(self.after):
            return
        x, start = self._x(self.after) + 16, lane.height(self.since)
        high = lane.height(self.after) - start
        self._level(start, self._x(self.since), x, stroke=color("soft"), stroke_dasharray="2 3")
        self.canvas.path(f"M{num(x - 5)} {num(start)}l5 0l0 {num(high)}l-5 0", stroke=color("text"))
        down = 4 if abs(high) > 12 else -5 - abs(high) / 2  # words on a short bracket are above the lines of the lane
        self.canvas.text(x + 4, start + high / 2 + down, lane.change(self.since, self.after), font_weight=650)
