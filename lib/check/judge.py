"""Run an answer in ranks, look at what they return, and say what it is."""

from __future__ import annotations

import copy
import linecache
import os
import random
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lib.check.exercise import SEEN, Data, Exercise, same
from lib.check.listen import is_handle, must_be_in_step
from lib.launch import HangError, MismatchError, RankError, RunError, RunTimeout, run
from lib.mesh import Group

PASS, FAIL, TODO = "PASS", "FAIL", "TODO"
UNFINISHED = "a handle that nobody has waited for"
_HERE = os.path.dirname(os.path.abspath(__file__))
_LIBRARY = ('  File "lib/', '  File "torch/')  # how a traceback's frame begins that is not the learner's


@dataclass(frozen=True)
class CaseVerdict:
    """What one case came to: `status` is PASS, FAIL or TODO; `hint` says what to do, empty after a PASS."""

    case: str
    status: str
    hint: str = ""


def judge(exercise: Exercise, answers: Sequence[Callable], seed: int) -> list[list[CaseVerdict]]:
    """Of each answer, all cases of the exercise, each on numbers that only depend on `seed`.

    Several answers are tried one after the other in the same ranks, as to start ranks takes longer than most answers.
    None notices another: if one raises, hangs or leaves a message under way, each gets ranks of its own.
    """
    cases = []
    for ranks in exercise.ranks:
        name = f"{ranks} ranks" if ranks > 1 else "several sizes"
        generator = torch.Generator().manual_seed(random.Random(f"{seed} {ranks}").getrandbits(62))
        outcomes = _case(exercise, answers, ranks, exercise.inputs(generator, ranks))
        cases.append([CaseVerdict(name, status, hint) for status, hint in outcomes])
        if all(verdict.status == TODO for verdict in cases[-1]):
            break
    return [list(verdicts) for verdicts in zip(*cases, strict=True)]


def new_seed() -> int:
    return int.from_bytes(os.urandom(3), "big")


def _in_rank(
    world: Group, body: Callable, answers: Sequence[Callable], inputs: list[Data], cells: dict
) -> list[Data]:
    linecache.cache.update(cells)
    results = []
    for answer in answers:
        if results:
            must_be_in_step()
        with torch.random.fork_rng(devices=()):
            found = body(answer, world, copy.deepcopy(inputs[world.rank]))
        results.append({name: UNFINISHED if is_handle(value) else value for name, value in found.items()})
    return results


def _cells() -> dict:
    """The cells that `lib.check.source` has read: a rank needs their text to show the line of an error."""
    return {name: entry for name, entry in linecache.cache.items() if ".ipynb, code cell " in name}


def _case(exercise: Exercise, answers: Sequence[Callable], ranks: int, inputs: list[Data]) -> list[tuple[str, str]]:
    # The learner's prints come out before the verdict, as in any cell.
    timeout_s = exercise.timeout_s * len(answers)
    try:
        results = run(_in_rank, ranks, exercise.body, answers, inputs, _cells(), timeout_s=timeout_s)
    except (RunError, MismatchError, TypeError) as error:
        if len(answers) == 1:
            return [_why_none(exercise, error)]
        return [outcome for answer in answers for outcome in _case(exercise, [answer], ranks, inputs)]
    wanted = exercise.reference(inputs)
    return [_compare(exercise, inputs, list(got), wanted) for got in zip(*results, strict=True)]


def _why_none(exercise: Exercise, error: Exception) -> tuple[str, str]:
    """What is said of an answer from which nothing came back."""
    if isinstance(error, RankError):
        if error.error == "NotImplementedError" and _raised_by_learner(error.trace_back):
            return TODO, "Replace `raise NotImplementedError` by your own lines, then run this cell again."
        return FAIL, _own_lines(error)
    if isinstance(error, HangError):
        return FAIL, f"{_of_the_learner(str(error))}\n{_way_out(error)}"
    if isinstance(error, MismatchError):
        return FAIL, _of_the_learner(str(error))
    if isinstance(error, RunTimeout):
        return (
            FAIL,
            f"Your function did not return within {exercise.timeout_s:g} s. Is there an endless loop?\n"
            f"{_of_the_learner(str(error))}",
        )
    return FAIL, str(error).replace(f"{_in_rank.__name__} or its arguments", "Your function, or what it uses,")


def _compare(exercise: Exercise, inputs: list[Data], got: list[Data], wanted: list[Data]) -> tuple[str, str]:
    if all(same(g, w) for g, w in zip(got, wanted, strict=True)):
        return PASS, ""
    for mistake in exercise.mistakes:
        looks_like = mistake.answers(inputs, wanted)
        if all(same(g, m) for g, m in zip(got, looks_like, strict=True)):
            return FAIL, textwrap.fill(mistake.hint, 96, break_on_hyphens=False) + _seen(got)
    return FAIL, _difference(got, wanted) + _seen(got)


def _seen(got: list[Data]) -> str:
    """What a rank wants to be shown."""
    return next((f"\n\n{found[SEEN]}" for found in got if found.get(SEEN)), "")


def _raised_by_learner(trace_back: str) -> bool:
    """Whether the error of a rank comes from the learner's own line, and not from one of a library."""
    frames = [line for line in trace_back.splitlines() if re.match(r"  \S.*, line \d+", line)]
    return bool(frames) and not frames[-1].startswith(_LIBRARY)


def _own_lines(error: RankError) -> str:
    """Of a rank's traceback, what is the learner's: their frames, and the error itself."""
    if not error.trace_back:  # it died, and perhaps Python's fault handler said where
        first, *rest = str(error).splitlines()
        return "\n".join([first[0].upper() + first[1:] + ".", *(line for line in rest if _HERE not in line)])
    _, _, frames = error.trace_back.partition("\n")
    return f"Your function raised an error:\n{_of_the_learner(frames)}"


def _of_the_learner(text: str) -> str:
    """What ranks say, without frames of the library; a call of the judge's own comes after the learner's function."""
    own, keep = [], True
    for line in text.splitlines():
        if not line.startswith("   "):  # a frame begins, or a text of its own
            keep = not line.startswith(_LIBRARY)
        if keep:
            own.append(re.sub(r"  lib/check/\S+, line .*", "  your function has returned", line))
    return "\n".join(own)


def _way_out(error: HangError) -> str:
    waits = error.waits
    if error.circle and all(waits[rank].kind == "send" for rank in error.circle):
        who = "Every rank" if len(error.circle) == len(waits) else "Every rank of the circle"
        return f"{who} sends first, and a send ends only when it is received: start the receives too, then wait."
    if any(wait.late and len(wait.peers) > 1 for wait in waits.values()):
        return "Every rank of a group must make the same collective calls, in the same order."
    return "Look at what each rank waits for: somebody must do the opposite."


def _difference(got: list[Data], wanted: list[Data]) -> str:
    """The first entry that differs, in words."""
    for rank, (mine, want) in enumerate(zip(got, wanted, strict=True)):
        for name, value in want.items():
            if not same(mine, {name: value}):
                place, value, found = _first_difference(name, mine.get(name), value)
                who = f"Rank {rank}: " if len(got) > 1 else ""
                digits = 10 if _short(value) == _short(found) else 4
                value, found = (_short(x, digits) for x in (value, found))
                return f"{who}{place} is not right.\n  wanted  {value}\n  got     {found}"
    return "The result is not right."


def _first_difference(name: str, got: Any, want: Any) -> tuple[str, Any, Any]:
    """Down to the first item of a list, or row of a matrix, that is seen to differ: its name, wanted, got."""
    lists = isinstance(want, (list, tuple)) and isinstance(got, (list, tuple)) and len(want) == len(got)
    tensors = torch.is_tensor(want) and torch.is_tensor(got) and want.shape == got.shape
    looks_right = tensors and want.dim() and _short(got) == _short(want)  # its first numbers are
    if lists or (tensors and want.dim() > 1) or looks_right:
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            if not same({"": g}, {"": w}):
                return _first_difference(f"{name}[{i}]", g, w)
    return name, want, got


def _short(value: object, digits: int = 4) -> str:
    if value is None:
        return "None: is a `return` missing? (Functions of torch.distributed work in place and return None.)"
    if isinstance(value, torch.Tensor):
        numbers = ", ".join(f"{x:.{digits}g}" for x in value.flatten()[:4].tolist())
        return f"{list(value.shape)}: {numbers}{', …' if value.numel() > 4 else ''}" if value.dim() else numbers
    if isinstance(value, (list, tuple)):
        return f"{len(value)} of them: " + "; ".join(_short(v, digits) for v in value[:3])
    return repr(value)[:200]
