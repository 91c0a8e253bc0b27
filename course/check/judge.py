"""Run an answer in ranks, compare the results with the expected ones, and give a verdict."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from course.check.difference import difference, filled
from course.check.exercise import SEEN, Data, Exercise, Mistake, same
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

    `mistake` is the one that the hint names, if it has a name.
    """

    case: str
    status: str
    hint: str = ""
    mistake: Mistake | None = None

    @property
    def advice(self) -> str:
        """The hint, with what to do behind the sentence that names the mistake."""
        if not self.mistake:
            return self.hint
        _, *seen = self.hint.partition("\n\n")
        return filled(self.mistake.words) + "".join(seen)


A_FEW = 4  # wrong programs that run first; then twice as many, and so on
# Of an answer, by its number, and a part that it failed: its mistake, if it has a name.
Known = dict[tuple[int, str], Mistake | None]
Outcome = tuple[Any, ...]  # status, hint and mistake of a case, as of a `CaseVerdict`; a PASS needs no more
# Of a program that hangs, and a number of ranks: the calls that they wait in, with any inputs. To find out takes 2 s.
_WAITS: dict[tuple[Mistake, int], str] = {}


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
    verdicts: list[list[CaseVerdict]] = [[] for _ in answers]
    known: Known = {}
    for ranks in exercise.ranks:
        generator = torch.Generator().manual_seed(random.Random(f"{seed} {ranks}").getrandbits(62))
        outcomes = _case(exercise, answers, exercise.inputs(generator, ranks), returned or in_ranks, known)
        for cases, parts in zip(verdicts, outcomes, strict=True):
            cases += [CaseVerdict(_name(ranks, part), *outcome) for part, outcome in parts.items()]
        if all(cases[-1].status == TODO for cases in verdicts):
            break
    return verdicts


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


def _case(
    exercise: Exercise, answers: Sequence[Callable], inputs: list[Data], returned: Callable, known: Known
) -> list[dict[str, Outcome]]:
    """For each answer, the outcome by part of the exercise; `known` has the mistakes of the cases before."""
    # The output of the learner's prints comes before the verdict, as in any cell.
    outcomes = returned(exercise, answers, inputs)
    there = [got for got in outcomes if not isinstance(got, NoAnswer)]
    expected = _expected(exercise, inputs) if there else []
    wrong = WrongPrograms(exercise, inputs, all_at_once=len(answers) > 1)
    hanging = [m for m in exercise.mistakes if isinstance(m, Mistake) and m.hangs]

    def hangs(mistake: Mistake) -> str:
        if (key := (mistake, len(inputs))) not in _WAITS:
            (looks_like,) = in_ranks(exercise, [mistake.wrong], inputs)
            _WAITS[key] = looks_like.stuck if isinstance(looks_like, NoAnswer) else ""
        return _WAITS[key]

    def outcome(k: int, got: list[Data] | NoAnswer, part: str) -> Outcome:
        if isinstance(got, NoAnswer):
            mistake = next((m for m in hanging if got.stuck and hangs(m) == got.stuck), None)
            if not mistake:
                return got.status, got.hint
            report, _, _ = got.hint.rpartition("\n")  # its last line is what to do, and the mistake's is better
            return got.status, f"{filled(mistake.hint)}\n\n{report}", mistake
        # A text for the reader is shown, not judged.
        of_part = [{k: v for k, v in one.items() if part in k and not k.endswith(SEEN)} for one in expected]
        if _agree(got, of_part):
            line = next((g[THROUGH_COMM] for g in got if g.get(THROUGH_COMM)), "")
            return (FAIL, f"{filled(USES_COMM)}\n  {line}") if line else (PASS,)
        if (k, part) not in known or known[k, part]:
            known[k, part] = wrong.first_that_fits(got, part, known.get((k, part)))
        mistake = known[k, part]
        if mistake:
            return FAIL, filled(mistake.hint) + _seen(got, part), mistake
        slip = named_slip(got, of_part)
        return FAIL, filled(slip) + "\n" * bool(slip) + difference(got, of_part) + _seen(got, part)

    return [{part: outcome(k, got, part) for part in exercise.parts} for k, got in enumerate(outcomes)]


def _expected(exercise: Exercise, inputs: list[Data]) -> list[Data]:
    if exercise.reference:
        return exercise.reference(inputs)
    (got,) = in_ranks(exercise, exercise.right[:1], inputs)
    if isinstance(got, NoAnswer):
        raise RuntimeError(f"the right answer to {exercise.id} does not run: {got.hint}")
    return got


def _agree(got: list[Data], expected: list[Data]) -> bool:
    return all(same(g, w) for g, w in zip(got, expected, strict=True))


class WrongPrograms:
    """The results of the wrong programs on the inputs of a case: they run when they are needed, a few at a time.

    A program that hangs takes seconds, and runs only after an answer hung.
    """

    def __init__(self, exercise: Exercise, inputs: list[Data], all_at_once: bool) -> None:
        self.exercise, self.inputs, self.all_at_once = exercise, inputs, all_at_once
        self.mistakes = [mistake for mistake in exercise.mistakes if not mistake.hangs]
        self.returned: dict[Mistake, list[Data] | NoAnswer] = {}

    def first_that_fits(self, got: list[Data], part: str, before: Mistake | None) -> Mistake | None:
        """The first mistake that returns the same; first of all `before`, this answer's mistake in an earlier case."""
        group, left, count = [before] if before else [], self.mistakes, A_FEW
        while group or left:
            self._run(group)
            if found := next((mistake for mistake in group if self._fits(mistake, got, part)), None):
                return found
            group, left, count = left[:count], left[count:], 2 * count
        return None

    def _run(self, group: list[Mistake]) -> None:
        left = [m for m in (self.mistakes if self.all_at_once else group) if m not in self.returned]
        if left:
            returned = in_ranks(self.exercise, [mistake.wrong for mistake in left], self.inputs)
            self.returned |= zip(left, returned, strict=True)

    def _fits(self, mistake: Mistake, got: list[Data], part: str) -> bool:
        looks_like = self.returned[mistake]
        return not isinstance(looks_like, NoAnswer) and all(
            mistake.fits(g, m, part) for g, m in zip(got, looks_like, strict=True)
        )


def _seen(got: list[Data], part: str) -> str:
    """The text that a rank returns for the reader, for the full exercise or for one part."""
    return next((f"\n\n{found[part + SEEN]}" for found in got if found.get(part + SEEN)), "")
