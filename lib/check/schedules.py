"""Chapters 08 to 10, a schedule that somebody writes; exercises 08.3 and 09.1."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from lib.check.exercise import SEEN, Data, Exercise, Mistake, call, kind, same, whole
from lib.mesh import Group
from lib.pipeline.action import Action, Op, Schedule, ScheduleError, one_stage_each
from lib.pipeline.check import check
from lib.pipeline.gantt import gantt
from lib.pipeline.gpipe import gpipe, naive
from lib.pipeline.one_f_one_b import in_turns, one_f_one_b
from lib.pipeline.simulate import Costs, simulate

Case = tuple[int, ...]  # ranks, microbatches; and stages on each rank, if there are several
Make = Callable[..., Schedule]

# What there is to say about a schedule.
WORKS, YES, NO, KIND = "whether it can work", "yes", "no", "the kind of what is wrong"
SIZES, STAGES, TIME, KEPT = "its size", "ranks of its stages", "units of time", "microbatches kept on rank"
FIRST = "0F0 is missing"  # of a complaint: nothing is numbered 0
ORDERS, ALIKE, UNLIKE = "orders of backward", "alike", "not alike"
JUDGED = (WORKS, SIZES, STAGES, TIME, KEPT)


def cases_inputs(generator: torch.Generator, n: int) -> list[Data]:
    """Small ones first, as they are shown when they are wrong."""
    several = [(ranks, whole(generator, *range_)) for ranks, range_ in ((2, (2, 5)), (3, (4, 7)), (4, (6, 10)))]
    half = whole(generator, 2, 5) / 2
    return [{"cases": [*several, (1, 3)], "costs": Costs(1, half, half)}]


def read(written: Any, name: str) -> Schedule:
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
        raise ScheduleError(f"{kind(written)} is no schedule; return a text with a line for each rank")
    return written


def _word(action: Any) -> str:
    """An action, or what it consists of: stage, op and microbatch."""
    return "".join(map(str, action)) if isinstance(action, tuple) else str(action)


def size(num_ranks: int, num_microbatches: int) -> str:
    return f"{num_ranks} rank{'s' * (num_ranks > 1)}, {num_microbatches} microbatches"


def complaint(error: ScheduleError, name: str) -> Data:
    """Why it cannot work."""
    said = str(error).removeprefix(f"{name}: ")
    first = said.partition("\n")[0]
    return {WORKS: NO, KIND: first if first == FIRST else re.sub(r"\d+", "_", first), SEEN: f"{name}: {said}"}


def facts(written: Any, name: str, costs: Costs) -> Data:
    """What there is to say of what somebody wrote."""
    found: Data = {WORKS: YES}
    try:
        schedule = read(written, name)
        found |= {SIZES: size(schedule.num_ranks, schedule.num_microbatches), STAGES: list(schedule.rank_of)}
        check(schedule)
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
            mine, right = (facts(written, title, given["costs"]) for written in (answer(*case), make(*case)))
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
            made = facts(make(*case), title, given[0]["costs"])
            found |= {f"{title}: {what}": value for what, value in made.items() if what in (*JUDGED, KIND)}
        return [found]

    return answers


def says(name: str, what: str, value: Any) -> Callable:
    """This fact of all cases with several ranks."""
    return lambda given, want: [{f"{call(name, case)}: {what}": value for case in given[0]["cases"] if case[0] > 1}]


def lacks(op: str) -> str:
    """The kind of complaint about an action that is not there."""
    return {"F": "_F_ is missing", "B": "_B_ is missing, or _I_ and _W_"}[op]


def misread(name: str) -> tuple[Mistake, ...]:
    """Numbers that mean something else than the form says."""
    on_two_ranks = (
        "A stage is on two ranks. A line is a rank; the first number of an action is the stage, which stays on its "
        "rank, and the second is the microbatch."
    )
    return (
        *(Mistake(on_two_ranks, says(name, KIND, f"_{op}_ is on rank _, but rank _ has stage _")) for op in "FB"),
        Mistake(
            "You number the stages from 1. The first one is number 0.",
            says(name, KIND, "nobody has stage _; the stages are _ to _"),
        ),
        Mistake("You number the microbatches from 1. The first one is number 0.", says(name, KIND, FIRST)),
        Mistake(
            "A forward is missing: each of the M microbatches, 0 to M - 1, goes through every stage. Or something is "
            "done with a microbatch that does not exist.",
            says(name, KIND, lacks("F")),
        ),
        Mistake(
            "All is in one line, so one rank does everything. Each rank has a line of its own.",
            says(name, KIND, "rank _ waits for ever"),
        ),
    )


# ---- 08.3 gpipe -----------------------------------------------------------------------------------------------------

_NAME = "gpipe"


def _other_way_round(num_ranks: int, num_microbatches: int) -> Schedule:
    right = gpipe(num_ranks, num_microbatches)
    return replace(right, rank_of=right.rank_of[::-1], actions=right.actions[::-1])


def _complains(kind_of: str) -> Callable:
    return says(_NAME, KIND, kind_of)


def _made(make: Make) -> Callable:
    return made_by(_NAME, make)


GPIPE = Exercise(
    id="08.3",
    title=_NAME,
    points=2,
    body=writes(_NAME, gpipe),
    inputs=cases_inputs,
    reference=_made(gpipe),
    ranks=(1,),
    mistakes=(
        Mistake(
            "A rank lacks a backward. Each stage has weights that want a gradient, so each microbatch goes back "
            "through all of them.",
            _complains(lacks("B")),
        ),
        Mistake(
            "Nothing goes backward: that is an evaluation. Behind its forwards each rank has as many backwards.",
            _made(lambda *case: gpipe(*case).forward_only()),
        ),
        Mistake(
            "That is 1F1B: right, as fast, and it keeps less. GPipe begins to go back only when all microbatches have "
            "gone forward. It is what you are asked to write here; 1F1B is chapter 9.",
            _made(one_f_one_b),
        ),
        Mistake(
            "A microbatch comes back before the next one goes forward. That is right and slow: look how the ranks wait "
            "for each other. Let all go forward first.",
            _made(naive),
        ),
        Mistake(
            "Ranks go back in different orders. Nothing is wrong with any of the orders, but a rank can only go back "
            "with what the rank behind it has done: one and the same order makes nobody wait.",
            says(_NAME, ORDERS, UNLIKE),
        ),
        Mistake(
            "One microbatch is missing. There are M of them, and the last one is number M - 1.",
            _made(lambda ranks, microbatches: gpipe(ranks, microbatches - 1)),
        ),
        Mistake(
            "There is one microbatch too many. There are M of them, and the first one is number 0.",
            _made(lambda ranks, microbatches: gpipe(ranks, microbatches + 1)),
        ),
        Mistake(
            "A backward comes before its own forward. It uses what forward has left behind.",
            _complains("_B_ comes before _F_"),
        ),
        Mistake(
            "The stages are the other way round. Rank 0 has the first one, where the rows come in.",
            _made(_other_way_round),
        ),
        *misread(_NAME),
    ),
)

# ---- 09.1 one_f_one_b -----------------------------------------------------------------------------------------------

_TURNS = "one_f_one_b"


def _turns_inputs(generator: torch.Generator, n: int) -> list[Data]:
    """And some in which there are fewer microbatches than a warm-up would like."""
    (given,) = cases_inputs(generator, n)
    return [given | {"cases": [*given["cases"], (5, 2), (6, 3)]}]


def _warmed_up(forwards: Callable[[int, int], int]) -> Callable:
    """1F1B with so many forwards first, of the number of ranks and of this rank."""

    def make(num_ranks: int, num_microbatches: int) -> Schedule:
        ranks = range(num_ranks)
        orders = [in_turns(num_microbatches, forwards(num_ranks, rank)) for rank in ranks]
        rows = [[Action(rank, op, m) for op, m in orders[rank]] for rank in ranks]
        return one_stage_each(_TURNS, num_microbatches, rows)

    return made_by(_TURNS, make)


def _not_limited(what: str, value: Callable[[int], Any]) -> Callable:
    """Right, but for a fact, by the number of ranks, where they warm up with P-1 microbatches and there are fewer."""

    def answers(given: list[Data], want: Any = None) -> list[Data]:
        (right,) = made_by(_TURNS, one_f_one_b)(given)
        for case in given[0]["cases"]:
            title = call(_TURNS, case)
            if case[1] < case[0] - 1:
                right = {name: fact for name, fact in right.items() if not name.startswith(title)}
                right[f"{title}: {what}"] = value(case[0])
        return [right]

    return answers


_NOT_LIMITED = (
    "Where there are few microbatches, the warm-up takes some that do not exist. It ends when there are none left."
)

_NEGATIVE = (
    "'_B-_' is no action; write stage, one of F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B, and microbatch, such as _F_"
)
_TOO_MANY = (
    "One forward too many before the first backward. It is as fast, and each rank keeps one microbatch more than it "
    "must. How long does it take until the first gradient reaches rank r, in forwards and in ranks behind it?"
)

TURNS = Exercise(
    id="09.1",
    title=_TURNS,
    points=3,
    body=writes(_TURNS, one_f_one_b),
    inputs=_turns_inputs,
    reference=made_by(_TURNS, one_f_one_b),
    ranks=(1,),
    mistakes=(
        Mistake(_TOO_MANY, _warmed_up(lambda n, rank: n - rank)),
        Mistake(_TOO_MANY, _warmed_up(lambda n, rank: n - rank if rank < n - 1 else 0)),
        Mistake(
            "One forward too few before the first backward. Nothing hangs, but it is slower: a rank stands still until "
            "the first gradient is there, and then again and again. There is one forward for each rank behind it.",
            _warmed_up(lambda n, rank: max(n - rank - 2, 0)),
        ),
        Mistake(
            "There is no warm-up: each rank turns round after one forward, so all wait for each other's. That is the "
            "naive pipeline.",
            _warmed_up(lambda n, rank: 0),
        ),
        Mistake(
            "Every rank has the warm-up of rank 0. The nearer a rank is to the loss, the sooner the first gradient is "
            "there, and the last rank has it at once.",
            _warmed_up(lambda n, rank: n - 1),
        ),
        Mistake(
            "Twice the forwards before the first backward: that is eager 1F1B, which keeps more so that late messages "
            "cost nothing. What is asked for here is the smallest warm-up that makes nobody wait.",
            _warmed_up(lambda n, rank: 2 * (n - rank - 1)),
        ),
        Mistake(
            "That is GPipe: right and as fast, but each rank keeps all microbatches. Let a rank go back with the first "
            "as soon as it can.",
            made_by(_TURNS, gpipe),
        ),
        Mistake(
            "The warm-up grows with the rank, and ranks wait for each other. It is the first rank that has the longest "
            "way to the loss and back.",
            says(_TURNS, KIND, "ranks wait for each other"),
        ),
        Mistake(_NOT_LIMITED, _not_limited(SIZES, lambda n: size(n, n - 1))),
        Mistake(_NOT_LIMITED, _not_limited(KIND, lambda n: _NEGATIVE)),
        Mistake(
            "Backwards are missing: the cool-down. A rank that was ahead by some forwards is behind by as many "
            "backwards when the forwards are through.",
            says(_TURNS, KIND, lacks("B")),
        ),
        Mistake(
            "A backward comes before its own forward. The last rank has no warm-up, so its first pair begins with the "
            "forward.",
            says(_TURNS, KIND, "_B_ comes before _F_"),
        ),
        *misread(_TURNS),
    ),
)

EXERCISES = (GPIPE, TURNS)
