"""Two ranks and the calls that each makes, from top to bottom, with an arrow from each send to its receive."""

from __future__ import annotations

from collections.abc import Sequence

from book.figures.canvas import FRAMES, Canvas
from book.figures.svg import NARROW, WIDE, Figure, color, drawn_twice, num

HIGH, STEP = 24.0, 34.0  # pixels of a call, and from one call to the next
PAINT = {"F": "forward", "B": "backward"}
Call = tuple[str, int, str]  # "run", "send" or "recv"; the peer; the action, or the activation that is sent


@drawn_twice
def draw_calls(
    calls: Sequence[Sequence[Call]], *, title: str, alt: str, caption: str = "", width: float = WIDE
) -> Figure:
    """The first calls of two ranks; a message whose receive is not among them has no arrow.

    Raises:
        ValueError: there are more or fewer than two ranks.
    """
    if len(calls) != 2:
        raise ValueError(f"two columns of calls are drawn, and there are {len(calls)} ranks")
    canvas = Canvas(alt)
    legend = [("forward", "forward"), ("backward", "backward"), ("comm", "send; framed: receive")]
    kinds = {name[1] for rank in calls for kind, _, name in rank if kind == "run"}
    y = canvas.head(title, [one for one in legend if one[0] != "backward" or "B" in kinds], 0, width) + 8
    wide = 118.0 if width <= NARROW else 190.0
    lefts = 20.0, (width if width <= NARROW else 560.0) - wide - 1
    for rank, left in enumerate(lefts):
        canvas.note(left + wide / 2, y + 12, f"rank {rank}", "middle")
    y += 22
    places = {}
    for rank, (mine, left) in enumerate(zip(calls, lefts, strict=True)):
        for k, (kind, _, name) in enumerate(mine):
            top = y + STEP * k
            places[kind, rank, name] = top + HIGH / 2
            words = {"run": f"run {name}", "send": f"send {name}", "recv": f"receive {name}"}[kind]
            if kind == "recv":
                canvas.layer(FRAMES, fill="none", stroke=color("comm"), stroke_width=2).rect(left, top, wide, HIGH)
                canvas.text(left + wide / 2, top + 16.5, words, "middle")
            else:
                paint = "comm" if kind == "send" else PAINT[name[1]]
                canvas.bars(paint).rect(left, top, wide, HIGH)
                canvas.words_on(paint).text(left + wide / 2, top + 16.5, words)
            if rank == 0:
                canvas.note(0, top + 16.5, f"{k + 1}")
    gap = lefts[0] + wide, lefts[1]
    for kind, rank, name in places:
        if kind == "send" and (end := places.get(("recv", 1 - rank, name))):
            start, (a, b) = places[kind, rank, name], gap if rank == 0 else gap[::-1]
            turn = -12 if rank else 12
            path = f"M{num(a)} {num(start)}l{num(b - a - turn)} {num(end - start)}l{num(turn)} 0"
            canvas.arrow(path, b, end, to_left=rank == 1)
    return canvas.figure(lefts[1] + wide + 1, y + STEP * max(map(len, calls)), caption)
