"""Figures of ranks: on the axes of a mesh, with the part of a step that each holds; nested in nodes.

Also over which ranks gradients are summed, and which boxes of a saved matrix a rank reads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import ceil, prod, sqrt

from book.figures.canvas import Canvas
from book.figures.svg import NARROW, WIDE, Figure, color, drawn_twice, num

_SENDS = {"dp": ("gradient", "dp: gradients"), "pp": ("activation", "pp: activations"), "tp": ("comm", "tp: sums")}
_WIDE, _HIGH, _APART = 144, 84, 9  # a rank, and the gap to the next


@drawn_twice
def draw_rank(rank: int, sizes: Mapping[str, int], *, alt: str, caption: str = "", width: float = WIDE) -> Figure:
    """The model part that one rank of a mesh holds, and the ranks with which it communicates on each axis.

    Copies are side by side while there is room, the stages of a pipeline from top to bottom, parts of a matrix from
    left to right. The square in each rank is the model, layers down and width across; the rank holds the filled part.

    Args:
        rank: whose partners are framed, in the colour of the axis.
        sizes: ranks along dp, pp and tp, the outermost first.
    """
    canvas, places = Canvas(alt), [_place(other, sizes) for other in range(prod(sizes.values()))]
    wide, high = sizes["tp"] * (_WIDE + _APART) + 26, sizes["pp"] * (_HIGH + _APART) + 48
    columns = min(sizes["dp"], int((width + 11) / wide) or 1)
    lefts, tops = zip(*((copy % columns * wide, copy // columns * high) for copy in range(sizes["dp"])), strict=True)
    for copy, (left, top) in enumerate(zip(lefts, tops, strict=True)):
        canvas.rect(left + 1, top + 1, wide - 14, high - 14, radius=8, fill="none", stroke=color("rule"))
        canvas.text(left + 12, top + 22, f"copy {copy}: 1/{sizes['dp']} of the batch", font_weight=650)
    for other, here in enumerate(places):
        x = lefts[here["dp"]] + 12 + here["tp"] * (_WIDE + _APART)
        y = tops[here["dp"]] + 34 + here["pp"] * (_HIGH + _APART)
        differs = [axis for axis in sizes if here[axis] != places[rank][axis]]
        axis = differs[0] if len(differs) == 1 else ""
        _draw_one_rank(canvas, x, y, other, here, sizes, axis, not differs)
    return canvas.figure(wide * columns - 11, tops[-1] + high - 11, caption)


def _place(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    here = {}
    for axis, n in reversed(sizes.items()):
        rank, here[axis] = divmod(rank, n)
    return here


def _draw_one_rank(canvas: Canvas, x, y, rank: int, here: Mapping, sizes: Mapping, axis: str, is_it: bool) -> None:
    name, said = _SENDS[axis] if axis else ("text", "you are here") if is_it else ("rule", "")
    canvas.rect(x, y, _WIDE, _HIGH, radius=6, fill=color("panel"), stroke=color(name), stroke_width=3 if said else 1)
    side, left, top = 36, x + 9, y + 24
    canvas.rect(left, top, side, side, fill="none", stroke=color("idle-line"))
    across, down = side / sizes["tp"], side / sizes["pp"]
    canvas.bars("param").rect(left + here["tp"] * across, top + here["pp"] * down, across, down)
    canvas.text(x + 53, y + 30, f"rank {rank}", font_weight=650)
    canvas.note(x + 53, y + 49, f"stage {here['pp']}")
    canvas.note(x + 53, y + 67, said)


@drawn_twice
def draw_nested(
    levels: Sequence[tuple[str, int, str]], *, alt: str, caption: str = "", width: float = WIDE
) -> Figure:
    """Groups inside groups, the innermost at the left or, on a phone, on top: a tile of a panel is the previous panel.

    Args:
        levels: the words above a panel, its number of tiles, and the words below.
    """
    canvas, side, gap = Canvas(alt), 176, 44
    is_down = width < len(levels) * (side + gap) - 34
    left, top, before = 4, 4 if is_down else 30, 0.0
    for level, (name, count, said) in enumerate(levels):
        columns = min(k for k in range(ceil(sqrt(count)), count + 1) if count % k == 0)
        pitch = side / columns
        high = count / columns * pitch
        canvas.text(*((left + side + 14, top + 14) if is_down else (left, 18)), name, font_weight=650)
        canvas.rect(left - 3, top - 3, side + 6, high + 6, radius=6, fill="none", stroke=color("rule"))
        for tile in range(count):
            row, column = divmod(tile, columns)
            bars = canvas.bars("series-0" if level and not tile else "series-1")
            bars.rect(left + column * pitch + 1, top + row * pitch + 1, pitch - 2, pitch - 2)
        canvas.note(*((left + side + 14, top + 33) if is_down else (left, top + high + 22)), said)
        if level:  # the first tile is the panel before
            line = {"stroke": color("text"), "stroke_width": 1.2, "stroke_dasharray": "4 3"}
            ends = ((-gap + 3, -3), (0, 1)), ((-gap + 3, before + 3), (0, pitch))
            if is_down:
                ends = ((-3, -gap + 3), (1, 0)), ((side + 3, -gap + 3), (pitch, 0))
            for (x, y), (to_x, to_y) in ends:
                canvas.path(f"M{num(left + x)} {num(top + y)}L{num(left + to_x)} {num(top + to_y)}", **line)
        before = high
        left, top = (left, top + high + gap) if is_down else (left + side + gap, top)
    size = (left + side + 130, top - gap + 4) if is_down else (left - gap + 6, top + side + 34)
    return canvas.figure(*size, caption)


@drawn_twice
def draw_sums(
    rows: Mapping[str, tuple[Collection[int], Collection[int]]],
    num_ranks: int,
    *,
    title: str,
    alt: str,
    caption: str = "",
    width: float = WIDE,
) -> Figure:
    """Over which ranks the gradients of some parameters are summed: a row for each parameter, a column for each rank.

    Args:
        rows: name of a parameter → the ranks that add up with rank 0, and all ranks that hold its elements.
    """
    canvas, named = Canvas(alt), 0 if width <= NARROW else 210
    legend = [("gradient", "adds its gradient"), ("param", "holds the same, and has the same gradient")]
    y = canvas.head(title, legend, 0, width) + 8
    across, high = min(56.0, (width - named) / num_ranks), 26
    for rank in range(num_ranks):
        canvas.note(named + (rank + 0.5) * across, y + 12, str(rank), "middle")
    canvas.note(named - 12 if named else 0, y + (12 if named else -3), "rank", "end" if named else "")
    y += 20
    for name, (adds, holds) in rows.items():
        canvas.text(0, y + (17 if named else 15), name)
        top = y if named else y + 22
        for rank in range(num_ranks):
            x, ink = named + rank * across, "gradient" if rank in adds else "param"
            if rank not in holds:
                canvas.rect(x + 2, top, across - 4, high, fill="none", stroke=color("idle-line"))
                continue
            canvas.bars(ink).rect(x + 2, top, across - 4, high)
            canvas.words_on(ink).text(x + across / 2, top + 18, "+" if rank in adds else "=")
        y = top + high + 10
    return canvas.figure(named + num_ranks * across, y, caption)


@drawn_twice
def draw_boxes(
    saved: int, read: int, rows: int, *, title: str, alt: str, caption: str = "", width: float = WIDE
) -> Figure:
    """A matrix whose rows some ranks saved, a box each, and which rows of it a different number of ranks reads.

    Args:
        saved, read: ranks of the run before and of the run after; they cut the rows as evenly as they can.
    """
    canvas = Canvas(alt)
    y, high, side = 46 + canvas.title(title, width), 15, min(230, 0.36 * width)
    right, line = width - side, {"stroke": color("text"), "stroke_width": 1.2, "stroke_dasharray": "4 3"}
    for left, words in ((0, f"{saved} ranks save"), (right, f"{read} ranks read")):
        canvas.text(left, y - 9, words)
    boxes, wanted = ([(rows * k // n, rows * (k + 1) // n) for k in range(n)] for n in (saved, read))
    for rank, (first, last) in enumerate(boxes):
        canvas.bars(f"rank-{rank}").rect(0, y + high * first, side, high * (last - first) - 2)
        canvas.words_on(f"rank-{rank}").text(side / 2, y + high * (first + last) / 2 + 4, f"box of rank {rank}")
    for rank, (first, last) in enumerate(wanted):
        parts = [(k, max(first, a), min(last, b)) for k, (a, b) in enumerate(boxes) if max(first, a) < min(last, b)]
        for k, a, b in parts:
            gap = 2 if b == last else 0
            canvas.bars(f"rank-{k}").rect(right, y + high * a, side, high * (b - a) - gap, radius=0)
        k, a, b = max(parts, key=lambda part: part[2] - part[1])
        canvas.words_on(f"rank-{k}").text(right + side / 2, y + high * (a + b) / 2 + 4, f"rank {rank}")
        if len(parts) > 1:
            canvas.note(right - 8, y + high * (first + last) / 2 - 8, f"reads {len(parts)} boxes", "end")
    for _, last in boxes[:-1]:
        at = num(y + high * last - 1)
        canvas.path(f"M{num(side)} {at}H{num(right)}", **line)
    return canvas.figure(width, y + high * rows + 4, caption)
