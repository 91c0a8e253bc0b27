"""Facts about a schedule that a learner wrote: for exercises 9.1 and 12.2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from course.check.compare import SEEN, Data
from course.check.exercise import kind
from lib.pipeline.gantt import gantt
from lib.pipeline.prove import prove
from lib.pipeline.schedules.action import Action, Fault, Op, Schedule, ScheduleError
from lib.pipeline.simulate import Costs, simulate

WORKS, YES, NO, KIND = "whether it can work", "yes", "no", "the kind of fault"
SIZES, STAGES, TIME, KEPT = "its size", "ranks of its stages", "units of time", "microbatches kept on rank"
FIRST = "nothing is numbered 0"
ORDERS, ALIKE, UNLIKE = "orders of backward", "alike", "not alike"


def read_schedule(written: Any, name: str) -> Schedule:
    """The schedule that an answer returned: as a text, lines, lists of actions, or a `Schedule`.

    Raises:
        ScheduleError: it returned none.
    """
    return (
        replace(written, name=name) if isinstance(written, Schedule) else Schedule.from_text(text_of(written), name)
    )


def text_of(written: Any) -> str:
    """The result of an answer as a text, which may or may not be the text of a schedule.

    Raises:
        ScheduleError: it cannot be the text of a schedule.
    """
    if isinstance(written, Schedule):
        return written.to_text()
    if isinstance(written, (list, tuple, Iterator)):
        return "\n".join(row if isinstance(row, str) else " ".join(map(_word, row)) for row in written)
    if not isinstance(written, str):
        raise ScheduleError(f"{kind(written)} is no schedule; return a text with a line for each rank", Fault.EMPTY)
    return written


def _word(action: Any) -> str:
    """The text of an action, or of a tuple of stage, op and microbatch."""
    return "".join(map(str, action)) if isinstance(action, tuple) else str(action)


def size(num_ranks: int, num_microbatches: int) -> str:
    return f"{num_ranks} rank{'s' * (num_ranks > 1)}, {num_microbatches} microbatches"


def kind_of(error: ScheduleError) -> str:
    """The kind of fault, without its numbers; and, unless ranks wait, the operations at fault."""
    if error.kind == Fault.MISSING and error.actions == (Action(0, Op.F, 0),):
        return FIRST
    return " ".join((error.kind, *(action.op for action in error.actions if not error.waits)))


def schedule_facts(written: Any, name: str, costs: Costs) -> Data:
    """Facts about a written schedule: whether it works, its size, time and memory, or its fault."""
    found: Data = {WORKS: YES}
    try:
        schedule = read_schedule(written, name)
        found |= {SIZES: size(schedule.num_ranks, schedule.num_microbatches), STAGES: list(schedule.rank_of)}
        prove(schedule)
    except ScheduleError as error:
        message = str(error)
        message = message if message.startswith(f"{name}: ") else f"{name}: {message}"
        return found | {WORKS: NO, KIND: kind_of(error), SEEN: message}
    timeline = simulate(schedule, costs)
    times = (
        f"a backward takes {costs.I + costs.W:g} units"
        + f", a message {costs.latency:g}; drawn in whole units" * bool(costs.latency)
    )
    back = {tuple(a.microbatch for a in row if a.op == Op.B) for row in schedule.actions}
    return found | {
        TIME: float(timeline.makespan),
        KEPT: [timeline.peak(rank) for rank in range(schedule.num_ranks)],
        ORDERS: ALIKE if len(back) == 1 else UNLIKE,
        SEEN: f"{name}, where {times}:\n{gantt(timeline, unit=1)}",
    }
