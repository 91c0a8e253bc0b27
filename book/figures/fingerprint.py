"""What a fault does to the tensors of each rank: a row for each tensor, a column for each rank, a number in a cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from book.figures.canvas import FRAMES, Canvas
from book.figures.svg import NARROW, WIDE, WRONG, Figure, color, drawn_twice, lines_of, text_width

GAP = 6.0  # around words in a row
NEAR = 0.005  # so far from 1 a value is still written as 1.00


@drawn_twice
def draw_fingerprint(
    rows: Mapping[str, Sequence[float | str]],
    *,
    title: str,
    alt: str,
    caption: str = "",
    columns: str | Sequence[str] = "rank",
    right: float = 1,
    near: float = NEAR,
    width: float = WIDE,
) -> Figure:
    """How much of the right tensor each rank has: 1.00 is right and stays pale, all else is in a red frame.

    Args:
        rows: name of a tensor → of each rank, its share of the right value; words have no frame.
        columns: what a column is, with a number after it; or the words above each column.
        right: the number that is right.
        near: how far from it a number is still right.
    """
    canvas, high = Canvas(alt), 28
    y = canvas.head(title, [("bad", "not right")], 0, width) + 8
    count = len(next(iter(rows.values())))
    heads = [f"{columns} {k}" for k in range(count)] if isinstance(columns, str) else columns
    named = 190.0 if width > NARROW else _room_for_names(rows, heads, width)
    across = min(84.0, (width - named) / count)
    for k, words in enumerate(heads):
        canvas.note(named + (k + 0.5) * across, y + 12, words, "middle")
    y += 20
    for name, values in rows.items():
        canvas.text(0, y + (18 if named else 15), name)
        top = y if named else y + 22
        for k, value in enumerate(values):
            x = named + k * across
            if isinstance(value, str):
                canvas.note(x + across / 2, top + 19, value, "middle")
            elif abs(value - right) < near:
                canvas.rect(x + 2, top, across - 4, high, fill="none", stroke=color("idle-line"))
                canvas.note(x + across / 2, top + 19, f"{right:.2f}", "middle")
            else:
                canvas.layer(FRAMES, fill="none", **WRONG).rect(x + 3, top + 1, across - 6, high - 2)
                canvas.text(x + across / 2, top + 19, apart(value, right), "middle", font_weight=700)
        y = top + high + 8
    titled = max(map(text_width, lines_of(title, width)))
    return canvas.figure(max(named + count * across, titled), y, caption)


def _room_for_names(rows: Mapping[str, Sequence[float | str]], heads: Sequence[str], width: float) -> float:
    """Left of the cells of a phone, where each cell keeps room for its words; else none: a name is above its row."""
    names = max(map(text_width, rows)) + GAP
    words = [cell for values in rows.values() for cell in values if isinstance(cell, str)]
    widest = max(map(text_width, [*words, *heads, "−0.000"])) + GAP
    return names if names + widest * len(heads) <= width else 0.0


def apart(value: float, right: float = 1) -> str:
    """A number with two decimals, or as many as tell it from the right one; with one from 10 on."""
    texts = (f"{value:.{digits}f}" for digits in ((1,) if abs(value) >= 10 else range(2, 6)))
    return next((text for text in texts if float(text) != right), f"{value:.0e}").replace("-", "−")
