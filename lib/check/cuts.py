"""Chapter 08, where to cut a model into stages: exercise 08.1."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise
from typing import Any

import torch

from lib.check.exercise import Data, Exercise, Mistake, call, kind, whole
from lib.mesh import Group

_NAME = "cut"
_EMPTY, _BORDERS = "a stage without a layer", "the places where stages end"

Case = tuple[list[int], int, int]  # cost of each layer, of the head, number of stages
Rule = Callable[[Sequence[int], Case], float]  # what somebody makes as small as can be


def _all_cuts(case: Case) -> Iterator[list[int]]:
    """How many layers each stage gets."""
    costs, _, num_stages = case
    for borders in combinations(range(1, len(costs)), num_stages - 1):
        yield [end - begin for begin, end in pairwise((0, *borders, len(costs)))]


def _work(counts: Sequence[int], case: Case, with_head: bool = True) -> list[int]:
    costs, head, _ = case
    left = iter(costs)
    work = [sum(next(left) for _ in range(count)) for count in counts]
    work[-1] += head if with_head else 0
    return work


def _dearest(counts: Sequence[int], case: Case) -> int:
    return max(_work(counts, case))


def _even(case: Case) -> list[int]:
    """As many layers for each stage; the last one takes what is left over."""
    costs, _, num_stages = case
    each = len(costs) // num_stages
    return [each] * (num_stages - 1) + [len(costs) - each * (num_stages - 1)]


def _filled(case: Case, over: bool) -> list[int]:
    """A stage is full when it has the mean (`over`), or when one layer more would be more than that."""
    costs, head, num_stages = case
    mean, counts, work = (sum(costs) + head) / num_stages, [0], 0
    for cost in costs:
        full = work >= mean if over else work + cost > mean
        if full and len(counts) < num_stages:
            counts, work = [*counts, 0], 0
        counts[-1] += 1
        work += cost
    return counts


_RULES: dict[str, Rule] = {
    "work": _dearest,
    "count": lambda counts, case: max(counts) - min(counts),
    "even, then the rest": lambda counts, case: counts != _even(case),
    "up to the mean": lambda counts, case: counts != _filled(case, over=False),
    "over the mean": lambda counts, case: counts != _filled(case, over=True),
    "work without the head": lambda counts, case: max(_work(counts, case, with_head=False)),
    "squares of the work": lambda counts, case: sum(work**2 for work in _work(counts, case)),
    "the cheapest, negative": lambda counts, case: -min(_work(counts, case)),
}
_ALWAYS = ("count", "even, then the rest", "squares of the work", "the cheapest, negative")
_PLAIN = (*_ALWAYS, "up to the mean", "over the mean")  # without a head, whose share of the mean people count or not
_HEADED = (*_ALWAYS, "work without the head")


def _is_wrong(rule: str, case: Case) -> bool:
    """Whether no cut that is best by this rule is right."""
    cuts = list(_all_cuts(case))
    least = min(_RULES[rule](counts, case) for counts in cuts)
    right = min(_dearest(counts, case) for counts in cuts)
    return all(_dearest(counts, case) > right for counts in cuts if _RULES[rule](counts, case) == least)


# ---- 08.1 cut -------------------------------------------------------------------------------------------------------

PLAIN, HEADED, HEAVY = slice(0, 1), slice(1, 2), slice(2, 3)  # of the cases


def _cut_inputs(generator: torch.Generator, n: int) -> list[Data]:
    def costs(count: int) -> list[int]:
        return [whole(generator, 1, 10) for _ in range(count)]

    def telling(rules: Sequence[str], count: int, num_stages: int, heads: tuple[int, int]) -> Case:
        """A case in which each of these rules is wrong."""
        while True:
            case = costs(count), whole(generator, *heads), num_stages
            if all(_is_wrong(rule, case) for rule in rules):
                return case

    plain = telling(_PLAIN, whole(generator, 10, 12), 4, (0, 1))
    headed = telling(_HEADED, whole(generator, 10, 12), 4, (8, 20))
    heavy, one, each = costs(6), costs(5), costs(4)
    return [{"cases": [plain, headed, (heavy, 2 * sum(heavy), 3), (one, 7, 1), (each, 2, 4)]}]


def _cut(answer: Callable, group: Group, given: Data) -> Data:
    found: Data = {}
    for case in given["cases"]:
        costs, head, num_stages = case
        found |= _facts(answer(list(costs), head, num_stages), case)
    return found


def _facts(result: Any, case: Case) -> Data:
    """By each rule, what has been reached."""
    costs, _, num_stages = case
    try:
        counts = [int(count) for count in result]
    except (TypeError, ValueError):
        return {_name("work", case): kind(result)}
    if len(counts) == num_stages and sum(counts) == len(costs) and min(counts) > 0:
        return {_name(rule, case): float(score(counts, case)) for rule, score in _RULES.items()}
    if counts[-1:] == [len(costs)] and counts == sorted({*counts}):
        return {_name("work", case): _BORDERS}
    if len(counts) == num_stages and sum(counts) == len(costs):
        return {_name("work", case): _EMPTY}
    return {_name("work", case): f"{len(counts)} stages with {sum(counts)} layers: {counts}"}


def _name(rule: str, case: Case) -> str:
    return f"{call(_NAME, case)}: {'the most expensive stage' if rule == 'work' else rule}"


def _best(rule: str, cases: slice = slice(None)) -> Callable:
    """What is reached by whoever follows this rule, and does it well."""

    def answers(given: list[Data], want: Any = None) -> list[Data]:
        least = {}
        for case in given[0]["cases"][cases]:
            least[_name(rule, case)] = float(min(_RULES[rule](counts, case) for counts in _all_cuts(case)))
        return [least]

    return answers


def _said(what: str, cases: slice) -> Callable:
    return lambda given, want: [{_name("work", case): what for case in given[0]["cases"][cases]}]


CUT = Exercise(
    id="08.1",
    title=_NAME,
    points=2,
    body=_cut,
    inputs=_cut_inputs,
    reference=_best("work"),
    ranks=(1,),
    mistakes=(
        Mistake(
            "You return the places where stages end. What was asked for is how many layers each of them gets.",
            _said(_BORDERS, PLAIN),
        ),
        Mistake(
            "Where the head costs more than all layers, you leave a stage without a layer. Each stage has one at "
            "least, also the one with the head.",
            _said(_EMPTY, HEAVY),
        ),
        Mistake(
            "You cut by count: all stages get equally many layers, to one. A step waits for the stage with the most "
            "work, so add up costs.",
            _best("count", slice(0, 2)),
        ),
        Mistake(
            "You cut by count, and the last stage takes what is left over. A step waits for the stage with the most "
            "work, so add up costs.",
            _best("even, then the rest", slice(0, 2)),
        ),
        Mistake(
            "You fill each stage as long as it stays below the mean. What then is left over piles up in the last "
            "stage. The best cut may give a stage more than the mean, to spare another one: look at all stages "
            "together.",
            _best("up to the mean", PLAIN),
        ),
        Mistake(
            "You fill each stage until it has the mean, so each takes up to a layer too much, and the last gets what "
            "is left. A border that looks good from the left may be bad for the rest: look at all stages together.",
            _best("over the mean", PLAIN),
        ),
        Mistake(
            "You leave the head out. The last stage computes it too, so it should have fewer layers than the others.",
            _best("work without the head", slice(0, 2)),
        ),
        Mistake(
            "You keep the stages close to each other: the sum of the squares is smallest, and so is the variance. "
            "That is another aim. All wait for the most expensive stage, however the others are.",
            _best("squares of the work", slice(0, 2)),
        ),
        Mistake(
            "You make the cheapest stage as expensive as can be. Nobody waits for that one: make the most expensive "
            "stage cheap.",
            _best("the cheapest, negative", slice(0, 2)),
        ),
    ),
)

EXERCISES = (CUT,)
