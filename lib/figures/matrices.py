"""Figures of a layer that is cut: which part of each matrix a rank has, and where the ranks must talk.

Matrices are drawn in proportion, as the formula has them: x · Wᵀ = y, with x's rows one below the other. Full colour is
what rank 0 has, pale is what the others have, and a part bears its rank's number. Sheets behind one another are terms
of a sum, one on each rank. Where a communication stands between two matrices, the upper half of the sign says what
happens forward and the lower half what happens backward; orange is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lib.figures.canvas import Canvas
from lib.figures.svg import SMALLEST_PX, Figure, color, num, text_width

INKS = {"activation": "activation", "parameter": "param", "gradient": "gradient"}
CUTS = ("whole", "columns", "rows", "terms")
PALE, SIGN, GAP, TOP = 0.28, 92, 10, 48  # opacity; pixels: width of a sign, between things, above the drawing
NOTHING = "nothing"


class Matrix(NamedTuple):
    """One matrix of the row.

    Args:
        name: written above it; a word for each of the sections, if there are any.
        rows, columns: its size, whole.
        cut: `whole` on every rank; in parts along `columns` or `rows`; `terms` of a sum, each of the whole size.
        kind: `activation`, `parameter` or `gradient`.
        sections: widths of what lies side by side in it, each cut for itself; empty if it is one thing.
        copies: for each section, how many neighbouring ranks have the same part.
    """

    name: str
    rows: int
    columns: int
    cut: str = "whole"
    kind: str = "activation"
    sections: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()


class Communication(NamedTuple):
    """Where a communication stands, and what it is in each direction; empty where nothing is sent."""

    forward: str = ""
    backward: str = ""


class HeadCut(NamedTuple):
    """Attention between two projections: a square for each head of queries, those of a rank together."""

    heads: int


Item = Matrix | Communication | HeadCut | str


def part_of(matrix: Matrix, ranks: int) -> tuple[int, int]:
    """(rows, columns) of what one rank has.

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


def draw_layer(
    items: Sequence[Item], ranks: int, *, title: str, alt: str, caption: str = "", cell: float = 5, width: float = 0
) -> Figure:
    """Matrices, signs between them and what happens to the numbers, from left to right, as `ranks` ranks share them.

    Args:
        items: `Matrix`, `Communication`, `HeadCut`, or words such as "·", "=" and "GELU".
        cell: pixels of one number.
        width: of the drawing; 0 is as wide as it needs to be. Give it in an `Explorer` so that frames compare.

    Raises:
        ValueError: a matrix that cannot be cut evenly, or a drawing that needs more than `width`.
    """
    tall = max([cell * i.rows for i in items if isinstance(i, Matrix)] + [60])
    x, middle = 0.0, TOP + tall / 2
    canvas = Canvas(alt)
    canvas.title(title)
    for item in items:
        if isinstance(item, Matrix):
            x = _matrix(canvas, item, ranks, x, middle, cell) + GAP
        elif isinstance(item, Communication):
            x = _sign(canvas, item if ranks > 1 else Communication(), x, middle) + GAP
        elif isinstance(item, HeadCut):
            x = _heads(canvas, item, ranks, x, middle) + GAP
        else:
            wide = text_width(item)
            canvas.text(x + wide / 2, middle + 4.5, item, "middle")
            x += wide + GAP
    if width and x - GAP > width:
        raise ValueError(f"the row needs {x - GAP:.0f} pixels, more than width={width:g}; take a smaller cell")
    return canvas.figure(width or max(x - GAP, 300), TOP + tall + 44, caption)


def _matrix(canvas: Canvas, matrix: Matrix, ranks: int, x: float, middle: float, cell: float) -> float:
    """Draw it with its left edge at `x`, or more to the right if its words are wider; return where it ends."""
    rows, columns = part_of(matrix, ranks)
    high, wide, ink = cell * matrix.rows, cell * matrix.columns, INKS[matrix.kind]
    whole = f"[{matrix.rows}, {matrix.columns}]"
    mine = {"whole": "on each", "terms": "a term each"}.get(matrix.cut, f"each [{rows}, {columns}]")
    sheets = min(ranks - 1, 3) if matrix.cut == "terms" else 0
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
        if matrix.cut == "whole" or matrix.cut == "terms":
            continue
        lines = [f"{r}" for r in rank] if len(rank) <= 3 else [f"{rank[0]}", "–", f"{rank[-1]}"]
        if text_width(lines[-1], SMALLEST_PX) > long + 1 or deep < 12 * len(lines):
            continue
        for i, line in enumerate(lines):
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
        at, label = (x + SIGN / 2, y + 16.5), f"{arrow} {text or NOTHING}"
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


# ---- what lies between the matrices ----------------------------------------------------------------------------------


class Activation(NamedTuple):
    """A square, tokens from top to bottom and the width from left to right, with what rank 0 has of it.

    Args:
        name, note: written above and below it.
        tokens, width: the part that rank 0 has, 0 to 1.
    """

    name: str
    note: str = ""
    tokens: float = 1.0
    width: float = 1.0


class Sent(NamedTuple):
    """What is sent between two squares, and how its arrow points; with something else that is sent there."""

    what: str = ""
    arrow: str = "→"
    also: str = ""


def draw_activations(row: Sequence[Activation | Sent], *, title: str, alt: str, caption: str = "") -> Figure:
    """Squares, and between two of them what is sent: blue is what rank 0 has, orange is sent."""
    canvas, side, sign, top = Canvas(alt), 64, 80, 62
    canvas.title(title)
    x, middle = 22.0, top + side / 2
    for item in row:
        if isinstance(item, Sent):
            centre = x + sign / 2
            if item.what:
                first, _, second = item.what.partition("-")
                canvas.bars("comm").rect(x + 3, middle - 22, sign - 6, 44)
                canvas.words_on("comm").text(centre, middle - 4, f"{item.arrow} {first}-")
                canvas.words_on("comm").text(centre, middle + 13, second)
                if item.also:
                    canvas.bars("comm").rect(x + 3, middle + 25, sign - 6, 22)
                    canvas.words_on("comm").text(centre, middle + 41, item.also)
            else:
                canvas.note(centre, middle + 4, f"{item.arrow} {NOTHING}", "middle")
            x += sign
        else:
            canvas.rect(x, top, side, side, fill=color("idle"), stroke=color("idle-line"))
            canvas.rect(x, top, side * item.width, side * item.tokens, fill=color("activation", True))
            canvas.text(x + side / 2, top - 10, item.name, "middle")
            canvas.note(x + side / 2, top + side + 32, item.note, "middle")
            x += side
    return canvas.figure(x + 22, top + side + 42, caption)


# ---- rows that the chapters draw ------------------------------------------------------------------------------------


def column_cut(tokens: int, inputs: int, outputs: int, backward: bool = False) -> list[Item]:
    """x · Wᵀ = y with W's outputs cut: y comes in parts. Backward ∂x = ∂y · W comes as terms of a sum."""
    sign = Communication("", "all-reduce")
    if backward:
        of_x, of_y = (
            Matrix("∂x", tokens, inputs, "terms", "gradient"),
            Matrix("∂y", tokens, outputs, "columns", "gradient"),
        )
        return [sign, of_x, "=", of_y, "·", Matrix("W", outputs, inputs, "rows", "parameter")]
    w = Matrix("Wᵀ", inputs, outputs, "columns", "parameter")
    return [sign, Matrix("x", tokens, inputs), "·", w, "=", Matrix("y", tokens, outputs, "columns")]


def row_cut(tokens: int, inputs: int, outputs: int, backward: bool = False) -> list[Item]:
    """x · Wᵀ = y with W's inputs cut: y comes as terms of a sum. Backward ∂x = ∂y · W comes in parts."""
    sign = Communication("all-reduce", "")
    if backward:
        of_x, of_y = (
            Matrix("∂x", tokens, inputs, "columns", "gradient"),
            Matrix("∂y", tokens, outputs, kind="gradient"),
        )
        return [of_x, "=", of_y, "·", Matrix("W", outputs, inputs, "columns", "parameter"), sign]
    w = Matrix("Wᵀ", inputs, outputs, "rows", "parameter")
    return [Matrix("x", tokens, inputs, "columns"), "·", w, "=", Matrix("y", tokens, outputs, "terms"), sign]


def mlp_cut(tokens: int, width: int, hidden: int, backward: bool = False) -> list[Item]:
    """Column, GELU, row: what leaves the first is what enters the second."""
    names, kind = (("∂x", "∂y"), "gradient") if backward else (("x", "y"), "activation")
    first, last = (Matrix(name, tokens, width, kind=kind) for name in names)
    up = Matrix("upᵀ", width, hidden, "columns", "parameter")
    down = Matrix("downᵀ", hidden, width, "rows", "parameter")
    return [first, Communication("", "all-reduce"), up, "GELU", down, Communication("all-reduce", ""), last]


def attention_cut(tokens: int, width: int, heads: int, kv_heads: int, ranks: int) -> list[Item]:
    """Queries, keys and values in one column layer, whole heads on each rank, and a row layer after them."""
    d_head, copies = width // heads, max(1, ranks // kv_heads)
    sections = (width, kv_heads * d_head, kv_heads * d_head)
    qkv = Matrix("qᵀ kᵀ vᵀ", width, sum(sections), "columns", "parameter", sections, (1, copies, copies))
    out = Matrix("outᵀ", width, width, "rows", "parameter")
    return [
        Matrix("x", tokens, width),
        Communication("", "all-reduce"),
        qkv,
        HeadCut(heads),
        out,
        Communication("all-reduce", ""),
    ]
