"""Four ways to share one training step among four ranks, at once: what each rank stores and computes, and what is sent.

ZeRO and a pipeline both give a rank a quarter of the weights. They are told apart by what a rank computes: under ZeRO a
quarter of *every* layer is stored and the rest is gathered (dashed), for rows of its own; in a pipeline a rank has
full layers, and activations go down from rank to rank.
"""

from __future__ import annotations

from book.figures.canvas import FRAMES, Canvas
from book.figures.svg import NARROW, OUTLINE, WIDE, Figure, drawn_twice

RANKS = LAYERS = 4
ROW, LAYER, GAP = 11.0, 15.0, 6.0  # pixels: a row of the batch, a layer, between ranks
HIGH = 190.0  # of a panel
CUTS = {  # the name of a panel → what its ranks send
    "Data": "gradients",
    "ZeRO": "weights, gradients",
    "Tensor": "activations",
    "Pipeline": "activations",
}


@drawn_twice
def draw_poster(*, title: str, alt: str, caption: str = "", width: float = WIDE) -> Figure:
    """The four cuts in a row, or two by two on a phone: rows of the batch in yellow, weights dark, messages orange."""
    canvas = Canvas(alt)
    legend = [("activation", "rows of the batch"), ("param", "weights"), ("outline", "gathered"), ("comm", "sent →")]
    top = canvas.head(title, legend, 0, width) + 10
    across = 2 if width <= NARROW else 4
    wide = (width - 18 * (across - 1)) / across
    for k, (name, draw) in enumerate(zip(CUTS, (_data, _zero, _tensor, _pipeline), strict=True)):
        x, y = k % across * (wide + 18), top + k // across * (HIGH + 18)
        canvas.text(x, y + 12, name, font_weight=650, font_size=15)
        draw(canvas, x, y + 26, wide)
        canvas.note(x, y + HIGH - 4, f"→ {CUTS[name]}")
    return canvas.figure(width, top + -(-len(CUTS) // across) * (HIGH + 18) - 12, caption)


def _data(canvas: Canvas, x: float, y: float, wide: float) -> None:
    """Each rank has rows of its own and a copy of all layers."""
    size = (wide - GAP * (RANKS - 1)) / RANKS
    for rank in range(RANKS):
        left = x + rank * (size + GAP)
        canvas.bars("activation").rect(left, y + rank * ROW, size, ROW - 2)
        for layer in range(LAYERS):
            canvas.bars("param").rect(left, _layer(y, layer), size, LAYER - 2)
    _sum(canvas, x, y, wide)


def _zero(canvas: Canvas, x: float, y: float, wide: float) -> None:
    """Each rank has rows of its own, and of every layer a quarter; it gathers the rest, layer by layer."""
    size = (wide - GAP * (RANKS - 1)) / RANKS
    for rank in range(RANKS):
        left = x + rank * (size + GAP)
        canvas.bars("activation").rect(left, y + rank * ROW, size, ROW - 2)
        for layer in range(LAYERS):
            frame = canvas.layer(FRAMES, fill="none", **OUTLINE | {"stroke_width": 1, "stroke_dasharray": "2.5 2"})
            frame.rect(left + 0.5, _layer(y, layer) + 0.5, size - 1, LAYER - 3, radius=1)
            canvas.bars("param").rect(left + rank * size / RANKS, _layer(y, layer), size / RANKS, LAYER - 2, radius=1)
    _sum(canvas, x, y, wide)


def _tensor(canvas: Canvas, x: float, y: float, wide: float) -> None:
    """All ranks have all rows, and a part of the width of every layer; after each layer they add up."""
    size = (wide - GAP * (RANKS - 1)) / RANKS
    for row in range(RANKS):
        canvas.bars("activation").rect(x, y + row * ROW, wide, ROW - 2)
    for layer in range(LAYERS):
        for rank in range(RANKS):
            canvas.bars("param").rect(x + rank * (size + GAP), _layer(y, layer), size, LAYER - 6)
        canvas.bars("comm").rect(x, _layer(y, layer) + LAYER - 5, wide, 3, radius=1)


def _pipeline(canvas: Canvas, x: float, y: float, wide: float) -> None:
    """All rows go through rank 0, then through the others: a rank has whole layers."""
    size = (wide - GAP * (RANKS - 1)) / RANKS
    for row in range(RANKS):
        canvas.bars("activation").rect(x, y + row * ROW, size, ROW - 2)
    for rank in range(RANKS):
        left, at = x + rank * (size + GAP), _layer(y, rank)
        canvas.bars("param").rect(left, at, size, LAYER + 4)
        if rank < RANKS - 1:
            canvas.bars("comm").rect(left + size, at + LAYER / 2, GAP + size / 2, 3, radius=1)
            canvas.bars("comm").rect(left + 1.5 * size + GAP - 3, at + LAYER / 2, 3, LAYER / 2, radius=1)


def _layer(y: float, layer: int) -> float:
    return y + RANKS * ROW + 6 + layer * (LAYER + 2)


def _sum(canvas: Canvas, x: float, y: float, wide: float) -> None:
    """Below all ranks: what they add up."""
    canvas.bars("comm").rect(x, _layer(y, LAYERS) + 4, wide, 6, radius=2)
