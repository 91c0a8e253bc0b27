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
    sentences = []
    for row, variant in exercise.rows.items():
        name = f"{exercise.id}, row {row}" if row else exercise.id
        rights, wrongs = len(variant.right), len(variant.mistakes)
        if rights < FEWEST_RIGHT:
            sentences.append(f"{name} needs {FEWEST_RIGHT} right programs, and has {rights}")
        if wrongs < FEWEST_WRONG:
            sentences.append(f"{name} needs {FEWEST_WRONG} wrong programs, and has {wrongs}")
    return sentences


def try_right(exercise: Exercise, seed: int) -> Tried:
    """Each right program must pass in all cases."""
    count = len(exercise.ranks) * len(exercise.parts)
    tried = []
    for cases in judge(exercise, exercise.right, seed):
        passes = all(case.status == PASS and not case.hint for case in cases)
        tried.append((passes and len(cases) == count, cases))
    return tried


def try_wrong(exercise: Exercise, seed: int) -> Tried:
    """Each wrong program must fail, and be named by its own hint."""
    verdicts = judge(exercise, [mistake.wrong for mistake in exercise.mistakes], seed)
    programs = zip(exercise.mistakes, verdicts, strict=True)
    return [(_is_named(exercise, mistake, cases), cases) for mistake, cases in programs]


def try_slips(exercise: Exercise, seed: int) -> Tried:
    """The results of the first right program, with a slip in them, must fail by a sentence where they changed."""
    changes: list[list[bool]] = []  # of each case, whether each slip changes it

    def slipped(exercise: Exercise, answers: list, inputs: list[Data]) -> list[list[Data]]:
        (right,) = in_ranks(exercise, exercise.right[:1], inputs)
        of_slips = []
        for _, changed in islice(slips(len(inputs)), len(answers)):
            of_slips.append([_slip(of_rank, changed) for of_rank in right])
        for part in exercise.parts:
            changes.append([_differ(results, right, part) for results in of_slips])
        return of_slips

    count = min(len(list(slips(ranks))) for ranks in exercise.ranks)
    verdicts = judge(exercise, [len] * count, seed, slipped)
    changes_of_slips = zip(*changes, strict=True)  # of each slip, whether it changes each case
    tried = []
    for cases, changed_there in zip(verdicts, changes_of_slips, strict=True):
        if any(changed_there):
            fails_there = [case.status == FAIL and bool(case.hint) for case in cases]
            tried.append((fails_there == [*changed_there], cases))
    return tried


def try_changed(exercise: Exercise, seed: int, count: int) -> Tried:
    """The results of right and wrong programs, with one changed at random: no mistake that predicts it may be named.

    Only the first number of ranks of the exercise is tried.
    """
    chosen = random.Random(seed)
    programs = [exercise.right[0], *(mistake.wrong for mistake in exercise.mistakes if not mistake.hangs)]
    spoilt: list[tuple[list[Data], int, str]] = []  # of each answer: all inputs, the rank and the name of the result

    def changed(exercise: Exercise, answers: list, inputs: list[Data]) -> list[list[Data] | NoAnswer]:
        outcomes = in_ranks(exercise, answers, inputs)
        for results in outcomes:
            if isinstance(results, NoAnswer):
                continue
            with_results = [rank for rank, of_rank in enumerate(results) if results_of_part(of_rank)]
            rank = chosen.choice(with_results)
            name = chosen.choice([*results_of_part(results[rank])])
            results[rank] = results[rank] | {name: f"changed to {chosen.random()}"}
            spoilt.append((inputs, rank, name))
        return outcomes

    def predicts(mistake: Mistake, inputs: list[Data], rank: int, name: str) -> bool:
        (results,) = in_ranks(exercise, [mistake.wrong], inputs)
        predicted = mistake.predicted(results[rank]).get(name, ANYTHING)
        return not same({name: "changed"}, {name: predicted})

    answers = [chosen.choice(programs) for _ in range(count)]
    verdicts = judge(replace(exercise, ranks=exercise.ranks[:1]), answers, seed, changed)
    tried = []
    for cases, what in zip(verdicts, spoilt, strict=True):
        named = [case.mistake for case in cases if case.mistake]
        is_wrong = any(predicts(mistake, *what) for mistake in named)
        tried.append((not is_wrong, cases))
    return tried


def try_mutants(exercise: Exercise, seed: int) -> list[tuple[bool, str]]:
    """Each mutant of the solution must fail, unless it is listed as equivalent: whether it does, and its text."""
    if exercise.solution is None:
        return []
    all_mutants = [mutant for _, mutant in mutants(exercise.solution)]
    programs = {_program(mutant) for mutant in all_mutants}
    equivalent = {_program(listed.wrong): listed.hint for listed in exercise.equivalent}
    tried = []
    for program, reason in equivalent.items():
        if program not in programs:
            tried.append((False, f"listed as equivalent, and no mutant: {reason}"))
    passing = _passing(exercise, all_mutants, seed)
    for mutant in all_mutants:
        as_it_must = mutant not in passing or _program(mutant) in equivalent
        tried.append((as_it_must, written(mutant, exercise.solution)))
    return tried


def _program(mutant: Edited) -> tuple[str, str]:
    """What two mutants have in common that are the same."""
    return mutant.text, mutant.expression


def _passing(exercise: Exercise, answers: list[Edited], seed: int) -> list[Edited]:
    """The answers that pass in all cases, without the search for the mistakes of the others."""
    at_once = AT_ONCE if exercise.timeout_s > SLOW_S else 1

    def in_groups(exercise: Exercise, answers: list, inputs: list[Data]) -> list:
        outcomes = []
        for first in range(0, len(answers), at_once):
            outcomes += in_ranks(exercise, answers[first : first + at_once], inputs)
        return outcomes

    passing = answers
    for ranks in exercise.ranks:
        bare = replace(exercise, mistakes=(), ranks=(ranks,), timeout_s=exercise.timeout_s / 2)
        verdicts = zip(passing, judge(bare, passing, seed, in_groups), strict=True)
        passing = [answer for answer, cases in verdicts if all(case.status == PASS for case in cases)]
    return passing


def _slip(right: Data, changed: Callable) -> Data:
    """The results of a rank with the slip, in those values that it changes."""
    slipped = dict(right)
    for name, value in right.items():
        if not name.endswith(SEEN):
            with contextlib.suppress(TypeError):
                slipped[name] = changed(value)
    return slipped


def _differ(made: list[Data], right: list[Data], part: str) -> bool:
    """Whether the results differ in this part of the exercise."""
    for results, right_ones in zip(made, right, strict=True):
        right_there = {name: value for name, value in right_ones.items() if part in name}
        if not same(results, right_there):
            return True
    return False


def _is_named(exercise: Exercise, mistake: Mistake, cases: list[CaseVerdict]) -> bool:
    """Whether the mistake fails, each FAIL has a name, and the last one its own."""
    passed = [case for case in cases if case.status == PASS]
    failed = [case for case in cases if case.status == FAIL]
    if not failed or len(passed) + len(failed) < len(cases):
        return False
    has_parts = exercise.parts != ("",)
    if passed and not has_parts:  # it may be a mistake in one part of an exercise
        return False
    if not all(case.mistake for case in failed):
        return False
    named = failed[-1].mistake  # of an exercise with parts, each part may have its own name
    return named.words == mistake.words  # several programs have the same words
