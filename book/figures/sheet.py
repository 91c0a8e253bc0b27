"""Text and small pictures in rows, for a sheet that is printed: side by side on paper, below each other on a phone.

The problem: a table with a paragraph in each cell is unreadable on a phone, and a browser's layout is not at hand where
paper is written. The idea: a sheet is rows of blocks, and a block is lines of words or a picture. One function places
them for any width. On a sheet that is full an estimate of words is not enough, so they are measured in the font of the
PDF, which is no narrower than those of a page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from io import BytesIO
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure as Page
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ft2font import LoadFlags

from book.figures.canvas import Canvas
from book.figures.raster import FONT, WIDER, draw
from book.figures.svg import NARROW, PAPER, SMALLEST_PX, Figure, color, css, drawn_twice, num, tag
from lib.pipeline.gantt import KIND
from lib.pipeline.simulate import Timeline

LINE = 15.8  # pixels from line to line
GAP = 14.0  # between blocks side by side
STYLES = {  # of words: size, weight, colour
    "title": (17, 650, "text"),
    "label": (SMALLEST_PX, 400, "soft"),
    "words": (SMALLEST_PX, 400, "text"),
    "strong": (SMALLEST_PX, 600, "text"),
}
A4_MM = 210, 297
MARGIN_MM = 10  # what any printer can leave white
_MM = 72 / 25.4  # points


class Line(NamedTuple):
    """Words in one of `STYLES`; they are broken into as many lines as they take."""

    words: str
    style: str = "words"


class Picture(NamedTuple):
    """A picture in a block: its size, and the function that draws it on a canvas at (x, y)."""

    width: float
    height: float
    draw: Callable[[Canvas, float, float], None]


Block = Picture | Sequence[Line]


class Band(NamedTuple):
    """Blocks side by side, and the fraction of the width that each has; with a rule above, if something new begins."""

    blocks: Sequence[Block]
    shares: Sequence[float]
    begins: bool = False


@drawn_twice
def draw_sheet(rows: Iterable[Band], *, alt: str, width: float) -> Figure:
    """The rows, one below the other; on a phone their blocks, too."""
    canvas, y = Canvas(alt), 0.0
    for row in rows:
        if row.begins and y:
            canvas.path(f"M0 {num(y + 5)}h{num(width)}", stroke=color("soft"), stroke_width=1)
            y += 11
        y = _stacked(canvas, row, y, width) if width <= NARROW else _abreast(canvas, row, y, width)
    return canvas.figure(width, y + 4)


def _abreast(canvas: Canvas, row: Band, y: float, width: float) -> float:
    ends, x = [y], 0.0
    for block, share in zip(row.blocks, row.shares, strict=True):
        wide = share * (width + GAP) - GAP
        ends.append(_block(canvas, block, x, y, wide))
        x += wide + GAP
    return max(ends) + 5


def _stacked(canvas: Canvas, row: Band, y: float, width: float) -> float:
    for block in row.blocks:
        y = _block(canvas, block, 0, y, width) + 4
    return y


def _block(canvas: Canvas, block: Block, x: float, y: float, width: float) -> float:
    """Draw a block; returns where it ends."""
    if isinstance(block, Picture):
        block.draw(canvas, x, y + 4)
        return y + 4 + block.height
    for words, style in block:
        size, weight, ink = STYLES[style]
        for line in broken(words, width, size, weight):
            y += LINE + 6 * (style == "title")
            canvas.text(x, y - 4, line, font_size=num(size), font_weight=weight, fill=color(ink))
    return y


@cache
def _advance(letter: str, is_bold: bool) -> float:
    """How wide a letter of one pixel is."""
    face = get_font(findfont(FontProperties(family=FONT, weight="bold" if is_bold else "normal")))
    return face.load_char(ord(letter), LoadFlags.NO_SCALE).horiAdvance / face.units_per_EM


def measured(words: str, size: float, weight: int) -> float:
    """Pixels that the words are wide."""
    return 1.02 * size / WIDER * sum(_advance(letter, weight >= 600) for letter in words)


def broken(words: str, width: float, size: float, weight: int) -> list[str]:
    """The words in as many lines as it takes: broken at spaces, and a word that is too long after a hyphen or a dot.

    Raises:
        ValueError: a word for which there is no room.
    """
    lines = [""]
    for word in words.split(" "):
        pieces, between = [word], " "
        if measured(word, size, weight) > width:
            pieces, between = re.findall(r"[-.]*[^-.]+[-.]?", word), ""
            lines.append("")
        for piece in pieces:
            longer = f"{lines[-1]}{between}{piece}".strip(" ")
            lines = [*lines[:-1], longer] if measured(longer, size, weight) <= width else [*lines, piece]
    if max(measured(line, size, weight) for line in lines) > width:
        raise ValueError(f"{words!r} has a word that is wider than {width:.0f} pixels")
    return [line for line in lines if line]


# ---- pictures --------------------------------------------------------------------------------------------------------


def picture_of(drawn: Iterable[tuple[float, float, float, float, str]], width: float, height: float) -> Picture:
    """Boxes of x, y, width, height and colour."""
    kept = list(drawn)

    def draw(canvas: Canvas, x: float, y: float) -> None:
        for left, top, wide, high, ink in kept:
            canvas.rect(x + left, y + top, wide, high, radius=1.5, fill=color(ink, True))

    return Picture(width, height, draw)


def small_gantt(timeline: Timeline, width: float, row: float = 9) -> Picture:
    """A schedule without words: a line for each rank, idle time hatched. All bars of a colour are one path."""
    ranks, scale = timeline.schedule.num_ranks, width / timeline.makespan
    gap = 0.25 if scale * min(end - start for *_, start, end in timeline.compute) < 3 else 0.6

    def draw(canvas: Canvas, x: float, y: float) -> None:
        canvas.rect(x, y, width, ranks * row, radius=0, fill=canvas.hatched)
        bars: dict[str, list[tuple[float, float, float]]] = {}
        for rank, action, start, end in timeline.compute:
            middle = y + row * rank + row / 2
            place = (x + scale * start, middle, scale * (end - start) - gap)
            bars.setdefault(KIND[action.op], []).append(place)
        for ink, dashes in bars.items():
            canvas.dashes(dashes, stroke=color(ink, True), stroke_width=num(row - 1))

    return Picture(width, ranks * row, draw)


# ---- files -----------------------------------------------------------------------------------------------------------


def as_svg(sheet: Figure) -> str:
    """A file of a side, on A4 with its margin, in the colours of the reader's system, and light on paper."""
    width, height = _size(sheet)
    margin = MARGIN_MM * width / (A4_MM[0] - 2 * MARGIN_MM)
    whole = width + 2 * margin
    tall = whole * A4_MM[1] / A4_MM[0]
    if height + 2 * margin > tall:
        raise ValueError(f"a side of {height:.0f} pixels does not fit on A4, which has {tall - 2 * margin:.0f}")
    light, dark = css().replace('html[data-theme="dark"]', ":root").split("}\n", 1)
    papers = [f":root{{--paper:{PAPER[mode]}}}" for mode in ("light", "dark")]
    style = f"{light}}}{papers[0]}@media screen and (prefers-color-scheme: dark){{{dark}{papers[1]}}}"
    frame = {"x": num(margin), "y": num(margin), "width": num(width), "height": num(height)}
    opening = tag("svg", " ", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {num(whole)} {num(tall)}")
    opening = opening.removesuffix(" </svg>").replace("<svg", f'<svg width="{A4_MM[0]}mm" height="{A4_MM[1]}mm"')
    paper = tag("rect", width="100%", height="100%", style="fill:var(--paper)")
    inner = sheet.svg.replace("<svg", "<svg " + " ".join(f'{key}="{x}"' for key, x in frame.items()), 1)
    return f"{opening}<title>{sheet.alt}</title><style>{style}</style>{paper}{inner}</svg>\n"


def as_pdf(sheets: Iterable[Figure], title: str) -> bytes:
    """All sides as a PDF of A4 pages, whose text can be searched. The same sheets give the same bytes."""
    written = BytesIO()
    wide, high = (side * _MM for side in A4_MM)
    about = {"Title": title, "CreationDate": None, "Creator": None, "Producer": None}
    with rc_context({"pdf.fonttype": 42}), PdfPages(written, metadata=about) as pages:
        for sheet in sheets:
            width, height = _size(sheet)
            room = wide - 2 * MARGIN_MM * _MM
            page = Page((wide / 72, high / 72), dpi=72, facecolor="white")
            draw(sheet.svg, page, (MARGIN_MM * _MM, MARGIN_MM * _MM, room, room * height / width))
            pages.savefig(page)
    return written.getvalue()


def _size(sheet: Figure) -> tuple[float, float]:
    """Width and height of a drawing."""
    *_, width, height = sheet.svg.partition('viewBox="')[2].partition('"')[0].split()
    return float(width), float(height)


def points(size: float, width: float) -> float:
    """How large letters of so many pixels are on paper, if a sheet is that wide."""
    return size * (A4_MM[0] - 2 * MARGIN_MM) * _MM / width
