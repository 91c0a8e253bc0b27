"""The programs that an exercise lists, judged as a learner's answer is: right ones must pass, wrong ones be named.

So must the engine's own mistakes, the slips in results, for which no exercise needs a list.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

from course.check.compare import ANYTHING, SEEN, Data, results_of_part, same
from course.check.edits import Edited
from course.check.exercise import Exercise, Mistake
from course.check.judge import PASS, CaseVerdict, judge
from course.check.mutants import mutants, written
from course.check.running import FAIL, NoAnswer, in_ranks
from course.check.slips import slips

FEWEST_RIGHT, FEWEST_WRONG = 2, 3  # programs that an exercise lists, and each of its variants
AT_ONCE = 6  # mutants in one run, where a run is slow: if one of them raises an error or never ends, each runs alone
SLOW_S = 10
Tried = list[tuple[bool, list[CaseVerdict]]]  # of each program, whether it came out as it must, and its cases


def too_few(exercise: Exercise) -> list[str]:
    """A sentence for each kind of program of which the exercise, or a variant of it, has too few."""
    found = []
    for row, one in exercise.rows.items():
        counts = ("right", len(one.right), FEWEST_RIGHT), ("wrong", len(one.mistakes), FEWEST_WRONG)
        name = f"{exercise.id}, row {row}" if row else exercise.id
        found += [f"{name} needs {least} {kind} programs, and has {n}" for kind, n, least in counts if n < least]
    return found


def try_right(exercise: Exercise, seed: int) -> Tried:
    """Each right program must pass in all cases."""
    n = len(exercise.ranks) * len(exercise.parts)
    found = judge(exercise, exercise.right, seed)
    return [([(case.status, case.hint) for case in cases] == [(PASS, "")] * n, cases) for cases in found]


def try_wrong(exercise: Exercise, seed: int) -> Tried:
    """Each wrong program must fail, and be named by its own hint."""
    found = judge(exercise, [mistake.wrong for mistake in exercise.mistakes], seed)
    return [(_is_named(exercise, m, cases), cases) for m, cases in zip(exercise.mistakes, found, strict=True)]


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


def try_changed(exercise: Exercise, seed: int, count: int) -> Tried:
    """The results of right and wrong programs, with one changed at random: no mistake that predicts it may be named.

    Only the first number of ranks of the exercise is tried.
    """
    chosen = random.Random(seed)
    programs = [exercise.right[0], *(mistake.wrong for mistake in exercise.mistakes if not mistake.hangs)]
    spoilt: list[tuple[list[Data], int, str]] = []  # of each answer: all inputs, the rank and the name of the result

    def changed(exercise: Exercise, answers: list, inputs: list[Data]) -> list[list[Data] | NoAnswer]:
        found = in_ranks(exercise, answers, inputs)
        for ranks in (one for one in found if not isinstance(one, NoAnswer)):
            rank = chosen.choice([rank for rank, one in enumerate(ranks) if results_of_part(one)])
            name = chosen.choice([*results_of_part(ranks[rank])])
            ranks[rank] = ranks[rank] | {name: f"changed to {chosen.random()}"}
            spoilt.append((inputs, rank, name))
        return found

    def predicts(mistake: Mistake, inputs: list[Data], rank: int, name: str) -> bool:
        (ranks,) = in_ranks(exercise, [mistake.wrong], inputs)
        return not same({name: "changed"}, {name: mistake.predicted(ranks[rank]).get(name, ANYTHING)})

    answers = [chosen.choice(programs) for _ in range(count)]
    tried = judge(replace(exercise, ranks=exercise.ranks[:1]), answers, seed, changed)
    return [
        (not any(case.mistake and predicts(case.mistake, *what) for case in cases), cases)
        for cases, what in zip(tried, spoilt, strict=True)
    ]


def try_mutants(exercise: Exercise, seed: int) -> list[tuple[bool, str]]:
    """Each mutant of the solution must fail, unless it is listed as equivalent: whether it does, and its text."""
    if exercise.solution is None:
        return []
    left = [mutant for _, mutant in mutants(exercise.solution)]
    reasons = {(m.wrong.text, m.wrong.expression): m.hint for m in exercise.equivalent}
    unknown = reasons.keys() - {(m.text, m.expression) for m in left}
    found = [(False, f"listed as equivalent, and no mutant: {hint}") for k, hint in reasons.items() if k in unknown]
    passing = _passing(exercise, left, seed)
    for mutant in left:
        as_it_must = mutant not in passing or (mutant.text, mutant.expression) in reasons
        found.append((as_it_must, written(mutant, exercise.solution)))
    return found


def _passing(exercise: Exercise, answers: list[Edited], seed: int) -> list[Edited]:
    """The answers that pass in all cases, without the search for the mistakes of the others."""
    left, at_once = answers, AT_ONCE if exercise.timeout_s > SLOW_S else 1

    def in_groups(exercise: Exercise, answers: list, inputs: list[Data]) -> list:
        groups = (answers[i : i + at_once] for i in range(0, len(answers), at_once))
        return [found for group in groups for found in in_ranks(exercise, group, inputs)]

    for ranks in exercise.ranks:
        bare = replace(exercise, mistakes=(), ranks=(ranks,), timeout_s=exercise.timeout_s / 2)
        found = judge(bare, left, seed, in_groups)
        left = [one for one, cases in zip(left, found, strict=True) if all(case.status == PASS for case in cases)]
    return left


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


def _is_named(exercise: Exercise, mistake: Mistake, cases: list[CaseVerdict]) -> bool:
    failed = [case for case in cases if case.status != PASS]
    said = [case.mistake.words if case.mistake else "" for case in failed]  # several programs have the same words
    return (
        {case.status for case in failed} == {FAIL}
        and (len(failed) == len(cases) or exercise.parts != ("",))  # it may be a mistake in one part of an exercise
        # Of an exercise with parts, each part may have its own name.
        and all(said)
        and said[-1] == mistake.words
    )
