"""Chapter 12, a schedule that is under par: exercise 12.2."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lib.check.exercise import SEEN, Data, Exercise, Mistake
from lib.check.pipelines.written import KIND, NO, WORKS, YES, kind_of, kind_text, text_of
from lib.mesh import Group
from lib.pipeline.schedules.action import Op
from lib.pipeline.schedules.fault import Fault, ScheduleError
from lib.pipeline.workshop import SLACK, Par, workshop

_NAME = "beats_par"
_PAR = Par(num_ranks=4, num_microbatches=6, limit=4)
_KEPT, _MAY, _MORE = "what a rank keeps", "four microbatches at most", "more than four"
_TIME, _UNDER, _EQUAL, _OVER = "its time", "under par", "just par", "over par"
_BACKWARD, _HALVES, _WHOLE, _SOME = "its backwards", "in two halves", "in one piece", "some in one piece"
_STAGES, _ONE, _SEVERAL = "stages on each rank", "one", "several"


def _inputs(generator: torch.Generator, n: int) -> list[Data]:
    return [{}]


def _beats_par(answer: Callable, group: Group, given: Data) -> Data:
    try:
        verdict = workshop(text_of(answer()), _PAR)
    except ScheduleError as error:  # no text at all
        return {WORKS: NO, KIND: kind_of(error), SEEN: str(error)}
    seen = {SEEN: repr(verdict)}
    if verdict.error:
        return seen | {WORKS: NO, KIND: kind_of(verdict.error)}
    over = verdict.score.time - _PAR.time
    ops = {slot.action.op for slot in verdict.timeline.compute}
    return seen | {
        WORKS: YES,
        _KEPT: _MAY if verdict.score.in_limit else _MORE,
        _TIME: _EQUAL if abs(over) < SLACK else _OVER if over > 0 else _UNDER,
        _BACKWARD: _HALVES if Op.B not in ops else _SOME if Op.I in ops else _WHOLE,
        _STAGES: _ONE if verdict.schedule.num_stages == _PAR.num_ranks else _SEVERAL,
    }


def _reference(given: list[Data]) -> list[Data]:
    return [{WORKS: YES, _KEPT: _MAY, _TIME: _UNDER}]


def _is(entries: Data) -> Callable:
    return lambda given, want: [entries]


_HALF = (
    "A W is missing, or an I. Each is done once for each microbatch and stage. Nobody waits for a W, so it is easily "
    "forgotten."
)


BEATS_PAR = Exercise(
    id="12.2",
    title=_NAME,
    points=3,
    body=_beats_par,
    inputs=_inputs,
    reference=_reference,
    ranks=(1,),
    mistakes=(
        Mistake(
            "It works, but a rank keeps more than four microbatches. With more room ZB-H2 has no holes either: the "
            "game is to be fast in little room. Start fewer forwards before the first I, or do a W sooner.",
            _is({WORKS: YES, _KEPT: _MORE}),
        ),
        Mistake(
            "That is par, and with one stage on each rank nothing is faster: the last rank does nothing until a "
            "microbatch has passed three whole stages. Which idea of chapter 11 makes that shorter?",
            _is({WORKS: YES, _TIME: _EQUAL, _STAGES: _ONE}),
        ),
        Mistake(
            "That is par, with several stages on each rank: now less is to be had. Is all the room used? Four "
            "microbatches in two stages each are eight short stages. The last line below names one thing more.",
            _is({WORKS: YES, _TIME: _EQUAL, _STAGES: _SEVERAL}),
        ),
        Mistake(
            "It works, and takes longer than par. Your backwards are in one piece, so each rank waits for weight "
            "gradients that it does not need. Write I and W.",
            _is({WORKS: YES, _TIME: _OVER, _BACKWARD: _WHOLE}),
        ),
        Mistake(
            "It works, and takes longer than par. Some of your backwards are in one piece, and the stage before waits "
            "for all of it. Write I and W for them, too.",
            _is({WORKS: YES, _TIME: _OVER, _BACKWARD: _SOME}),
        ),
        Mistake(
            "It works, and takes longer than par. Look where a rank waits, and what it could do there: the last line "
            "below names one thing.",
            _is({WORKS: YES, _TIME: _OVER, _BACKWARD: _HALVES}),
        ),
        Mistake(
            "Nothing goes backward. Each microbatch also wants an I and a W, or a B, on each stage.",
            _is({KIND: kind_text(Fault.NO_BACKWARD)}),
        ),
        Mistake(_HALF, _is({KIND: kind_text(Fault.HALF, Op.I, Op.W)})),
        Mistake(_HALF, _is({KIND: kind_text(Fault.HALF, Op.W, Op.I)})),
        Mistake(
            "A microbatch does not come back through one of the stages. Each wants a backward there, or I and W.",
            _is({KIND: kind_text(Fault.MISSING, Op.B)}),
        ),
        Mistake(
            "A stage lacks a microbatch. There are six of them, numbered from 0, and each goes through all stages.",
            _is({KIND: kind_text(Fault.MISSING, Op.F)}),
        ),
        Mistake(
            "Ranks wait for each other. Put what is waited for in front of the wait.",
            _is({KIND: kind_text(Fault.CIRCLE)}),
        ),
        Mistake(
            "It is for other sizes: four lines are asked for, one for each rank, and six microbatches, 0 to 5.",
            _is({KIND: kind_text(Fault.OTHER_SIZES)}),
        ),
        Mistake("It cannot work. Below stands why.", _is({WORKS: NO})),
    ),
)

EXERCISES = (BEATS_PAR,)
