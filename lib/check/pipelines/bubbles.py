"""Chapter 08, how long a step of a pipeline takes, and how much of it is bubble: exercise 08.5."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import ceil, floor

import torch

from lib.check.exercise import Data, Exercise, Mistake, each_result, result, results, whole

_NAME = "plan"
_STEP, _BUBBLE, _ENOUGH = "the step's time", "the bubble", "microbatches that are enough"

Case = tuple[int, int, int, int, Fraction]  # t_F, t_B, P, M, and the part of the step below which a bubble should be


def _cases_inputs(generator: torch.Generator, n: int) -> list[Data]:
    def case(num_stages: int, part: Fraction) -> Case:
        t_F = whole(generator, 50, 200)
        return t_F, t_F + whole(generator, 20, 250), num_stages, whole(generator, 3, 40), part

    def reached(is_telling: Callable[[int, Fraction], bool]) -> Case:
        """A part that is met by some number of microbatches, and about which this can be said."""
        while True:
            P, part = whole(generator, 3, 18), Fraction(whole(generator, 1, 10), whole(generator, 11, 41))
            if part < Fraction(1, 3) and _waits(P, part).denominator == 1 and is_telling(P, part):
                return case(P, part)

    cases = [reached(lambda P, part: all(floated(P, part) == _enough(P, part) for floated in _FLOATED))]
    cases += [reached(lambda P, part, f=floated: f(P, part) != _enough(P, part)) for floated in _FLOATED]
    cases += [case(3 * whole(generator, 1, 6), Fraction(3, 3 * whole(generator, 6, 13) + 1))]  # not reached
    return [{"cases": [case(1, Fraction(1, 4)), *cases]}]


def _waits(P: int, part: Fraction) -> Fraction:
    """Microbatches for a bubble of just that part."""
    return (P - 1) * (1 - part) / part


def _enough(P: int, part: Fraction) -> int:
    return floor(_waits(P, part)) + 1


_FLOATED = (  # in numbers that are rounded
    lambda P, part: floor((P - 1) * (1 - float(part)) / float(part)) + 1,
    lambda P, part: floor((P - 1) * (1 / float(part) - 1)) + 1,
)


def _by(what: str, of: Callable[[int, int, int, int, Fraction], float]) -> Callable:
    """One of the three numbers, computed so; where there is one stage all may be anything."""
    return result(_NAME, what, of, where=lambda t_F, t_B, P, M, part: P > 1)


_RIGHT = {
    _STEP: lambda t_F, t_B, P, M, part: (M + P - 1) * (t_F + t_B),
    _BUBBLE: lambda t_F, t_B, P, M, part: (P - 1) / (M + P - 1),
    _ENOUGH: lambda t_F, t_B, P, M, part: _enough(P, part),
}

PLAN = Exercise(
    id="08.5",
    title=_NAME,
    points=1,
    body=each_result(_NAME, *_RIGHT),
    inputs=_cases_inputs,
    reference=results(_NAME, _RIGHT),
    ranks=(1,),
    mistakes=(
        Mistake(
            "Your step counts the longer of the two times for each microbatch. A rank does a forward *and* a backward "
            "of each, one after the other: such a step would be shorter than a rank's own work.",
            _by(_STEP, lambda t_F, t_B, P, M, part: (M + P - 1) * max(t_F, t_B)),
        ),
        Mistake(
            "Your step has a rank's work and no waiting. The last rank begins P-1 forwards later, and behind its last "
            "backward the first rank still has P-1 to go.",
            _by(_STEP, lambda t_F, t_B, P, M, part: M * (t_F + t_B)),
        ),
        Mistake(
            "Your step waits once too often. The first microbatch passes P-1 stages before the last one begins, not P.",
            _by(_STEP, lambda t_F, t_B, P, M, part: (M + P) * (t_F + t_B)),
        ),
        Mistake(
            "Your step is that of the naive pipeline, in which a microbatch has come back before the next one starts.",
            _by(_STEP, lambda t_F, t_B, P, M, part: M * P * (t_F + t_B)),
        ),
        Mistake(
            "Your bubble is waiting against *work*, (P-1)/M. Here it is a part of the whole step, which is work and "
            "waiting.",
            _by(_BUBBLE, lambda t_F, t_B, P, M, part: (P - 1) / M),
        ),
        Mistake(
            "You share the waiting out among the ranks. Each of them waits all of it: P-1 forwards and P-1 backwards.",
            _by(_BUBBLE, lambda t_F, t_B, P, M, part: (P - 1) / (M + P - 1) / P),
        ),
        Mistake(
            "That is the part in which a rank works, M/(M+P-1). The bubble is what is left of the step.",
            _by(_BUBBLE, lambda t_F, t_B, P, M, part: M / (M + P - 1)),
        ),
        Mistake(
            "Your bubble is that of the naive pipeline, (P-1)/P. The more microbatches there are, the smaller it is.",
            _by(_BUBBLE, lambda t_F, t_B, P, M, part: (P - 1) / P),
        ),
        Mistake(
            "Your bubble has P where P-1 belongs. Look at one stage, which never waits.",
            _by(_BUBBLE, lambda t_F, t_B, P, M, part: P / (M + P)),
        ),
        Mistake(
            "Your bubble is a time. Asked for is which part of the step it is.",
            _by(_BUBBLE, lambda t_F, t_B, P, M, part: (P - 1) * (t_F + t_B)),
        ),
        Mistake(
            "Your bubble is in percent. Give it as a part, from 0 to 1.",
            _by(_BUBBLE, lambda t_F, t_B, P, M, part: 100 * (P - 1) / (M + P - 1)),
        ),
        Mistake(
            "One microbatch too few, where some number gives just that part: you take `at most`. The bubble should be "
            "*below* it.",
            _by(_ENOUGH, lambda t_F, t_B, P, M, part: ceil(_waits(P, part))),
        ),
        *(
            Mistake(
                "Your formula for the number of microbatches is right, and was computed in floats. Where some number "
                "gives just that part, rounding decides: compute with the Fraction as it is.",
                _by(_ENOUGH, lambda t_F, t_B, P, M, part, f=floated: f(P, part)),
            )
            for floated in _FLOATED
        ),
        Mistake(
            "One microbatch too many, where no number gives just that part: you round up and add one. Round down and "
            "add one.",
            _by(_ENOUGH, lambda t_F, t_B, P, M, part: ceil(_waits(P, part)) + 1),
        ),
        Mistake(
            "You have put waiting against work, (P-1)/M, below that part. That takes P-1 microbatches more than the "
            "bubble does.",
            _by(_ENOUGH, lambda t_F, t_B, P, M, part: int((P - 1) / part) + 1),
        ),
        Mistake(
            "4P is a rule of thumb, for a bubble below a fifth. Solve for the part that was given.",
            _by(_ENOUGH, lambda t_F, t_B, P, M, part: 4 * P),
        ),
    ),
)

EXERCISES = (PLAN,)
