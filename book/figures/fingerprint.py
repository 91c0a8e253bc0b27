"""What a fault does to the tensors of each rank: a row for each tensor, a column for each rank, a number in a cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from book.figures.canvas import FRAMES, Canvas
from book.figures.svg import NARROW, WIDE, WRONG, Figure, color, drawn_twice

RIGHT = 0.005  # so far from 1 a value is still written as 1.00


@drawn_twice
def draw_fingerprint(
    rows: Mapping[str, Sequence[float]],
    *,
    title: str,
    alt: str,
    caption: str = "",
    columns: str = "rank",
    width: float = WIDE,
) -> Figure:
    """How much of the right tensor each rank has: 1.00 is right and stays pale, all else is in a red frame.

    Args:
        rows: name of a tensor → of each rank, its share of the right value.
        columns: what a column is.
    """
    canvas, named = Canvas(alt), 0 if width <= NARROW else 190
    y = canvas.head(title, [("bad", "not right")], 0, width) + 8
    count = len(next(iter(rows.values())))
    across, high = min(84.0, (width - named) / count), 28
    for rank in range(count):
        canvas.note(named + (rank + 0.5) * across, y + 12, f"{columns} {rank}", "middle")
    y += 20
    for name, values in rows.items():
        canvas.text(0, y + (18 if named else 15), name)
        top = y if named else y + 22
        for rank, value in enumerate(values):
            x = named + rank * across
            if abs(value - 1) < RIGHT:
                canvas.rect(x + 2, top, across - 4, high, fill="none", stroke=color("idle-line"))
                canvas.note(x + across / 2, top + 19, "1.00", "middle")
            else:
                canvas.layer(FRAMES, fill="none", **WRONG).rect(x + 3, top + 1, across - 6, high - 2)
                words = f"{value:.2f}".replace("-", "−")
                canvas.text(x + across / 2, top + 19, words, "middle", font_weight=700)
        y = top + high + 8
    return canvas.figure(named + count * across, y, caption)
