"""1F1B on two ranks with messages that take time: when each is in flight, and where a rank pauses for one."""

from __future__ import annotations

from book.figures.canvas import Canvas
from book.figures.mechanisms.pipeline import HEAD
from book.figures.player import NARROW, Beat, Player, Scene, Thing
from lib.pipeline.gantt import KIND
from lib.pipeline.schedules.action import Op
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.simulate import Costs, Timeline, simulate

ROW, BAND, BOX = 30, 34, 11  # pixels: the boxes of a rank, the messages between two ranks, one of them
PALE = 0.25
Box = tuple[float, float, float, float]  # pixels: x, y, width, height


def play_late_messages(num_microbatches: int, latency: float) -> Player:
    """The step without latency, then with it: the messages, and the two places where it becomes longer.

    Args:
        latency: of a message, in forwards.
    """
    on_time, late = (simulate(one_f_one_b(2, num_microbatches), Costs(latency=one)) for one in (0, latency))
    found = late.pauses(1)
    before = " and ".join(f"{slot.action.microbatch}" for _, slot in found)
    total, inside = late.makespan - on_time.makespan, sum(slot.start - end for end, slot in found)
    assert total - inside == 2 * latency, "the rest is at both ends"
    at_ends, step = _units(2 * latency), _units(total)
    beats = [
        Beat("On time", "Each result is on the next rank as soon as it is computed. What if messages take time?", 0),
        Beat("Late", f"Each message, in the middle, takes {_units(latency)}. The step ends {step} later.", 1),
        Beat(
            "At the ends",
            f"At the ends {at_ends} is lost: the first activation and the last gradient come {_units(latency)} late.",
            2,
        ),
        Beat(
            "A round trip",
            "Rank 0 has 0 and 1 in flight. It starts 2 when the gradient of 0 is back: two messages late.",
            3,
        ),
        Beat(
            "Pauses",
            f"Rank 1 therefore pauses before {before}, {at_ends} each time. Together the step is {step} longer.",
            4,
        ),
    ]
    title = f"1F1B on two ranks: messages on time, and {_units(latency)} late"
    return Player(title, lambda width: _scene(on_time, late, latency, width), beats)


def _units(time: float) -> str:
    return {0.5: "half a unit", 1: "1 unit"}.get(time, f"{time:g} units")


def _scene(on_time: Timeline, late: Timeline, latency: float, width: float) -> Scene:
    left = 50.0 if width > NARROW else 18.0
    unit = (width - left - 2) / late.makespan
    tops = HEAD, HEAD + ROW + BAND
    canvas = Canvas(f"late messages {width}")
    for rank, y in enumerate(tops):
        canvas.text(0, y + 19, f"rank {rank}" if width > NARROW else f"{rank}")
        canvas.rect(left, y, unit * late.makespan - 1, ROW, fill=canvas.hatched)
    canvas.note(left, 14, "time; hatched: the rank waits")

    def box(start: float, end: float, y: float, high: float) -> Box:
        return left + start * unit, y, (end - start) * unit - 1, high

    def things(timeline: Timeline, sent: float, bright: tuple[str, ...] = ()) -> dict[str, Thing]:
        """All actions, and messages of `sent` units; if some are bright, the rest is pale."""
        found = {}
        for rank, action, start, end in timeline.compute:
            place = box(start, end, tops[rank], ROW)
            found[f"{action}"] = Thing(*place, KIND[action.op], f"{action.microbatch}")
            down = action.op == Op.F
            if sent and rank == (0 if down else 1):
                place = box(end, end + sent, tops[0] + ROW + (4 if down else BAND - BOX - 4), BOX)
                seen = 1.0 if not bright or f"{action}" in bright else PALE
                found[f"message {action}"] = Thing(*place, "comm", "", seen)
        return found

    wait = box(on_time.makespan, late.makespan, HEAD - 2, 2 * ROW + BAND + 4)
    more = {"more": Thing(*wait, "outline", f"+{late.makespan - on_time.makespan:g}")}
    moments = [
        {**things(on_time, 0), "after": Thing(*wait, "paper")},
        {**things(late, latency), **more},
        {**things(late, latency, ("0F0", f"1B{on_time.schedule.num_microbatches - 1}")), **more},
        {**things(late, latency, ("0F0", "1B0")), **more},
        {**things(late, latency), **more},
    ]
    for number, (end, slot) in enumerate(late.pauses(1)):
        moments[-1][f"pause {number}"] = Thing(*box(end, slot.start, tops[1] - 2, ROW + 4), "bad")
    return Scene(canvas, tops[1] + ROW + 4, moments)
