"""Training in several layouts: one loss curve, and below it on a logarithmic axis how far the layouts are apart.

The problem: curves that coincide show that two runs are equal to the width of a line, a thousandth. The idea: draw one
of them small, and give the room to their difference, down to the last bit of a double.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from book.figures.canvas import BARS, Canvas
from book.figures.svg import NARROW, Figure, color, drawn_twice, num, text_width

CURVE, BETWEEN, APART = 92, 66, 150  # pixels: height of the loss, of the words below it, and of the differences
_MARKS = ("series-0", 5.5), ("rank-1", 3.8), ("rank-0", 2.2)  # of the runs after the first: colour and radius


@drawn_twice
def draw_equal(
    losses: Mapping[str, Sequence[float]],
    *,
    limit: float,
    title: str,
    alt: str,
    caption: str = "",
    reference: tuple[str, float] | None = None,
    changes: Mapping[int, str] | None = None,
    width: float = 680,
) -> Figure:
    """The losses of the first run, and the relative difference of each other run to it.

    Args:
        losses: name to one loss per step, two to four runs. A difference of 0 is drawn on the ground.
        limit: the largest difference that is allowed, a dashed line.
        reference: words and height of a line across the losses.
        changes: the last step before a change → what begins after it, a line down both curves.
    """
    (first, curve), *others = losses.items()
    if not 1 <= len(others) <= len(_MARKS) or any(len(run) != len(curve) for _, run in others):
        raise ValueError(
            f"{len(losses)} runs of {[len(run) for run in losses.values()]} steps; draw 2 to 4, equally long"
        )
    canvas, left = Canvas(alt), 58.0
    right = width - (14 if width <= NARROW else 12)
    top = 40 + canvas.title(title, width)
    low, high = min(curve), max([*curve, *(reference[1:] if reference else ())])

    def across(step: int) -> float:
        return left + (right - left) * step / max(len(curve) - 1, 1)

    def of_loss(loss: float) -> float:
        return top + CURVE * (high - loss) / (high - low)

    canvas.text(left, top - 9, f"loss, {first}")
    for loss in (low, high):
        canvas.note(left - 8, of_loss(loss) + 4.5, f"{loss:.3g}", "end")
    if reference:
        y = of_loss(reference[1])
        canvas.path(f"M{num(left)} {num(y)}H{num(right)}", stroke=color("soft"), stroke_dasharray="5 3")
        canvas.note(right, y - 6, reference[0], "end")
    for step, words in (changes or {}).items():
        x = across(step + 0.5)
        both = f"M{num(x)} {num(top)}v{CURVE}m0 {BETWEEN}v{APART}"  # the names between the two stay free
        canvas.path(both, stroke=color("soft"), stroke_dasharray="5 3")
        canvas.note(x + 5, top + 10, words)
    line = "L".join(f"{num(across(i))} {num(of_loss(loss))}" for i, loss in enumerate(curve))
    canvas.layer(BARS, stroke=color("series-0", True), stroke_width=2.6, stroke_linejoin="round").path(f"M{line}")

    y = top + CURVE + BETWEEN
    ground = y + APART
    decades = (math.floor(math.log10(limit)), -17)  # the highest and the lowest; a double has 16 digits

    def of_difference(apart: float) -> float:
        place = max(math.log10(apart), decades[1]) if apart > 0 else decades[1]
        return y + APART * (decades[0] - place) / (decades[0] - decades[1])

    canvas.note(right, y + 14, "limit", "end")
    canvas.text(left, y - 33, f"relative difference from {first}")
    _draw_names(canvas, left, y - 12, [name for name, _ in others])
    for decade in range(decades[0], decades[1], -4):
        canvas.note(left - 8, of_difference(10.0**decade) + 4.5, f"10{_superscript(decade)}", "end")
    canvas.note(left - 8, ground + 4.5, "0", "end")
    canvas.path(f"M{num(left)} {num(ground)}H{num(right)}", stroke=color("soft"))
    canvas.path(f"M{num(left)} {num(y)}H{num(right)}", stroke=color("soft"), stroke_dasharray="5 3")
    for (_, run), (ink, radius) in zip(others, _MARKS, strict=False):
        dots = canvas.layer(BARS + 1, fill=color(ink, True))
        for i, (a, b) in enumerate(zip(run, curve, strict=True)):
            dots.rect(
                across(i) - radius, of_difference(abs(a / b - 1)) - radius, 2 * radius, 2 * radius, radius=radius
            )
    for step in (0, len(curve) - 1):
        canvas.note(across(step), ground + 20, f"{step}", "end" if step else "middle")
    canvas.note((left + right) / 2, ground + 20, "step", "middle")
    return canvas.figure(width, ground + 28, caption)


def _draw_names(canvas: Canvas, x: float, y: float, names: Sequence[str]) -> None:
    """The names of the runs, each behind its mark."""
    for name, (ink, radius) in zip(names, _MARKS, strict=False):
        canvas.bars(ink).rect(x + 5.5 - radius, y - 4.5 - radius, 2 * radius, 2 * radius, radius=radius)
        canvas.text(x + 15, y, name)
        x += 28 + text_width(name)


def _superscript(number: int) -> str:
    return f"{number}".translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
