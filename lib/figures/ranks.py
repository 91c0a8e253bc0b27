"""Figures of ranks: as a board with groups along its rows and columns, and what of a step each of them has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from lib.figures.canvas import FRAMES, Canvas
from lib.figures.svg import OUTLINE, Figure, color

_CELL, _PITCH, _SIDE = 19, 22, 4  # pixels of a cell and from cell to cell; cells of a model in each direction


def draw_board(rows: int, columns: int, *, row: str, column: str, alt: str, caption: str = "") -> Figure:
    """Ranks as a board, numbered row by row; a dashed frame around each row, an orange one around each column.

    Args:
        row, column: what a row and a column is, such as "a tp group".
    """
    canvas = Canvas(alt)
    for rank in range(rows * columns):
        x, y = 70 + 130 * (rank % columns), 34 + 62 * (rank // columns)
        canvas.bars("forward").rect(x, y, 90, 34)
        canvas.words_on("forward").text(x + 45, y + 21.5, f"rank {rank}")
    right, bottom = 50 + 130 * columns, 20 + 62 * rows
    for k in range(rows):
        canvas.layer(FRAMES, fill="none", **OUTLINE).rect(50, 24 + 62 * k, right - 50, 54, radius=8)
        canvas.text(right + 10, 55 + 62 * k, row)
    for k in range(columns):
        frames = canvas.layer(FRAMES, fill="none", stroke=color("comm"), stroke_width=2)
        frames.rect(62 + 130 * k, 16, 106, bottom - 16, radius=8)
        canvas.text(115 + 130 * k, bottom + 16, column, "middle")
    return canvas.figure(right + 90, bottom + 24, caption)


class Cut(NamedTuple):
    """A way to share a step over ranks.

    Args:
        batch: row of the batch → the rank that works on it; empty if all of them need it.
        model: (layer, column) of the model → the same.
        sent: what the ranks send one another.
    """

    batch: Callable[[int], int | str]
    model: Callable[[int, int], int | str]
    sent: str


def draw_cuts(cuts: Mapping[str, Cut], *, alt: str, caption: str = "") -> Figure:
    """For each way, side by side: a batch of four rows and a model of four layers and four columns.

    A cell bears the number of the rank that works on it; one that all ranks need is grey.
    """
    canvas = Canvas(alt)

    def cell(x: float, y: float, rank: int | str, ink: str) -> None:
        shared = rank == ""
        canvas.rect(x, y, _CELL, _CELL, radius=3, fill=color("idle" if shared else ink))
        if not shared:
            canvas.text(x + _CELL / 2, y + 14, f"{rank}", "middle", style="font-size:12px")

    for i, (name, cut) in enumerate(cuts.items()):
        left = 2 + i * 137
        canvas.text(left, 18, name, font_weight=650)
        canvas.text(left, 44, "batch")
        canvas.text(left + 42, 44, "model")
        for r in range(_SIDE):
            y = 54 + _PITCH * r
            cell(left, y, cut.batch(r), "comm")
            for c in range(_SIDE):
                cell(left + 42 + _PITCH * c, y, cut.model(r, c), "forward")
        canvas.text(left, 164, cut.sent, style="font-size:12px")
    return canvas.figure(137 * len(cuts) + 1, 172, caption)
