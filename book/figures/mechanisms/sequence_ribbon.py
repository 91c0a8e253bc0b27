"""A layer under sequence parallelism: tokens, heads, tokens, columns, and the parts that a rank keeps and sends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from book.figures.canvas import Canvas
from book.figures.player import NARROW, WIDE, Beat, Player, Scene, Thing
from book.figures.svg import SMALLEST_PX, color, text_width
from lib.cost.comm import block_wire_bytes, wire_bytes
from lib.cost.held import activation_bytes
from lib.cost.sizes import ModelShape

PLACES = "norm", "attention", "norm", "MLP"
SIDE, SHEET = 108, 4  # pixels of a place, and between two of several copies
PITCH, PAIR = 160, 336  # from place to place, and from a norm and its successor to the next two
TOP, HIGH, BAR = 58, 212, 26  # of the places, and height with all words; of a row at the bottom
HALVES, APART = 1, 2  # steps: all-reduces are two halves each; a norm is between the halves
WALK = [  # then forward: where it is, and how the ranks share the activation there
    *((0, "tokens"), (1, "copies"), (1, "parts"), (1, "terms")),
    *((2, "tokens"), (3, "copies"), (3, "parts")),
]
SENT, BACKWARD = APART + len(WALK) + 1, APART + len(WALK) + 2  # the last steps


def play_sequence_parallel(shape: ModelShape, rows: int, tp: int) -> Player:
    """A layer of `shape` on tp ranks: tensor parallelism, then its all-reduces in two halves with a norm in between.

    Bytes are of a layer in 16 bit, counted as in the papers, with an attention that stores no matrices.

    Args:
        rows: sequences of a microbatch.
        tp: ranks, at most 8; they divide the heads, the tokens and the hidden width of the MLP.
    """
    title = f"A layer of width {shape.d_model} on {tp} ranks: from tensor to sequence parallelism"
    return Player(
        title, lambda width: _Ribbon(shape, rows, tp, width).scene(), _Ribbon(shape, rows, tp, WIDE).beats()
    )


def _kept_bytes(shape: ModelShape, rows: int, tp: int, sequence_parallel: bool) -> list[float]:
    """Bytes that a rank keeps at each of `PLACES`, from `activation_bytes`.

    The bytes that tp ranks do not divide are around the two norms, half at each; an MLP twice as wide keeps twice the
    bytes.
    """
    one, many = (activation_bytes(shape, rows, "selective", tp=n) for n in (1, tp))
    norms = one - (one - many) * tp / (tp - 1)
    hidden = shape.d_mlp or 4 * shape.d_model
    mlp = activation_bytes(replace(shape, d_mlp=2 * hidden), rows, "selective") - one
    norm = norms / 2 / (tp if sequence_parallel else 1)
    return [norm, (one - norms - mlp) / tp, norm, mlp / tp]


class _Ribbon:
    """All steps for one width of page; the second norm and the MLP are next to the first two places or below them."""

    def __init__(self, shape: ModelShape, rows: int, tp: int, width: float) -> None:
        self.tp, self.width = tp, width
        self.tokens, self.heads, self.hidden = rows * shape.context, shape.num_heads, shape.d_mlp or 4 * shape.d_model
        self.whole, self.cut = (_kept_bytes(shape, rows, tp, sliced) for sliced in (False, True))
        x_bytes = 2 * self.tokens * shape.d_model
        self.half = wire_bytes("all_gather", x_bytes, tp)
        sent = (block_wire_bytes(x_bytes, tp, sequence_parallel=sliced) for sliced in (False, True))
        self.calls = [round(n_bytes / self.half) for n_bytes in sent]
        self.pairs = [(6, 0), (6, HIGH) if width == NARROW else (6 + PAIR, 0)]
        self.bars = self.pairs[1][1] + HIGH + 8

    def scene(self) -> Scene:
        canvas = Canvas(f"ribbon {self.tp} {self.width}")
        for x, y in self.pairs:
            canvas.rect(x, y + TOP + SIDE / 2 - 3, PITCH + SIDE + 60, 6, radius=0, fill=color("rule"))
        for place in range(len(PLACES)):
            canvas.rect(*self._corner(place), SIDE, SIDE, fill=color("panel"), stroke=color("rule"))
        for row, name in enumerate(("kept", "sent")):
            canvas.text(0, self.bars + BAR * row + 14, name)
        canvas.note(0, self.bars + 2 * BAR + 12, "Numbers are ranks. Dashed: tensor parallelism.")
        return Scene(canvas, self.bars + 2 * BAR + 18, [dict(self._things(at)) for at in range(BACKWARD + 1)])

    def beats(self) -> list[Beat]:
        """Tensor parallelism, its all-reduces in halves, a walk through the layer, and both passes."""
        tp, tokens = self.tp, self.tokens
        whole, cut, norms = map(_mb, (sum(self.whole), sum(self.cut), 2 * self.whole[0]))
        half, alone, sliced = (_mb(calls * self.half) for calls in (1, *self.calls))
        return [
            Beat(
                "Before", f"Tensor parallelism: a rank keeps {whole}, and {norms} of it are the same on all. Why?", 0
            ),
            Beat("Two halves", "An all-reduce is a reduce-scatter, then an all-gather. The two can come apart.", 1),
            Beat("Apart", "All-gathers move past the norms, which need only one token at a time.", APART),
            Beat(
                "To attention",
                f"A rank normalises {tokens // tp} of {tokens} tokens; attention needs all, for 1/{tp} of the heads.",
                APART + 3,
            ),
            Beat(
                "To the MLP",
                f"Partial sums are added and scattered: {half} from each rank. After the norm all gather again.",
                APART + 6,
            ),
            Beat(
                "Forward ends",
                f"Kept for backward: {cut} instead of {whole}, because the norms keep only their tokens.",
                SENT,
            ),
            Beat(
                "Backward",
                f"Backward swaps the halves, and gathers x once more: {sliced} sent in both passes, not {alone}.",
                BACKWARD,
            ),
        ]

    def _things(self, at: int) -> Iterator[tuple[str, Thing]]:
        """Later things are in front."""
        walks = APART < at < SENT
        done = WALK[: at - APART] if walks else WALK
        now = done[-1] if walks else None
        kept = self.whole if at < APART else self.cut
        reached = [place for place, form in done if form in ("tokens", "parts")]
        for place, name in enumerate(PLACES):
            form = "parts" if place % 2 else "copies" if at < APART else "tokens"
            x, y = self._corner(place)
            x, y = x + SIDE / 2 - 72, y + SIDE
            if place in reached:
                for r in range(self.tp):
                    yield f"kept {place} {r}", self._share(place, form, r, 0.5 if walks else 1.0)
                yield f"bytes {place}", Thing(x, y + 24, 144, 18, "plain", _mb(kept[place]))
                name += f": {self._part(place, form)}"
            yield f"name {place}", Thing(x, y + 6, 144, 18, "plain", name)
        yield from self._calls(at, now)
        for r in range(self.tp) if now else ():
            yield f"now {r}", self._share(*now, r)
        sent = sum(form in ("tokens", "copies") for _, form in done)
        yield from self._bars([kept[place] for place in reached], at, self.calls[1] if at == BACKWARD else sent)

    def _corner(self, place: int) -> tuple[float, float]:
        x, y = self.pairs[place // 2]
        return x + 44 + PITCH * (place % 2), y + TOP

    def _share(self, place: int, form: str, r: int, seen: float = 1.0) -> Thing:
        """The part of the activation that rank r holds at a place."""
        x, y = self._corner(place)
        part = SIDE / self.tp
        if form == "tokens":
            return Thing(x, y + r * part, SIDE, part - 1, "activation", f"{r}", seen)
        if form == "parts":
            return Thing(x + r * part, y, part - 1, SIDE, "activation", f"{r}", seen)
        behind = self.tp - 1 - r
        shift = SHEET * min(behind, 3)
        words = "" if behind else f"{self.tp} {'full copies' if form == 'copies' else form}"
        return Thing(x + shift, y - shift, SIDE, SIDE, "activation", words, max(0.0, 1 - behind / 4))

    def _part(self, place: int, form: str) -> str:
        """How much of the activation a rank has."""
        part = f"{self.heads // self.tp} heads" if place == 1 else f"{self.hidden // self.tp} columns"
        return {"copies": "full on each", "tokens": f"{self.tokens // self.tp} tokens", "parts": part}[form]

    def _calls(self, at: int, now: tuple[int, str] | None) -> Iterator[tuple[str, Thing]]:
        """The collectives: a bar through the ribbon, and its name. The two halves of an all-reduce touch."""
        names = ["all-reduce"] * 2 if at < HALVES else ["reduce-scatter", "all-gather"]
        if at == BACKWARD:
            names = names[::-1]
        for pair, (x, y) in enumerate(self.pairs):
            for k, name in enumerate(names):
                seen = 0.5 if now and now != (2 * pair + k, ("tokens", "copies")[k]) else 1.0
                away = PITCH if k and at >= APART else 0
                wide = text_width(name, SMALLEST_PX) + 10
                left = x + 185 - wide / 2 if away else x
                top = y + 24 - 24 * (k and at == HALVES)
                yield f"call {pair} {k}", Thing(left, top, wide, 21, "comm", name, seen, radius=5)
                yield f"bar {pair} {k}", Thing(x + 10 + 10 * k + away, y + 46, 10, TOP + SIDE - 46, "comm", seen=seen)

    def _bars(self, kept: list[float], at: int, sent: int) -> Iterator[tuple[str, Thing]]:
        """The bytes that a rank keeps and sends, and in outline the bytes under tensor parallelism alone."""
        left, y = 44, self.bars
        longest = self.width - left - 74
        scale, each = longest / sum(self.whole), longest // self.calls[1]
        for place, n_bytes in enumerate(kept):
            x, wide = left + sum(kept[:place]) * scale, max(n_bytes * scale - 1, 1)
            words = PLACES[place] if text_width(PLACES[place], SMALLEST_PX) <= wide else ""
            yield f"kept bar {place}", Thing(x, y, wide, 18, "activation", words)
        for k in range(sent):
            wide = each - 2 * (at >= HALVES or k % 2)
            yield f"sent bar {k}", Thing(left + k * each, y + BAR, wide, 18, "comm")
        alone = self.calls[0] if at == BACKWARD else 4
        yield "kept alone", Thing(left, y, longest, 18, "outline")
        yield "sent alone", Thing(left, y + BAR, alone * each - 2, 18, "outline")
        if at < BACKWARD:
            words = "in forward only"
            wide = text_width(words, SMALLEST_PX) + 10
            yield "direction", Thing(left + 4 * each, y + BAR, wide, 18, "plain", words)
        for row, total in enumerate((sum(kept), sent * self.half)):
            yield f"total {row}", Thing(self.width - 66, y + BAR * row, 66, 18, "plain", _mb(total))


def _mb(n_bytes: float) -> str:
    return f"{n_bytes / 1e6:.0f} MB"
