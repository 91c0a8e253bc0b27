"""Links between ranks: a square of numbers, each with a bar as long as the number is large."""

from __future__ import annotations

from collections.abc import Mapping

from book.figures.canvas import FRAMES, Canvas
from book.figures.svg import SMALLEST_PX, WRONG, Figure, drawn_twice, text_width

_HIGH, _TRACK = 26.0, 5.0  # pixels of a row, and of a bar


@drawn_twice
def draw_links(
    values: Mapping[tuple[int, int], float],
    *,
    unit: str,
    title: str,
    alt: str,
    caption: str = "",
    marked: Mapping[tuple[int, int], str] | None = None,
    width: float = 680,
) -> Figure:
    """A row for each rank that sends, a column for each that receives.

    Args:
        values: (sender, receiver) → the value of its link; the ranks are those of the keys.
        unit: of the values.
        marked: links with a frame, and the words that the mouse finds on it: those that look wrong.

    Raises:
        ValueError: no links, or a negative value.
    """
    if not values or min(values.values()) < 0:
        raise ValueError(
            f"{len(values)} links, the least {min(values.values(), default=0):g}: give links, none below 0"
        )
    ranks, most, marked = (
        sorted({rank for pair in values for rank in pair}),
        max(values.values()) or 1.0,
        marked or {},
    )
    canvas = Canvas(alt)
    left = 12 + text_width("rank 00")
    cell = min(90.0, (width - left) / len(ranks))
    y = canvas.head(title, [("comm", unit)] + [("bad", "looks wrong")] * bool(marked), left, width)
    for column, rank in enumerate(ranks):
        words = f"to {rank}" if text_width(f"to {rank}") < cell else f"{rank}"
        canvas.note(left + (column + 0.5) * cell, y + 10, words, "middle")
    for row, a in enumerate(ranks):
        top = y + 18 + row * _HIGH
        canvas.text(0, top + 14, f"rank {a}")
        for column, b in enumerate(ranks):
            if (a, b) not in values:
                continue
            x, long = left + column * cell + 3, (cell - 6) * values[a, b] / most
            tip = marked.get((a, b), f"from rank {a} to rank {b}: {values[a, b]:,.3g} {unit}")
            canvas.bars("comm").rect(x, top + 16, long, _TRACK, tip, radius=1)
            if text_width(words := f"{values[a, b]:,.0f}") < cell:  # of many ranks, only the bars
                canvas.text(x + cell / 2 - 3, top + 12, words, "middle", font_size=SMALLEST_PX)
            if (a, b) in marked:
                canvas.layer(FRAMES, fill="none", **WRONG).rect(x - 1, top - 1, cell - 4, _HIGH - 1, tip)
    return canvas.figure(width, y + 22 + len(ranks) * _HIGH, caption)
