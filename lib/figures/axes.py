"""Axes, linear or logarithmic: from numbers to pixels, and the marks that say so.

A logarithmic axis spans a message of one byte and one of a gigabyte. Marks are few and round on both kinds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lib.figures.canvas import Canvas
from lib.figures.svg import SMALLEST_PX, color, num, text_width


@dataclass(frozen=True)
class Scale:
    """The numbers from `low` to `high`, all above 0 if it is logarithmic."""

    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """Where a number lies between the two, 0 to 1."""
        low, high, value = (math.log10(x) if self.log else x for x in (self.low, self.high, value))
        return (value - low) / (high - low or 1)

    def marks(self, most: int = 7) -> list[float]:
        """Round numbers between the two."""
        if not self.log:
            return ticks(self.low, self.high, most)
        low, high = math.log10(self.low), math.log10(self.high)
        steps = (1, 2, 5) if high - low < 2.5 else (1,)
        marks = [step * 10.0**power for power in range(math.floor(low), math.floor(high) + 1) for step in steps]
        return [mark for mark in marks if low - 1e-9 <= math.log10(mark) <= high + 1e-9]

    def words(self, mark: float) -> str:
        """A mark as one writes it: 0.01, 100; and 2 k, 10 M where it is logarithmic."""
        thousands = min(max(0, math.floor(math.log10(mark) / 3 + 1e-9)), 5) if self.log else 0
        return f"{mark / 1000**thousands:g} {('', 'k', 'M', 'G', 'T', 'P')[thousands]}".rstrip()


class Axes:
    """A rectangle of a canvas with a scale in each direction; its left edge leaves room for the numbers beside it.

    Args:
        right, top, bottom: the other edges, in pixels.
    """

    def __init__(self, canvas: Canvas, x: Scale, y: Scale, *, right: float, top: float, bottom: float) -> None:
        self.canvas, self.x, self.y = canvas, x, y
        self.left = 12 + max(text_width(y.words(mark), SMALLEST_PX) for mark in y.marks())
        self.right, self.top, self.bottom = right, top, bottom

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Where a point lies, in pixels."""
        across, up = self.x.share(x) * (self.right - self.left), self.y.share(y) * (self.bottom - self.top)
        return self.left + across, self.bottom - up

    def draw(self, x: str | Sequence[str], y: str) -> float:
        """A line across at each mark of y, its name on top, and the axis of x below; how much that one takes.

        Args:
            x, y: their names with units. Several names for x are those of equal stretches, and there are no numbers.
        """
        levels = [(self.at(self.x.low, mark)[1], self.y.words(mark)) for mark in self.y.marks()]
        self.canvas.note(0, self.top - 10, y)
        grid = "".join(f"M{num(self.left)} {num(level)}H{num(self.right)}" for level, _ in levels)
        self.canvas.path(grid, stroke=color("rule"))
        for level, words in levels:
            self.canvas.note(self.left - 8, level + 4.5, words, "end")
        if isinstance(x, str):
            return draw_axis(self.canvas, self.left, self.right, self.bottom, self.x, x)
        ends = [self.left + (self.right - self.left) * i / len(x) for i in range(len(x) + 1)]
        between = "".join(f"M{num(end)} {num(self.bottom)}V{num(self.top)}" for end in ends[1:-1])
        self.canvas.path(f"M{num(self.left)} {num(self.bottom)}H{num(self.right)}{between}", stroke=color("soft"))
        for a, b, name in zip(ends, ends[1:], x, strict=False):
            self.canvas.note((a + b) / 2, self.bottom + 17, name, "middle")
        return 22

    def line(self, points: Sequence[tuple[float, float]]) -> str:
        """The path through these points; it breaks where one is not finite."""
        path, pen = "", "M"
        for x, y in points:
            if math.isfinite(y):
                path, pen = path + pen + " ".join(map(num, self.at(x, y))), "L"
            else:
                pen = "M"
        return path


def draw_axis(canvas: Canvas, left: float, right: float, y: float, scale: Scale, name: str) -> float:
    """A horizontal axis at height `y` with its marks and its name (with its unit); the height that it takes."""
    marks = [(left + scale.share(mark) * (right - left), scale.words(mark)) for mark in scale.marks(9)]
    path = f"M{num(left)} {num(y)}H{num(right)}" + "".join(f"M{num(x)} {num(y)}v4" for x, _ in marks)
    canvas.path(path, stroke=color("soft"))
    for x, words in marks:
        canvas.note(x, y + 17, words, "middle")
    x, words = marks[-1]
    beside = x + text_width(words, SMALLEST_PX) / 2 + 10 <= right - text_width(name, SMALLEST_PX)
    canvas.note(right, y + (17 if beside else 34), name, "end")
    return 22 if beside else 39


def ticks(low: float, high: float, most: int = 8) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) from `low` to `high`, at most `most` of them."""
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"an axis from {low:g} to {high:g} has no length; give two different finite numbers")
    power = 10 ** math.floor(math.log10((high - low) / most))
    for step in (power, 2 * power, 5 * power, 10 * power, 20 * power):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < most:
            break
    return [round(k * step, 12) for k in range(first, last + 1)]
