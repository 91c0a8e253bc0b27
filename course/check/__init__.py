"""Check your answer to an exercise: `check("03.1", average_gradients)`.

The answer runs in real ranks on new random inputs, and the judge compares the results in this process. The verdict is
PASS, TODO, or FAIL with a hint. The engine is in this folder; `course/exercises/` has a file for each exercise.

May import `lib.launch`, `lib.runtime`, `lib.comm`, `lib.mesh`; for its bill and its refusals `lib.cost`, `lib.layout`,
`lib.pipeline`, `lib.planner`; and in its catalogue `course.exercises`.
Must never know what an exercise asks.
"""

from __future__ import annotations

import difflib
import os
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from course.check import record, stale
from course.check.difference import filled
from course.check.exercise import Exercise, Mistake
from course.check.judge import PASS, CaseVerdict, dealt, judge, new_seed
from course.check.running import FAIL, TODO


def _environment_at_start() -> dict[str, str]:
    """The variables at the start of this process: a student's cell above the imports may change `os.environ`."""
    try:
        given = os.fsdecode(Path("/proc/self/environ").read_bytes())
    except OSError:  # not Linux
        given = ""
    return {**os.environ, **dict(entry.split("=", 1) for entry in given.split("\0") if "=" in entry)}


_STARTED = _environment_at_start()
NOTHING_YET = "Nothing is checked yet: run the cells above."
NBGRADER = bool(_STARTED.get("NBGRADER_EXECUTION"))
_session: dict[str, tuple[Exercise, float]] = {}  # id -> exercise and points, of all checks in this process
# id -> exercise, status, mistakes, and the call that checks again, of the last check of each, for `hint`
_judged: dict[str, tuple[Exercise, str, list[Mistake], str]] = {}


def check(
    exercise: str | Exercise, answer: Callable, seed: int | None = None, points: float | None = None, row: str = ""
) -> float | None:
    """Judge `answer`, and print the verdict.

    Args:
        exercise: the id of an exercise of the book, such as `"03.1"`, or a teacher's exercise.
        answer: your function.
        seed: gives the same inputs as an earlier check; None: new random inputs.
        points: the points of the exercise in a homework; None: its points in the book.
        row: the letter of a variant, in a homework that has them; "": the task in the book.

    Returns:
        None; under nbgrader, the points of an answer that is partly right: nbgrader counts the number that the last
        line of a cell returns.

    Raises:
        ValueError: there is no such exercise, or no such row.
        TypeError: the answer is not a function.
        AssertionError: only under a grader. nbgrader: the answer has no points. A different grader, with
            `CHECK_STRICT=1` in its environment: the answer does not pass.
    """
    text, status = verdict(exercise, answer, seed, points, row)
    sys.stdout.write(text + "\n")  # in one piece, or a notebook may store two outputs
    if not _strict() or status == PASS:
        return None
    _, got = _session[find(exercise).id]
    if got and NBGRADER:
        return got
    raise AssertionError(text)


def verdict(
    exercise: str | Exercise,
    answer: Callable,
    seed: int | None = None,
    points: float | None = None,
    row: str = "",
    told: bool = False,
    asked_by: str = "hint()",
) -> tuple[str, str]:
    """The text that `check` prints, and PASS, FAIL or TODO.

    Of a mistake, the text says what is wrong; and what to do if this is `told`, if the answer had the mistake before,
    or to a grader. Otherwise it says who is `asked_by` the learner for this.
    """
    named = f'"{exercise}"' if isinstance(exercise, str) else "…"
    exercise = _counting(in_row(find(exercise), row), points)
    if not callable(answer):
        raise TypeError(f"check({named}, ...) needs your function {exercise.title}, not {type(answer).__name__}")
    seed = new_seed() if seed is None else seed
    (verdicts,) = judge(exercise, [answer], seed)
    each = [v.of(most) for v, most in zip(verdicts, dealt(exercise.points, len(verdicts)), strict=True)]
    got = round(sum(each), 2)
    status = PASS if all(v.status == PASS for v in verdicts) else TODO if verdicts[0].status == TODO else FAIL
    _session[exercise.id] = exercise, got
    mistakes = [v.mistake for v in verdicts if v.mistake]
    told_of = {m.hint for m in mistakes} if told or _strict() else record.met_in(exercise)
    if status != TODO and not _strict():
        record.keep(exercise, got, [m.hint for m in mistakes])
    again = on_the_same_numbers(exercise, seed, points, named)
    _judged.pop(exercise.id, None)  # the last one is the last in order
    _judged[exercise.id] = exercise, status, mistakes, again
    text = _text(exercise, status, got, [*zip(verdicts, each, strict=True)], told_of, stale.sentence(answer))
    if any(m.repair and m.hint not in told_of for m in mistakes):
        text += f"\n  What to do: {asked_by}, or the same mistake once more."
    return text + f"\n  The same numbers again: {again}" * (status == FAIL), status


def on_the_same_numbers(exercise: Exercise, seed: int, points: float | None = None, named: str = "") -> str:
    """The call that checks an answer again with these inputs; `named`: an exercise that is not the book's."""
    chosen = f'row="{exercise.row}", ' * bool(exercise.row) + ("" if points is None else f"points={points:g}, ")
    named = named or f'"{exercise.id}"'
    return f"check({named}, {exercise.title}, {chosen}seed={seed})"


def hint(exercise: str | Exercise = "") -> None:
    """Print what to do about the mistake that a check named.

    Args:
        exercise: as of `check`; "": the exercise that was checked last.
    """
    sys.stdout.write(what_to_do(exercise) + "\n")


def what_to_do(exercise: str | Exercise = "") -> str:
    """The text that `hint` prints."""
    asked = find(exercise).id if exercise else next(reversed(_judged), "")
    if asked not in _judged:
        return f"{asked or 'Nothing'} is not checked yet: run its check, then hint()."
    one, status, mistakes, again = _judged[asked]
    title = f"{one.id} {one.title}"
    if status != FAIL:
        return f"{title} passes." if status == PASS else f"{title} has no lines of yours yet: write some, and check."
    if repairs := dict.fromkeys(m.repair for m in mistakes if m.repair):
        return "\n".join([title, *(textwrap.indent(filled(repair), "  ") for repair in repairs)])
    if mistakes:
        return f"{title}: the check has said all that it knows of this mistake."
    return (
        f"{title}: no mistake that is known here does this. Print what each rank has, on the same numbers:\n  {again}"
    )


def missing(exercise_id: str, why: str = "", points: float | None = None) -> tuple[str, str]:
    """The verdict on a missing answer; `why` is its sentence, by default of a lost cell."""
    from course.check.catalogue import BrokenExercise

    try:
        exercise = _counting(find(exercise_id), points)
    except BrokenExercise as error:
        return f"{FAIL}  {exercise_id}\n  {error}.", FAIL
    why = why or f'No cell calls check("{exercise.id}", {exercise.title}).'
    _session[exercise.id] = exercise, 0
    return f"{FAIL}  {exercise.id} {exercise.title}   0/{exercise.points:g} points\n  {why}", FAIL


def in_row(exercise: Exercise, row: str) -> Exercise:
    """The variant with this letter; "" is the exercise itself.

    Raises:
        ValueError: there is no such row.
    """
    if (row := row.upper()) not in exercise.rows:
        there = f"has the rows {', '.join(filter(None, exercise.rows))}" if exercise.variants else "has no rows"
        raise ValueError(f"{exercise.id} {there}, and row is {row!r}")
    return exercise.rows[row]


def _counting(exercise: Exercise, points: float | None) -> Exercise:
    return exercise if points is None else replace(exercise, points=points)


def find(exercise: str | Exercise) -> Exercise:
    """The exercise with this id; a teacher's exercise is returned unchanged."""
    if isinstance(exercise, Exercise):
        return exercise
    from course.check.catalogue import EXERCISES  # not in a rank: a rank imports only the exercise that it runs

    if exercise in EXERCISES:
        return EXERCISES[exercise]
    # "5.4" is one letter from 15.4, and means 05.4.
    near = difflib.get_close_matches(str(exercise), EXERCISES, n=1)
    near = [padded] if (padded := f"0{str(exercise).strip()}") in EXERCISES else near
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(EXERCISES))}"
    raise ValueError(f"there is no exercise {exercise!r}; {hint}")


def progress(asked: Mapping[str, float] | None = None) -> None:
    """Print the points of the exercises of this notebook and of all chapters, and the next exercise.

    Args:
        asked: exercise -> points, of a homework's notebook; then only these are printed.
    """
    if asked:
        found = {i: (_counting(find(i), points), 0.0) for i, points in asked.items()}
        found |= {i: row for i, row in _session.items() if i in asked}
        lines = [*_table(found), next_of(found)]
    elif _strict():
        lines = _table(_here()) if _session else [NOTHING_YET]
    else:
        here = ["In this session:", *_table(_here(), record.kept())] if _session else [NOTHING_YET]
        lines = [*here, "", "Best so far, with earlier sessions:", record.all_chapters()]
    sys.stdout.write("\n".join(lines) + "\n")


def next_of(found: dict[str, tuple[Exercise, float]]) -> str:
    left = [exercise for exercise, points in found.values() if points < exercise.points]
    return f"Next to do: {left[0].id} {left[0].title}" if left else "All exercises of this notebook are done."


def total() -> str:
    """The points of the chapters that were checked here, in a line."""
    return f"{_table(_here())[-1].split(maxsplit=1)[1]} in what was checked"


def _here() -> dict[str, tuple[Exercise, float]]:
    """All exercises of each chapter that was checked here, and a teacher's exercises that were checked."""
    from course.check.catalogue import EXERCISES

    of_book = {exercise.chapter for exercise, _ in _session.values() if exercise is EXERCISES.get(exercise.id)}
    able, _ = EXERCISES.able(of_book)  # `progress` lists broken ones under all chapters
    return {exercise.id: (exercise, 0.0) for exercise in able} | _session


def _table(found: dict[str, tuple[Exercise, float]], before: Mapping[str, float] = MappingProxyType({})) -> list[str]:
    """A line for each exercise, and the sum. `before`: exercise → fraction of its points in the record."""
    rows = [found[i] for i in sorted(found)]
    width = max(len(e.title) for e, _ in rows)
    lines = [f"{e.id}  {e.title:<{width}}  {points:g}/{e.points:g}{_not_yet(e, before)}" for e, points in rows]
    total, possible = sum(p for _, p in rows), sum(e.points for e, _ in rows)
    return [*lines, f"{'all':<{width + 6}}  {total:g}/{possible:g} points"]


def _not_yet(exercise: Exercise, before: Mapping[str, float]) -> str:
    """The words after the points of an exercise that was not checked in this session."""
    if exercise.id in _session:
        return ""
    if exercise.id not in before:
        return "   not checked yet"
    return f"   not checked yet, {round(before[exercise.id] * exercise.points, 2):g} before"


def forget() -> None:
    """Begin again: nothing is checked here yet. The record of solved exercises stays."""
    _session.clear()
    _judged.clear()


def _text(
    exercise: Exercise,
    status: str,
    points: float,
    verdicts: list[tuple[CaseVerdict, float]],
    told_of: Collection[str],
    warning: str,
) -> str:
    row = f", row {exercise.row}" * bool(exercise.row)
    lines = [f"{status}  {exercise.id} {exercise.title}{row}   {points:g}/{exercise.points:g} points"]
    lines += [f"  {warning}"] * bool(warning)
    if status == TODO:
        return "\n".join([*lines, f"  {verdicts[0][0].hint}"])
    printed = None
    for v, got in verdicts:
        said = v.advice if v.mistake and v.mistake.hint in told_of else v.hint
        again_so = bool(said) and said == printed
        part = f", {got:g} points" if got and v.status != PASS else ""
        lines.append(f"  [{'x' if v.status == PASS else ' '}] {v.case}{part}{', as above' * again_so}")
        if said and not again_so:
            lines += [f"      {line}".rstrip() for line in said.splitlines()]
            printed = said
    return "\n".join(lines)


def _strict() -> bool:
    """Whether a grader checks: then a FAIL is an error, and the record of progress does not change.

    nbgrader gives a cell its points unless the cell raises. It sets `NBGRADER_EXECUTION` to "autograde" or "validate"
    while it runs a notebook, and to "" while it converts one, or runs the teacher's version for a page of solutions.
    """
    return NBGRADER or "1" in (os.environ.get("CHECK_STRICT"), _STARTED.get("CHECK_STRICT"))
