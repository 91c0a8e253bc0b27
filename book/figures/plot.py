"""Plots: matplotlib chooses the marks of an axis and places every value, and the book's canvas writes the SVG.

The problem: the SVG that matplotlib writes weighs three times as much, its colours are lost in dark mode, its ids
repeat from picture to picture, and its style reaches every path of the page. The idea: matplotlib draws by calling a
renderer, once for each line, area and word, and this renderer puts them on a `Canvas`. A plot then has the colours and
the font of all figures. It is imported only where a plot is drawn: loading matplotlib takes 0.5 s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from matplotlib.backend_bases import RendererBase
from matplotlib.figure import Figure as Sheet
from matplotlib.path import Path
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator

from book.figures.canvas import BARS, WORDS, Canvas
from book.figures.svg import INK, PALETTE, SMALLEST_PX, Figure, color, lines_of, num, text_width

Pair = tuple[float, float]
_ROW = 18  # pixels from line to line of a legend
_LETTERS = {Path.LINETO: "l", Path.CURVE3: "q", Path.CURVE4: "c"}


def marks(low: float, high: float, most: int, log: bool = False) -> dict[float, str]:
    """About `most` round numbers between the two, and how each is written: 0.01, 100; on a log scale 2 k, 10 M."""
    few = (1, 2, 5) if log and high < 300 * low else (1,)  # few powers of ten: also twice and five times them
    locator = LogLocator(subs=few, numticks=20) if log else MaxNLocator(most, steps=(1, 2, 5, 10))
    low, high = low - 1e-9 * abs(low), high + 1e-9 * abs(high)
    inside = [mark for mark in locator.tick_values(low, high) if low <= mark <= high]
    return {mark: EngFormatter()(mark) if log and mark >= 1000 else f"{mark:g}" for mark in inside}


def marks_across(low: float, high: float, room: float, log: bool = False) -> dict[float, str]:
    """The most marks, about nine at most, that do not touch in so many pixels."""

    def place(mark: float) -> float:
        return room * (math.log(mark / low, high / low) if log else (mark - low) / (high - low))

    for fewer in range(1, 9):
        found = marks(low, high, 10 - fewer, log)
        found = dict(list(found.items())[::fewer]) if log else found
        ends = [(place(mark), 4 + text_width(words, SMALLEST_PX) / 2) for mark, words in found.items()]
        if all(a + half <= b - other for (a, half), (b, other) in pairwise(ends)):
            break
    return found


class Plot:
    """Axes on a canvas: a drawing on `axes` in colours of `INK` becomes a figure of the book.

    Args:
        size: width and height of the picture, in pixels as all lengths; it is higher where title, legend or the name
            of y take more than a line.
        x, y: the lowest and the highest number.
        names: of x and y, with their units. Several names for x name 0 to 1, 1 to 2 and so on, without numbers.
        right: edge of the axes. Words to the right of it need room; the numbers at the left have it.
        legend: the labels of the curves to come. They are below the title, each after a sample.
        sample: length of a sample.
        above: room between the axes and the name of y.
        log: x and y are logarithmic.
    """

    def __init__(
        self,
        title: str,
        alt: str,
        size: Pair,
        x: Pair,
        y: Pair,
        names: tuple,
        right: float,
        legend: Sequence[str] = (),
        sample: float = 10.4,
        above: float = 0,
        log: bool = False,
    ) -> None:
        self.canvas, self._sample = Canvas(alt), sample
        self._below_title = 26 + self.canvas.title(title, size[0])
        long = [sample + 16 + text_width(words) for words in legend]
        self._columns = len(legend) if sum(long) <= size[0] else int(size[0] / max(long)) or 1
        rows = math.ceil(len(legend) / self._columns) if legend else 0
        name = lines_of(names[1], size[0], SMALLEST_PX)
        end_of_name = self._below_title + (10 if rows else 0) + _ROW * rows + 15 * (len(name) - 1) + 10
        for i, line in enumerate(reversed(name)):
            self.canvas.note(0, end_of_name - 15 * i, line)
        self.top = top = end_of_name + 10 + above
        self.size = size = size[0], size[1] + self._below_title - 26 + _ROW * max(0, rows - 1) + 15 * (len(name) - 1)
        stretches, up = () if isinstance(names[0], str) else names[0], marks(*y, 7, log)
        self.left = 12 + max(text_width(words, SMALLEST_PX) for words in up.values())
        across = {i + 0.5: name for i, name in enumerate(stretches)} or marks_across(*x, right - self.left, log)
        *_, last = across.values()
        self.right = min(right, size[0] - text_width(last, SMALLEST_PX) / 2)
        below = 24 if stretches else 40
        self._sheet = Sheet((size[0] / 72, size[1] / 72), dpi=72, frameon=False)  # 72 to the inch: a point is a pixel
        place = self.left, below, self.right - self.left, size[1] - below - top
        self.axes = axes = self._sheet.add_axes([v / size[i % 2] for i, v in enumerate(place)], facecolor="none")
        if log:
            axes.set(xscale="log", yscale="log")
        axes.set(xlim=x, ylim=y, axisbelow=True)
        axes.minorticks_off()
        axes.grid(False)  # also if the reader chose a style with a grid for other plots
        axes.tick_params(length=0, width=1, pad=8, direction="out", colors=INK["soft"], labelsize=SMALLEST_PX)
        axes.set_yticks(list(up), up.values())
        axes.set_xticks(list(across), across.values())
        axes.grid(axis="y", color=INK["rule"], linestyle="-", linewidth=1)
        axes.spines[["left", "right", "top"]].set_visible(False)
        axes.spines["bottom"].set(color=INK["soft"], linewidth=1)
        if stretches:
            axes.vlines(range(1, len(stretches)), *y, color=INK["soft"], linewidth=1)
        else:
            axes.tick_params("x", length=4, pad=4)
            self.canvas.note(self.right, size[1] - 6, names[0], "end")

    def at(self, x: float, y: float) -> Pair:
        """The place of a point."""
        across, up = self.axes.transData.transform((x, y))
        return across, self.size[1] - up

    def clear_place(self, y: float, long: float) -> Pair:
        """Where words near a horizontal line touch no curve: at its left or right, above or below, or farther."""
        numbers = (y, self.axes.get_ylim()[0], *self.axes.get_yticks())
        level, ground, *grid = (self.at(self.axes.get_xlim()[0], number)[1] for number in numbers)
        lines = [line.get_transform().transform(line.get_path().interpolated(9).vertices) for line in self.axes.lines]

        def room(place: Pair) -> float:
            near = [self.size[1] - up for line in lines for x, up in line if place[0] <= x <= place[0] + long]
            near += [height + math.copysign(6, height - place[1] + 4) for height in grid]  # these disturb less
            return min([12, *(abs(height - place[1] + 4) for height in near if math.isfinite(height))])

        heights = [height for height in (level - 6, level + 15, level - 13, level + 22) if self.top < height < ground]
        return max(((x, height) for height in heights for x in (self.left + 6, self.right - 4 - long)), key=room)

    def _draw_legend(self) -> None:
        place = {"bbox_transform": self._sheet.transFigure, "loc": "upper left"}
        place["bbox_to_anchor"] = 0, 1 - self._below_title / self.size[1]
        space = {"handletextpad": 0.4, "columnspacing": 0.8, "borderpad": 0, "borderaxespad": 0, "frameon": False}
        space["labelspacing"] = _ROW / 13 - 1
        look = {"fontsize": 13, "handlelength": self._sample / 13, "scatterpoints": 1, "scatteryoffsets": [0.5]}
        self.axes.legend(ncols=self._columns, labelcolor=INK["text"], **place, **space, **look)

    def figure(self, caption: str) -> Figure:
        if self._columns:
            self._draw_legend()
        self._sheet.draw(_Pen(self.canvas, self.size))
        return self.canvas.figure(*self.size, caption)


class _Pen(RendererBase):
    """matplotlib calls it to draw a path or words, each with a context that holds colour, width and dash.

    The words that the mouse finds on a mark follow its address, after a space.
    """

    def __init__(self, canvas: Canvas, size: Pair) -> None:
        super().__init__()
        self._canvas, self._size = canvas, size

    def get_canvas_width_height(self) -> Pair:
        return self._size

    def get_text_width_height_descent(self, s, prop, ismath) -> tuple[float, float, float]:
        """Estimated, as in all figures: which font the reader has is not known."""
        return text_width(s, prop.get_size()), 0.72 * prop.get_size(), 0

    def draw_text(self, gc, x, y, s, prop, angle, ismath=False, mtext=None) -> None:
        share, anchor = {"left": (0, ""), "center": (0.5, "middle"), "right": (1, "end")}[mtext.get_ha()]
        paint = {"fill": _color(gc.get_rgb()), "font_size": num(prop.get_size())}
        self._canvas.layer(WORDS, **paint).text(x + share * text_width(s, prop.get_size()), y, s, anchor)

    def draw_path(self, gc, path, transform, rgbFace=None) -> None:
        stroke, fill, clip, dashes = {}, {}, gc.get_clip_rectangle(), gc.get_dashes()[1]
        if gc.get_linewidth():
            stroke = {"stroke": _color(gc.get_rgb()), "stroke_width": num(gc.get_linewidth())}
        if dashes is not None:
            stroke["stroke_dasharray"] = " ".join(map(num, dashes))
        if rgbFace is not None:
            fill, clip = {"fill": _color(rgbFace), "fill_opacity": num(rgbFace[3])}, None
        href, _, tip = (gc.get_url() or "").partition(" ")
        if stroke or fill:
            written = self._written(path.iter_segments(transform, clip=clip and clip.extents))
            self._canvas.layer(BARS, stroke_linejoin="round", **stroke).path(written, tip=tip, href=href, **fill)

    def _written(self, segments: Iterable) -> str:
        """The path as SVG writes it, relative from its start on: equal marks are then nearly equal text."""
        written, at = "", []
        for numbers, code in segments:
            ends = [round(self._size[1] - v if i % 2 else v, 1) for i, v in enumerate(map(float, numbers))]
            if code == Path.CLOSEPOLY:
                written += "z"
            elif code == Path.MOVETO:
                written += "M" + " ".join(map(num, ends))
            elif ends != at:
                written += _LETTERS[code] + " ".join(num(v - at[i % 2]) for i, v in enumerate(ends))
            at = ends[-2:]
        return written


def _color(rgba: Sequence[float]) -> str:
    return color(list(PALETTE)[round(255 * rgba[2])])
