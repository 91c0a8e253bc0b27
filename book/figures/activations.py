"""Figures of the activations between layers: which part of each activation a rank holds, and which messages it sends.

An activation is a square, so that a part of its tokens looks different from a part of its width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from book.figures.canvas import Canvas
from book.figures.svg import SMALLEST_PX, WIDE, Figure, color, drawn_twice, text_width


class Activation(NamedTuple):
    """A square, tokens from top to bottom and the width from left to right, with the part that rank 0 holds.

    Args:
        name, note: written above and below it.
        tokens, width: the fraction that rank 0 holds, 0 to 1.
    """

    name: str
    note: str = ""
    tokens: float = 1.0
    width: float = 1.0


class Sent(NamedTuple):
    """A message between two squares, and how its arrow points; `also` is a second message there."""

    what: str = ""
    arrow: str = "→"
    also: str = ""


@drawn_twice
def draw_activations(
    row: Sequence[Activation | Sent], *, title: str, alt: str, caption: str = "", width: float = WIDE
) -> Figure:
    """Squares, and messages between them: blue is the part of rank 0, orange is sent."""
    canvas, side, sign, edge = Canvas(alt), 64, 80, 20.0
    x, top = edge, 64 + canvas.title(title, width)
    canvas.note(0, top - 30, "In a square: tokens down, features across")
    for item in row:
        if x + (sign if isinstance(item, Sent) else side) > width - edge:  # it continues below
            x, top = edge, top + side + 88
        middle = top + side / 2
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
                canvas.note(centre, middle + 4, f"{item.arrow} nothing", "middle")
            x += sign
        else:
            canvas.rect(x, top, side, side, fill=color("idle"), stroke=color("idle-line"))
            canvas.rect(x, top, side * item.width, side * item.tokens, fill=color("activation", True))
            named, noted = text_width(item.name) / 2, text_width(item.note, SMALLEST_PX) / 2
            canvas.text(max(x + side / 2, named), top - 10, item.name, "middle")
            canvas.note(min(max(x + side / 2, noted), width - noted), top + side + 32, item.note, "middle")
            x += side
    return canvas.figure(width, top + side + 42, caption)
