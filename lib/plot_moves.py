"""Figures of who holds what: before and after a collective, and after each step of an all-reduce.

A row is a rank, rank 0 on top; a cell is a chunk of its array. What a cell holds is written in it. Orange is what came
over the network.
"""

from __future__ import annotations

from collections.abc import Sequence

from lib import svg
from lib.steps import Move, Step, after
from lib.svg import Figure, color

CELL, HIGH = 42, 26  # pixels

Held = Sequence[Sequence[float] | None]  # for each rank its numbers; None where it has nothing


def before_after(before: Held, held: Held, *, title: str, alt: str, caption: str = "") -> Figure:
    """The numbers of all ranks before a collective, an arrow, and the numbers after it.

    Args:
        before, held: for each rank its numbers, as they went in and as they came out of a real run. A number that was
            not at that place of that rank before is drawn as received.
    """
    if len(before) != len(held) or not before:
        raise ValueError(
            f"{len(before)} ranks before and {len(held)} after; a collective keeps its ranks, at least one"
        )
    left = 62
    middle = left + max(len(row or ()) for row in before) * CELL
    right = middle + 64
    width = right + max(max(len(row or ()) for row in held) * CELL, 80)
    out = [svg.text(0, 15, title, font_weight=650)]
    words: list[str] = []
    for rank, (was, now) in enumerate(zip(before, held, strict=True)):
        y = 28 + rank * (HIGH + 6)
        out.append(svg.text(left - 10, y + 18, f"rank {rank}", "end"))
        out += _cells(left, y, was, was, words) + _cells(right, y, now, was, words)
    level = 28 + len(before) * (HIGH + 6) / 2 - 3
    out.append(_arrow(f"M{svg.num(middle + 14)} {svg.num(level)}H{svg.num(right - 16)}", right - 12, level))
    out.append(svg.words_on("comm", words))
    return Figure(svg.document(out, width, 28 + len(before) * (HIGH + 6), alt), alt, caption)


def _cells(
    x: float, y: float, numbers: Sequence[float] | None, was: Sequence[float] | None, words: list
) -> list[str]:
    if numbers is None:
        return [svg.text(x + 4, y + 18, "nothing", fill=color("soft"), font_size=svg.SMALLEST_PX)]
    out = []
    for i, number in enumerate(numbers):
        same = was is not None and i < len(was) and was[i] == number and len(was) == len(numbers)
        at, fill = x + i * CELL, color("idle") if same else color("comm", True)
        out.append(svg.rect(at, y, CELL - 2, HIGH, fill))
        label = svg.text(at + CELL / 2 - 1, y + 17.5, f"{number:g}", "middle")
        (out if same else words).append(label)
    return out


def all_reduce_step(steps: Sequence[Step], n: int, number: int, *, alt: str, caption: str = "") -> Figure:
    """What all ranks hold after step `number` of an all-reduce (0 is the start), and the moves of that step.

    A cell lists the ranks whose numbers are in the sum; a full one is framed.
    """
    if not 0 <= number <= len(steps):
        raise ValueError(f"step {number} is none of the {len(steps)}; 0 is the start")
    held = after(steps[:number], n)
    moves = steps[number - 1] if number else []
    new = {(move.dst, c) for move in moves for c in move.chunks}
    wide = 13 * n + 8
    left, top = 62, 26
    right = left + n * (wide + 4)
    out = [svg.text(left + c * (wide + 4) + wide / 2, 15, f"chunk {c}", "middle") for c in range(n)]
    words: list[str] = []
    for rank in range(n):
        y = top + rank * (HIGH + 8)
        out.append(svg.text(left - 10, y + 18, f"rank {rank}", "end"))
        for c in range(n):
            x, inside = left + c * (wide + 4), held[rank][c]
            fill = color("comm", True) if (rank, c) in new else color("idle")
            frame = f' stroke="{color("text")}" stroke-width="1.6"' if len(inside) == n else ""
            out.append(svg.rect(x, y, wide, HIGH, fill).replace("/>", frame + "/>"))
            for r in inside:
                label = svg.text(x + 4 + 13 * r + 6.5, y + 17.5, f"{r}", "middle")
                (words if (rank, c) in new else out).append(label)
    out.append(svg.words_on("comm", words))
    out += [_hop(move, right + 4, top) for move in moves]
    width = right + 14 + 17 * (n - 1)
    return Figure(svg.document(out, width, top + n * (HIGH + 8), alt), alt, caption)


def _hop(move: Move, x: float, top: float) -> str:
    """An arc at the right of the rows, from the sender's to the receiver's; long ones reach further out."""
    start, end = (top + rank * (HIGH + 8) + HIGH / 2 + shift for rank, shift in ((move.src, 4), (move.dst, -4)))
    if move.dst < move.src:
        start, end = start - 8, end + 8
    out = x + 20 * abs(move.dst - move.src) + 6
    near = x + 5
    return _arrow(
        f"M{svg.num(x)} {svg.num(start)}C{svg.num(out)} {svg.num(start)} {svg.num(out)} {svg.num(end)} "
        f"{svg.num(near)} {svg.num(end)}",
        near - 4,
        end,
        left=True,
    )


def _arrow(path: str, x: float, y: float, left: bool = False) -> str:
    """A line, and the tip of its arrow at (x, y)."""
    back = 7 if left else -7
    tip = f"M{svg.num(x)} {svg.num(y)}l{back} -4v8z"
    ink = color("text")
    return f'<path d="{path}" fill="none" stroke="{ink}" stroke-width="1.5"/><path d="{tip}" fill="{ink}"/>'
