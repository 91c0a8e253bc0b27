"""Chapters 08 to 12, what there is to say of a schedule that somebody has written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from lib.check.exercise import SEEN, Data, Mistake, call, kind, same
from lib.mesh import Group
from lib.pipeline.gantt import gantt
from lib.pipeline.prove import prove
from lib.pipeline.schedules.action import Action, Op, Schedule
from lib.pipeline.schedules.fault import Fault, ScheduleError
from lib.pipeline.simulate import Costs, simulate

Case = tuple[int, ...]  # ranks, microbatches; and stages on each rank, if there are several
Make = Callable[..., Schedule]

# What there is to say about a schedule.
WORKS, YES, NO, KIND = "whether it can work", "yes", "no", "the kind of what is wrong"
SIZES, STAGES, TIME, KEPT = "its size", "ranks of its stages", "units of time", "microbatches kept on rank"
FIRST = "nothing is numbered 0"
ORDERS, ALIKE, UNLIKE = "orders of backward", "alike", "not alike"
JUDGED = (WORKS, SIZES, STAGES, TIME, KEPT)


def read_schedule(written: Any, name: str) -> Schedule:
    """The schedule in what an answer has returned: a text, lines, lists of actions, or a schedule.

    Raises:
        ScheduleError: there is none.
    """
    return (
        replace(written, name=name) if isinstance(written, Schedule) else Schedule.from_text(text_of(written), name)
    )


def text_of(written: Any) -> str:
    """What an answer has returned as a text, whether or not it is one of a schedule.

    Raises:
        ScheduleError: it can be none.
    """
    if isinstance(written, Schedule):
        return written.to_text()
    if isinstance(written, (list, tuple, Iterator)):
        return "\n".join(row if isinstance(row, str) else " ".join(map(_word, row)) for row in written)
    if not isinstance(written, str):
        raise ScheduleError(f"{kind(written)} is no schedule; return a text with a line for each rank", Fault.EMPTY)
    return written


def _word(action: Any) -> str:
    """An action, or what it consists of: stage, op and microbatch."""
    return "".join(map(str, action)) if isinstance(action, tuple) else str(action)


def size(num_ranks: int, num_microbatches: int) -> str:
    return f"{num_ranks} rank{'s' * (num_ranks > 1)}, {num_microbatches} microbatches"


def complaint(error: ScheduleError, name: str) -> Data:
    """Why it cannot work."""
    said = str(error)
    return {WORKS: NO, KIND: kind_of(error), SEEN: said if said.startswith(f"{name}: ") else f"{name}: {said}"}


def kind_of(error: ScheduleError) -> str:
    """What is wrong, whatever the numbers are."""
    if error.kind == Fault.MISSING and error.actions == (Action(0, Op.F, 0),):
        return FIRST
    return kind_text(error.kind, *(action.op for action in error.actions if not error.waits))


def kind_text(kind: Fault, *ops: Op) -> str:
    """The kind of an error about actions that do this; where ranks wait, it does not count at what they do."""
    return " ".join((kind, *ops))


def schedule_facts(written: Any, name: str, costs: Costs) -> Data:
    """What there is to say of what somebody wrote."""
    found: Data = {WORKS: YES}
    try:
        schedule = read_schedule(written, name)
        found |= {SIZES: size(schedule.num_ranks, schedule.num_microbatches), STAGES: list(schedule.rank_of)}
        prove(schedule)
    except ScheduleError as error:
        return found | complaint(error, name)
    timeline = simulate(schedule, costs)
    times = (
        f"a backward takes {costs.I + costs.W:g} units"
        + f", a message {costs.latency:g}; drawn in whole ones" * bool(costs.latency)
    )
    back = {tuple(a.microbatch for a in row if a.op == Op.B) for row in schedule.actions}
    return found | {
        TIME: float(timeline.makespan),
        KEPT: [timeline.peak(rank) for rank in range(schedule.num_ranks)],
        ORDERS: ALIKE if len(back) == 1 else UNLIKE,
        SEEN: f"{name}, where {times}:\n{gantt(timeline, unit=1)}",
    }


def writes(name: str, make: Make) -> Callable:
    """A body: the answer writes schedules; the first that is not as good as what `make` makes is shown."""

    def body(answer: Callable, group: Group, given: Data) -> Data:
        found: Data = {}
        for case in given["cases"]:
            title = call(name, case)
            mine, right = (schedule_facts(written, title, given["costs"]) for written in (answer(*case), make(*case)))
            shown = mine.pop(SEEN)
            if not same(mine, {what: right[what] for what in JUDGED}):
                found.setdefault(SEEN, shown)
            found |= {f"{title}: {what}": value for what, value in mine.items()}
        return found

    return body


def made_by(name: str, make: Make) -> Callable:
    """What is judged, of a schedule that is made so; used as reference and as mistake."""

    def answers(given: list[Data], want: Any = None) -> list[Data]:
        found: Data = {}
        for case in given[0]["cases"]:
            title = call(name, case)
            made = schedule_facts(make(*case), title, given[0]["costs"])
            found |= {f"{title}: {what}": value for what, value in made.items() if what in (*JUDGED, KIND)}
        return [found]

    return answers


def says(name: str, what: str, value: Any) -> Callable:
    """This fact of all cases with several ranks."""
    return lambda given, want: [{f"{call(name, case)}: {what}": value for case in given[0]["cases"] if case[0] > 1}]


def misread(name: str) -> tuple[Mistake, ...]:
    """Numbers that mean something else than the form says."""
    on_two_ranks = (
        "A stage is on two ranks. A line is a rank; the first number of an action is the stage, which stays on its "
        "rank, and the second is the microbatch."
    )
    return (
        *(Mistake(on_two_ranks, says(name, KIND, kind_text(Fault.WRONG_RANK, op))) for op in (Op.F, Op.B)),
        Mistake(
            "You number the stages from 1. The first one is number 0.",
            says(name, KIND, kind_text(Fault.NO_RANK)),
        ),
        Mistake("You number the microbatches from 1. The first one is number 0.", says(name, KIND, FIRST)),
        Mistake(
            "A forward is missing: each of the M microbatches, 0 to M - 1, goes through every stage. Or something is "
            "done with a microbatch that does not exist.",
            says(name, KIND, kind_text(Fault.MISSING, Op.F)),
        ),
        Mistake(
            "All is in one line, so one rank does everything. Each rank has a line of its own.",
            says(name, KIND, kind_text(Fault.ENDLESS)),
        ),
    )
