"""08.5: how long a step of GPipe takes, how much of it is bubble, and how many microbatches are enough."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import ceil, floor

import torch

from lib.check.exercise import Data, Exercise, Mistake, call, kind, several, whole
from lib.mesh import Group

STEP, BUBBLE, ENOUGH = "the time of the step", "the bubble", "microbatches that are enough"
Case = tuple[
    int, int, int, int, Fraction
]  # T_F, T_B, p, m, and the fraction of the step below which a bubble is to be


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    def case(p: int, part: Fraction) -> Case:
        t_F = whole(generator, 50, 200)
        return t_F, t_F + whole(generator, 20, 250), p, whole(generator, 3, 40), part

    def reached(is_telling: Callable[[int, Fraction], bool]) -> Case:
        """A fraction that some number of microbatches meets, and about which this is true."""
        while True:
            p, part = whole(generator, 3, 18), Fraction(whole(generator, 1, 10), whole(generator, 11, 41))
            if part < Fraction(1, 3) and waits(p, part).denominator == 1 and is_telling(p, part):
                return case(p, part)

    cases = [reached(lambda p, part: all(floated(p, part) == enough(p, part) for floated in FLOATED))]
    cases += [reached(lambda p, part, f=floated: f(p, part) != enough(p, part)) for floated in FLOATED]
    cases += [case(3 * whole(generator, 1, 6), Fraction(3, 3 * whole(generator, 6, 13) + 1))]  # not met
    return [{"cases": [case(1, Fraction(1, 4)), *cases]}]


def body(answer: Callable, group: Group, given: Data) -> Data:
    found: Data = {}
    for case in given["cases"]:
        result, title = answer(*case), call("plan", case)
        found[f"{title}: what was returned"] = kind(result)
        whats = (STEP, BUBBLE, ENOUGH) if case[2] > 1 else ("first", "second", "third")  # of one stage: no mistake's
        found |= {f"{title}: {what}": number(x) for what, x in zip(whats, several(result, 3), strict=True)}
    return found


def number(x: object) -> object:
    try:
        return float(x)
    except (TypeError, ValueError):
        return x


# ---- plans, right and wrong -----------------------------------------------------------------------------------------


def waits(p: int, part: Fraction) -> Fraction:
    """Microbatches for a bubble of just that fraction."""
    return (p - 1) * (1 - part) / part


def enough(p: int, part: Fraction) -> int:
    return floor(waits(p, part)) + 1


FLOATED = (  # in numbers that are rounded
    lambda p, part: floor((p - 1) * (1 - float(part)) / float(part)) + 1,
    lambda p, part: floor((p - 1) * (1 / float(part) - 1)) + 1,
)


def plan(
    step: Callable = lambda t_F, t_B, p, m: (m + p - 1) * (t_F + t_B),
    bubble: Callable = lambda p, m, t: (p - 1) / (m + p - 1),
    enough: Callable = enough,
) -> Callable:
    return lambda t_F, t_B, p, m, part: (step(t_F, t_B, p, m), bubble(p, m, t_F + t_B), enough(p, part))


def by_trying(t_F, t_B, p, m, part):
    def bubble(m):
        return Fraction(p - 1, m + p - 1)

    enough = 1
    while bubble(enough) >= part:
        enough += 1
    return [m * (t_F + t_B) / (1 - bubble(m)), bubble(m), torch.tensor(enough)]


EXERCISE = Exercise(
    id="08.5",
    title="plan",
    points=1,
    body=body,
    inputs=inputs,
    ranks=(1,),
    right=(plan(), by_trying),
    mistakes=(
        Mistake(
            "You count the longer of the two times for each microbatch. A rank does a forward *and* a backward of "
            "each, one after the other: such a step would be shorter than a rank's own work.",
            plan(step=lambda t_F, t_B, p, m: (m + p - 1) * max(t_F, t_B)),
            about=(STEP,),
        ),
        Mistake(
            "Your step has the work of a rank and no waiting. The last rank begins p-1 forwards later, and after "
            "its last backward the first rank still has p-1 to go.",
            plan(step=lambda t_F, t_B, p, m: m * (t_F + t_B)),
            about=(STEP,),
        ),
        Mistake(
            "Your step waits one time too often. The first microbatch passes p-1 stages before the last one "
            "begins, not p.",
            plan(step=lambda t_F, t_B, p, m: (m + p) * (t_F + t_B)),
            about=(STEP,),
        ),
        Mistake(
            "Your step is that of the naive pipeline, in which a microbatch returns before the next one starts.",
            plan(step=lambda t_F, t_B, p, m: m * p * (t_F + t_B)),
            about=(STEP,),
        ),
        Mistake(
            "Your bubble divides the wait by the *work*, (p-1)/m. Here it is a fraction of the whole step, work "
            "and wait.",
            plan(bubble=lambda p, m, t: (p - 1) / m),
            about=(BUBBLE,),
        ),
        Mistake(
            "You share the waiting out among the ranks. Each of them waits all of it: p-1 forwards and p-1 "
            "backwards.",
            plan(bubble=lambda p, m, t: (p - 1) / (m + p - 1) / p),
            about=(BUBBLE,),
        ),
        Mistake(
            "That is the fraction in which a rank works, m/(m+p-1). The bubble is the rest of the step.",
            plan(bubble=lambda p, m, t: m / (m + p - 1)),
            about=(BUBBLE,),
        ),
        Mistake(
            "Your bubble is that of the naive pipeline, (p-1)/p. The more microbatches there are, the smaller it is.",
            plan(bubble=lambda p, m, t: (p - 1) / p),
            about=(BUBBLE,),
        ),
        Mistake(
            "Your bubble has p where p-1 belongs. Look at one stage, which never waits.",
            plan(bubble=lambda p, m, t: p / (m + p)),
            about=(BUBBLE,),
        ),
        Mistake(
            "Your bubble is a time. Return it as a fraction of the step.",
            plan(bubble=lambda p, m, t: (p - 1) * t),
            about=(BUBBLE,),
        ),
        Mistake(
            "Your bubble is in percent. Return it as a fraction, from 0 to 1.",
            plan(bubble=lambda p, m, t: 100 * (p - 1) / (m + p - 1)),
            about=(BUBBLE,),
        ),
        Mistake(
            "One microbatch too few, where some number gives just that fraction: you take `at most`. The bubble "
            "should be *below* it.",
            plan(enough=lambda p, part: ceil(waits(p, part))),
            about=(ENOUGH,),
        ),
        *(
            Mistake(
                "Your formula for the number of microbatches is right, and was computed in floats. Where some number "
                "gives just that fraction, rounding decides: compute with the Fraction as it is.",
                plan(enough=floated),
                about=(ENOUGH,),
            )
            for floated in FLOATED
        ),
        Mistake(
            "One microbatch too many, where no number gives just that fraction: you round up and add one. Round "
            "down and add one.",
            plan(enough=lambda p, part: ceil(waits(p, part)) + 1),
            about=(ENOUGH,),
        ),
        Mistake(
            "You have put wait against work, (p-1)/m, below that fraction. That takes p-1 microbatches more than "
            "the bubble does.",
            plan(enough=lambda p, part: floor((p - 1) / part) + 1),
            about=(ENOUGH,),
        ),
        Mistake(
            "4p is a rule of thumb, for a bubble below a fifth. Solve for the fraction that was given.",
            plan(enough=lambda p, part: 4 * p),
            about=(ENOUGH,),
        ),
    ),
)
