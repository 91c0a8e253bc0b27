"""Two nodes of a cluster: GPUs around a fast switch, and a network card for each GPU."""

from __future__ import annotations

from book.figures.canvas import Canvas
from book.figures.svg import NARROW, WIDE, Figure, color, drawn_twice, num


@drawn_twice
def draw_nodes(
    gpus: int, inside: str, across: str, *, title: str, alt: str, caption: str = "", width: float = WIDE
) -> Figure:
    """Two nodes side by side; every GPU has a line to its switch and a card to the network.

    Args:
        gpus: of a node, an even number.
        inside, across: what one GPU can send through the switch, and through its card.
    """
    canvas, is_small = Canvas(alt), width <= NARROW
    top = (22 if is_small else 30) + canvas.title(title, width)
    side, gap, card = (25.0, 6.0, 3.0) if is_small else (34.0, 8.0, 12.0)
    wide = gpus / 2 * (side + gap) + 2 * card + 24
    high = 2 * (side + gap) + (46 if is_small else 64)
    for node, left in enumerate((0.0, width - wide)):
        canvas.rect(left + 1, top, wide - 2, high, radius=8, fill="none", stroke=color("rule"))
        canvas.text(left + 12, top + 19, f"node {node}", font_weight=650)
        switch = top + 28 + side + gap
        canvas.bars("series-1").rect(left + 12, switch, wide - 24, 14)
        for gpu in range(gpus):
            row, column = divmod(gpu, gpus // 2)
            x = left + 12 + card + column * (side + gap)
            at = top + 24 if row == 0 else switch + 14 + gap
            canvas.bars("param").rect(x, at, side, side - 4)
            canvas.words_on("param").text(x + side / 2, at + side / 2 + 3, f"{gpus * node + gpu}")
            canvas.path(
                f"M{num(x + side / 2)} {num(switch if row == 0 else switch + 14)}"
                f"V{num(at + side - 4 if row == 0 else at)}",
                stroke=color("soft"),
                stroke_width=2,
            )
            canvas.bars("comm").rect(x + side - 10, at + side - 9 if row else at + 1, 8, 4)
        if not is_small:
            canvas.note(left + 12, top + high - 8, f"switch: {inside} each")
    middle, around = top + high / 2, 6.0 if is_small else 12.0
    long = width - 2 * (wide + around)
    canvas.bars("comm").rect(wide + around, middle - 7, long, 14)
    if is_small:
        canvas.note(0, top + high + 18, f"switch: {inside} from each GPU")
        canvas.note(0, top + high + 36, f"network: {across} from each card")
        return canvas.figure(width, top + high + 40, caption)
    for line, words in enumerate(("network:", across, "from each card")):
        canvas.note(width / 2, middle + 28 + 18 * line, words, "middle")
    return canvas.figure(width, top + high + 4, caption)
