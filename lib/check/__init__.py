"""Check your answer to an exercise: `check("03.1", average_gradients)`.

The answer runs in real ranks on fresh random numbers, and what it returns is judged here. The verdict is PASS, TODO, or
FAIL with the mistake by its name. The engine is beside this file; each chapter's exercises have a folder.

May import what its exercises are about: `lib.launch`, `lib.runtime`, `lib.comm`, `lib.mesh`, `lib.trace`, `lib.cost`,
`lib.model`, `lib.memory`, `lib.placement`, `lib.facts`, `lib.conjugate`, `lib.deferred`, `lib.verify`, `lib.layout`,
`lib.data_parallel`, `lib.pipeline`, `lib.planner`.
Must never be known by any of them.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lib.check.exercise import Exercise
from lib.check.judge import FAIL, PASS, TODO, CaseVerdict, judge, new_seed

PROGRESS = Path(__file__).resolve().parents[2] / ".progress.json"

_session: dict[str, float] = {}  # exercise -> points, for what was checked in this process


def check(exercise_id: str, answer: Callable, seed: int | None = None) -> None:
    """Judge `answer`, and print the verdict.

    Args:
        exercise_id: such as `"03.1"`.
        answer: your function.
        seed: the same numbers as an earlier check; None for new ones.

    Raises:
        ValueError: there is no such exercise.
        TypeError: the answer is not a function.
        AssertionError: only where a machine grades (`CHECK_STRICT=1` in the environment, or under nbgrader): then
            everything but a PASS is an error.
    """
    text, status = verdict(exercise_id, answer, seed)
    sys.stdout.write(text + "\n")  # in one piece, or a notebook may store two outputs
    if _strict() and status != PASS:
        raise AssertionError(text)


def verdict(exercise_id: str, answer: Callable, seed: int | None = None) -> tuple[str, str]:
    """The text that `check` prints, and PASS, FAIL or TODO."""
    exercise = find(exercise_id)
    if not callable(answer):
        raise TypeError(
            f'check("{exercise_id}", ...) needs your function {exercise.title}, not {type(answer).__name__}'
        )
    seed = new_seed() if seed is None else seed
    (verdicts,) = judge(exercise, [answer], seed)
    passed = sum(v.status == PASS for v in verdicts)
    points = exercise.points * passed / len(exercise.ranks)
    status = PASS if passed == len(exercise.ranks) else TODO if verdicts[0].status == TODO else FAIL
    _session[exercise_id] = points
    if status != TODO and not _strict():
        _keep(exercise, points)
    return _text(exercise, status, points, verdicts, seed), status


def missing(exercise_id: str, why: str) -> tuple[str, str]:
    """The verdict on an answer that is not there, with a sentence that says so."""
    exercise = find(exercise_id)
    _session[exercise_id] = 0
    return f"{FAIL}  {exercise.id} {exercise.title}   0/{exercise.points} points\n  {why}", FAIL


def find(exercise_id: str) -> Exercise:
    """The exercise of that id."""
    from lib.check.catalogue import EXERCISES  # not in a rank, which finds the one that it runs by its path

    if exercise_id in EXERCISES:
        return EXERCISES[exercise_id]
    near = difflib.get_close_matches(str(exercise_id), EXERCISES, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(EXERCISES))}"
    raise ValueError(f"there is no exercise {exercise_id!r}; {hint}")


def progress() -> None:
    """Print the points of the exercises that were checked here."""
    if not _session:
        print("Nothing is checked yet: run the cells above.")
        return
    rows = [(find(i), _session[i]) for i in sorted(_session)]
    width = max(len(e.title) for e, _ in rows)
    lines = [f"{e.id}  {e.title:<{width}}  {points:g}/{e.points}" for e, points in rows]
    total, possible = sum(p for _, p in rows), sum(e.points for e, _ in rows)
    sys.stdout.write("\n".join([*lines, f"{'all':<{width + 6}}  {total:g}/{possible} points\n"]))


def _text(exercise: Exercise, status: str, points: float, verdicts: list[CaseVerdict], seed: int) -> str:
    lines = [f"{status}  {exercise.id} {exercise.title}   {points:g}/{exercise.points} points"]
    if status == TODO:
        return "\n".join([*lines, f"  {verdicts[0].hint}"])
    said = None
    for v in verdicts:
        lines.append(f"  [{'x' if v.status == PASS else ' '}] {v.case}")
        if v.hint and v.hint != said:
            lines += [f"      {line}".rstrip() for line in v.hint.splitlines()]
            said = v.hint
    if status == FAIL:
        lines.append(f'  The same numbers again: check("{exercise.id}", {exercise.title}, seed={seed})')
    return "\n".join(lines)


def _strict() -> bool:
    """Whether a machine checks: then a FAIL is an error, and nobody's progress changes.

    nbgrader gives a cell its points unless it raises. It sets `NBGRADER_EXECUTION` to "autograde" or "validate" while
    it runs a notebook, and to nothing where it only converts one, or runs the teacher's own for a page of solutions.
    """
    return os.environ.get("CHECK_STRICT") == "1" or bool(os.environ.get("NBGRADER_EXECUTION"))


def _keep(exercise: Exercise, points: float) -> None:
    """Remember the points in a file of the book's folder; for the reader, not for a grade."""
    try:
        kept = json.loads(PROGRESS.read_text(encoding="utf-8")) if PROGRESS.exists() else {}
        kept[exercise.id] = {"points": points, "max": exercise.points, "when": time.strftime("%Y-%m-%d %H:%M")}
        PROGRESS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    except (OSError, ValueError, TypeError):
        pass  # a folder that cannot be written, or a file that somebody edited: the verdict counts
