"""Which mistake an answer has made: a name is given only if all that the mistake predicts is seen.

The problem: many wrong programs return the same with three ranks, or in one part of their results. Named by one case
alone, a learner is told of a mistake that was not made, and looks for it in vain.
The idea: a mistake is a wrong program, and so it predicts the results of every case. It has a name only where some
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
            return next((mistake for mistake in self.hanging if self._hangs(answer, mistake)), None)
        found = next((one for one in self._run_first(answer, at) if self._is_seen(answer, one, at, part)), None)
        if found and found not in self.made[answer]:
            self.made[answer].append(found)
        return found

    def _run_first(self, answer: int, at: int) -> Iterator[Mistake]:
        """The mistakes that the answer may have made, each after it ran on the inputs of this case."""
        group = [*self.made[answer]]
        left = [one for one in self.mistakes if one not in group and (answer, one) not in self.ruled_out]
        count = A_FEW
        while group or left:
            self._run(group, at)
            yield from group
            group, left, count = left[:count], left[count:], 2 * count

    def _run(self, group: list[Mistake], at: int) -> None:
        case, returned = self.cases[at], self.returned[at]
        several = len(case.outcomes) > 1  # answers: then they have many mistakes
        left = [m for m in (self.mistakes if several and group else group) if m not in returned]
        if left:
            returned |= zip(left, in_ranks(self.exercise, [m.wrong for m in left], case.inputs), strict=True)

    def _is_seen(self, answer: int, mistake: Mistake, at: int, part: str) -> bool:
        """Whether the mistake explains a wrong result in this part, and all cases are as it predicts."""
        if not self._fits(answer, mistake, at):
            return False
        case = self.cases[at]
        looks_like = (mistake.predicted(one, part) for one in self.returned[at][mistake])
        wrong = (
            not same(found, {name: right.get(name) for name in predicted}, self.exercise.tolerances)
            for found, predicted, right in zip(case.outcomes[answer], looks_like, case.right, strict=True)
        )
        return any(wrong) and all(self._fits(answer, mistake, other) for other in range(len(self.cases)))

    def _fits(self, answer: int, mistake: Mistake, at: int) -> bool:
        if (answer, mistake) in self.ruled_out:
            return False
        self._run([mistake], at)
        got, looks_like = self.cases[at].outcomes[answer], self.returned[at][mistake]
        fits = not isinstance(got, NoAnswer) and not isinstance(looks_like, NoAnswer)
        if fits:
            predicted = [mistake.predicted(one) for one in looks_like]
            fits = any(predicted) and all(same(g, p) for g, p in zip(got, predicted, strict=True))
        if not fits:
            self.ruled_out.add((answer, mistake))
        return fits

    def _hangs(self, answer: int, mistake: Mistake) -> bool:
        """Whether in each case the ranks of the answer wait in the calls in which those of the mistake wait."""
        outcomes = [case.outcomes[answer] for case in self.cases]
        hung = all(isinstance(got, NoAnswer) and got.stuck for got in outcomes)
        return hung and all(
            got.stuck == self._waits(mistake, case) for got, case in zip(outcomes, self.cases, strict=True)
        )

    def _waits(self, mistake: Mistake, case: CaseRun) -> str:
        if (key := (mistake, len(case.inputs))) not in _WAITS:
            (looks_like,) = in_ranks(self.exercise, [mistake.wrong], case.inputs)
            _WAITS[key] = looks_like.stuck if isinstance(looks_like, NoAnswer) else ""
        return _WAITS[key]
