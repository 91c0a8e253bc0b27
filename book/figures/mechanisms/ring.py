"""An all-reduce, step by step: a row for each rank, a column for each chunk, and the bytes that a rank sent.

The problem: on a circle of ranks a reader follows arrows, and misses which chunk is finished on which rank.
The idea: the ranks are rows and the chunks are columns. In a chunk the numbers of each rank have their place and their
hue, so a sum grows in sight, and the finished sums of a ring form a diagonal.
"""

from __future__ import annotations

from collections.abc import Iterator

from book.figures.canvas import Canvas
from book.figures.player import MOST_BEATS, NARROW, Beat, Player, Scene, Thing
from book.figures.svg import RANKS, SMALLEST_PX, color, text_width
from lib.cost.steps import ALL_REDUCE, Move, after, chunks_sent
from lib.cost.steps import Step as Moves

GAP, ARROW = 24.0, 15.0  # pixels: between two rows, of an arrow in that gap
TOP = 24.0  # above the first row, for the numbers of the chunks


def play_all_reduce(algorithm: str, n: int) -> Player:
    """Naive, tree or ring, on n ranks, at most four, with n chunks each.

    A chunk has a stripe for each rank whose numbers are in it; a complete sum has all, and a frame.

    Args:
        algorithm: a key of `lib.cost.steps.ALL_REDUCE`.
    """
    steps, title = ALL_REDUCE[algorithm](n), f"All-reduce as a {algorithm}, {n} ranks"
    return Player(title, lambda width: _scene(algorithm, steps, n, width), _beats(algorithm, steps, n))


def _scene(algorithm: str, steps: list[Moves], n: int, width: float) -> Scene:
    narrow, is_ring = width == NARROW, algorithm == "ring"
    left, wide, high, pitch = (68.0, 60.0, 30.0, 66.0) if narrow else (78.0, 76.0, 36.0, 86.0)  # of chunks
    row = high + GAP
    right, end = left + pitch * n, TOP + row * n
    bar_x, bar_y, bar = (left, end + 26, pitch * n - 6) if narrow else (right + 34, TOP + 18, width - right - 40)
    canvas = Canvas(f"{algorithm} {n} {width}")
    for chunk in range(n):
        canvas.note(left + pitch * chunk + wide / 2, TOP - 10, f"chunk {chunk}", "middle")
        for rank in range(n):
            canvas.rect(left + pitch * chunk, TOP + row * rank, wide, high, stroke=color("rule"), fill="none")
    for rank in range(n):
        canvas.bars(RANKS[rank]).rect(0, TOP + row * rank + high / 2 - 7, 13, 13)
        canvas.text(19, TOP + row * rank + high / 2 + 4, f"rank {rank}", font_weight=650)
    canvas.text(0 if narrow else bar_x, bar_y - 8, f"sent by {'each' if is_ring else 'the busiest'} rank")
    canvas.rect(bar_x, bar_y, bar, 20, fill=color("idle"), stroke=color("rule"))

    def box(rank: float, chunk: int) -> tuple[float, float, float, float]:
        return left + pitch * chunk, TOP + row * rank, wide, high

    def stripe(rank: float, chunk: int, of: int, seen: float = 1.0) -> Thing:
        """The numbers of one rank in a chunk, at their place."""
        x, y, *_ = box(rank, chunk)
        part = (wide - 4) / n
        return Thing(x + 2.5 + part * of, y + 2, part - 1, high - 4, RANKS[of], seen=seen, radius=1)

    def arrow(move: Move) -> Thing:
        """Below or above the sender; around a ring the last rank sends to the first."""
        down = is_ring or move.dst > move.src
        words = ("↓" if down else "↑") + (f" rank {move.dst}" if abs(move.dst - move.src) > 1 else "")
        long = max(30.0, text_width(words, SMALLEST_PX) + 4)
        x, y, *_ = box(move.src, min(move.chunks))
        middle = x + (pitch * (len(move.chunks) - 1) + wide) / 2
        gap = (GAP - ARROW) / 2
        return Thing(middle - long / 2, y + high + gap if down else y - GAP + gap, long, ARROW, "comm", words)

    def things(done: int) -> Iterator[tuple[str, Thing]]:
        """The chunks of all ranks after so many steps, and the arrows of the last step."""
        held = after(steps[:done], n)
        for rank, chunks in enumerate(held):
            for chunk, inside in enumerate(chunks):
                x, y, w, h = box(rank, chunk)
                full = len(inside) == n
                cell = Thing(x - 2.5, y - 2.5, w + 5, h + 5, "frame", radius=5) if full else Thing(x, y, w, h, "idle")
                yield f"cell {rank} {chunk}", cell
                for of in sorted(inside):
                    yield f"cell {rank} {chunk} of {of}", stripe(rank, chunk, of)
        for move in steps[done] if done < len(steps) else []:  # they wait, invisible, at their sender
            start = -TOP / row if is_ring and move.dst < move.src else move.src  # a ring comes in at the top
            for chunk in move.chunks:
                for of in sorted(held[move.src][chunk] - held[move.dst][chunk]):
                    yield f"cell {move.dst} {chunk} of {of}", stripe(start, chunk, of, seen=0.0)
        for move in steps[done - 1] if done else []:
            yield f"arrow {move.src} {move.dst}", arrow(move)
        sent, most = (max(chunks_sent(steps[:k], n)) / n for k in (done, len(steps)))
        yield "sent", Thing(bar_x, bar_y, max(1.0, bar * sent / most), 20, "comm")
        said = f"{sent:g} of {most:g} arrays" if done else "0 arrays"  # the end would answer a guess
        yield (
            "words",
            Thing(*((bar_x + bar - 138, bar_y - 22) if narrow else (bar_x, bar_y + 24)), 138, 18, "plain", said),
        )

    moments = [dict(things(done)) for done in range(len(steps) + 1)]
    return Scene(canvas, bar_y + 22 if narrow else end + 4, moments)


def _beats(algorithm: str, steps: list[Moves], n: int) -> list[Beat]:
    """A ring is told in its two halves, other algorithms step by step, or in halves where there are many."""
    sent = [max(chunks_sent(steps[:done], n)) / n for done in range(len(steps) + 1)]
    arrays = f"{sent[-1]:g} array" + "s" * (sent[-1] != 1)
    told = [Beat("Before", f"Each of {n} ranks has its own numbers, and needs every sum: who sends how much?", 0)]
    if algorithm == "ring":
        return [
            *told,
            Beat("First step", "Each rank sends one chunk, and adds the chunk that arrives to its own.", 1),
            Beat(
                "Reduce-scatter",
                f"What arrived last is sent on. After {n - 1} steps each rank has a finished sum: a diagonal.",
                n - 1,
            ),
            Beat("Sums travel", "Each rank sends its finished sum to the next, which keeps it.", n),
            Beat("All-gather", f"Each rank has every sum after {len(steps)} steps, and sent {arrays}.", len(steps)),
        ]
    adding = sum(step[0].adds for step in steps)
    each = len(steps) <= MOST_BEATS - 2
    for done in range(1, len(steps)) if each else [adding]:
        told.append(Beat("Up" if done <= adding else "Down", _told(steps[done - 1]), done))
    end = f"Every rank has every sum, after {len(steps)} steps. The busiest rank sent {arrays}."
    return [*told, Beat("End", end, len(steps))]


def _told(step: list[Move]) -> str:
    """Who sends to whom in a step, and whether it is added there."""
    pairs = [f"{move.src} to {move.dst}" for move in step]
    does = "which adds it to its own" if step[0].adds else "where it replaces the old numbers"
    return f"A whole array from rank {' and from '.join(pairs)}, {does}."
