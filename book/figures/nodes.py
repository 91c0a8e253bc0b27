"""Two nodes of a cluster: GPUs around a fast switch, and a network card for each GPU."""

from __future__ import annotations

from book.figures.canvas import Canvas
from book.figures.svg import NARROW, WIDE, Figure, color, drawn_twice, num


@drawn_twice
def draw_nodes(
    gpus: int, inside: str, across: str, *, title: str, alt: str, caption: str = "", width: float = WIDE
) -> Figure:
    """Two nodes, one above the other on a phone; every GPU has a line to its switch and a card to the network.

    Args:
        gpus: of a node, an even number.
        inside, across: what one GPU can send through the switch, and through its card.
    """
    canvas, is_down = Canvas(alt), width <= NARROW
    y = 30 + canvas.title(title, width)
    side, gap, card = 34.0, 8.0, 12.0
    wide = gpus / 2 * (side + gap) + 2 * card + 24
    high = 2 * (side + gap) + 64
    places = [(0.0, y), (0.0, y + high + 56) if is_down else (width - wide, y)]
    for node, (left, top) in enumerate(places):
        canvas.rect(left + 1, top, wide - 2, high, radius=8, fill="none", stroke=color("rule"))
        canvas.text(left + 12, top + 19, f"node {node}", font_weight=650)
        switch = top + 28 + side + gap
        canvas.bars("series-1").rect(left + 12, switch, wide - 24, 14)
        for gpu in range(gpus):
            row, column = divmod(gpu, gpus // 2)
            x = left + 12 + card + column * (side + gap)
            at = top + 24 if row == 0 else switch + 14 + gap
            canvas.bars("param").rect(x, at, side, side - 4)
            canvas.words_on("param").text(x + side / 2, at + 20, f"{gpus * node + gpu}")
            canvas.path(
                f"M{num(x + side / 2)} {num(switch if row == 0 else switch + 14)}"
                f"V{num(at + side - 4 if row == 0 else at)}",
                stroke=color("soft"),
                stroke_width=2,
            )
            canvas.bars("comm").rect(x + side - 10, at + side - 9 if row else at + 1, 8, 4)
        canvas.note(left + 12, top + high - 8, f"switch: {inside} each")
    (left, top), (right, below) = places
    if is_down:
        canvas.bars("comm").rect(wide / 2 - 40, top + high + 12, 80, 14)
        canvas.note(0, top + high + 46, f"network: {across} from each card")
        return canvas.figure(width, below + high + 4, caption)
    middle, long = top + high / 2, right - wide - 24
    canvas.bars("comm").rect(wide + 12, middle - 7, long, 14)
    canvas.note(wide + 12 + long / 2, middle + 28, "network:", "middle")
    canvas.note(wide + 12 + long / 2, middle + 46, across, "middle")
    canvas.note(wide + 12 + long / 2, middle + 64, "from each card", "middle")
    return canvas.figure(width, top + high + 4, caption)
