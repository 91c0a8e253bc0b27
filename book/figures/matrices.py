"""Figures of a layer that is cut: which part of each matrix a rank holds, and where the ranks communicate.

Matrices are drawn in proportion, in the order of the formula: x · Wᵀ = y, with the rows of x from top to bottom. The
part of rank 0 has full colour, all other parts are pale, and each part has the number of its rank. Stacked sheets are
partial sums, one on each rank. A communication between two matrices is a sign: its upper half names the collective of
forward, its lower half the collective of backward; orange is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from book.figures.canvas import Canvas
from book.figures.svg import SMALLEST_PX, WIDE, Figure, color, drawn_twice, num, text_width

INKS = {"activation": "activation", "parameter": "param", "gradient": "gradient"}
CUTS = ("whole", "columns", "rows", "partial")
PALE, SIGN, GAP = 0.28, 92, 10  # opacity; pixels: width of a sign, between things
TOP, APART = 48, 34  # pixels above the drawing, and from row to row


class Matrix(NamedTuple):
    """One matrix of the row.

    Args:
        name: written above it; a word for each of the sections, if there are any.
        rows, columns: its size, whole.
        cut: `whole` on every rank; in parts along `columns` or `rows`; `partial` sums, each of the whole size.
        kind: `activation`, `parameter` or `gradient`.
        sections: widths of the matrices side by side in it, each cut separately; empty if it is one matrix.
        copies: for each section, how many neighbouring ranks have the same part.
        words: written below its size, instead of the words for its cut.
    """

    name: str
    rows: int
    columns: int
    cut: str = "whole"
    kind: str = "activation"
    sections: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()
    words: str = ""


class Communication(NamedTuple):
    """The place of a communication, and its name in each direction; empty where nothing is sent."""

    forward: str = ""
    backward: str = ""


class HeadCut(NamedTuple):
    """Attention between two projections: a square for each head of queries, grouped by rank."""

    heads: int


Item = Matrix | Communication | HeadCut | str
BEFORE, AFTER = Communication("", "all-reduce"), Communication("all-reduce", "")  # a column layer, a row layer


def part_of(matrix: Matrix, ranks: int) -> tuple[int, int]:
    """(rows, columns) of the part of one rank.

    Raises:
        ValueError: it cannot be cut evenly, or there is no such cut.
    """
    if matrix.cut not in CUTS:
        raise ValueError(f"{matrix.name}: cut={matrix.cut!r} must be one of {', '.join(CUTS)}")
    if matrix.cut == "rows":
        return _even(matrix.rows, ranks, matrix.name), matrix.columns
    if matrix.cut == "columns":
        return matrix.rows, sum(size for _, size, _ in _sections(matrix, ranks))
    return matrix.rows, matrix.columns


def _even(size: int, ranks: int, name: str) -> int:
    if ranks < 1 or size % ranks:
        raise ValueError(f"{name}: {size} cannot be split over {ranks} ranks; use a multiple")
    return size // ranks


def _sections(matrix: Matrix, ranks: int) -> list[tuple[int, int, int]]:
    """(where it begins, size of one rank's part, copies) of each section of a matrix that is cut by columns."""
    widths = matrix.sections or (matrix.columns,)
    copies = matrix.copies or (1,) * len(widths)
    if sum(widths) != matrix.columns or len(copies) != len(widths):
        raise ValueError(f"{matrix.name}: sections {widths} and copies {copies} do not make {matrix.columns} columns")
    starts = [sum(widths[:i]) for i in range(len(widths))]
    parts = zip(starts, widths, copies, strict=True)
    return [(start, _even(width, ranks // c or 1, matrix.name), c) for start, width, c in parts]


@drawn_twice
def draw_layer(
    items: Sequence[Item],
    ranks: int,
    *,
    title: str,
    alt: str,
    caption: str = "",
    cell: float = 5,
    width: float = WIDE,
) -> Figure:
    """Matrices, signs and operations between them, from left to right, as `ranks` ranks share them.

    Items without room continue in a row below.

    Args:
        items: `Matrix`, `Communication`, `HeadCut`, or words such as "·", "=" and "GELU".
        cell: pixels of one number; less if the widest matrix has no room.
        width: of the drawing.

    Raises:
        ValueError: a matrix that cannot be cut evenly.
    """
    widest = max((item.columns for item in items if isinstance(item, Matrix)), default=1)
    cell = min(cell, (width - 30) / widest)
    canvas = Canvas(alt)
    top = TOP + canvas.title(title, width)
    for row in _rows(items, ranks, cell, width):
        tall = max([cell * item.rows for item in row if isinstance(item, Matrix)] + [60])
        x = 0.0
        for item in row:
            x = _item(canvas, item, ranks, x, top + tall / 2, cell) + GAP
        top += tall + 44 + APART
    return canvas.figure(width, top - APART, caption)


def _rows(items: Sequence[Item], ranks: int, cell: float, width: float) -> list[list[Item]]:
    """The items in rows that are not wider; an operator begins a row and does not end it."""
    rows, x, before = [[]], 0.0, []
    for item in items:
        before.append(item)
        if isinstance(item, str):
            continue
        long = sum(_item(Canvas(""), one, ranks, 0, 0, cell) + GAP for one in before)
        if x + long - GAP > width:
            rows, x = [*rows, []], 0.0
        rows[-1] += before
        x, before = x + long, []
    return rows


def _item(canvas: Canvas, item: Item, ranks: int, x: float, middle: float, cell: float) -> float:
    """Draw it with its left edge at `x`; return where it ends."""
    if isinstance(item, Matrix):
        return _matrix(canvas, item, ranks, x, middle, cell)
    if isinstance(item, Communication):
        return _sign(canvas, item if ranks > 1 else Communication(), x, middle)
    if isinstance(item, HeadCut):
        return _heads(canvas, item, ranks, x, middle)
    canvas.text(x + text_width(item) / 2, middle + 4.5, item, "middle")
    return x + text_width(item)


def _matrix(canvas: Canvas, matrix: Matrix, ranks: int, x: float, middle: float, cell: float) -> float:
    """Draw it with its left edge at `x`, or more to the right if its words are wider; return where it ends."""
    rows, columns = part_of(matrix, ranks)
    high, wide, ink = cell * matrix.rows, cell * matrix.columns, INKS[matrix.kind]
    whole = f"[{matrix.rows}, {matrix.columns}]"
    mine = matrix.words or {"whole": "on each", "partial": "partial sums"}.get(
        matrix.cut, f"each [{rows}, {columns}]"
    )
    sheets = min(ranks - 1, 3) if matrix.cut == "partial" else 0
    room = max(wide + 5 * sheets, *(text_width(text, SMALLEST_PX) for text in (matrix.name, whole, mine)))
    left, top = x + (room - wide - 5 * sheets) / 2, middle - high / 2
    centre = x + room / 2
    titles = [(matrix.name, centre)]
    if matrix.sections:
        edges = [sum(matrix.sections[:i]) for i in range(len(matrix.sections) + 1)]
        middles = [left + cell * (a + b) / 2 for a, b in zip(edges, edges[1:], strict=False)]
        titles = list(zip(matrix.name.split(), middles, strict=True))
    for title, at in titles:
        canvas.text(at, top - 8 - 5 * sheets, title, "middle", font_weight=650)
    canvas.note(centre, top + high + 17, whole, "middle")
    canvas.note(centre, top + high + 33, mine, "middle")
    for sheet in range(sheets, 0, -1):
        _block(canvas, left + 5 * sheet, top - 5 * sheet, wide, high, ink, pale=True)
    for rank, (at, down, long, deep) in _parts(matrix, ranks, cell):
        first = 0 in rank
        _block(canvas, left + at, top + down, long, deep, ink, pale=not first)
        lines = [f"{r}" for r in rank] if len(rank) <= 3 else [f"{rank[0]}", "–", f"{rank[-1]}"]
        is_narrow = text_width(lines[-1], SMALLEST_PX) > long + 1 or deep < 12 * len(lines)
        for i, line in enumerate([] if is_narrow or matrix.cut in ("whole", "partial") else lines):
            place = left + at + long / 2, top + down + deep / 2 + 4.5 + 16 * (i - (len(lines) - 1) / 2)
            if first:
                canvas.words_on(ink).text(*place, line)
            else:
                canvas.text(*place, line, "middle", font_size=SMALLEST_PX)
    return x + room


def _parts(matrix: Matrix, ranks: int, cell: float) -> list[tuple[range, tuple[float, float, float, float]]]:
    """(ranks that have it, (left, top, width, height) in pixels) of each part."""
    high, wide = cell * matrix.rows, cell * matrix.columns
    if matrix.cut == "rows":
        deep = high / ranks
        return [(range(r, r + 1), (0, r * deep, wide, deep)) for r in range(ranks)]
    if matrix.cut == "columns":
        return [
            (range(p * c, (p + 1) * c), (cell * (start + p * size), 0, cell * size, high))
            for start, size, c in _sections(matrix, ranks)
            for p in range(ranks // c)
        ]
    return [(range(ranks), (0, 0, wide, high))]


def _block(canvas: Canvas, x: float, y: float, wide: float, high: float, ink: str, pale: bool) -> None:
    """A rectangle with a thin rim of the page between it and the next."""
    fill = color(ink, True)
    paint = {"fill": fill, "fill_opacity": PALE, "stroke": fill} if pale else {"fill": fill}
    canvas.rect(x + 0.5, y + 0.5, wide - 1, high - 1, radius=1, **paint)


def _sign(canvas: Canvas, call: Communication, x: float, middle: float) -> float:
    for text, arrow, y in ((call.forward, "→", middle - 25), (call.backward, "←", middle + 1)):
        canvas.rect(x, y, SIGN, 24, radius=4, fill=color("comm", True) if text else color("idle"))
        at, label = (x + SIGN / 2, y + 16.5), f"{arrow} {text or 'nothing'}"
        if text:
            canvas.words_on("comm").text(*at, label)
        else:
            canvas.note(*at, label, "middle")
    return x + SIGN


def _heads(canvas: Canvas, item: HeadCut, ranks: int, x: float, middle: float) -> float:
    """Squares, a column of them for each rank; each with the diagonal of a causal mask."""
    each, side = _even(item.heads, ranks, "heads"), 24
    columns, below = (ranks, each) if ranks > 1 else (2, -(-each // 2))
    wide, high = columns * (side + 4) - 4, below * (side + 4) - 4
    room = max(wide, text_width("attention", SMALLEST_PX))
    left, top = x + (room - wide) / 2, middle - high / 2
    canvas.text(x + room / 2, top - 8, "attention", "middle", font_weight=650)
    canvas.note(x + room / 2, top + high + 17, f"{item.heads} heads", "middle")
    canvas.note(x + room / 2, top + high + 33, f"each {each}", "middle")
    for head in range(item.heads):
        column, row = divmod(head, below)
        at, down = left + column * (side + 4), top + row * (side + 4)
        _block(canvas, at, down, side, side, "activation", pale=head >= each)
        diagonal = f"M{num(at)} {num(down)}L{num(at + side)} {num(down + side)}"
        canvas.path(diagonal, stroke=color("text"), stroke_width=0.8)
    return x + room


# ---- rows that the chapters draw ------------------------------------------------------------------------------------


def column_cut(tokens: int, inputs: int, outputs: int, backward: bool = False) -> list[Item]:
    """x · Wᵀ = y with W's outputs cut: y comes in parts. Backward ∂x = ∂y · W comes as partial sums."""
    if backward:
        of_x = Matrix("∂x", tokens, inputs, "partial", "gradient")
        of_y = Matrix("∂y", tokens, outputs, "columns", "gradient")
        return [BEFORE, of_x, "=", of_y, "·", Matrix("W", outputs, inputs, "rows", "parameter")]
    w = Matrix("Wᵀ", inputs, outputs, "columns", "parameter")
    return [BEFORE, Matrix("x", tokens, inputs), "·", w, "=", Matrix("y", tokens, outputs, "columns")]


def row_cut(tokens: int, inputs: int, outputs: int, backward: bool = False) -> list[Item]:
    """x · Wᵀ = y with W's inputs cut: y comes as partial sums. Backward ∂x = ∂y · W comes in parts."""
    if backward:
        of_x = Matrix("∂x", tokens, inputs, "columns", "gradient")
        of_y = Matrix("∂y", tokens, outputs, kind="gradient")
        return [of_x, "=", of_y, "·", Matrix("W", outputs, inputs, "columns", "parameter"), AFTER]
    w = Matrix("Wᵀ", inputs, outputs, "rows", "parameter")
    return [Matrix("x", tokens, inputs, "columns"), "·", w, "=", Matrix("y", tokens, outputs, "partial"), AFTER]


def mlp_cut(tokens: int, width: int, hidden: int, backward: bool = False) -> list[Item]:
    """Column, GELU, row: the output of the first is the input of the second."""
    names, kind = (("∂x", "∂y"), "gradient") if backward else (("x", "y"), "activation")
    first, last = (Matrix(name, tokens, width, kind=kind) for name in names)
    up = Matrix("upᵀ", width, hidden, "columns", "parameter")
    down = Matrix("downᵀ", hidden, width, "rows", "parameter")
    return [first, BEFORE, up, "GELU", down, AFTER, last]


def attention_cut(tokens: int, width: int, heads: int, kv_heads: int, ranks: int) -> list[Item]:
    """Queries, keys and values in one column layer, whole heads on each rank, and a row layer after them."""
    d_head, copies = width // heads, max(1, ranks // kv_heads)
    sections = (width, kv_heads * d_head, kv_heads * d_head)
    qkv = Matrix("qᵀ kᵀ vᵀ", width, sum(sections), "columns", "parameter", sections, (1, copies, copies))
    out = Matrix("outᵀ", width, width, "rows", "parameter")
    return [Matrix("x", tokens, width), BEFORE, qkv, HeadCut(heads), out, AFTER]
