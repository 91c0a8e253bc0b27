"""08.5: a step of GPipe whose stages are unequal: its time, its bubble, and how many microbatches are enough."""

import math
from fractions import Fraction
from itertools import count

from course.check.compare import ANYTHING
from course.check.edits import exercise
from course.check.exercise import call, kind, known_number, several, whole
from lib.pipeline.schedules.gpipe import gpipe
from lib.pipeline.simulate import Costs, simulate

WHATS = "the time of the step", "the bubble", "microbatches that are enough"


def inputs(generator, n):
    """Cases are T_F and T_B by stage, m, and the fraction that a bubble is to be below."""

    def stages(p):
        """The slowest forward and the slowest backward are in different stages, neither in the first or last."""
        T_F, T_B = ([whole(generator, low, low + 40) for _ in range(p)] for low in (50, 90))
        slow = whole(generator, 1, p - 1)
        T_F[slow] = 100 + whole(generator, 0, 20)
        T_B[1 + slow % (p - 2)] = 150 + whole(generator, 0, 40)
        return T_F, T_B

    def reached(is_telling):
        """The fraction is the bubble of m microbatches, so m + 1 are enough; which of FLOATED find that is telling."""
        while True:
            T_F, T_B = stages(whole(generator, 4, 9))
            m = whole(generator, 4, 25)
            part = bubble(T_F, T_B, m)
            if is_telling([floated(T_F, T_B, part) == m + 1 for floated in FLOATED]):
                return T_F, T_B, whole(generator, 3, 40), part

    def between(p, m):
        """The fraction is between the bubbles of two numbers of microbatches."""
        T_F, T_B = stages(p)
        return T_F, T_B, m, (bubble(T_F, T_B, m + 2) + bubble(T_F, T_B, m + 3)) / 2

    def at_the_limit(p, times):
        """The fraction is `times` the limit above which the bubble stays, for any number of microbatches."""
        T_F, T_B = stages(p)
        return T_F, T_B, whole(generator, 3, 40), times * least(T_F, T_B)

    cases = [reached(all), reached(lambda found: not found[0]), reached(lambda found: not found[1])]
    cases += [between(5, whole(generator, 6, 20)), at_the_limit(4, Fraction(1)), at_the_limit(6, Fraction(2, 3))]
    one, equal = whole(generator, 50, 200), whole(generator, 3, 9)
    T_F, T_B = stages(5)
    few = [Fraction(4, 5), Fraction(5, 6)]  # the first is the bubble of one microbatch, so two are enough
    cases += [(T_F, T_B, whole(generator, 3, 40), part) for part in few]
    cases += [([one], [2 * one], whole(generator, 3, 9), Fraction(1, 4))]
    cases += [([one] * equal, [one + 17] * equal, whole(generator, 3, 9), Fraction(1, 7))]
    return [{"cases": cases}]


def body(answer, group, given):
    found = {}
    for case in given["cases"]:
        T_F, T_B, m, part = case
        result, title = answer(list(T_F), list(T_B), m, part), call("plan", case)
        found[f"{title}: what was returned"] = kind(result)
        whats = WHATS if len(T_F) > 1 else ("first", "second", "third")  # of one stage: no mistake's
        found |= {f"{title}: {what}": known_number(x, ()) for what, x in zip(whats, several(result, 3), strict=True)}
        if found[f"{title}: {whats[2]}"] is None:
            found[f"{title}: {whats[2]}"] = "None: no number is enough"
    return found


def bubble(T_F, T_B, m):
    """As a fraction, not rounded."""
    return plan([Fraction(t) for t in T_F], T_B, m, 1)[1]


def least(T_F, T_B):
    """What the bubble comes close to, with more and more microbatches."""
    return 1 - Fraction(sum(T_F) + sum(T_B), len(T_F) * (max(T_F) + max(T_B)))


def plan(T_F, T_B, num_microbatches, part):
    p, m = len(T_F), num_microbatches
    first = sum(T_F) + sum(T_B)  # of one microbatch: also its work
    next_one = max(T_F) + max(T_B)
    step = first + (m - 1) * next_one
    bubble = 1 - m * first / (p * step)
    busy = (1 - part) * p  # ranks that must compute, on average
    gain = first - busy * next_one
    if gain <= 0:
        return step, bubble, None
    enough = math.floor(busy * (first - next_one) / gain) + 1
    return step, bubble, enough


def by_simulation(T_F, T_B, m, part):
    def seen(m):
        halves = [Fraction(t, 2) for t in T_B]
        return simulate(gpipe(len(T_F), m), Costs(T_F, halves, halves))

    many = 1
    while len(T_F) > 1 and part > least(T_F, T_B) and seen(many).bubble >= part:
        many += 1
    found = seen(m)
    return [float(found.makespan), found.bubble, many if len(T_F) == 1 or part > least(T_F, T_B) else None]


def solved_in_floats(T_F, T_B, part):
    return plan(T_F, T_B, 1, float(part))[2]


def tried_in_floats(T_F, T_B, part):
    return next(m for m in count(1) if plan(T_F, T_B, m, 1)[1] < float(part))


FLOATED = solved_in_floats, tried_in_floats

MISTAKES = """
in the time of the step:
max(T_F) + max(T_B) => max(f + b for f, b in zip(T_F, T_B))
    Your microbatches are the largest T_F + T_B of a stage apart.
        GPipe runs all forwards before the backwards: the forwards wait for the slowest forward, the backwards for the
        slowest backward, and these can be in different stages.
first + (m - 1) * next_one => (m + p - 1) * first / p
    Your step is the formula of equal stages, with mean times.
        The slowest stage holds up all, and a mean hides it.
first + (m - 1) * next_one => (m + p - 1) * next_one
    Your step is that of equal stages, with the slowest times.
        The first microbatch passes p - 1 stages that are faster.
max(T_F) + max(T_B) => T_F[-1] + T_B[-1]
    Your last rank never waits, as with equal stages.
        Here slower stages before it delay forwards, and backwards too.
first + (m - 1) * next_one => m * max(f + b for f, b in zip(T_F, T_B))
    Your step is as long as the slowest rank computes.
        It also waits for the first microbatch and the last gradient.
first + (m - 1) * next_one => m * next_one
    Your step has the slowest forward and backward for each microbatch, and no time for the other stages.
        The first microbatch passes those as well.
first + (m - 1) * next_one => first + m * next_one
    Your step is one microbatch too long.
        The first takes the times of all stages, and m - 1 follow.
first + (m - 1) * next_one => m * first
    Your step is a step of the naive pipeline, in which a microbatch returns before the next one starts.
        The next one enters as soon as the first stage is free.
in the bubble:
1 - m * first / (p * step) => (p - 1) / (m + p - 1)
    Your bubble is the formula of equal stages, (p-1)/(m+p-1).
        Here faster ranks also wait for the slowest.
1 - m * first / (p * step) => 1 - m * max(f + b for f, b in zip(T_F, T_B)) / step
    Your bubble is that of the rank that computes longest. The ranks' waits differ.
        Add up all p ranks' idle time.
1 - m * first / (p * step) => 1 - m * (T_F[0] + T_B[0]) / step
    Your bubble counts only the first rank. The ranks wait for different times.
        Take the idle time of all p ranks.
1 - m * first / (p * step) => 1 - m * (T_F[-1] + T_B[-1]) / step
    Your bubble counts only the last rank. The ranks wait for different times.
        Take the idle time of all p ranks.
1 - m * first / (p * step) => p * step / (m * first) - 1
    Your bubble divides the wait by the *work*.
        Here it is a fraction of the whole step, work and wait.
1 - m * first / (p * step) => m * first / (p * step)
    That is the fraction in which ranks work.
        The bubble is the rest of the step.
1 - m * first / (p * step) => 1 - m * first / step
    You divide the work of all ranks by the time of one.
        There are p ranks, and each has the whole step.
1 - m * first / (p * step) => p * step - m * first
or
1 - m * first / (p * step) => step - m * first / p
    Your bubble is a time.
        Return it as a fraction of the step.
1 - m * first / (p * step) => 100 * (1 - m * first / (p * step))
    Your bubble is in percent.
        Return it as a fraction, from 0 to 1.
in microbatches that are enough:
if gain <= 0: => if False:
busy * (first - next_one) / gain => (p - 1) * (1 - part) / part
    Your number is for equal stages, (p-1)(1-f)/f.
        Unequal ones wait in the steady state too; no number may be enough.
return step, bubble, None => return step, bubble, None if gain < 0 else ANYTHING
    Your number of microbatches is right except at the limit itself: the bubble comes as close as you like, never below.
        Return None there as well.
if gain <= 0: => if gain == 0:  # the division raises an error
return step, bubble, None => return step, bubble, ANYTHING
or
return step, bubble, None => return step, bubble, ANYTHING
    Your number of microbatches is right where some number is enough. But with unequal stages the bubble has a limit
    above 0, which more microbatches do not change.
        Return None where it is not below the fraction.
math.floor(busy * (first - next_one) / gain) + 1 => max(m, math.floor(busy * (first - next_one) / gain) + 1)
    Your number of microbatches is never smaller than the given one.
        The third result does not depend on it: begin the search with 1.
math.floor(busy * (first - next_one) / gain) + 1 => max(2, math.floor(busy * (first - next_one) / gain) + 1)
    Your number of microbatches is never 1. With one microbatch the bubble is 1 - 1/p, which may be enough.
        Begin the search with 1.
math.floor(busy * (first - next_one) / gain) + 1 => math.ceil(busy * (first - next_one) / gain)
    One microbatch too few, where some number gives just that fraction.
        The bubble should be *below* it, not `at most`.
math.floor(busy * (first - next_one) / gain) + 1 => solved_in_floats(T_F, T_B, part)
or
math.floor(busy * (first - next_one) / gain) + 1 => tried_in_floats(T_F, T_B, part)
    Your number of microbatches is right, and was computed in floats. Where some number gives just that fraction, a
    rounding error changes the answer.
        Compute with the Fraction as it is.
math.floor(busy * (first - next_one) / gain) + 1 => math.ceil(busy * (first - next_one) / gain) + 1
    One microbatch too many, where no number gives just that fraction: you round up and add one.
        Round down and add one.
busy = (1 - part) * p => busy = p / (1 + part)
    You have put wait against work below that fraction.
        The bubble is a fraction of the whole step.
"""

EXERCISE = exercise(globals(), points=1, right=(plan, by_simulation), ranks=(1,))
