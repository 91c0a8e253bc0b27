"""The backward in two halves: the half for which no rank waits slides into the gaps of 1F1B."""

from __future__ import annotations

from collections.abc import Mapping

from book.figures.canvas import Canvas
from book.figures.mechanisms.pipeline import HEAD, ROW, TALL, bracket
from book.figures.player import NARROW, Beat, Player, Scene, Thing
from lib.pipeline.gantt import KIND
from lib.pipeline.schedules.action import Action, Op
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.schedules.zero_bubble import zb_h1
from lib.pipeline.simulate import Costs, Timeline, simulate

Places = Mapping[Action, tuple[float, float]]  # of each forward, I and W: when it begins and ends


def play_split_backward(num_ranks: int, num_microbatches: int, costs: Costs | None = None) -> Player:
    """1F1B, its backwards split, and ZB-H1, with everything where it is in the simulator."""
    costs = costs or Costs()
    whole, split = (simulate(make(num_ranks, num_microbatches), costs) for make in (one_f_one_b, zb_h1))
    saved, kept = whole.makespan - split.makespan, split.peak(0)
    beats = [
        Beat(
            "Before",
            f"1F1B: a backward is one block, and each rank waits {whole.bubble:.0%} of the step. Must it?",
            0,
        ),
        Beat("Two halves", "The rank before waits for I, the input's gradient. No rank waits for W, in green.", 1),
        Beat("I first", "So I goes first: gradients run back through the ranks without a W between them.", 2),
        Beat("W fills", f"Then W fills the gaps. Each rank waits {split.bubble:.0%} of a shorter step.", 3),
        Beat("Saved", f"ZB-H1 saves {saved:g} of {whole.makespan:g} units. Rank 0 keeps {kept:g}, as under 1F1B.", 4),
    ]
    return Player("A backward in two halves", lambda width: _scene(whole, split, costs, width), beats)


def _scene(whole: Timeline, split: Timeline, costs: Costs, width: float) -> Scene:
    ranks, end = whole.schedule.num_ranks, whole.makespan
    left = 50.0 if width > NARROW else 18.0
    unit = (width - left - 2) / end
    canvas = Canvas(f"split backward {width}")
    for rank in range(ranks):
        y = HEAD + ROW * rank
        canvas.text(0, y + 15, f"rank {rank}" if width > NARROW else f"{rank}")
        canvas.rect(left, y, unit * end - 2, TALL, fill=canvas.hatched)
    canvas.note(left, 14, "time; hatched: the rank waits")
    before, after = _places(whole, costs), {slot.action: (slot.start, slot.end) for slot in split.compute}

    def things(places: Places, *, is_split: bool = True, of_w: float = 1.0) -> dict[str, Thing]:
        found = {}
        for action, (start, stop) in places.items():
            is_w = action.op == Op.W
            ink = KIND[action.op] if is_split or not is_w else KIND[Op.B]
            words = f"{action.microbatch}" if is_split or not is_w else ""
            box = left + start * unit, HEAD + ROW * action.stage, (stop - start) * unit - 2 * is_split, TALL
            seen, radius = of_w if is_w else 1.0, 3.0 if action.op == Op.F else 0  # two halves make one block
            found[f"{action}"] = Thing(*box, ink, words, seen, radius)
        return found

    first_i = {action: before[action] if action.op == Op.W else place for action, place in after.items()}
    begin, until, high = left + split.makespan * unit, left + end * unit, ROW * (ranks - 1) + TALL
    paper = {"paper": Thing(begin, HEAD - 2.0, until - begin - 2, high + 4.0, "paper")}
    gain = {
        "end of ZB-H1": Thing(begin, HEAD, 1, high, "frame", radius=0),
        "end of 1F1B": Thing(until - 3, HEAD, 1, high, "outline", radius=0),
        **dict(bracket("gain", begin + 4, until - 6, HEAD + high / 2, split.makespan - end)),
    }
    moments = [
        things(before, is_split=False),
        things(before),
        things(first_i, of_w=0.25),
        {**paper, **things(after)},
        {**paper, **things(after), **gain},
    ]
    return Scene(canvas, HEAD + ROW * ranks, moments)


def _places(whole: Timeline, costs: Costs) -> dict[Action, tuple[float, float]]:
    """1F1B's actions, with its backwards in halves: I, then W."""
    found = {}
    for slot in whole.compute:
        if slot.action.op == Op.F:
            found[slot.action] = slot.start, slot.end
        else:
            middle = slot.start + (slot.end - slot.start) * costs.I / (costs.I + costs.W)
            found[slot.action._replace(op=Op.I)] = slot.start, middle
            found[slot.action._replace(op=Op.W)] = middle, slot.end
    return found
