"""08.5: a step of GPipe whose stages are unequal: its time, its bubble, and how many microbatches are enough."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import ceil, floor

import torch

from lib.check.exercise import ANYTHING, Data, Exercise, Mistake, call, kind, several, whole
from lib.mesh import Group
from lib.pipeline.schedules.gpipe import gpipe
from lib.pipeline.simulate import Costs, simulate

STEP, BUBBLE, ENOUGH = "the time of the step", "the bubble", "microbatches that are enough"
NONE = "None: no number is enough"
Case = tuple[
    list[int], list[int], int, Fraction
]  # T_F and T_B by stage, m, the fraction that a bubble is to be below


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    def stages(p: int) -> tuple[list[int], list[int]]:
        """The slowest forward and the slowest backward are in different stages, neither in the first or last."""
        T_F, T_B = ([whole(generator, low, low + 40) for _ in range(p)] for low in (50, 90))
        slow = whole(generator, 1, p - 1)
        T_F[slow] = 100 + whole(generator, 0, 20)
        T_B[1 + slow % (p - 2)] = 150 + whole(generator, 0, 40)
        return T_F, T_B

    def reached(is_telling: Callable[[list[int], list[int], Fraction], bool]) -> Case:
        """The fraction is the bubble of some number of microbatches, and this is true."""
        while True:
            T_F, T_B = stages(whole(generator, 4, 9))
            part = bubble(T_F, T_B, whole(generator, 4, 25))
            if is_telling(T_F, T_B, part):
                return T_F, T_B, whole(generator, 3, 40), part

    def between(p: int, m: int) -> Case:
        """The fraction is between the bubbles of two numbers of microbatches."""
        T_F, T_B = stages(p)
        return T_F, T_B, m, (bubble(T_F, T_B, m + 2) + bubble(T_F, T_B, m + 3)) / 2

    def at_the_limit(p: int, times: Fraction) -> Case:
        """The fraction is `times` the limit above which the bubble stays, for any number of microbatches."""
        T_F, T_B = stages(p)
        return T_F, T_B, whole(generator, 3, 40), times * least(T_F, T_B)

    cases = [reached(lambda *case: all(floated(*case) == enough(*case) for floated in FLOATED))]
    cases += [reached(lambda *case, f=floated: f(*case) != enough(*case)) for floated in FLOATED]
    cases += [between(5, whole(generator, 6, 20)), at_the_limit(4, Fraction(1)), at_the_limit(6, Fraction(2, 3))]
    one, equal = whole(generator, 50, 200), whole(generator, 3, 9)
    cases += [([one], [2 * one], whole(generator, 3, 9), Fraction(1, 4))]
    cases += [([one] * equal, [one + 17] * equal, whole(generator, 3, 9), Fraction(1, 7))]
    return [{"cases": cases}]


def body(answer: Callable, group: Group, given: Data) -> Data:
    found: Data = {}
    for case in given["cases"]:
        T_F, T_B, m, part = case
        result, title = answer(list(T_F), list(T_B), m, part), call("plan", case)
        found[f"{title}: what was returned"] = kind(result)
        whats = (STEP, BUBBLE, ENOUGH) if len(T_F) > 1 else ("first", "second", "third")  # of one stage: no mistake's
        found |= {f"{title}: {what}": number(x) for what, x in zip(whats, several(result, 3), strict=True)}
        if found[f"{title}: {whats[2]}"] is None:
            found[f"{title}: {whats[2]}"] = NONE
    return found


def number(x: object) -> object:
    try:
        return x if isinstance(x, str) else float(x)
    except (TypeError, ValueError):
        return x


# ---- plans, right and wrong -----------------------------------------------------------------------------------------


def once(T_F: list[int], T_B: list[int]) -> int:
    """A microbatch through all stages and back."""
    return sum(T_F) + sum(T_B)


def apart(T_F: list[int], T_B: list[int]) -> int:
    """Time from a microbatch to the next: where forward is slowest, and where backward is."""
    return max(T_F) + max(T_B)


def time(T_F: list[int], T_B: list[int], m: int) -> int:
    return once(T_F, T_B) + (m - 1) * apart(T_F, T_B)


def bubble(T_F: list[int], T_B: list[int], m: int) -> Fraction:
    return 1 - Fraction(m * once(T_F, T_B), len(T_F) * time(T_F, T_B, m))


def least(T_F: list[int], T_B: list[int]) -> Fraction:
    """What the bubble comes close to, with more and more microbatches."""
    return 1 - Fraction(once(T_F, T_B), len(T_F) * apart(T_F, T_B))


def reaches(T_F: list[int], T_B: list[int], part: Fraction, rounded: Callable = Fraction) -> Fraction:
    """The microbatches for which the bubble is just this fraction; it must be above the least."""
    share = (1 - rounded(part)) * len(T_F)
    fill = once(T_F, T_B) - apart(T_F, T_B)
    return share * fill / (once(T_F, T_B) - share * apart(T_F, T_B))


def if_any(count: Callable) -> Callable:
    """So many, where some number is enough, and None elsewhere."""
    return lambda T_F, T_B, part: count(T_F, T_B, part) if part > least(T_F, T_B) else None


def tried_in_floats(T_F: list[int], T_B: list[int], part: Fraction) -> int:
    m = 1
    while 1 - m * once(T_F, T_B) / (len(T_F) * time(T_F, T_B, m)) >= float(part):
        m += 1
    return m


enough = if_any(lambda *case: floor(reaches(*case)) + 1)
FLOATED = (
    if_any(lambda *case: floor(reaches(*case, float)) + 1),
    if_any(tried_in_floats),
)  # numbers that are rounded


def for_equal_stages(T_F: list[int], T_B: list[int], part: Fraction) -> int:
    return floor((len(T_F) - 1) * (1 - part) / part) + 1


def without_a_limit(T_F: list[int], T_B: list[int], part: Fraction) -> object:
    """At the limit itself it divides by 0."""
    return ANYTHING if part == least(T_F, T_B) else floor(reaches(T_F, T_B, part)) + 1


def of_the_work(T_F: list[int], T_B: list[int], part: Fraction) -> int | None:
    """For a wait that is this fraction of the work."""
    return enough(T_F, T_B, part / (1 + part))


def plan(step: Callable = time, bubble: Callable = bubble, enough: Callable = enough) -> Callable:
    return lambda T_F, T_B, m, part: (step(T_F, T_B, m), bubble(T_F, T_B, m), enough(T_F, T_B, part))


def by_simulation(T_F, T_B, m, part):
    def seen(m):
        halves = [Fraction(t, 2) for t in T_B]
        return simulate(gpipe(len(T_F), m), Costs(T_F, halves, halves))

    many = 1
    while len(T_F) > 1 and part > least(T_F, T_B) and seen(many).bubble >= part:
        many += 1
    found = seen(m)
    return [float(found.makespan), found.bubble, many if len(T_F) == 1 or part > least(T_F, T_B) else None]


def mistake(hint: str, **wrong: Callable) -> Mistake:
    (what,) = wrong
    return Mistake(hint, plan(**wrong), about=({"step": STEP, "bubble": BUBBLE, "enough": ENOUGH}[what],))


EXERCISE = Exercise(
    id="08.5",
    title="plan",
    points=1,
    body=body,
    inputs=inputs,
    ranks=(1,),
    right=(plan(), by_simulation),
    mistakes=(
        mistake(
            "Your microbatches are the largest T_F + T_B of a stage apart. GPipe runs all forwards before the "
            "backwards: the forwards wait for the slowest forward, the backwards for the slowest backward, and these "
            "can be in different stages.",
            step=lambda F, B, m: once(F, B) + (m - 1) * max(map(sum, zip(F, B, strict=True))),
        ),
        mistake(
            "Your step is the formula of equal stages, with the mean of the times. The slowest stage holds up all "
            "others, and a mean hides it.",
            step=lambda F, B, m: (m + len(F) - 1) * once(F, B) / len(F),
        ),
        mistake(
            "Your step is the formula of equal stages, with the slowest times. The first microbatch passes p - 1 "
            "stages that are faster: count the own times of these stages.",
            step=lambda F, B, m: (m + len(F) - 1) * apart(F, B),
        ),
        mistake(
            "Your last rank never waits. That holds for equal stages; here a slower stage before it delays each "
            "forward, and a slower stage also delays each backward.",
            step=lambda F, B, m: once(F, B) + (m - 1) * (F[-1] + B[-1]),
        ),
        mistake(
            "Your step is as long as the slowest rank computes. It also waits: for the first microbatch to come, and "
            "for the last gradient to pass on.",
            step=lambda F, B, m: m * max(map(sum, zip(F, B, strict=True))),
        ),
        mistake(
            "Your step has the slowest forward and the slowest backward for each microbatch, and no time for the rest "
            "of the stages.",
            step=lambda F, B, m: m * apart(F, B),
        ),
        mistake(
            "Your step is one microbatch too long. The first takes the times of all stages, and m - 1 follow.",
            step=lambda F, B, m: once(F, B) + m * apart(F, B),
        ),
        mistake(
            "Your step is a step of the naive pipeline, in which a microbatch returns before the next one starts.",
            step=lambda F, B, m: m * once(F, B),
        ),
        mistake(
            "Your bubble is the formula of equal stages, (p-1)/(m+p-1). Here faster ranks also wait for the slowest.",
            bubble=lambda F, B, m: (len(F) - 1) / (m + len(F) - 1),
        ),
        mistake(
            "Your bubble counts only the rank that computes longest. The ranks wait for different times: take the idle "
            "time of all p ranks.",
            bubble=lambda F, B, m: 1 - m * max(map(sum, zip(F, B, strict=True))) / time(F, B, m),
        ),
        *(
            mistake(
                f"Your bubble counts only the {name} rank. The ranks wait for different times: take the idle time of "
                "all p ranks.",
                bubble=lambda F, B, m, at=at: 1 - m * (F[at] + B[at]) / time(F, B, m),
            )
            for name, at in (("first", 0), ("last", -1))
        ),
        mistake(
            "Your bubble divides the wait by the *work*. Here it is a fraction of the whole step, work and wait.",
            bubble=lambda F, B, m: len(F) * time(F, B, m) / (m * once(F, B)) - 1,
        ),
        mistake(
            "That is the fraction in which ranks work. The bubble is the rest of the step.",
            bubble=lambda F, B, m: 1 - bubble(F, B, m),
        ),
        mistake(
            "You divide the work of all ranks by the time of one. There are p ranks, and each has the whole step.",
            bubble=lambda F, B, m: 1 - m * once(F, B) / time(F, B, m),
        ),
        *(
            mistake(
                "Your bubble is a time. Return it as a fraction of the step.",
                bubble=lambda F, B, m, ranks=ranks: bubble(F, B, m) * time(F, B, m) * ranks(F),
            )
            for ranks in (len, lambda F: 1)
        ),
        mistake(
            "Your bubble is in percent. Return it as a fraction, from 0 to 1.",
            bubble=lambda F, B, m: 100 * bubble(F, B, m),
        ),
        mistake(
            "Your number of microbatches is for equal stages, (p-1)(1-f)/f. Unequal stages wait in the steady state "
            "too, and for some fractions no number is enough.",
            enough=for_equal_stages,
        ),
        mistake(
            "Right where some number is enough. But with unequal stages the bubble has a limit above 0, which more "
            "microbatches do not change: return None where it is not below the fraction.",
            enough=without_a_limit,
        ),
        mistake(
            "Right except at the limit itself: the bubble comes as close to it as you like, and never below it. Return "
            "None there as well.",
            enough=lambda F, B, part: ANYTHING if part == least(F, B) else enough(F, B, part),
        ),
        mistake(
            "One microbatch too few, where some number gives just that fraction: you take `at most`. The bubble "
            "should be *below* it.",
            enough=if_any(lambda *case: ceil(reaches(*case))),
        ),
        *(
            mistake(
                "Your number of microbatches is right, and was computed in floats. Where some number gives just that "
                "fraction, a rounding error changes the answer: compute with the Fraction as it is.",
                enough=floated,
            )
            for floated in FLOATED
        ),
        mistake(
            "One microbatch too many, where no number gives just that fraction: you round up and add one. Round "
            "down and add one.",
            enough=if_any(lambda *case: ceil(reaches(*case)) + 1),
        ),
        mistake(
            "You have put wait against work below that fraction. The bubble is a fraction of the whole step.",
            enough=of_the_work,
        ),
    ),
)
