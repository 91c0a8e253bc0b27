"""Figures of the contents of ranks: before and after a collective, and after each step of an all-reduce.

A row is a rank, rank 0 on top; a cell is a chunk of its array. The content of a cell is written in it. Orange content
came over the network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from book.figures.canvas import WORDS, Canvas
from book.figures.svg import NARROW, RANKS, SMALLEST_PX, WIDE, Figure, color, drawn_twice, num
from lib.cost.steps import Move, Step, after

CELL, HIGH, LEFT = 42, 26, 62  # pixels: a cell at most, and where the first begins

_ON_STRIPES = {
    "fill": color("panel", True),
    "stroke": color("text", True),
    "stroke_width": 3,
    "stroke_linejoin": "round",
}
_ON_STRIPES |= {"paint_order": "stroke", "font_size": SMALLEST_PX, "font_weight": 650, "text_anchor": "middle"}

Held = Sequence[Sequence[float] | None]  # for each rank its numbers; None where it has nothing


@drawn_twice
def draw_before_after(
    before: Held, held: Held, *, title: str, alt: str, caption: str = "", width: float = WIDE
) -> Figure:
    """The numbers of all ranks before a collective, an arrow, and the numbers after it.

    Args:
        before, held: for each rank its numbers, before and after a collective in a real run. A number that was
            not at that place of that rank before is drawn as received.
    """
    if len(before) != len(held) or not before:
        raise ValueError(
            f"{len(before)} ranks before and {len(held)} after; a collective keeps its ranks, at least one"
        )
    longest = [max(len(row or ()) for row in rows) for rows in (before, held)]
    cell = min(CELL, (width - LEFT - 64) / sum(longest))
    middle = LEFT + longest[0] * cell
    right = middle + 64
    canvas = Canvas(alt)
    canvas.title(title)
    for rank, (was, now) in enumerate(zip(before, held, strict=True)):
        y = 28 + rank * (HIGH + 6)
        canvas.text(LEFT - 10, y + 18, f"rank {rank}", "end")
        _cells(canvas, LEFT, y, cell, was, was)
        _cells(canvas, right, y, cell, now, was)
    level = 28 + len(before) * (HIGH + 6) / 2 - 3
    canvas.arrow(f"M{num(middle + 14)} {num(level)}H{num(right - 16)}", right - 12, level)
    return canvas.figure(right + max(longest[1] * cell, 80), 28 + len(before) * (HIGH + 6), caption)


@drawn_twice
def draw_collectives(
    calls: Mapping[str, tuple[Held, Held]],
    *,
    who: Callable[[float], Iterable[int]],
    title: str,
    alt: str,
    caption: str = "",
    width: float = WIDE,
) -> Figure:
    """Collectives side by side: the numbers of all ranks before each, and after it, in the hues of their ranks.

    Args:
        calls: name → for each rank its numbers before and after the call, in a real run.
        who: the ranks whose numbers are in a number; a sum has a stripe for each.
    """
    columns, cell, gap = (3, 29.0, 22.0) if width > NARROW else (1, 34.0, 40.0)
    canvas, pitch, left = Canvas(alt), width / columns, 18.0
    top = 24 + canvas.title(title, width)
    high = 0.0
    for k, (name, (before, held)) in enumerate(calls.items()):
        x, y = k % columns * pitch, top + k // columns * high
        high = 30 + len(before) * (HIGH + 4) + 20
        canvas.text(x, y + 14, name, font_weight=650)
        longest = max(len(row or ()) for row in before)
        for rank, rows in enumerate(zip(before, held, strict=True)):
            level = y + 24 + rank * (HIGH + 4)
            canvas.note(x + 2, level + 17.5, f"{rank}")
            for begin, numbers in zip((x + left, x + left + longest * cell + gap), rows, strict=True):
                _striped(canvas, begin, level, cell, numbers, who)
        level = y + 24 + len(before) * (HIGH + 4) / 2 - 2
        begin = x + left + longest * cell
        canvas.arrow(f"M{num(begin + 2)} {num(level)}H{num(begin + gap - 8)}", begin + gap - 4, level)
    rows = math.ceil(len(calls) / columns)
    return canvas.figure(width, top + rows * high - 12, caption)


def _striped(canvas: Canvas, x: float, y: float, wide: float, numbers: Sequence[float] | None, who: Callable) -> None:
    if numbers is None:
        canvas.note(x + 4, y + 18, "nothing")
        return
    for i, number in enumerate(numbers):
        ranks = list(who(number))
        for k, rank in enumerate(ranks):
            part = (wide - 2) / len(ranks)
            canvas.bars(RANKS[rank]).rect(x + i * wide + k * part, y, part, HIGH, radius=0)
        words = canvas.words_on(RANKS[ranks[0]]) if len(ranks) == 1 else canvas.layer(WORDS, **_ON_STRIPES)
        words.text(x + i * wide + wide / 2 - 1, y + 17.5, f"{number:g}")


def _cells(canvas: Canvas, x: float, y: float, wide: float, numbers: Sequence | None, was: Sequence | None) -> None:
    if numbers is None:
        canvas.note(x + 4, y + 18, "nothing")
        return
    for i, number in enumerate(numbers):
        same = was is not None and i < len(was) and was[i] == number and len(was) == len(numbers)
        canvas.rect(x + i * wide, y, wide - 2, HIGH, fill=color("idle") if same else color("comm", True))
        _words(canvas, x + i * wide + wide / 2 - 1, y, f"{number:g}", is_new=not same)


def _words(canvas: Canvas, x: float, y: float, words: str, is_new: bool) -> None:
    """In a cell at height `y`."""
    layer, anchor = (canvas.words_on("comm"), "") if is_new else (canvas, "middle")
    layer.text(x, y + 17.5, words, anchor)


@drawn_twice
def draw_step(
    steps: Sequence[Step], n: int, number: int, *, alt: str, caption: str = "", width: float = WIDE
) -> Figure:
    """The contents of all ranks after step `number` of an all-reduce (0 is the start), and the moves of that step.

    A cell lists the ranks whose numbers are in the sum; a full one is framed.
    """
    if not 0 <= number <= len(steps):
        raise ValueError(f"step {number} is none of the {len(steps)}; 0 is the start")
    held = after(steps[:number], n)
    moves = steps[number - 1] if number else []
    new = {(move.dst, c) for move in moves for c in move.chunks}
    out, left, top = min(17, width / 40), LEFT - 8, 26  # how much farther an arc reaches that is a rank longer
    digit = min(13, ((width - left - 14 - out * (n - 1)) / n - 10) / n)
    wide = digit * n + 6
    right = left + n * (wide + 4)
    canvas = Canvas(alt)
    canvas.text(left - 8, 15, "chunk", "end")
    for c in range(n):
        canvas.text(left + c * (wide + 4) + wide / 2, 15, f"{c}", "middle")
    for rank in range(n):
        y = top + rank * (HIGH + 8)
        canvas.text(left - 8, y + 18, f"rank {rank}", "end")
        for c in range(n):
            x, inside, is_new = left + c * (wide + 4), held[rank][c], (rank, c) in new
            frame = {"stroke": color("text"), "stroke_width": 1.6} if len(inside) == n else {}
            canvas.rect(x, y, wide, HIGH, fill=color("comm", True) if is_new else color("idle"), **frame)
            for r in inside:
                _words(canvas, x + 3 + digit * (r + 0.5), y, f"{r}", is_new)
    for move in moves:
        _hop(canvas, move, right + 4, top, out)
    return canvas.figure(right + 14 + out * (n - 1), top + n * (HIGH + 8), caption)


def _hop(canvas: Canvas, move: Move, x: float, top: float, out: float) -> None:
    """An arc at the right of the rows, from the sender's to the receiver's; long ones reach further out."""
    start, end = (top + rank * (HIGH + 8) + HIGH / 2 + shift for rank, shift in ((move.src, 4), (move.dst, -4)))
    if move.dst < move.src:
        start, end = start - 8, end + 8
    far, near = num(x + 1.2 * out * abs(move.dst - move.src) + 6), x + 5
    arc = f"M{num(x)} {num(start)}C{far} {num(start)} {far} {num(end)} {num(near)} {num(end)}"
    canvas.arrow(arc, near - 4, end, to_left=True)
