"""Ring attention: keys and values go round, and each step fills a part of the causal triangle.

The problem: consecutive tokens are equal parts of a sequence and very unequal parts of its attention; a formula
does not show where the work is.
The idea: each pair of a query and a key has its place in a triangle, and takes the hue of the rank that computes it.
The bars are the same areas, step after step: a rank without work is hatched, and the longest bar is as long as the
attention. Then the same with tokens in zig-zag order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from book.figures.canvas import Canvas
from book.figures.player import NARROW, Beat, Player, Scene, Thing
from book.figures.svg import RANKS, SMALLEST_PX, color, num, text_width
from lib.cost.token_orders import AttentionBlock, blocks_of, causal_pairs, tokens_of_rank

TOKENS, BEFORE, AFTER = 48, "contiguous", "zigzag"
TOKEN, EDGE, ARROW = 5.0, 18.0, 15.0  # pixels: a token of the triangle, the ranks at its edge, an arrow
SIDE = TOKENS * TOKEN


def play_context_ring(n: int = 4) -> Player:
    """All steps of a causal attention over n ranks with consecutive tokens, then with an early and a late chunk each.

    Args:
        n: 2 to 4: there are hues for four ranks.
    """
    title = f"Ring attention on {n} ranks, with {TOKENS} tokens"
    return Player(title, lambda width: _Room(n, width).scene(), _beats(n))


class RingWork(NamedTuple):
    """The work of a rank in a step.

    Args:
        blocks: its queries and the keys that it holds; none if all these keys are later.
        pairs: of a query and a key, in all blocks.
        begin: the pairs of the busiest rank in each step before, added up.
    """

    blocks: list[AttentionBlock]
    pairs: int
    begin: int


def ring_work(order: str, n: int) -> list[list[RingWork]]:
    """For each step the work of each rank. Keys and values move one rank on after a step."""
    steps, begin = [], 0
    for step in range(n):
        steps.append([])
        for rank in range(n):
            blocks = blocks_of(order, TOKENS, n, rank, (rank - step) % n)
            pairs = sum(len(keys) for block in blocks for _, keys in _rows_of(block))
            steps[-1].append(RingWork(blocks, pairs, begin))
        begin += max(part.pairs for part in steps[-1])
    return steps


def _rows_of(block: AttentionBlock) -> list[tuple[int, range]]:
    """Each query of a block, with its keys in the block that are not later."""
    return [(query, range(block.keys.start, min(query + 1, block.keys.stop))) for query in block.queries]


def _beats(n: int) -> list[Beat]:
    """Consecutive tokens step by step, then zig-zag from its start to its end."""
    steps, last = ring_work(BEFORE, n), n - 1
    before, after = ([causal_pairs(order, TOKENS, n, rank) for rank in range(n)] for order in (BEFORE, AFTER))
    mean, most = sum(before) / n, max(before)
    told = [
        (
            "Before",
            f"Each of {n} ranks has {TOKENS // n} of {TOKENS} tokens. A query attends to no later key. "
            "Which rank computes most?",
        ),
        ("Own keys", f"Step 1: each rank attends to its own keys, {steps[0][0].pairs} pairs of a query and a key."),
        *((f"Move {moved}", _told(moved + 1, steps[moved])) for moved in range(1, last)),
        (
            f"Move {last}",
            f"Rank {last} had work in each step: {most} pairs, {most / mean:.2f} times the mean of {mean:.0f}. "
            f"Rank 0 computed {before[0]}.",
        ),
        (
            "Zig-zag",
            f"Zig-zag order: of {2 * n} chunks each rank has an early and a late chunk, rank 0 the first and the last.",
        ),
        (
            "Equal work",
            f"No rank is idle in any step: each computes {after[0]} pairs. The longest bar is "
            f"{1 - max(after) / most:.0%} shorter.",
        ),
    ]
    ends = [*range(n + 2), 2 * n + 1]
    return [Beat(*words, until) for words, until in zip(told, ends, strict=True)]


def _told(number: int, parts: list[RingWork]) -> str:
    """Who has work in a step after the first; it is not the last."""
    idle, busy = ([rank for rank, part in enumerate(parts) if bool(part.blocks) is has] for has in (False, True))
    if number == 2:
        return f"Step 2: K and V move one rank on. Rank {idle[0]} now holds later keys, and has nothing to compute."
    ranks, more = (" and ".join(map(str, some)) for some in (idle, busy))
    return f"Step {number}: ranks {ranks} are idle. Ranks {more} compute {parts[-1].pairs} pairs each."


class _Room:
    """All frames for one width of page: ranks, triangle and bars in a row, or the triangle below."""

    def __init__(self, n: int, width: float) -> None:
        self.n, self.width, self.is_narrow = n, width, width == NARROW
        self.steps = {order: ring_work(order, n) for order in (BEFORE, AFTER)}
        pairs = {order: [causal_pairs(order, TOKENS, n, rank) for rank in range(n)] for order in self.steps}
        self.longest, self.mean = max(pairs[BEFORE]), sum(pairs[BEFORE]) / n
        self.saved = 1 - max(pairs[AFTER]) / self.longest
        if self.is_narrow:
            self.top, self.pitch, self.high, self.margin = 26.0, 42.0, 24.0, 4.0
            self.q, self.kv, self.bar, self.end = (20.0, 36.0), (62.0, 50.0), 130.0, 302.0
            self.left, self.above = 76.0, self.top + n * self.pitch + 52
        else:
            self.top, self.pitch, self.high, self.margin = 42.0, SIDE / n, 30.0, 7.0
            self.q, self.kv, self.bar, self.end = (58.0, 40.0), (104.0, 52.0), 474.0, 640.0
            self.left, self.above = 208.0, self.top
        self.scale = (self.end - self.bar) / self.longest

    def scene(self) -> Scene:
        moments = [(order, done) for order in self.steps for done in range(self.n + 1)]
        height = self.above + SIDE + 22
        return Scene(self._canvas(), height, [dict(self._things(*moment)) for moment in moments])

    def _canvas(self) -> Canvas:
        canvas, n = Canvas(f"context ring {self.n} {self.width}"), self.n
        stairs = f"h{num(TOKEN)}v{num(TOKEN)}" * TOKENS
        triangle = f"M{num(self.left)} {num(self.above)}{stairs}H{num(self.left)}z"
        canvas.path(triangle, fill=color("idle"), stroke=color("soft"), stroke_width=0.8)
        for rank in range(n):
            x, y, wide, high = self._lane(rank)
            canvas.rect(x, y, wide, high, radius=6, fill=canvas.hatched, stroke=color("rule"))
            canvas.rect(self.bar, self._y(rank), self.end - self.bar, self.high, fill=canvas.hatched)
            canvas.text(0, self._y(rank) + self.high / 2 + 4.5, f"{rank}" if self.is_narrow else f"rank {rank}")
        if self.is_narrow:
            canvas.note(0, 14, "rank")
        canvas.note(self.bar, 14, "pairs, step by step")
        begin, end = self._rows()
        canvas.path(f"M{num(self.bar - 2)} {num(begin)}V{num(end)}", stroke=color("rule"), stroke_width=1.5)
        canvas.note(self.left, self.above - EDGE - 10, "keys →")
        canvas.note(self.left - EDGE - 8, self.above - 6, "queries ↓", "end")
        canvas.note(self.left + SIDE, self.above + 16, "later keys: no work", "end")
        canvas.note(self.left, self.above + SIDE + 17, "along the edges: a token's rank; inside: the step")
        return canvas

    def _y(self, row: float) -> float:
        """Where the boxes of a row begin."""
        return self.top + self.pitch * (row + 0.5) - self.high / 2

    def _rows(self) -> tuple[float, float]:
        """From a little above the first row to a little below the last."""
        return self._y(0) - 5, self._y(self.n - 1) + self.high + 5

    def _lane(self, rank: int) -> tuple[float, float, float, float]:
        """Around the boxes of a rank."""
        out = self.margin
        wide = self.kv[0] + self.kv[1] - self.q[0]
        return self.q[0] - out, self._y(rank) - out, wide + 2 * out, self.high + 2 * out

    def _things(self, order: str, done: int) -> Iterator[tuple[str, Thing]]:
        """After so many steps in an order. Later things are in front."""
        steps = self.steps[order]
        for rank in range(self.n):
            x, y, wide, high = self._lane(rank)
            is_idle = done > 0 and not steps[done - 1][rank].blocks
            yield f"busy {rank}", Thing(x - 1, y - 1, wide + 2, high + 2, "paper", seen=1.0 - is_idle)
            yield f"queries {rank}", Thing(self.q[0], self._y(rank), self.q[1], self.high, RANKS[rank], f"Q {rank}")
        yield from self._passing(order, max(done - 1, 0))
        yield from self._edges(order)
        for number, parts in enumerate(steps[:done], 1):
            for rank, part in enumerate(parts):
                for k, block in enumerate(part.blocks):
                    yield from self._block(f"{order} {number} {rank} {k}", RANKS[rank], f"{number}", block)
        is_running = done and (order, done) != (AFTER, self.n)
        for rank, part in enumerate(steps[done - 1] if is_running else ()):
            for k, block in enumerate(part.blocks):
                yield f"now {order} {done} {rank} {k}", Thing(*self._box(block), "frame", radius=1)
        yield from self._bars(order, done)

    def _passing(self, order: str, moved: int) -> Iterator[tuple[str, Thing]]:
        """Keys and values after so many moves; the block of the last rank leaves below and comes in above."""
        x, wide = self.kv
        for owner in range(self.n):
            for lap in range(2):
                row = owner + moved - self.n * lap
                if -1 <= row <= self.n:
                    place = self._y(min(max(row, -0.5), self.n - 0.5))
                    seen = float(0 <= row < self.n)
                    words = f"K, V {owner}"
                    yield f"keys {order} {owner} {lap}", Thing(x, place, wide, self.high, RANKS[owner], words, seen)
        for rank in range(self.n) if moved else ():
            words = "↓" if rank + 1 < self.n else "↓ rank 0"
            long = max(30.0, text_width(words, SMALLEST_PX) + 4)
            y = self._y(rank) + self.high + (self.pitch - self.high - ARROW) / 2
            yield f"sent {rank}", Thing(x + (wide - long) / 2, y, long, ARROW, "comm", words)

    def _edges(self, order: str) -> Iterator[tuple[str, Thing]]:
        """Whose the tokens are: keys above the triangle, queries at its left, in the chunks of the zig-zag order."""
        size = TOKENS // (2 * self.n)
        long = size * TOKEN - 1
        for rank in range(self.n):
            chunks = {token // size for tokens in tokens_of_rank(order, TOKENS, self.n, rank) for token in tokens}
            for chunk in chunks:
                at = chunk * size * TOKEN
                x, y = self.left - EDGE - 2, self.above - EDGE - 2
                yield f"key {chunk}", Thing(self.left + at, y, long, EDGE, RANKS[rank], f"{rank}")
                yield f"query {chunk}", Thing(x, self.above + at, EDGE, long, RANKS[rank], f"{rank}")

    def _box(self, block: AttentionBlock) -> tuple[float, float, float, float]:
        """The rectangle of a block in the triangle."""
        x, y = self.left + block.keys.start * TOKEN, self.above + block.queries.start * TOKEN
        return x, y, len(block.keys) * TOKEN, len(block.queries) * TOKEN

    def _block(self, name: str, ink: str, words: str, block: AttentionBlock) -> Iterator[tuple[str, Thing]]:
        """A rectangle, or stairs: each query down to the end of the block, so that no line shows between two."""
        x, y, wide, high = self._box(block)
        if block.is_whole:
            yield name, Thing(x, y, wide - 1, high - 1, ink, words, radius=0)
            return
        for k, (_, keys) in enumerate(_rows_of(block)):
            yield f"{name} {k}", Thing(x, y + k * TOKEN, len(keys) * TOKEN, high - 1 - k * TOKEN, ink, radius=0)
        yield name, Thing(x, y + high / 2, wide / 2, high / 2 - 1, ink, words, radius=0)  # inside the stairs

    def _bars(self, order: str, done: int) -> Iterator[tuple[str, Thing]]:
        """The pairs of each rank; the future is covered, and the end of the first order stays as a dashed frame."""
        steps, (top, bottom) = self.steps[order], self._rows()
        now = self.bar + self.scale * (max(part.begin + part.pairs for part in steps[done - 1]) if done else 0)
        yield "future", Thing(now, top, self.end - now + 1, bottom - top, "paper", radius=0)
        for rank in range(self.n) if done else ():
            y, worked = self._y(rank), self.bar
            for number, part in enumerate((parts[rank] for parts in steps[:done]), 1):
                if part.pairs:
                    x, wide = self.bar + self.scale * part.begin, self.scale * part.pairs
                    yield f"bar {order} {number} {rank}", Thing(x, y, wide - 1, self.high, RANKS[rank], f"{number}")
                    worked = x + wide
            if worked < now - 1:  # all at the end: a rank without work gets none later
                yield f"idle {rank}", Thing(worked, y, now - worked, self.high, "plain", "idle")
            total = sum(parts[rank].pairs for parts in steps[:done])
            yield f"total {rank}", Thing(self.end + 2, y, 36, self.high, "plain", f"{total}")
        if order == AFTER:
            words = f"{BEFORE}: {self.longest} pairs" if not done else f"−{self.saved:.0%}" if done == self.n else ""
            yield "longest", Thing(now, top, self.end - now, bottom - top, "outline", words)
        elif done == self.n:
            yield from self._mean()

    def _mean(self) -> Iterator[tuple[str, Thing]]:
        """A line between the bars, which carry words."""
        x, (top, bottom), gap = self.bar + self.scale * self.mean, self._rows(), self.pitch - self.high
        begins = [top - 3, *(self._y(row) + self.high + 1 for row in range(self.n))]
        for row, begin in enumerate(begins):
            end = begin + gap - 2 if 0 < row < self.n else begin + 7
            yield f"mean {row}", Thing(x - 0.8, begin, 1.6, end - begin, "soft", radius=0)
        words = f"mean {self.mean:.0f}"
        wide = text_width(words, SMALLEST_PX) + 2
        yield "mean", Thing(x - wide / 2, bottom + 3, wide, 18, "plain", words)
