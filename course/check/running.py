"""Run answers in ranks: the results of each rank, or in words of the learner why there are none."""

from __future__ import annotations

import copy
import linecache
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from course.check.compare import Data, plain
from course.check.edits import Edited
from course.check.exercise import Exercise
from course.check.listen import is_handle, must_be_in_step, own_listeners
from course.check.source import Answer
from lib.launch import HangError, MismatchError, RankError, RunError, RunTimeout, run
from lib.mesh import Group
from lib.runtime.headroom import size_text

FAIL, TODO = "FAIL", "TODO"
MUCH_BYTES = 10**9  # of all ranks of an answer: no exercise needs so much memory
UNFINISHED = "a handle without a wait"
_HERE = os.path.dirname(os.path.abspath(__file__))
_LIBRARY = ('  File "lib/', '  File "course/', '  File "torch/')  # frames that are not the learner's


@dataclass(frozen=True)
class NoAnswer:
    """An answer that returned nothing: `status` is FAIL or TODO, `hint` says why.

    After a hang, `stuck` is the call that each rank waits in: a mistake that hangs in the same calls is recognised.
    `fault`: the machine could not run the answer, because it has too little memory or disk. `slow`: its time was over.
    """

    status: str
    hint: str
    stuck: str = ""
    fault: bool = False
    slow: bool = False


class _Loaded:
    """An answer that is text, on the way to a rank, which defines it on receipt, before the answer's time begins.

    On a busy machine the imports of a notebook take longer than its function.
    """

    def __init__(self, answer: Answer | Edited) -> None:
        self.answer = answer

    def __reduce__(self) -> tuple:
        return _load, (self.answer,)


def _load(answer: Answer | Edited) -> Callable:
    """The function; where it cannot be defined, one that raises the reason when it is called."""
    try:
        return answer.load()
    except Exception as error:
        why = error

        def raises(*args: object, **kwargs: object) -> None:
            raise why

        return raises


def in_ranks(exercise: Exercise, answers: Sequence[Callable], inputs: list[Data]) -> list[list[Data] | NoAnswer]:
    """For each answer, the results of all ranks, or the reason why there are none."""
    return as_compared(exercise, _in_ranks(exercise, answers, for_ranks(exercise, inputs)), inputs)


def for_ranks(exercise: Exercise, inputs: list[Data]) -> list[Data]:
    """The inputs that ranks get."""
    return [{name: x for name, x in given.items() if name not in exercise.withheld} for given in inputs]


def as_compared(
    exercise: Exercise, outcomes: list[list[Data] | NoAnswer], inputs: list[Data]
) -> list[list[Data] | NoAnswer]:
    """What ranks returned, as it is compared: each rank's results after `exercise.compared`."""
    if not exercise.compared:
        return outcomes

    def each(got: list[Data] | NoAnswer) -> list[Data] | NoAnswer:
        if isinstance(got, NoAnswer):
            return got
        try:
            return [exercise.compared(found, given) for found, given in zip(got, inputs, strict=True)]
        except Exception as error:  # an answer that took over its rank may return anything
            return NoAnswer(FAIL, f"The result of your function cannot be read: {type(error).__name__}: {error}")

    return [each(got) for got in outcomes]


def _in_ranks(exercise: Exercise, answers: Sequence[Callable], inputs: list[Data]) -> list[list[Data] | NoAnswer]:
    timeout_s = exercise.timeout_s * len(answers)
    sent = [_Loaded(answer) if isinstance(answer, Answer | Edited) else answer for answer in answers]
    try:
        results = run(_in_rank, len(inputs), exercise.body, sent, inputs, _cells(), timeout_s=timeout_s)
    except (RunError, MismatchError, TypeError) as error:
        if len(answers) == 1:
            about = {"fault": type(error) is RunError, "slow": isinstance(error, RunTimeout)}
            return [NoAnswer(*_why_none(exercise, error), _stuck(error), **about)]
        return [outcome for answer in answers for outcome in _in_ranks(exercise, [answer], inputs)]
    return [list(got) for got in zip(*results, strict=True)]


def _in_rank(
    world: Group, body: Callable, answers: Sequence[Callable], inputs: list[Data], cells: dict
) -> list[Data]:
    linecache.cache.update(cells)
    results = []
    for answer in answers:
        if results:
            must_be_in_step()
        with torch.random.fork_rng(devices=()), own_listeners():
            found = body(answer, world, copy.deepcopy(inputs[world.rank]))
        results.append({name: UNFINISHED if is_handle(value) else plain(value) for name, value in found.items()})
    return results


def _cells() -> dict:
    """The cells that `course.check.source` read: a rank needs their text to show the line of an error."""
    return {name: entry for name, entry in linecache.cache.items() if ".ipynb, code cell " in name}


def _why_none(exercise: Exercise, error: Exception) -> tuple[str, str]:
    """Status and hint of an answer that returned nothing."""
    if isinstance(error, RankError):
        if error.error == "NotImplementedError" and _raised_by_learner(error.trace_back):
            return TODO, "Replace `raise NotImplementedError` by your own lines, then run this cell again."
        return FAIL, _own_lines(error)
    if isinstance(error, HangError):
        return FAIL, _of_the_learner(str(error))
    if isinstance(error, MismatchError):
        return FAIL, _of_the_learner(str(error))
    if isinstance(error, RunTimeout):
        why = "Is there an endless loop?"
        if error.held_bytes > MUCH_BYTES:
            why = (
                f"Its ranks hold {size_text(error.held_bytes)} of memory together: to fill that much takes this time."
            )
        said = f"Your function did not return within {exercise.timeout_s:g} s. {why}"
        return FAIL, f"{said}\n{_of_the_learner(str(error))}"
    return FAIL, str(error).replace(
        f"{_in_rank.__name__} or its arguments", "Your function, or an object that it uses,"
    )


def _stuck(error: Exception) -> str:
    """The call that each rank waits in, after a hang."""
    waits = sorted(error.waits.items()) if isinstance(error, HangError) else []
    return "; ".join(f"rank {rank}: {call.kind} {call.peers}" for rank, call in waits)


def _raised_by_learner(trace_back: str) -> bool:
    """Whether a line of the learner raised the error, and not a line of a library."""
    frames = [line for line in trace_back.splitlines() if re.match(r"  \S.*, line \d+", line)]
    return bool(frames) and not frames[-1].startswith(_LIBRARY)


def _own_lines(error: RankError) -> str:
    """The learner's frames of a rank's traceback, and the error."""
    if not error.trace_back:  # the rank died; Python's fault handler may have printed where
        first, *rest = str(error).splitlines()
        return "\n".join([first[0].upper() + first[1:] + ".", *(line for line in rest if _HERE not in line)])
    _, _, frames = error.trace_back.partition("\n")
    return f"Your function raised an error:\n{_of_the_learner(frames)}"


def _of_the_learner(text: str) -> str:
    """The text of ranks, without frames of the library; a call by the judge comes after the learner's function."""
    own, keep = [], True
    for line in text.splitlines():
        if not line.startswith("   "):  # the start of a frame, or a line outside frames
            keep = not line.startswith(_LIBRARY)
        if keep:
            own.append(re.sub(r"  course/(?:check|exercises)/\S+, line .*", "  after your function returned", line))
    return "\n".join(own)
