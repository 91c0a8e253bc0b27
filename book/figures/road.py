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
        values = {chapter: stop.gigabytes for chapter, stop in self.stops.items() if chapter <= self.after}
        self._draw_bracket(values, y, "{:,.0f}", "GB")
        self._draw_line([(chapter, y(value)) for chapter, value in values.items()])
        for chapter, value in values.items():
            self._draw_stop(chapter, y(value), "ok" if self.stops[chapter].fits else "bad")
        for chapter in self._said(values, y, "{:,.0f}"):
            self._number(
                chapter, y(values[chapter]) + (20 if self.stops[chapter].fits else -10), values[chapter], "{:,.0f}"
            )

    def _draw_seconds(self) -> None:
        top = self.top + MEMORY_PX + 90

        def y(seconds: float) -> float:
            return top - 14 if seconds > OFF_S else top + SECONDS_PX * (MOST_S - seconds) / (MOST_S - LEAST_S)

        for tick in TICKS_S:
            self._level(y(tick), self._left, stroke=color("rule"))
        self._name(top - 30, "seconds of a step", {y(tick): f"{tick}" for tick in TICKS_S})
        values = {chapter: stop.seconds for chapter, stop in self.stops.items() if chapter <= self.after}
        self._draw_bracket(values, y, "{:.1f}", "s")
        first, *rest = [(chapter, y(value)) for chapter, value in values.items()]
        self._draw_line([first, *rest[:1]], stroke_dasharray="3 4")
        self._draw_line(rest)
        for chapter, value in values.items():
            self._draw_stop(chapter, y(value), "text")
        for chapter in self._said(values, y, "{:.1f}"):
            if values[chapter] > OFF_S:
                self.canvas.text(self._x(chapter) + 11, y(OFF_S + 1) + 4, f"{values[chapter] / 60:.0f} min")
            else:
                down = 20 if self._comes_from_above(chapter, values, y) else -10
                self._number(chapter, y(values[chapter]) + down, values[chapter], "{:.1f}")

    def _comes_from_above(self, chapter: int, values: dict[int, float], y: Callable[[float], float]) -> bool:
        """Whether a line would run through a number above the stop: a steep one, or one that leads to the bracket."""
        before = max((one for one in values if one < chapter), default=chapter)
        is_led_past = (
            chapter == self.after and self.since is not None and 3 < y(values[chapter]) - y(values[self.since]) < 28
        )
        return is_led_past or values[before] > OFF_S >= values[chapter]

    def _name(self, y: float, name: str, ticks: dict[float, str]) -> None:
        self.canvas.text(0, y, name)
        for height, words in ticks.items():
            self.canvas.note(self._left - 7, height + 4, words, "end")

    def _level(self, y: float, start: float, end: float | None = None, **paint: object) -> None:
        self.canvas.path(f"M{num(start)} {num(y)}l{num((end or self.width) - start)} 0", **paint)

    def _draw_line(self, points: list[tuple[int, float]], **paint: object) -> None:
        for (one, start), (after, end) in pairwise(points):
            path = f"M{num(self._x(one))} {num(start)}l{num(self._x(after) - self._x(one))} {num(end - start)}"
            self.canvas.path(path, stroke=color("soft"), stroke_width=1.5, **paint)

    def _draw_stop(self, chapter: int, y: float, ink: str) -> None:
        half = 6.0 if chapter == self.after else 4.2
        fill = color(ink) if self.stops[chapter].fits else color("panel", True)
        place = self._x(chapter) - half, y - half, 2 * half, 2 * half
        self.canvas.rect(*place, radius=half, fill=fill, stroke=color(ink), stroke_width=2)

    def _number(self, chapter: int, y: float, value: float, form: str) -> None:
        paint = {"font_weight": 650} if chapter == self.after else {"font_size": SMALLEST_PX}
        self.canvas.text(self._x(chapter), y, form.format(value), "middle", **paint)

    def _said(self, values: dict[int, float], y: Callable[[float], float], form: str) -> list[int]:
        """The last stop, the one compared with it, and those that differ from the one before.

        On a phone, of all but the last the one before alone, if it is far.
        """
        words = {chapter: form.format(value) for chapter, value in values.items()}
        befores = dict(pairwise(reversed(words)))
        others = [
            one
            for one in words
            if one != self.after and (one == self.since or words[one] != words.get(befores.get(one)))
        ]
        if self._is_narrow:
            others = [one for one in others[-1:] if abs(y(values[one]) - y(values[self.after])) > 14]
        return [*others, self.after]

    def _draw_bracket(self, values: dict[int, float], y: Callable[[float], float], form: str, unit: str) -> None:
        """Right of the last stop, from the height of the earlier one; none where their numbers are the same."""
        if self.since is None or form.format(values[self.since]) == form.format(values[self.after]):
            return
        was, now = (
            round(values[one], 1 if unit == "s" else 0) for one in (self.since, self.after)
        )  # as they are shown
        x, start, high = self._x(self.after) + 16, y(was), y(now) - y(was)
        self._level(start, self._x(self.since), x, stroke=color("soft"), stroke_dasharray="2 3")
        self.canvas.path(f"M{num(x - 5)} {num(start)}l5 0l0 {num(high)}l-5 0", stroke=color("text"))
        if max(was / now, now / was) < 2:
            words = f"{'+' if now > was else '−'}{form.format(abs(now - was))} {unit}"
        else:
            words = f"÷ {was / now:.2g}" if was > now else f"× {now / was:.2g}"
        down = 4 if abs(high) > 12 else -5 - abs(high) / 2  # words on a short bracket are above the lines of the lane
        self.canvas.text(x + 4, start + high / 2 + down, words, font_weight=650)
