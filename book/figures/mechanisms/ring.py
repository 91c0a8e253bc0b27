"""An all-reduce, step by step: ranks on a circle, chunks that travel and add up, bytes that each rank sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import cos, pi, sin

from book.figures.canvas import Canvas
from book.figures.player import MOST_BEATS, NARROW, Beat, Player, Scene, Thing
from book.figures.svg import RANKS, color, num
from lib.cost.steps import ALL_REDUCE, after, chunks_sent
from lib.cost.steps import Step as Moves

CELL, HIGH = 25, 26  # pixels of a chunk
TOP = 30  # above the circle


def play_all_reduce(algorithm: str, n: int) -> Player:
    """Naive, tree or ring, on n ranks, at most four, with n chunks each.

    A chunk has a stripe for each rank whose numbers are in it; a complete sum has all, and a frame.

    Args:
        algorithm: a key of `lib.cost.steps.ALL_REDUCE`.
    """
    steps, title = ALL_REDUCE[algorithm](n), f"All-reduce as a {algorithm}, {n} ranks"
    return Player(title, lambda width: _scene(algorithm, steps, n, width), _beats(algorithm, steps, n))


def _scene(algorithm: str, steps: list[Moves], n: int, width: float) -> Scene:
    middle, half = min(width, 430) / 2, n * CELL / 2
    across, turns = middle - half - 6, [2 * pi * r / n for r in range(n)]
    places = [(middle + across * sin(turn) - half, TOP + 100 - 92 * cos(turn)) for turn in turns]
    canvas = Canvas(f"{algorithm} {n} {width}")
    for src, dst in sorted({(min(move[:2]), max(move[:2])) for step in steps for move in step}):
        (x, y), (far_x, far_y) = places[src], places[dst]
        line = f"M{num(x + half)} {num(y + HIGH / 2)}L{num(far_x + half)} {num(far_y + HIGH / 2)}"
        canvas.path(line, stroke=color("rule"), stroke_width=2)
    for rank, (x, y) in enumerate(places):
        canvas.rect(x - 5, y - 24, n * CELL + 8, HIGH + 52, radius=6, fill=color("panel"), stroke=color("rule"))
        canvas.text(x, y - 8, f"rank {rank}", font_weight=650)
        canvas.bars(RANKS[rank]).rect(x + 48, y - 18, 12, 12)
    bars = (0.0, TOP + 280) if width == NARROW else (470.0, TOP + 30)
    canvas.text(*bars, "sent, in arrays")
    for rank in range(n):
        canvas.text(bars[0], bars[1] + 25 + 26 * rank, f"rank {rank}")

    def cell(rank: int, chunk: int) -> tuple[float, float, float, float]:
        return places[rank][0] + CELL * chunk, places[rank][1], CELL - 2, HIGH

    def stripes(name: str, inside: Iterable[int], box: tuple[float, ...]) -> Iterator[tuple[str, Thing]]:
        """One for each rank whose numbers are in a sum, in the hue of that rank."""
        x, y, wide, high = box
        for rank in inside:
            part = (wide - 2) / n
            yield f"{name} of {rank}", Thing(x + 1 + part * rank, y + 1, part, high - 2, RANKS[rank], radius=0)

    def things(done: int) -> Iterator[tuple[str, Thing]]:
        """The chunks of all ranks after so many steps, and the chunks of the last messages."""
        for rank, chunks in enumerate(after(steps[:done], n)):
            for chunk, inside in enumerate(chunks):
                ink = "frame" if len(inside) == n else "idle"
                yield f"cell {rank} {chunk}", Thing(*cell(rank, chunk), ink)
                yield from stripes(f"cell {rank} {chunk}", sorted(inside), cell(rank, chunk))
        most = max(chunks_sent(steps, n))
        for rank, sent in enumerate(chunks_sent(steps[:done], n)):
            yield f"bar {rank}", Thing(bars[0] + 52, bars[1] + 12 + 26 * rank, max(1, 100 * sent / most), 18, "comm")
            yield f"sent {rank}", Thing(bars[0] + 160, bars[1] + 12 + 26 * rank, 40, 18, "plain", f"{sent / n:g}")
        if algorithm == "ring" and done:
            half = "reduce-scatter" if done < n else "all-gather"
            yield half, Thing(middle - 60, TOP + 96, 120, 30, "plain", half)
        for number in (done, done + 1):  # chunks of the next step wait, invisible, at their sender
            held = after(steps[: number - 1], n) if 0 < number <= len(steps) else []
            for move in steps[number - 1] if held else []:
                for chunk in move.chunks:
                    x, y, wide, _ = cell(move.dst if number == done else move.src, chunk)
                    name, seen = f"token {number} {move.src} {chunk}", float(number == done)
                    box = x, y + HIGH + 2, wide, 20.0
                    yield name, Thing(*box, "comm", seen=seen)
                    for stripe, thing in stripes(
                        name, sorted(held[move.src][chunk]), (x + 1, y + HIGH + 3, wide - 2, 18)
                    ):
                        yield stripe, thing._replace(seen=seen)

    moments = [dict(things(done)) for done in range(len(steps) + 1)]
    return Scene(canvas, bars[1] + 30 + 26 * n if width == NARROW else TOP + 250, moments)


def _beats(algorithm: str, steps: list[Moves], n: int) -> list[Beat]:
    """A ring is told in its two halves, other algorithms step by step, or in halves where there are many."""
    sent = [max(chunks_sent(steps[:done], n)) / n for done in range(len(steps) + 1)]
    told = [
        Beat(
            "Before",
            f"Each of {n} ranks has its own numbers, in its own colour. All want every sum: who sends how much?",
            0,
        )
    ]
    if algorithm == "ring":
        told += [
            Beat("First step", "Each rank sends a chunk to its right neighbour, which adds it to its own.", 1),
            Beat(
                "Reduce-scatter",
                "On they go, one chunk a step, until each rank has one chunk of all stripes: a complete sum.",
                n - 1,
            ),
            Beat("Sums travel", "Now each rank sends its complete sum to the right, where it replaces the old.", n),
        ]
    else:
        adding = sum(step[0].adds for step in steps)
        each = len(steps) <= MOST_BEATS - 2
        for done in range(1, len(steps)) if each else [adding]:
            told.append(Beat("Up" if done <= adding else "Down", _told(steps[done - 1]), done))
    arrays = f"{sent[-1]:g} array" + "s" * (sent[-1] != 1)
    end = f"Every rank has every sum, after {len(steps)} steps. The busiest rank sent {arrays}."
    return [*told, Beat("All-gather" if algorithm == "ring" else "End", end, len(steps))]


def _told(step: list[Moves]) -> str:
    """Who sends to whom in a step, and whether it is added there."""
    pairs = [f"{move.src} to {move.dst}" for move in step]
    does = "which adds it to its own" if step[0].adds else "where it replaces the old numbers"
    return f"A whole array from rank {' and from '.join(pairs)}, {does}."
