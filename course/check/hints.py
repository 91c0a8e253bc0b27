"""Which hint an answer gets: that of the mistake which it has made, given only if all that it predicts is seen.

The problem: many wrong programs return the same with three ranks, or in one part of their results. Named by one case
alone, a learner is told of a mistake that was not made, and looks for it in vain.
The idea: a mistake is a wrong program, and so it predicts the results of every case. Its hint is given only where some
result is wrong that it predicts so, and where it predicts all others, too, of the parts that it is about.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from course.check.compare import Data, same
from course.check.exercise import Exercise, Mistake
from course.check.running import NoAnswer, in_ranks

A_FEW = 4  # wrong programs that run first; then twice as many, and so on
# Of a program that hangs, and a number of ranks: the calls that they wait in, with any inputs. To find out takes 2 s.
_WAITS: dict[tuple[Mistake, int], str] = {}


@dataclass(frozen=True)
class CaseRun:
    """One number of ranks: the inputs of each, the right results, and what each answer returned.

    `right` is empty if no answer returned anything.
    """

    inputs: list[Data]
    right: list[Data]
    outcomes: list[list[Data] | NoAnswer]


class WrongPrograms:
    """The results of the wrong programs on the inputs of all cases: they run when they are needed, a few at a time.

    A program that hangs takes seconds, and runs only after an answer hung.

    Args:
        exercise: whose mistakes they are.
        cases: as they came out.
    """

    def __init__(self, exercise: Exercise, cases: list[CaseRun]) -> None:
        self.exercise, self.cases = exercise, cases
        self.mistakes = [mistake for mistake in exercise.mistakes if not mistake.hangs]
        self.hanging = [mistake for mistake in exercise.mistakes if mistake.hangs]
        self.returned: list[dict[Mistake, list[Data] | NoAnswer]] = [{} for _ in cases]
        self.made: dict[int, list[Mistake]] = defaultdict(list)  # of an answer, by its number: what was named
        self.ruled_out: set[tuple[int, Mistake]] = set()  # of an answer: what some case is not like

    def named(self, answer: int, at: int, part: str) -> Mistake | None:
        """The first mistake that the answer made, and that is seen in this part of the case with number `at`."""
        if isinstance(self.cases[at].outcomes[answer], NoAnswer):
            return self._hanging_like(answer)
        for mistake in self._run_first(answer, at):
            if self._is_seen(answer, mistake, at, part):
                if mistake not in self.made[answer]:
                    self.made[answer].append(mistake)
                return mistake
        return None

    def _run_first(self, answer: int, at: int) -> Iterator[Mistake]:
        """The mistakes that the answer may have made, each after it ran on the inputs of this case."""
        group = [*self.made[answer]]
        possible = [mistake for mistake in self.mistakes if (answer, mistake) not in self.ruled_out]
        left = [mistake for mistake in possible if mistake not in group]
        count = A_FEW
        while group or left:
            self._run(group, at)
            yield from group
            group, left = left[:count], left[count:]
            count *= 2

    def _run(self, group: list[Mistake], at: int) -> None:
        """Run these wrong programs on the inputs of this case, unless they have run."""
        case, returned = self.cases[at], self.returned[at]
        if group and len(case.outcomes) > 1:
            group = self.mistakes  # several answers have many mistakes
        new = [mistake for mistake in group if mistake not in returned]
        if new:
            programs = [mistake.wrong for mistake in new]
            returned |= zip(new, in_ranks(self.exercise, programs, case.inputs), strict=True)

    def _is_seen(self, answer: int, mistake: Mistake, at: int, part: str) -> bool:
        """Whether the mistake explains a wrong result in this part, and all cases are as it predicts."""
        if not self._fits(answer, mistake, at):
            return False
        if not self._explains_a_wrong_result(answer, mistake, at, part):
            return False
        return all(self._fits(answer, mistake, other) for other in range(len(self.cases)))

    def _explains_a_wrong_result(self, answer: int, mistake: Mistake, at: int, part: str) -> bool:
        """Whether some result that the mistake predicts in this part is wrong in the answer."""
        case = self.cases[at]
        for got, looks_like, right in zip(case.outcomes[answer], self.returned[at][mistake], case.right, strict=True):
            predicted = mistake.predicted(looks_like, part)
            right_there = {name: right.get(name) for name in predicted}
            if not same(got, right_there, self.exercise.tolerances):
                return True
        return False

    def _fits(self, answer: int, mistake: Mistake, at: int) -> bool:
        """Whether this case is as the mistake predicts; if it is not, the answer has not made it."""
        if (answer, mistake) in self.ruled_out:
            return False
        self._run([mistake], at)
        fits = _is_as_predicted(self.cases[at].outcomes[answer], self.returned[at][mistake], mistake)
        if not fits:
            self.ruled_out.add((answer, mistake))
        return fits

    def _hanging_like(self, answer: int) -> Mistake | None:
        """The first mistake that hangs in each case in the calls in which the ranks of the answer wait."""
        outcomes = [case.outcomes[answer] for case in self.cases]
        for outcome in outcomes:
            if not isinstance(outcome, NoAnswer) or not outcome.stuck:
                return None
        waits_of_answer = [outcome.stuck for outcome in outcomes]
        for mistake in self.hanging:
            if self._waits_in(mistake, waits_of_answer):
                return mistake
        return None

    def _waits_in(self, mistake: Mistake, calls: list[str]) -> bool:
        """Whether the ranks of the mistake wait in these calls, a text for each case; it ends at one that differs."""
        cases = zip(self.cases, calls, strict=True)
        return all(self._waits(mistake, case) == calls_there for case, calls_there in cases)

    def _waits(self, mistake: Mistake, case: CaseRun) -> str:
        """The calls that the ranks of the mistake wait in; "" if it does not hang."""
        key = mistake, len(case.inputs)
        if key not in _WAITS:
            (outcome,) = in_ranks(self.exercise, [mistake.wrong], case.inputs)
            _WAITS[key] = outcome.stuck if isinstance(outcome, NoAnswer) else ""
        return _WAITS[key]


def _is_as_predicted(got: list[Data] | NoAnswer, looks_like: list[Data] | NoAnswer, mistake: Mistake) -> bool:
    """Whether the results of all ranks are those with the mistake; not so if it predicts none."""
    if isinstance(got, NoAnswer) or isinstance(looks_like, NoAnswer):
        return False
    predicted = [mistake.predicted(results) for results in looks_like]
    if not any(predicted):
        return False
    ranks = zip(got, predicted, strict=True)
    return all(same(of_rank, predicted_there) for of_rank, predicted_there in ranks)
