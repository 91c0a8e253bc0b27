"""The first page: cards of the chapters, `{cards}`.

A card has the title of its chapter and an icon, drawn here: a picture of a page, shrunk to a card, cannot be read.
"""

import re
from collections.abc import Iterator
from html import escape

from docutils import nodes
from live_page import add_place

from book.figures.svg import RANKS, color, num, tag

CHAPTER = re.compile(r"chapters/0?(\d+c?)_")  # 10c is the second page of chapter 10
WIDE, HIGH = 96, 44  # pixels of an icon
Box = tuple[float, float, float, float, str]  # x, y, width, height, colour


# ---- icons: boxes in the colours of the book -------------------------------------------------------------------------


def memory() -> Iterator[Box]:
    top = HIGH
    for ink, high in (("param", 7), ("gradient", 7), ("opt", 20), ("activation", 8)):
        top -= high
        yield 30, top, 36, high - 1, ink


def collectives() -> Iterator[Box]:
    for rank, (x, y) in enumerate(((38, 0), (66, 15), (38, 30), (10, 15))):
        for k in range(4):
            yield x + 5 * k, y, 4, 14, RANKS[(rank + k) % 4]


def copies() -> Iterator[Box]:
    for rank in range(4):
        yield 8 + 21 * rank, 0, 17, 9, "activation"
        yield 8 + 21 * rank, 11, 17, 22, "param"
    yield 8, 36, 80, 7, "comm"


def shards(whole: int | None = None) -> Iterator[Box]:
    for rank in range(4):
        for k in range(4):
            ink = "opt" if whole is None else "param"
            yield 8 + 21 * rank, 11 * k, 17, 10, ink if k in (rank, whole) else "idle"


def columns() -> Iterator[Box]:
    for rank in range(4):
        yield 8 + 21 * rank, 2, 17, 32, "param"
    for rank in range(3):
        yield 26 + 21 * rank, 14, 5, 8, "comm"
    yield 8, 37, 80, 6, "comm"


def tokens() -> Iterator[Box]:
    for k in range(4):
        yield 8, 11 * k, 34, 9, RANKS[k]
        yield 54 + 9 * k, 0, 8, 42, RANKS[k]
    yield 46, 0, 4, 42, "comm"


def stairs(turns_early: bool = False, split: bool = False) -> Iterator[Box]:
    """A pipeline of three ranks and three microbatches, in units of 8 pixels."""
    for rank in range(3):
        for k in range(3):
            late = 2 * k if turns_early and rank == 2 else k
            yield 2 + 7 * (rank + late), 15 * rank, 6, 12, "forward"
            begin = 3 + 2 * (2 - rank) + 2 * k + (0 if turns_early else 2)
            yield 9 + 7 * begin, 15 * rank, 6 if split else 13, 12, "backward"
            if split:
                yield 16 + 7 * begin, 15 * rank, 6, 12, "weight"


def crossing() -> Iterator[Box]:
    yield 6, 6, 24, 32, "idle"
    yield 66, 6, 24, 32, "idle"
    yield 26, 11, 44, 8, "forward"
    yield 26, 25, 44, 8, "backward"


def late() -> Iterator[Box]:
    """A pipeline of two ranks whose messages arrive late: each waits before it goes on."""
    for rank in range(2):
        for k in range(3):
            yield 6 + 30 * k + 9 * rank, 4 + 22 * rank, 8, 14, "forward"
            yield 17 + 30 * k + 9 * rank, 4 + 22 * rank, 6, 14, "idle"


def rounds() -> Iterator[Box]:
    for rank in range(4):
        for k in range(4):
            yield 4 * (rank + k), 11 * rank, 3, 9, "forward"
            yield 20 + 4 * (rank + k), 11 * rank, 3, 9, "forward"
            yield 66 + 7 * k - 6 * rank, 11 * rank, 6, 9, "backward"


def blocks() -> Iterator[Box]:
    for copy in range(2):
        for stage in range(2):
            for part in range(2):
                yield 10 + 42 * copy + 18 * part, 2 + 21 * stage, 15, 17, RANKS[2 * copy + stage]


def layouts() -> Iterator[Box]:
    for k in range(18):
        yield 4 + k * (k + 29) * 7 % 86, 1 + k * (k + 5) * 3 % 37, 5, 5, "soft"
    yield 20, 32, 11, 11, "ok"


def fingerprint() -> Iterator[Box]:
    for row in range(4):
        for rank in range(4):
            yield 18 + 16 * rank, 11 * row, 13, 9, "bad" if row == 2 else "idle"


def machines() -> Iterator[Box]:
    for node in range(2):
        for gpu in range(4):
            yield 6 + 52 * node + 17 * (gpu % 2), 2 + 26 * (gpu // 2), 14, 14, "param"
        yield 6 + 52 * node, 19, 31, 5, "series-1"
    yield 41, 19, 14, 5, "comm"


def triangle() -> Iterator[Box]:
    """Causal attention of four ranks: a block for each pair of queries and earlier keys."""
    for queries in range(4):
        for keys in range(4):
            yield 14 + 17 * keys, 11 * queries, 16, 10, RANKS[queries] if keys <= queries else "idle"


def expert_loads() -> Iterator[Box]:
    """Copies of tokens on the ranks of four experts: as many as chose each."""
    for expert, load in enumerate((9, 5, 4, 14)):
        for k in range(load):
            yield 6 + 6 * k, 11 * expert, 5, 9, RANKS[expert]


ICONS = (
    *(memory, collectives, copies, shards, lambda: shards(1), columns, tokens, stairs, lambda: stairs(True)),
    *(crossing, rounds, lambda: stairs(True, True), blocks, layouts, fingerprint, machines, triangle),
    expert_loads,
)
SECOND_PAGES = {"10c": late}


def icon(number: str) -> str:
    """Of a chapter; a screen reader is told nothing of it, because its card has words."""
    boxes = (
        tag("rect", x=num(x), y=num(y), width=num(wide), height=num(high), rx=1.5, fill=color(ink, True))
        for x, y, wide, high, ink in (SECOND_PAGES.get(number) or ICONS[int(number) - 1])()
    )
    return tag("svg", "".join(boxes), viewBox=f"0 0 {WIDE} {HIGH}", width=WIDE, height=HIGH, aria_hidden="true")


# ---- cards and folds -------------------------------------------------------------------------------------------------


def card(app, home: str, page: str) -> str:
    number, title = CHAPTER.match(page)[1], escape(app.env.titles[page].astext())
    link = app.builder.get_relative_uri(home, page)
    return f'<li><a href="{link}">{icon(number)}<b>{number} · {title}</b></a></li>'


def cards(app, page: str) -> nodes.raw:
    pages = [one for one in app.env.toctree_includes.get(app.config.root_doc, []) if CHAPTER.match(one)]
    made = "".join(card(app, page, one) for one in pages)
    return nodes.raw("", f'<ul class="cards">{made}</ul>', format="html")


def setup(app):
    add_place(app, "cards", cards)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
