"""Ways to cut a training step over ranks: batch and model come apart, and the messages of the ranks cross the gaps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise, product
from typing import NamedTuple

from book.figures.canvas import Canvas
from book.figures.player import NARROW, Beat, Player, Scene, Thing
from book.figures.svg import SMALLEST_PX, text_width

SIDE = 4  # rows of the batch, layers and columns of the model
ROW, PILL, GAP = 18, 19, 22  # pixels: from row to row of the batch; height of a message; between ranks of one copy
EDGE = 5  # pixels left free at either side
TECHNIQUES = {  # the dimension that is cut → the technique: what its ranks send
    "batch": "data parallelism: gradients, because all copies take the same step.",
    "state": "ZeRO-3: weights to every rank that computes with them, and gradients.",
    "width": "tensor parallelism: activations, several times in every layer.",
    "depth": "pipeline parallelism: activations to the next rank, and their gradients back.",
    "batch, depth, width": "all three: gradients between the copies, activations inside each of them.",
}
NAMES = {"batch": "Data", "state": "ZeRO", "width": "Tensor", "depth": "Pipeline", "batch, depth, width": "3D"}
CELLS = list(product(range(SIDE), repeat=2))  # (layer, column)


class Cut(NamedTuple):
    """A way to share a step over ranks.

    Args:
        batch: row of the batch → the rank that works on it; empty if all of them need it.
        model: (layer, column) of the model → the same.
        sent: the messages of the ranks.
    """

    batch: Callable[[int], int | str]
    model: Callable[[int, int], int | str]
    sent: str


def play_cuts(cuts: Mapping[str, Cut]) -> Player:
    """Each cut, and the messages of its ranks; at the end all techniques side by side.

    Args:
        cuts: name → how a batch of four rows and a model of four layers and columns are cut: one of `TECHNIQUES`.
    """
    told = [
        (
            "One rank",
            f"A training step: a batch of {SIDE} rows, a model of layers. Which ways are there to cut it?",
            0,
        )
    ]
    for k, parts in enumerate(map(_Parts, cuts.values())):
        told.append((NAMES[parts.axes], _sentence(parts), 2 * k + 2))
    told.append(("All", "Each technique is a cut, and the cut decides what must be sent.", 2 * len(cuts) + 1))
    return Player("A training step, cut over ranks", lambda width: _scene(cuts, width), [Beat(*one) for one in told])


class _Parts:
    """The shares of a step under a cut, read off its functions.

    Attributes:
        batch: the share of each row.
        model: (layer, column) → the share of this cell.
        lines: the shares of rows, layers and columns, in their order.
        copies: shares of the batch. Each goes through its own model.
        shares: of the model.
        keeps: batch and model are shared by the same ranks (ZeRO): a rank keeps its cells, and computes with all.
        axes: the dimensions that are cut, a key of `TECHNIQUES`.
        ranks: how many.
    """

    def __init__(self, cut: Cut) -> None:
        self.batch = [cut.batch(row) for row in range(SIDE)]
        self.model = {(layer, column): cut.model(layer, column) for layer, column in CELLS}
        layers = [tuple(self.model[layer, column] for column in range(SIDE)) for layer in range(SIDE)]
        self.lines = {"batch": self.batch, "depth": layers, "width": list(zip(*layers, strict=True))}
        self.copies, self.shares = list(dict.fromkeys(self.batch)), list(dict.fromkeys(self.model.values()))
        self.keeps = len(self.copies) > 1 and set(self.copies) == set(self.shares)
        axes = ", ".join(name for name, shares in self.lines.items() if len(set(shares)) > 1)
        self.axes, self.sent = "state" if self.keeps else axes, cut.sent
        self.ranks = len(self.copies) * (1 if self.keeps else len(self.shares))

    def rank(self, mine: int | str | None, share: int | str) -> str | None:
        """The rank with a share of the model, in the copy for a share of the batch: None in a different copy.

        Args:
            mine: None for all of the batch.
        """
        if mine is not None and self.keeps:
            return f"{share}" if share == mine else None
        return f"{share}" if mine is None else f"{mine}{share}"


class _Box(NamedTuple):
    """Where the batch and the model below it are, and how far the parts of the model are apart."""

    left: float
    top: float
    width: float
    high: float  # of the model
    gap: float

    @property
    def model(self) -> float:
        return self.top + SIDE * ROW + 8

    @property
    def bottom(self) -> float:
        return self.model + self.high

    def cells(self, parts: _Parts) -> dict[tuple[int, int], Thing]:
        """They overlap a little, so that the cells of a rank look like one block."""
        across, wide = _lay(parts.lines["width"], self.left, self.width - 1, self.gap)
        down, high = _lay(parts.lines["depth"], self.model, self.high - 1, self.gap)
        return {(k, c): Thing(across[c], down[k], wide + 1, high + 1, "param", radius=0) for k, c in CELLS}

    def copy(self, k: int, parts: _Parts, mine: int | str | None) -> Iterator[tuple[str, Thing]]:
        """Batch and model.

        Args:
            k: its number, for the names.
            mine: the share of the batch that goes through this copy; None for all of them.
        """
        rows = [row for row in range(SIDE) if mine in (None, parts.batch[row])]
        top = self.top + ROW * (SIDE - len(rows))
        places, size = _lay([parts.batch[row] for row in rows], top, ROW * len(rows), 4)
        for row, y in zip(rows, places, strict=True):
            words = f"row {row}" if mine is not None or parts.batch[row] == "" else f"rank {parts.batch[row]}"
            yield f"{k} row {row}", Thing(self.left, y, self.width, size - 2, "activation", words)
        for cell, thing in self.cells(parts).items():
            seen = 0.2 if parts.rank(mine, parts.model[cell]) is None else 1.0
            yield f"{k} cell {cell}", thing._replace(seen=seen)

    def labels(self, parts: _Parts, mine: int | str | None) -> Iterator[tuple[str, Thing]]:
        """The rank of each part of the model, as words on it; the number alone if there is no room."""
        cells = self.cells(parts)
        for share in parts.shares:
            rank = parts.rank(mine, share)
            if rank is not None:
                block, words = _block(cells[cell] for cell in CELLS if parts.model[cell] == share), f"rank {rank}"
                shown = "model" if not rank else words if text_width(words, SMALLEST_PX) <= block.width else rank
                yield words, _on(block, text_width(shown, SMALLEST_PX), min(16.0, block.height), "param", shown)


def _lay(shares: Sequence, start: float, length: float, gap: float) -> tuple[list[float], float]:
    """Where each of a line of boxes begins, with a gap where the share changes; and how long a box is."""
    gaps = list(accumulate((gap * (one != other) for one, other in pairwise(shares)), initial=0.0))
    size = (length - gaps[-1]) / len(shares)
    return [start + i * size + before for i, before in enumerate(gaps)], size


def _block(cells: Iterable[Thing]) -> Thing:
    """All of them together."""
    corners = [(cell.x, cell.y, cell.x + cell.width, cell.y + cell.height) for cell in cells]
    xs, ys, rights, bottoms = zip(*corners, strict=True)
    return Thing(min(xs), min(ys), max(rights) - min(xs), max(bottoms) - min(ys), radius=0)


def _on(thing: Thing, wide: float, high: float, ink: str, words: str) -> Thing:
    """A box in its middle."""
    return Thing(thing.x + (thing.width - wide) / 2, thing.y + (thing.height - high) / 2, wide, high, ink, words)


def _scene(cuts: Mapping[str, Cut], width: float) -> Scene:
    uncut = _Parts(Cut(lambda row: "", lambda layer, column: "", ""))
    (box,) = _boxes(uncut, width)
    labels = {
        "batch": Thing(box.left - 42, box.top, 40, SIDE * ROW, "plain", "batch"),
        "depth": Thing(box.left - 42, box.model, 40, box.high, "plain", "depth"),
        "width": Thing(box.left, box.bottom + 2, box.width, 18, "plain", "width"),
    }
    moments = [_held(uncut, [box]) | labels]
    for parts in map(_Parts, cuts.values()):
        boxes = _boxes(parts, width)
        for sent in (False, True):
            messages = [places[sent]._replace(seen=float(sent)) for places in _messages(parts, boxes)]
            named = {f"{parts.axes} {i}": message for i, message in enumerate(messages)}
            moments.append(_held(parts, boxes) | named)
    moments.append(_overview(cuts, width))
    return Scene(Canvas(f"cuts {width}"), 340 if width > NARROW else 448, moments)


def _boxes(parts: _Parts, width: float) -> list[_Box]:
    """Of each copy, side by side."""
    between, most, top, high = (44.0, 300.0, 4.0, 200.0) if width > NARROW else (22.0, 256.0, 20.0, 270.0)
    n = len(parts.copies)
    wide = min(most, (width - 2 * EDGE - (n - 1) * between) / n)
    left = (width - n * wide - (n - 1) * between) / 2
    return [_Box(left + i * (wide + between), top, wide, high, 0 if parts.keeps else GAP) for i in range(n)]


def _held(parts: _Parts, boxes: list[_Box]) -> dict[str, Thing]:
    """Four copies, always. A copy that is not needed is hidden under a visible copy, comes from there and returns."""
    copies = [(k, k % len(boxes)) for k in reversed(range(SIDE))]
    things = {name: thing for k, i in copies for name, thing in boxes[i].copy(k, parts, parts.copies[i])}
    for box, share in zip(boxes, parts.copies, strict=True):
        things |= dict(box.labels(parts, share))
    return things


def _messages(parts: _Parts, boxes: list[_Box]) -> Iterator[tuple[Thing, Thing]]:
    """Each where it comes from, and where it is once sent."""
    first = parts.model[0, 0]  # the share of the first layer
    for box, share in zip(boxes, parts.copies, strict=True):
        cells = box.cells(parts)
        for (layer, column), words in product([] if parts.keeps else CELLS, "⇄⇅"):
            here, there = (layer, column), (layer, column + 1) if words == "⇄" else (layer + 1, column)
            if parts.model.get(there, parts.model[here]) != parts.model[here]:
                between = _block([cells[here], cells[there]])
                yield _on(cells[here], 18, PILL, "comm", words), _on(between, 18, PILL, "comm", words)
        if parts.keeps and share != first:
            owner = boxes[parts.copies.index(first)].cells(parts)
            blocks = (_block(of[cell] for cell in CELLS if parts.model[cell] == first) for of in (owner, cells))
            yield tuple(block._replace(ink="comm", words="weights") for block in blocks)
        if len(boxes) > 1:
            model = _on(_block(cells.values()), 18, PILL, "comm", "⇅")
            yield model, model._replace(y=box.bottom + 4)
    across = _block(cell for box in boxes for cell in box.cells(parts).values())
    wide, below = (across.width, PILL + 8) if len(boxes) > 1 else (text_width(parts.sent, SMALLEST_PX) + 20, 4)
    yield (_on(across, wide, PILL, "comm", parts.sent)._replace(y=boxes[0].bottom + below),) * 2


def _overview(cuts: Mapping[str, Cut], width: float) -> dict[str, Thing]:
    """Each technique with its shares and its messages; not combined techniques."""
    techniques = {name: parts for name, cut in cuts.items() if "," not in (parts := _Parts(cut)).axes}
    columns, high = (4, 190.0) if width > NARROW else (2, 86.0)
    pitch, things = (width - 2 * EDGE + 20) / columns, {}
    for k, (name, parts) in enumerate(techniques.items()):
        box = _Box(EDGE + k % columns * pitch, 22 + k // columns * 226, pitch - 20, high, 6)
        things |= dict(box.copy(k, parts, None)) | {f"{k} {name}": thing for name, thing in box.labels(parts, None)}
        things[f"{k} name"] = Thing(box.left, box.top - 21, box.width, 18, "plain", name)
        things[f"{k} sent"] = Thing(box.left, box.bottom + 6, box.width, PILL, "comm", parts.sent)
    return things


def _sentence(parts: _Parts) -> str:
    """What the ranks have after the cut, and what they send."""
    name, message = TECHNIQUES[parts.axes].split(": ", 1)
    batch, model = ("the whole" if len(of) == 1 else f"1/{len(of)} of the" for of in (parts.copies, parts.shares))
    has = f"{batch} batch and {'keeps ' if parts.keeps else ''}{model} model"
    return f"{name[0].upper()}{name[1:]}: each rank has {has}. It sends {message}"
