"""A circle of ranks that each hold a message out until it is taken; and `exchange`, where each sends and receives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import atan2, cos, pi, sin
from typing import NamedTuple

from book.figures.canvas import Canvas
from book.figures.player import NARROW, Beat, Player, Scene, Thing
from book.figures.svg import color, num
from lib.runtime.hang import AwaitedCall, circle_of

BOX, LINE, MESSAGE = (108, 104), (96, 22), (46, 20)  # pixels: a rank, a line in it, a message
MIDDLE = 116, 22  # pixels of a line in the middle of all
POINTS, DOT = 48, 5  # on the circle, those under the ranks too; and pixels of a dot on one
OTHER_HALF, TO = {"send": "recv", "recv": "send"}, {"send": "to", "recv": "from"}
ARROWS = "→↘↓↙←↖↑↗"  # an eighth of a turn apart

Calls = Mapping[int, Sequence[tuple[str, int]]]  # rank -> the calls it is in: `send` or `recv`, and with whom
Point = tuple[float, float]


class _Moment(NamedTuple):
    """The state of all ranks at a step.

    Args:
        program: of all ranks.
        calls: of the ranks that are in one.
        moved: the fraction of its path that each message covered: 0, 0.5 or 1.
        name, sentence: of the event.
    """

    name: str
    program: str
    calls: Calls
    moved: float
    sentence: str


def play_deadlock(messages: Sequence[str]) -> Player:
    """Each rank has a message for its right neighbour: first `send` before `recv`, then `exchange`.

    Args:
        messages: what rank 0 sends, then rank 1, and so on, in a few letters; of 2 to 4 ranks.
    """
    n, told = len(messages), list(_moments(messages))
    ends = [0, 1, *range(n, len(told))]  # the sends between the first and the last are one beat
    beats = [Beat(told[moment].name, told[moment].sentence, moment) for moment in dict.fromkeys(ends)]
    whom = "each with a message for the other" if n == 2 else "with a message for the right neighbour"
    title = f"{n} ranks, {whom}: send, then recv; and exchange"
    return Player(title, lambda width: _scene(messages, width), beats)


def _moments(messages: Sequence[str]) -> Iterator[_Moment]:
    n, program, calls = len(messages), "send, then recv", {}
    both_or_all = "Both" if n == 2 else f"All {n}"
    right_or_other, left_or_other = ("the other",) * 2 if n == 2 else ("its right neighbour", "its left neighbour")
    said = f"Each of {n} ranks has a message for {right_or_other}. It sends, then receives. All wait. What helps?"
    yield _Moment("Before", program, {}, 0, said)
    for rank in range(n):
        right = (rank + 1) % n
        calls = {**calls, rank: [("send", right)]}
        said = f"Rank {rank} holds its message out to rank {right}, which has not called recv. It waits."
        if circle := circle_of(_waits(calls)):
            pairs = ", ".join(f"{a} waits for {b}" for a, b in zip(circle, circle[1:] + circle[:1], strict=True))
            said = f"{both_or_all} hold one out: {pairs}. A circle: no rank reaches recv."
        yield _Moment("A circle" if circle else "First send", program, calls, 0, said)
    both = {rank: [("send", (rank + 1) % n), ("recv", (rank - 1) % n)] for rank in range(n)}
    assert not any(wait.late for wait in _waits(both).values())
    said = "Exchange starts both calls, then waits: each send meets its recv, and no rank is stuck."
    yield _Moment("Exchange", "exchange", both, 0, said)
    yield _Moment("In flight", "exchange", both, 0.5, f"{both_or_all} messages cross at the same time.")
    said = f"{both_or_all} have arrived in the time of one. Each rank has the message of {left_or_other}."
    yield _Moment("Arrived", "exchange", {}, 1, said)


def _waits(calls: Calls) -> dict[int, AwaitedCall]:
    """For each rank in a call: the peers that are not in the other half of it."""
    waits = {}
    for rank, mine in calls.items():
        late = (peer for half, peer in mine if (OTHER_HALF[half], rank) not in calls.get(peer, ()))
        waits[rank] = AwaitedCall(" and ".join(half for half, _ in mine), late=tuple(late))
    return waits


def _around(point: Point, size: tuple[float, float], ink: str, words: str = "", seen: bool = True) -> Thing:
    (x, y), (wide, high) = point, size
    return Thing(x - wide / 2, y - high / 2, wide, high, ink, words, float(seen))


def _scene(messages: Sequence[str], width: float) -> Scene:
    n = len(messages)
    is_flat = width != NARROW and n == 2  # rank 0 at the left; else on top
    across, down = (width - BOX[0]) / 2 - 1 if width == NARROW else 210, 88 if is_flat else 140
    middle_y = down + (12 if is_flat else BOX[1] / 2 + 1)

    def on_circle(place: float) -> Point:
        """Where rank `place` is, or if that is no whole number, a point between two."""
        turn = 2 * pi * place / n - (pi / 2 if is_flat else 0)
        return width / 2 + across * sin(turn), middle_y - down * cos(turn)

    ranks = [on_circle(rank) for rank in range(n)]
    each = POINTS // n
    arcs = [[on_circle(rank + k / each) for k in range(each)] for rank in range(n)]
    canvas = Canvas(f"deadlock {n} {width}")
    track = "L".join(f"{num(x)} {num(y)}" for arc in arcs for x, y in arc)
    canvas.path(f"M{track}Z", stroke=color("rule"), stroke_width=1.5)
    for rank, (x, y) in enumerate(ranks):
        canvas.rect(x - BOX[0] / 2, y - BOX[1] / 2, *BOX, radius=6, fill=color("panel"), stroke=color("rule"))
        canvas.text(x, y - 32, f"rank {rank}", "middle", font_weight=650)

    def free(rank: int, size: tuple[float, float]) -> list[Point]:
        """Where something of that size, between a rank and the next, covers neither."""
        far = [(size[k] + BOX[k]) / 2 + 4 for k in (0, 1)]
        return [(x, y) for x, y in arcs[rank] if all(abs(x - a) > far[0] or abs(y - b) > far[1] for a, b in ranks)]

    def things_of(rank: int, calls: Calls, moved: float, late: bool, in_circle: bool) -> Iterator[tuple[str, Thing]]:
        x, y = ranks[rank]
        right, home = (rank + 1) % n, (x, y + 38)
        held_out, *_, at_door = free(rank, MESSAGE)
        dots = free(rank, (DOT, DOT))
        *dots, before, tip = dots[dots.index(held_out) :]
        for k, dot in enumerate([*dots, before]):  # without a wait they are in their rank, invisible
            at = dot if late else (x, y)
            yield f"dot {rank} {k}", _around(at, (DOT, DOT), "bad" if in_circle else "soft", seen=late)
        arrow = ARROWS[round(4 * atan2(tip[1] - before[1], tip[0] - before[0]) / pi) % 8]
        yield f"arrow {rank}", _around(tip if late else (x, y), (16, 16), "plain", arrow, late)
        for k, call in enumerate((("send", right), ("recv", (rank - 1) % n))):
            called, over = "bad" if in_circle else "comm", "idle" if moved == 1 else "plain"
            ink = called if call in calls.get(rank, ()) else over
            yield f"line {rank} {k}", _around((x, y - 12 + 24 * k), LINE, ink, f"{call[0]} {TO[call[0]]} {call[1]}")
        yield f"wait {rank}", _around(home, LINE, "plain", f"waits for {right}", late)
        arrived = ranks[right][0], ranks[right][1] + 38
        at = arrived if moved == 1 else at_door if moved else held_out if rank in calls else home
        yield f"x {rank}", _around(at, MESSAGE, "comm", messages[rank])

    def things(moment: _Moment) -> Iterator[tuple[str, Thing]]:
        waits = _waits(moment.calls)
        circle = circle_of(waits)
        for rank in range(n):
            late = rank in waits and bool(waits[rank].late)
            yield from things_of(rank, moment.calls, moment.moved, late, rank in circle)
        x, y = width / 2, middle_y - (32 if n == 3 else 0)  # two of three ranks are below the middle
        yield "program", _around((x, y - 26), MIDDLE, "frame", moment.program)
        yield "arrived", _around((x, y), MIDDLE, "plain", f"{n if moment.moved == 1 else 0} of {n} arrived")
        yield "verdict", _around((x, y + 26), MIDDLE, "bad", "deadlock", bool(circle))

    bottoms = [on_circle(k / 2)[1] + (12 if k % 2 else BOX[1] / 2 + 1) for k in range(2 * n)]
    return Scene(canvas, max(bottoms), [dict(things(moment)) for moment in _moments(messages)])
