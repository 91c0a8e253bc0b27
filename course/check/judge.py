"""Run an answer in ranks, compare the results with the expected ones, and give a verdict."""

from __future__ import annotations

import math
import os
import random
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from course.check.compare import SEEN, Data, results_of_part, same
from course.check.difference import difference, filled
from course.check.exercise import Exercise, Mistake
from course.check.listen import THROUGH_COMM
from course.check.naming import CaseRun, WrongPrograms
from course.check.running import FAIL, TODO, NoAnswer, in_ranks
from course.check.slips import named_slip

PASS = "PASS"
USES_COMM = (
    "The values are right, but this exercise is for torch.distributed alone, and a line of yours calls lib.comm:"
)


@dataclass(frozen=True)
class CaseVerdict:
    """The verdict on one case: `status` is PASS, FAIL or TODO; `hint` helps further, and is empty after a PASS.

    `mistake` is the one that the hint names, if it has a name. `share` is the fraction of the points that it gets.
    """

    case: str
    status: str
    hint: str = ""
    mistake: Mistake | None = None
    share: float = 0.0

    def of(self, points: float) -> float:
        """The points of the case that the answer gets, in hundredths; only a PASS gets all."""
        return points if self.status == PASS else math.floor(100 * points * self.share + 1e-6) / 100

    @property
    def advice(self) -> str:
        """The hint, with what to do behind the sentence that names the mistake."""
        if not self.mistake:
            return self.hint
        _, *seen = self.hint.partition("\n\n")
        return filled(self.mistake.words) + "".join(seen)


Outcome = tuple[Any, ...]  # status, hint and mistake of a case, as of a `CaseVerdict`; a PASS needs no more


def judge(
    exercise: Exercise, answers: Sequence[Callable], seed: int, returned: Callable | None = None
) -> list[list[CaseVerdict]]:
    """For each answer, the verdicts on all cases of the exercise, with inputs that only depend on `seed`.

    Several answers run in sequence in the same ranks, because starting ranks takes longer than most answers.
    Each answer is judged alone: if one raises, hangs or leaves a message in flight, each gets its own ranks.

    Args:
        exercise: the exercise.
        answers: functions, or each a `course.check.source.Answer`.
        seed: of the inputs.
        returned: runs the answers instead of `in_ranks`; a grader isolates them.
    """
    cases = []
    for ranks in exercise.ranks:
        generator = torch.Generator().manual_seed(random.Random(f"{seed} {ranks}").getrandbits(62))
        inputs = exercise.inputs(generator, ranks)
        # The output of the learner's prints comes before the verdict, as in any cell.
        outcomes = (returned or in_ranks)(exercise, answers, inputs)
        there = [got for got in outcomes if not isinstance(got, NoAnswer)]
        cases.append(CaseRun(inputs, _right(exercise, inputs) if there else [], outcomes))
        if all(isinstance(got, NoAnswer) and got.status == TODO for got in outcomes):
            break
    wrong = WrongPrograms(exercise, cases)
    return [
        [
            CaseVerdict(
                _name(len(case.inputs), part),
                *_outcome(wrong, answer, at, part),
                share=_share(exercise, case, answer, part),
            )
            for at, case in enumerate(cases)
            for part in exercise.parts
        ]
        for answer in range(len(answers))
    ]


def _outcome(wrong: WrongPrograms, answer: int, at: int, part: str) -> Outcome:
    """The outcome of an answer, by its number, in a part of the case with number `at`."""
    case, tolerances = wrong.cases[at], wrong.exercise.tolerances
    got = case.outcomes[answer]
    if isinstance(got, NoAnswer):
        if not (mistake := wrong.named(answer, at, part)):
            return got.status, got.hint
        report, _, _ = got.hint.rpartition("\n")  # its last line is what to do, and the mistake's is better
        return got.status, f"{filled(mistake.hint)}\n\n{report}", mistake
    right = [results_of_part(one, part) for one in case.right]
    if all(same(g, r, tolerances) for g, r in zip(got, right, strict=True)):
        line = next((g[THROUGH_COMM] for g in got if g.get(THROUGH_COMM)), "")
        return (FAIL, f"{filled(USES_COMM)}\n  {line}") if line else (PASS,)
    if mistake := wrong.named(answer, at, part):
        return FAIL, filled(mistake.hint) + _seen(got, part), mistake
    is_fixed = wrong.exercise.is_fixed
    slip = "" if is_fixed else named_slip(got, right, tolerances)
    return FAIL, filled(slip) + "\n" * bool(slip) + difference(got, right, tolerances, is_fixed) + _seen(got, part)


def _share(exercise: Exercise, case: CaseRun, answer: int, part: str) -> float:
    """The fraction of the sizes that are right, where one process calls an answer with several.

    A table of findings has no sizes: a guess may be right. Nor has an answer that returns the same for each.
    """
    got = case.outcomes[answer]
    if isinstance(got, NoAnswer) or len(got) > 1 or exercise.is_fixed:
        return 0.0
    size = re.compile(rf"(?:{re.escape(exercise.title)}\(.*\)|\w+ (?:\d+|[A-Z])|\d+ \w+)(?=: |\[|$)", re.DOTALL)
    found: dict[str, Data] = defaultdict(dict)
    for name, value in results_of_part(case.right[0], part).items():
        if not (of := size.match(name)):
            return 0.0
        found[of[0]][name] = value
    returned = {repr([got[0].get(name) for name in names]) for names in found.values()}
    if len(returned) < 2:
        return 0.0
    return sum(same(got[0], right, exercise.tolerances) for right in found.values()) / len(found)


def cases_of(exercise: Exercise) -> list[tuple[int, str]]:
    """Number of ranks and name of each case, in the order of the verdicts."""
    return [(ranks, _name(ranks, part)) for ranks in exercise.ranks for part in exercise.parts]


def dealt(points: float, count: int) -> list[float]:
    """The points of each of so many cases, in hundredths: they differ by one at most, and their sum is `points`."""
    sums = [round(points * k / count, 2) for k in range(count + 1)]
    return [round(after - before, 2) for before, after in pairwise(sums)]


def _name(ranks: int, part: str) -> str:
    return part or (f"{ranks} ranks" if ranks > 1 else "several sizes")


def new_seed() -> int:
    return int.from_bytes(os.urandom(3), "big")


def _right(exercise: Exercise, inputs: list[Data]) -> list[Data]:
    if exercise.reference:
        return exercise.reference(inputs)
    (got,) = in_ranks(exercise, exercise.right[:1], inputs)
    if isinstance(got, NoAnswer):
        raise RuntimeError(f"the right answer to {exercise.id} does not run: {got.hint}")
    return got


def _seen(got: list[Data], part: str) -> str:
    """The text that a rank returns for the reader, for the full exercise or for one part."""
    return next((f"\n\n{found[part + SEEN]}" for found in got if found.get(part + SEEN)), "")
