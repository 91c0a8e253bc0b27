"""Chapter 10, messages put into a schedule: exercise 10.1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lib.check.exercise import SEEN, Data, Exercise, Mistake, same, whole
from lib.check.pipelines.written import KIND, WORKS, YES, complaint, kind_text, read_schedule
from lib.mesh import Group
from lib.pipeline.prove import prove
from lib.pipeline.schedules.action import COMPUTE, RECVS, SENDS, Action, Op, Schedule, one_stage_each
from lib.pipeline.schedules.fault import Fault, ScheduleError
from lib.pipeline.schedules.gpipe import gpipe
from lib.pipeline.schedules.one_f_one_b import in_turns, one_f_one_b
from lib.pipeline.simulate import simulate

_NAME = "with_messages"
_COMPUTE, _SAME, _OTHER = "what is computed, in which order", "as given", "something else"
_MESSAGES, _TIME = "sends, receives", "units of time"
_LEAVE, _AT_ONCE, _LATE = "when messages leave", "as soon as they can", "later"
_MADE_BY = {Op.SEND_F: Op.F, Op.SEND_B: Op.B}
_WIDE = 110  # characters of a line that is shown

Case = tuple[str, int, int]  # schedule, ranks, microbatches


def _eager(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B with a longer warmup: microbatches cross on several links at once."""
    ranks = range(num_ranks)
    orders = [in_turns(num_microbatches, 2 * (num_ranks - rank - 1)) for rank in ranks]
    rows = [[Action(rank, op, m) for op, m in orders[rank]] for rank in ranks]
    return one_stage_each("eager 1F1B", num_microbatches, rows)


_MAKE = {"1F1B": one_f_one_b, "eager 1F1B": _eager, "GPipe": gpipe}


def _cases_inputs(generator: torch.Generator, n: int) -> list[Data]:
    """Small ones first, as they are shown when they are wrong; GPipe last, which hardly anything makes hang."""
    cases = [("1F1B", 2, whole(generator, 2, 4)), ("1F1B", 3, whole(generator, 3, 6)), ("eager 1F1B", 3, 5)]
    cases += [("1F1B", 4, whole(generator, 4, 9)), ("eager 1F1B", 4, whole(generator, 7, 10))]
    return [{"cases": [*cases, ("GPipe", 3, whole(generator, 2, 5)), ("1F1B", 1, 2)]}]


def _title(case: Case) -> str:
    name, ranks, microbatches = case
    return f"{name} for {ranks} rank{'s' * (ranks > 1)} and {microbatches} microbatches"


def _with_messages(answer: Callable, group: Group, given: Data) -> Data:
    found: Data = {}
    for case in given["cases"]:
        schedule = _MAKE[case[0]](*case[1:])
        mine = _facts(answer(schedule), schedule, _title(case))
        if not same(mine, _right(schedule)) and SEEN not in found:  # the first that is wrong says which mistake it is
            found |= mine | {SEEN: _cut(mine[SEEN])}
        found |= {f"{_title(case)}: {what}": value for what, value in mine.items() if what != SEEN}
    return found


def _facts(written: Any, given: Schedule, title: str) -> Data:
    try:
        schedule = prove(read_schedule(written, title))
    except ScheduleError as error:
        return complaint(error, title)
    computed = tuple(tuple(a for a in row if a.op in COMPUTE) for row in schedule.actions)
    return {
        WORKS: YES,
        _COMPUTE: _SAME if computed == given.actions else _OTHER,
        _MESSAGES: [sum(a.op in ops for row in schedule.actions for a in row) for ops in (SENDS, RECVS)],
        _TIME: simulate(schedule).makespan,
        _LEAVE: _AT_ONCE if simulate(schedule).makespan == simulate(given).makespan and _prompt(schedule) else _LATE,
        SEEN: f"{title}:\n{schedule.grid()}",
    }


def _prompt(schedule: Schedule) -> bool:
    """Whether each message is sent before its rank computes anything else, even where nobody waits for it yet."""
    made = None
    for action in (action for row in schedule.actions for action in row):
        if action.op in SENDS and (made.op, made.microbatch) != (_MADE_BY[action.op], action.microbatch):
            return False
        made = action if action.op in COMPUTE else made
    return True


def _cut(seen: str) -> str:
    """Of lines that are too wide, the part around what is marked."""
    lines = seen.splitlines()
    begin = max(0, max(line.find(">") for line in lines) - _WIDE // 2)
    rank = len("  rank 0  ")
    return "\n".join(
        line if len(line) <= _WIDE else f"{line[:rank]}{'… ' * (begin > 0)}{line[rank + begin :][:_WIDE].rstrip()} …"
        for line in lines
    )


def _right(schedule: Schedule) -> Data:
    """A message for each microbatch, boundary and direction; and none of them late."""
    messages, time = 2 * schedule.num_microbatches * (schedule.num_stages - 1), simulate(schedule).makespan
    return {WORKS: YES, _COMPUTE: _SAME, _MESSAGES: [messages] * 2, _TIME: time, _LEAVE: _AT_ONCE}


def _reference(given: list[Data]) -> list[Data]:
    found: Data = {}
    for case in given[0]["cases"]:
        found |= {f"{_title(case)}: {what}": value for what, value in _right(_MAKE[case[0]](*case[1:])).items()}
    return [found]


def _says(what: str, value: Any) -> Callable:
    """This fact of the first case that is wrong."""
    return lambda given, want: [{what: value}]


def _complaints(hint: str, *kinds: str) -> list[Mistake]:
    return [Mistake(hint, _says(KIND, kind)) for kind in kinds]


WITH_MESSAGES = Exercise(
    id="10.1",
    title=_NAME,
    points=3,
    body=_with_messages,
    inputs=_cases_inputs,
    reference=_reference,
    ranks=(1,),
    mistakes=(
        Mistake(
            "Ranks wait for each other. Each list looks right for itself, but on one rank a send stands where the "
            "other has planned to send, too. Do not write the lists one by one: put both ends of a message down at the "
            "same moment of one order.",
            _says(KIND, kind_text(Fault.CIRCLE)),
        ),
        Mistake(
            "There is no message in it. What a stage makes for one on another rank has to be sent there, and received.",
            _says(_MESSAGES, [0, 0]),
        ),
        *_complaints(
            "Something is not sent. Each forward but the last stage's makes an output that the next stage needs, each "
            "backward but the first stage's a gradient that the stage before needs.",
            *(kind_text(Fault.MISSING, op) for op in SENDS),
        ),
        *_complaints(
            "Something is sent that nobody receives. A message has two ends, on two ranks.",
            *(kind_text(Fault.MISSING, op) for op in RECVS),
        ),
        *_complaints(
            "A message is there more than once: each is sent once and received once.",
            *(kind_text(Fault.REPEATED, op) for op in (*SENDS, *RECVS)),
        ),
        *_complaints(
            "Messages between two ranks are received in another order than they are sent. They carry no names: the "
            "second would be taken for the first.",
            kind_text(Fault.CROSSED, Op.RECV_F, Op.SEND_F),
            kind_text(Fault.CROSSED, Op.RECV_B, Op.SEND_B),
        ),
        *_complaints(
            "Something is received behind what computes with it.",
            kind_text(Fault.TOO_LATE, Op.RECV_F, Op.F),
            kind_text(Fault.TOO_LATE, Op.RECV_B, Op.B),
        ),
        *_complaints(
            "Something is sent before it is made.",
            kind_text(Fault.TOO_EARLY, Op.SEND_F, Op.F),
            kind_text(Fault.TOO_EARLY, Op.SEND_B, Op.B),
        ),
        *_complaints(
            "A message carries nothing that anybody needs. Behind the last stage comes the loss, and before the first "
            "one there are only the rows.",
            *(kind_text(Fault.NEEDLESS, op) for op in SENDS),
        ),
        *_complaints(
            "A receive bears the number of the sender's stage. Each action belongs to the stage that does it: what "
            "stage 0 sends by 0SEND_F0, stage 1 receives by 1RECV_F0.",
            *(kind_text(Fault.WRONG_RANK, op) for op in RECVS),
        ),
        Mistake(
            "What is computed, or in which order, is not as it was given. Only put messages between.",
            _says(_COMPUTE, _OTHER),
        ),
        Mistake(
            "Nothing hangs, but messages leave later than they could. What an action has made can be sent right behind "
            "it, before its rank computes anything else.",
            _says(_LEAVE, _LATE),
        ),
    ),
)

EXERCISES = (WITH_MESSAGES,)
