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

import torch

from course.check.compare import SEEN, Data, results_of_part, same
from course.check.difference import difference, filled
from course.check.exercise import Exercise, Mistake
from course.check.hints import CaseRun, WrongPrograms
from course.check.listen import THROUGH_COMM
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
        _, empty_line, seen = self.hint.partition("\n\n")
        return filled(self.mistake.words) + empty_line + seen


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
    run_answers = returned or in_ranks
    cases = []
    for ranks in exercise.ranks:
        inputs = exercise.inputs(_generator(seed, ranks), ranks)
        # The output of the learner's prints comes before the verdict, as in any cell.
        outcomes = run_answers(exercise, answers, inputs)
        reasons = [outcome for outcome in outcomes if isinstance(outcome, NoAnswer)]  # why there are no results
        nobody_returned = len(reasons) == len(outcomes)
        cases.append(CaseRun(inputs, [] if nobody_returned else _right(exercise, inputs), outcomes))
        if nobody_returned and all(reason.status == TODO for reason in reasons):
            break
    wrong = WrongPrograms(exercise, cases)
    verdicts: list[list[CaseVerdict]] = [[] for _ in answers]
    for answer, of_answer in enumerate(verdicts):
        for at in range(len(cases)):
            of_answer += [_verdict(wrong, answer, at, part) for part in exercise.parts]
    return verdicts


def _generator(seed: int, ranks: int) -> torch.Generator:
    """For the inputs of a case: its numbers depend on the seed and on the number of ranks."""
    return torch.Generator().manual_seed(random.Random(f"{seed} {ranks}").getrandbits(62))


def _verdict(wrong: WrongPrograms, answer: int, at: int, part: str) -> CaseVerdict:
    """The verdict on an answer, by its number, in a part of the case with number `at`."""
    case, exercise = wrong.cases[at], wrong.exercise
    name = _name(len(case.inputs), part)
    results = case.outcomes[answer]
    if isinstance(results, NoAnswer):
        mistake = wrong.named(answer, at, part)
        return CaseVerdict(name, results.status, _hint_without_results(results, mistake), mistake)
    right = [results_of_part(of_rank, part) for of_rank in case.right]
    share = _share(exercise, results, right)
    if _all_same(results, right, exercise):
        line = _line_through_comm(results)
        if line:
            return CaseVerdict(name, FAIL, f"{filled(USES_COMM)}\n  {line}", share=share)
        return CaseVerdict(name, PASS, share=share)
    mistake = wrong.named(answer, at, part)
    said = filled(mistake.hint) if mistake else _unnamed(exercise, results, right)
    return CaseVerdict(name, FAIL, said + _seen(results, part), mistake, share)


def _hint_without_results(outcome: NoAnswer, mistake: Mistake | None) -> str:
    """Why an answer returned nothing, below the mistake that it has made, if that is known."""
    if not mistake:
        return outcome.hint
    report, _, _ = outcome.hint.rpartition("\n")  # its last line is what to do, and the mistake's is better
    return f"{filled(mistake.hint)}\n\n{report}"


def _all_same(results: list[Data], right: list[Data], exercise: Exercise) -> bool:
    """Whether each rank's results are right."""
    ranks = zip(results, right, strict=True)
    return all(same(of_rank, right_there, exercise.tolerances) for of_rank, right_there in ranks)


def _line_through_comm(results: list[Data]) -> str:
    """The first line of the answer that calls `lib.comm`, where the exercise listens to that; or ""."""
    for of_rank in results:
        line = of_rank.get(THROUGH_COMM)
        if line:
            return line
    return ""


def _unnamed(exercise: Exercise, results: list[Data], right: list[Data]) -> str:
    """What is said of wrong results that no listed mistake explains: a slip, if it is one, and what differs first."""
    differs = difference(results, right, exercise.tolerances, exercise.is_fixed)
    if exercise.is_fixed:
        return differs
    slip = named_slip(results, right, exercise.tolerances)
    return f"{filled(slip)}\n{differs}" if slip else differs


def _share(exercise: Exercise, results: list[Data], right: list[Data]) -> float:
    """The fraction of the sizes that are right, where one process calls an answer with several.

    A table of findings has no sizes: a guess may be right. Nor has an answer that returns the same for each.
    """
    if len(results) > 1 or exercise.is_fixed:
        return 0.0
    (returned,), (expected,) = results, right
    of_sizes = _by_size(exercise, expected)
    different = {repr([returned.get(name) for name in of_size]) for of_size in of_sizes}
    if len(different) < 2:
        return 0.0
    return sum(same(returned, of_size, exercise.tolerances) for of_size in of_sizes) / len(of_sizes)


def _by_size(exercise: Exercise, expected: Data) -> list[Data]:
    """The expected results of each size, which the name of a result begins with; none if a result has no size.

    The beginning is a call, `shard(10, 4)`, or a word and a number or letter: `rank 3`, `run B`, `4 ranks`.
    """
    begin = re.compile(rf"(?:{re.escape(exercise.title)}\(.*\)|\w+ (?:\d+|[A-Z])|\d+ \w+)(?=: |\[|$)", re.DOTALL)
    of_size: dict[str, Data] = defaultdict(dict)
    for name, value in expected.items():
        size = begin.match(name)
        if not size:
            return []
        of_size[size[0]][name] = value
    return [*of_size.values()]


def cases_of(exercise: Exercise) -> list[tuple[int, str]]:
    """Number of ranks and name of each case, in the order of the verdicts."""
    return [(ranks, _name(ranks, part)) for ranks in exercise.ranks for part in exercise.parts]


def dealt(points: float, count: int) -> list[float]:
    """The points of each of so many cases, in hundredths: they differ by one at most, and their sum is `points`."""
    sums = [round(points * k / count, 2) for k in range(count + 1)]
    return [round(after - before, 2) for before, after in pairwise(sums)]


def _name(ranks: int, part: str) -> str:
    if part:
        return part
    return f"{ranks} ranks" if ranks > 1 else "several sizes"


def new_seed() -> int:
    return int.from_bytes(os.urandom(3), "big")


def _right(exercise: Exercise, inputs: list[Data]) -> list[Data]:
    """The right results of each rank."""
    if exercise.reference:
        return exercise.reference(inputs)
    (outcome,) = in_ranks(exercise, exercise.right[:1], inputs)
    if isinstance(outcome, NoAnswer):
        raise RuntimeError(f"the right answer to {exercise.id} does not run: {outcome.hint}")
    return outcome


def _seen(results: list[Data], part: str) -> str:
    """The text that a rank returns for the reader, for the full exercise or for one part."""
    for of_rank in results:
        text = of_rank.get(part + SEEN)
        if text:
            return f"\n\n{text}"
    return ""
