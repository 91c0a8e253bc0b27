"""An all-reduce comes apart, and the optimizer step moves in between its halves: from data parallelism to ZeRO-1.

Each rank is a row, each shard a column. A reduce-scatter collapses the columns onto the diagonal, an all-gather spreads
the diagonal: first gradients, then parameters instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from book.figures.canvas import Canvas
from book.figures.player import NARROW, Beat, Player, Scene, Thing
from lib.cost import wire_bytes
from lib.cost.steps import after, ring_steps

PLAIN = ("reduce_scatter", "all_gather", "step")  # data parallelism: an all-reduce, then the step
ZERO_1 = ("reduce_scatter", "step", "all_gather")
FRAMES = [(PLAIN, count) for count in range(4)] + [(ZERO_1, count) for count in range(1, 4)]  # so many are done
NAMES = ("Before", "Scatter", "Gather", "Step", "Once more", "Own shard", "Gather w′")
GRIDS = ("gradients", "optimizer states", "parameters")
HIGH, GAP = 28, 4  # pixels: of a box, between boxes
COLLECTIVE, STEP = 210, 216  # pixels across: the block of a collective, and of a step on all shards
ALL_REDUCE = 200  # pixels across: its bytes


def play_split_all_reduce(n: int = 4) -> Player:
    """First a step of data parallelism, then one of ZeRO-1, each with the bytes that a rank sends.

    Args:
        n: ranks, 2 to 4: more do not fit a phone.
    """
    beats = [Beat(name, _sentence(n, *frame), i) for i, (name, frame) in enumerate(zip(NAMES, FRAMES, strict=True))]
    title = f"A step of data parallelism on {n} ranks, then a step of ZeRO-1"
    return Player(title, lambda width: _scene(n, width), beats)


def _owners(n: int) -> list[int]:
    """For each shard the rank that has its sum after a reduce-scatter, the first half of a ring."""
    held = after(ring_steps(n)[: n - 1], n)
    return [next(rank for rank in range(n) if len(held[rank][shard]) == n) for shard in range(n)]


def _scene(n: int, width: float) -> Scene:
    narrow = width == NARROW
    left, between = (37, 12) if narrow else (56, 38)
    top = 3 * (HIGH + GAP) + 46 if narrow else HIGH + 46  # of the grids
    pitch = (width - left - 2 * between) / (3 * n)
    owners, cells = _owners(n), list(product(range(n), range(n)))  # (rank, shard)
    bar, bottom = 130, top + n * (HIGH + GAP) + 10

    canvas = Canvas(f"split all-reduce {n} {width}")
    for grid, words in enumerate(GRIDS):
        for line, part in enumerate(words.split()[::-1] if narrow else [words]):
            canvas.text(left + grid * (n * pitch + between), top - 9 - 15 * line, part, font_weight=650)
    for rank in range(n):
        canvas.text(0, top + rank * (HIGH + GAP) + 19, f"{rank}" if narrow else f"rank {rank}")
    if narrow:
        canvas.text(0, top - 9, "rank")
    canvas.text(0, bottom + 17, "sent by each rank")

    def cell(grid: int, rank: int, shard: int) -> tuple[float, float, float, float]:
        x = left + grid * (n * pitch + between) + shard * pitch
        return x, top + rank * (HIGH + GAP), pitch - GAP + 1, HIGH

    def things(order: tuple[str, ...], count: int) -> Iterator[tuple[str, Thing]]:
        done, x, y = order[:count], 0.0, 2.0
        for operation in order:
            block = _block(n, order, operation)
            yield operation, block._replace(x=x, y=y, ink=block.ink if operation in done else "idle")
            x, y = (x, y + HIGH + GAP) if narrow else (x + block.width + GAP, y)
        is_reduced, is_stepped = "reduce_scatter" in done, "step" in done
        for rank, shard in cells:
            is_kept = order is PLAIN or not is_stepped or rank == owners[shard]
            yield f"no gradient {rank} {shard}", Thing(*cell(0, rank, shard), "idle")
            yield f"states {rank} {shard}", Thing(*cell(1, rank, shard), "opt" if is_kept else "outline")
            yield f"old {rank} {shard}", Thing(*cell(2, rank, shard), "idle", "w")
        for rank, shard in sorted(cells, key=lambda at: at[0] == owners[at[1]]):  # gradients gather beneath the sum
            owner = owners[shard]
            is_here = rank == owner or not is_reduced or done[:2] == PLAIN[:2]
            words = "Σ" if is_here and is_reduced else f"{rank}"
            where = cell(0, rank if is_here else owner, shard)
            yield f"gradient {rank} {shard}", Thing(*where, "gradient", words)
            is_new = len(done) == 3 or is_stepped and rank == owner
            where = cell(2, rank if is_new else owner, shard) if is_stepped else cell(0, rank, shard)
            yield f"new {rank} {shard}", Thing(*where, "param", "w′", float(is_new))
        yield "all-reduce", Thing(bar, bottom, ALL_REDUCE, HIGH - 4, "outline", seen=float(order is ZERO_1))
        sent = _sent(n, done)
        across = ALL_REDUCE * sent / wire_bytes("all_reduce", 1, n)
        yield "sent", Thing(bar, bottom, across, HIGH - 4, "comm", f"{sent:.3g} S" if sent else "", float(sent > 0))

    return Scene(canvas, bottom + HIGH, [dict(things(*frame)) for frame in FRAMES])


def _block(n: int, order: tuple[str, ...], operation: str) -> Thing:
    """An operation; a step is as wide as its work."""
    if operation == "step":
        across, words = (STEP, f"step on all {n} shards") if order is PLAIN else (STEP / n, "step")
        return Thing(0, 0, across, HIGH, "opt", words)
    what = "parameters" if (order, operation) == (ZERO_1, "all_gather") else "gradients"
    return Thing(0, 0, COLLECTIVE, HIGH, "comm", f"{operation.replace('_', '-')} of {what}")


def _sent(n: int, done: tuple[str, ...]) -> float:
    """Bytes that a rank sent, in multiples of S: gradients and parameters are equally long."""
    return sum(wire_bytes(operation, 1, n) for operation in done if operation != "step")


def _sentence(n: int, order: tuple[str, ...], count: int) -> str:
    sent = f"{_sent(n, order[:count]):.3g} S"
    if order is PLAIN:
        return (
            f"Each of {n} ranks has its own gradients, S bytes in {n} shards. Which work is done {n} times?",
            f"Reduce-scatter: each rank gets the sum Σ of one shard. It has sent {sent}.",
            f"All-gather: each rank gets all sums. That completes the all-reduce; each rank has sent {sent}.",
            f"Optimizer step: each rank updates all {n} shards, from w to w′. The same step is computed {n} times.",
        )[count]
    return (
        "After the reduce-scatter each rank has the Σ of one shard, all that its update needs. The step moves here.",
        f"Each rank updates only its shard, 1/{n} of the step, and keeps only that shard of the optimizer states.",
        f"All-gather of w′ instead of Σ: {sent} sent, as before, and the same parameters on all ranks. This is ZeRO-1.",
    )[count - 1]
