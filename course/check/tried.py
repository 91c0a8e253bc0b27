"""The programs that an exercise lists, judged as a learner's answer is: right ones must pass, wrong ones be named."""

from __future__ import annotations

from course.check.exercise import Exercise
from course.check.judge import FAIL, PASS, CaseVerdict, judge

Tried = list[tuple[bool, list[CaseVerdict]]]  # of each program, whether it came out as it must, and its cases


def try_right(exercise: Exercise, seed: int) -> Tried:
    """Each right program must pass in all cases."""
    n = len(exercise.ranks) * len(exercise.parts)
    found = judge(exercise, exercise.right, seed)
    return [([(case.status, case.hint) for case in cases] == [(PASS, "")] * n, cases) for cases in found]


def try_wrong(exercise: Exercise, seed: int) -> Tried:
    """Each wrong program must fail, and be named by its own hint."""
    found = judge(exercise, [mistake.wrong for mistake in exercise.mistakes], seed)
    return [(_is_named(exercise, m.hint, cases), cases) for m, cases in zip(exercise.mistakes, found, strict=True)]


def _is_named(exercise: Exercise, hint: str, cases: list[CaseVerdict]) -> bool:
    failed = [case for case in cases if case.status != PASS]
    hints = [" ".join(case.hint.partition("\n\n")[0].split()) for case in failed]  # before what was seen
    return (
        {case.status for case in failed} == {FAIL}
        and (len(failed) == len(cases) or exercise.parts != ("",))  # it may be a mistake in one part of an exercise
        # A mistake that takes a rank without samples is another mistake where all have some.
        and set(hints) <= {mistake.hint for mistake in exercise.mistakes}
        and hints[-1] == hint
    )
