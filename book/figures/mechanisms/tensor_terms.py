"""A column-parallel layer, ReLU, a row-parallel layer, in numbers: two partial sums, forward and backward.

f and g are the conjugate operators of Megatron-LM: one passes its input on, and adds up over the ranks in backward; the
other adds up, and passes gradients on. ReLU stands for GELU: numbers stay whole. Forward multiplies by W₁ᵀ and W₂ᵀ,
backward by W₁ and W₂, and each is drawn as the factor that it is there: a reader can compute every number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from book.figures.canvas import Canvas
from book.figures.player import NARROW, Beat, Player, Scene, Thing
from book.figures.svg import SMALLEST_PX, color, text_width
from lib.cost.comm import wire_bytes

Numbers = Sequence[Sequence[int]]
HIGH, LINE = 22, 18  # pixels of a row of numbers, and of a line of words
PANEL, LANE = LINE + 4 * HIGH + 18, 4 * HIGH + 44  # heights: of a rank, and of the lane between the two
X, W1, H, W2, Y = range(5)  # the matrices from left to right
SHAPES = (2, 2), (2, 4), (2, 4), (4, 2), (2, 2)  # of them, on one process
BACK = (2, 2), (4, 2), (2, 4), (2, 4), (2, 2)  # in backward, which multiplies by W₁ and W₂
WHOLE, CUT, PART, TERM, SUM, DONE, WRONG = range(7)  # the phases of forward and of backward
MOMENTS = [  # (whether backward, how far)
    *((False, phase) for phase in (WHOLE, CUT, PART, TERM, SUM, DONE)),
    *((True, phase) for phase in (PART, TERM, SUM, DONE)),
    *((False, WRONG), (True, WRONG)),
]


class _Share(NamedTuple):
    """What one rank, or one process, holds and computes: W₁ᵀ and W₂ᵀ, h and y, ∂h and ∂x."""

    w1: Numbers
    w2: Numbers
    h: Numbers
    y: Numbers
    dh: Numbers
    dx: Numbers


def play_tensor_parallel(x: Numbers, w1: Numbers, w2: Numbers, dy: Numbers) -> Player:
    """x · W₁ᵀ → ReLU → h · W₂ᵀ → y on two ranks and backward, ∂y · W₂ → ∂h · W₁ → ∂x, then without all-reduces.

    Args:
        x, dy: the input and the gradient of the output, [2 tokens, 2].
        w1, w2: the weights as `nn.Linear` stores them, [4, 2] and [2, 4]. All are whole numbers, so small that no
            result has more than two digits.
    """
    title = "A column-parallel layer, ReLU, and a row-parallel layer, on two ranks"
    beats = _beats(wire_bytes("all_reduce", len(dy) * len(dy[0]), 2))
    return Player(title, lambda width: _Drawing(x, w1, w2, dy, width).scene(), beats)


def _computed(x: Numbers, w1: Numbers, w2: Numbers, dy: Numbers) -> _Share:
    h = [[max(number, 0) for number in row] for row in _product(x, _transposed(w1))]
    dh = [[d * (a > 0) for d, a in zip(*rows, strict=True)] for rows in zip(_product(dy, w2), h, strict=True)]
    return _Share(_transposed(w1), _transposed(w2), h, _product(h, _transposed(w2)), dh, _product(dh, w1))


def _transposed(a: Numbers) -> Numbers:
    return list(zip(*a, strict=True))


def _product(a: Numbers, b: Numbers) -> Numbers:
    return [[sum(p * q for p, q in zip(row, column, strict=True)) for column in _transposed(b)] for row in a]


def _added(a: Numbers, b: Numbers) -> Numbers:
    return [[p + q for p, q in zip(*rows, strict=True)] for rows in zip(a, b, strict=True)]


def _beats(sent: float) -> list[Beat]:
    """In an all-reduce a rank sends `sent` elements."""
    ends = [MOMENTS.index(place) for place in ((False, DONE), (True, DONE), (True, WRONG))]
    return [
        Beat("One process", "One process: W₁, ReLU, W₂. Where can two ranks cut this, and what must they send?", 0),
        Beat("Cut", "W₁ᵀ is cut by columns, W₂ᵀ by rows. Each rank holds 8 of 16 weights, and all of x.", 1),
        Beat("Columns", "Each rank computes whole columns of h, so it can apply ReLU alone. Nothing is sent.", 2),
        Beat("Rows", "Part of h times part of W₂ᵀ is a partial sum, y₀ or y₁. Neither of them is y.", 3),
        Beat(
            "g adds",
            f"g is an all-reduce: partial sums are added, and both ranks hold y. Each sends {sent:g}.",
            ends[0],
        ),
        Beat(
            "f adds",
            "From right to left: both ranks get ∂y from the layers above, ∂h = ∂y·W₂, ∂x = ∂h·W₁. "
            f"f adds the partial sums of ∂x: each rank sends {sent:g} more.",
            ends[1],
        ),
        Beat(
            "Forgotten",
            "Without g, y is wrong. Without f, y is right, and all layers before get a wrong ∂x.",
            ends[2],
        ),
    ]


class _Drawing:
    """All steps for one width of page: a panel for each rank, and between them a lane for their collectives."""

    def __init__(self, x: Numbers, w1: Numbers, w2: Numbers, dy: Numbers, width: float) -> None:
        self.x, self.dy, self.width, self.whole = x, dy, width, _computed(x, w1, w2, dy)
        self.ranks = [_computed(x, w1[k : k + 2], [row[k : k + 2] for row in w2], dy) for k in (0, 2)]
        self.sums = {X: _added(*(rank.dx for rank in self.ranks)), Y: _added(*(rank.y for rank in self.ranks))}
        self.gap = 15 if width == NARROW else 38
        columns = [[columns for _, columns in shapes] for shapes in (SHAPES, BACK)]
        self.cell = (width - 12 - 4 * self.gap) // sum(columns[0])
        left = (width - sum(columns[0]) * self.cell - 4 * self.gap) / 2
        self.left = [[left + sum(of[:k]) * self.cell + k * self.gap for k in range(5)] for of in columns]
        self.tops = PANEL - 4 * HIGH - 8, 2 * PANEL + LANE - 4 * HIGH - 8  # of four rows, on each rank
        self.middle = PANEL + (LANE + LINE) / 2 - 2 * HIGH  # and in the lane

    def scene(self) -> Scene:
        canvas = Canvas(f"two ranks {self.width}")
        for r, top in enumerate((0, PANEL + LANE)):
            paint = {"fill": color("panel"), "stroke": color("rule")}
            canvas.rect(1, top + 1, self.width - 2, PANEL - 2, radius=6, **paint)
            canvas.text(9, top + 19, f"rank {r}", font_weight=650)
        return Scene(canvas, 2 * PANEL + LANE, [dict(self._things(*place)) for place in MOMENTS])

    def _things(self, back: bool, phase: int) -> Iterator[tuple[str, Thing]]:
        """Later things are in front."""
        if phase == WHOLE:
            yield from self._matrix("whole h", H, self.middle, self.whole.h)
            yield from self._matrix("whole y", Y, self.middle, self.whole.y)
        for r, rank in enumerate(self.ranks):
            top = self.middle if phase == WHOLE else self.tops[r]
            yield from self._words(back, phase, r, top)
            yield from self._matrix(f"w1 {r}", W1, top, rank.w1, "param", across=2 * r, back=back)
            yield from self._matrix(f"w2 {r}", W2, top, rank.w2, "param", down=2 * r, back=back)
            if back:
                yield from self._matrix(f"dy {r}", Y, top, self.dy, "gradient")
                yield from self._matrix(f"dh {r}", H, top, rank.dh, "gradient", across=2 * r, back=back)
            else:
                yield from self._matrix(f"x {r}", X, top, self.x)
                if phase >= PART:
                    yield from self._matrix(f"h {r}", H, top, rank.h, across=2 * r)
            if phase >= TERM:
                yield from self._terms(back, phase, r)
        if phase in (SUM, WRONG):
            yield from self._call(X if back else Y, phase)
        if phase not in (WHOLE, WRONG):  # the operator that only passes on
            x, y, wide, high = self._frame(Y if back else X, self.middle, back)
            words = "g passes ∂y on" if back else "f passes x on"
            across = text_width(words, SMALLEST_PX)
            yield (
                words,
                Thing(x + wide - across if back else x, y + high / 2 - LINE / 2, across, LINE, "plain", words),
            )

    def _terms(self, back: bool, phase: int, r: int) -> Iterator[tuple[str, Thing]]:
        """A rank's partial sum, and a copy of it that meets that of the other rank, and returns as the sum."""
        slot, ink = (X, "gradient") if back else (Y, "activation")
        term = self.ranks[r].dx if back else self.ranks[r].y
        if phase != DONE:
            yield from self._matrix(f"term {slot} {r}", slot, self.tops[r], term, ink)
        if phase == WRONG:
            x, y, wide, high = self._frame(slot, self.tops[r])
            yield f"wrong {slot} {r}", Thing(x - 3, y - 3, wide + 6, high + 6, "bad")
        else:
            top, ink = (self.middle, "comm") if phase == SUM else (self.tops[r], ink)
            numbers = self.sums[slot] if phase == DONE else term
            yield from self._matrix(f"sent {slot} {r}", slot, top, numbers, ink, seen=float(phase > TERM))

    def _words(self, back: bool, phase: int, r: int, top: float) -> Iterator[tuple[str, Thing]]:
        """The name of each matrix, a dashed frame for the part of the other rank, signs between."""
        result = ("∂x" if back else "y") + ("₀₁"[r] if phase in (TERM, SUM) else "")
        names = [result, "W₁", "ReLU: ∂h", "W₂", "∂y"] if back else ["x", "W₁ᵀ", "ReLU: h", "W₂ᵀ", result]
        there = {X, W1, H, W2, Y} - {CUT: {H, Y}, PART: {X if back else Y}}.get(phase, set())
        for slot in sorted(there):
            x, y, wide, _ = self._frame(slot, top, back)
            yield f"name {slot} {r}", Thing(x, y - LINE - 5, wide, LINE, "plain", names[slot])
            if slot in (W1, H, W2) and phase != WHOLE:
                down, across = ((1 - r) * (size - 2) for size in (BACK if back else SHAPES)[slot])
                place = x + across * self.cell + 1, y + down * HIGH + 1, 2 * self.cell - 4, 2 * HIGH - 4
                yield f"absent {slot} {r}", Thing(*place, "outline", seen=0.6)
        for slot, sign in enumerate("←×←×" if back else "×→×→"):
            if there >= {slot, slot + 1}:
                place = self.left[back][slot + 1] - self.gap + 2, top + HIGH, self.gap - 6, 2 * HIGH
                yield f"sign {slot} {r}", Thing(*place, "plain", sign)

    def _call(self, slot: int, phase: int) -> Iterator[tuple[str, Thing]]:
        """In the lane: the collective and its result, or that there is none."""
        if phase == SUM:
            yield from self._matrix(f"sum {slot}", slot, self.middle, self.sums[slot], "comm")
        operator = "f" if slot == X else "g"
        words, ink = (f"{operator}: all-reduce", "comm") if phase == SUM else (f"no {operator}", "bad")
        name = "differ" if phase == WRONG else "y" if slot == Y else "∂x"
        wide = text_width(words) + 14
        x, y, matrix, high = self._frame(slot, self.middle)
        beside = x + matrix + 14 if slot == X else x - 14 - wide
        yield "call", Thing(beside, y + high / 2 - 14, wide, 28, ink, words, radius=6)
        y = y + (high - LINE) / 2 if phase == WRONG else y - LINE - 5
        yield "shared", Thing(x - 5, y, matrix + 10, LINE, "plain", name)

    def _matrix(
        self,
        name: str,
        slot: int,
        top: float,
        numbers: Numbers,
        ink: str = "activation",
        down: int = 0,
        across: int = 0,
        seen: float = 1.0,
        back: bool = False,
    ) -> Iterator[tuple[str, Thing]]:
        """Its numbers, from a row and a column of the whole matrix on; weights lie on their side in backward."""
        left, top, *_ = self._frame(slot, top, back)
        for i, row in enumerate(numbers, down):
            for j, number in enumerate(row, across):
                at_row, at_column = (j, i) if back and slot in (W1, W2) else (i, j)
                place = left + at_column * self.cell, top + at_row * HIGH, self.cell - 2, HIGH - 2
                yield f"{name} {i} {j}", Thing(*place, ink, f"{number}".replace("-", "−"), seen)

    def _frame(self, slot: int, top: float, back: bool = False) -> tuple[float, float, float, float]:
        """Place of a whole matrix, in the middle of four rows that begin at `top`."""
        rows, columns = (BACK if back else SHAPES)[slot]
        return self.left[back][slot], top + (4 - rows) * HIGH / 2, columns * self.cell - 2, rows * HIGH - 2
