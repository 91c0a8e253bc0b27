"""The programs that an exercise lists, judged as a learner's answer is: right ones must pass, wrong ones be named.

So must the engine's own mistakes, the slips in results, for which no exercise needs a list.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import islice

from course.check.exercise import SEEN, Data, Exercise, same
from course.check.judge import FAIL, PASS, CaseVerdict, in_ranks, judge
from course.check.slips import slips

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


def try_slips(exercise: Exercise, seed: int) -> Tried:
    """The results of the first right program, with a slip in them, must fail by a sentence where they changed."""
    changes: list[list[bool]] = []  # of each case, whether each slip changes it

    def slipped(exercise: Exercise, answers: list, inputs: list[Data]) -> list[list[Data]]:
        (right,) = in_ranks(exercise, exercise.right[:1], inputs)
        made = [[_slip(one, changed) for one in right] for _, changed in islice(slips(len(inputs)), len(answers))]
        changes.extend([_differ(one, right, part) for one in made] for part in exercise.parts)
        return made

    count = min(len(list(slips(ranks))) for ranks in exercise.ranks)
    found = judge(exercise, [len] * count, seed, slipped)
    return [
        ([case.status == FAIL and bool(case.hint) for case in cases] == [*wrong], cases)
        for cases, wrong in zip(found, zip(*changes, strict=True), strict=True)
        if any(wrong)
    ]


def _slip(right: Data, changed: Callable) -> Data:
    made = dict(right)
    for name, value in right.items():
        if not name.endswith(SEEN):
            with contextlib.suppress(TypeError):
                made[name] = changed(value)
    return made


def _differ(made: list[Data], right: list[Data], part: str) -> bool:
    """Whether the results differ in this part of the exercise."""
    return any(
        not same(m, {name: x for name, x in r.items() if part in name}) for m, r in zip(made, right, strict=True)
    )


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
