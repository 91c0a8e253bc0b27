"""Chapter 08, where to cut a model into stages: exercise 08.1."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations, pairwise
from typing import Any

import torch

from lib.check.exercise import SEEN, Data, Exercise, Mistake, call, kind, whole
from lib.mesh import Group

_NAME = "cut"
_EMPTY, _BORDERS, _UNEVEN = (
    "a stage without a layer",
    "the places where stages begin or end",
    "counts that are not whole",
)
_RETURNED = "what was returned"

Case = tuple[list[int], int, int]  # cost of each layer, of the head, number of stages
Rule = Callable[[Sequence[int], Case], float]  # what somebody makes as small as can be


def _all_cuts(case: Case) -> Iterator[tuple[int, ...]]:
    """How many layers each stage gets."""
    costs, _, num_stages = case
    for borders in combinations(range(1, len(costs)), num_stages - 1):
        yield tuple(end - begin for begin, end in pairwise((0, *borders, len(costs))))


def _work(counts: Iterable[int], case: Case, with_head: bool = True) -> list[int]:
    costs, head, _ = case
    left = iter(costs)
    work = [sum(next(left) for _ in range(count)) for count in counts]
    work[-1] += head if with_head else 0
    return work


def _dearest(counts: Sequence[int], case: Case) -> int:
    return max(_work(counts, case))


def _even(case: Case) -> tuple[int, ...]:
    """As many layers for each stage; the last one takes what is left over."""
    costs, _, num_stages = case
    each = len(costs) // num_stages
    return *[each] * (num_stages - 1), len(costs) - each * (num_stages - 1)


def _filled(case: Case, over: bool) -> tuple[int, ...]:
    """A stage is full when it has the mean (`over`), or when one layer more would be more than that."""
    costs, head, num_stages = case
    mean, counts, work = (sum(costs) + head) / num_stages, [0], 0
    for cost in costs:
        full = work >= mean if over else work + cost > mean
        if full and len(counts) < num_stages:
            counts, work = [*counts, 0], 0
        counts[-1] += 1
        work += cost
    return tuple(counts)


_RULES: dict[str, Rule] = {
    "work": _dearest,
    "count": lambda counts, case: max(counts) - min(counts),
    "even, then the rest": lambda counts, case: counts != _even(case),
    "up to the mean": lambda counts, case: counts != _filled(case, over=False),
    "over the mean": lambda counts, case: counts != _filled(case, over=True),
    "work without the head": lambda counts, case: max(_work(counts, case, with_head=False)),
    "squares of the work": lambda counts, case: sum(work**2 for work in _work(counts, case)),
    "work of the stages backwards": lambda counts, case: _dearest(counts[::-1], case),
    "work with the head in front": lambda counts, case: max(_work(counts[::-1], (case[0][::-1], *case[1:]))),
}
_ALWAYS = ("count", "even, then the rest", "squares of the work", "work of the stages backwards")
_PLAIN = (*_ALWAYS, "up to the mean", "over the mean")  # without a head, whose share of the mean people count or not
_HEADED = (*_ALWAYS, "work without the head", "work with the head in front")


def _best(rule: str, case: Case) -> set[tuple[int, ...]]:
    """The cuts that are best by this rule."""
    scores = {cut: _RULES[rule](cut, case) for cut in _all_cuts(case)}
    least = min(scores.values())
    return {cut for cut, score in scores.items() if score == least}


def _is_telling(case: Case, rules: Sequence[str]) -> bool:
    """Whether no cut that is best by one of these rules is right."""
    right = _best("work", case)
    return all(right.isdisjoint(_best(rule, case)) for rule in rules)


# ---- 08.1 cut -------------------------------------------------------------------------------------------------------

_PLAIN_ONES, _TELLING, _HEAVY = slice(0, 2), slice(0, 4), slice(4, 5)  # of the cases


def _cut_inputs(generator: torch.Generator, n: int) -> list[Data]:
    def costs(count: int) -> list[int]:
        return [whole(generator, 1, 20) for _ in range(count)]

    def telling(rules: Sequence[str], heads: tuple[int, int]) -> Case:
        """A case in which each of these rules is wrong."""
        while True:
            case = costs(11), whole(generator, *heads), 4
            if _is_telling(case, rules):
                return case

    cases = [telling(rules, heads) for rules, heads in ((_PLAIN, (0, 1)), (_HEADED, (15, 45))) for _ in range(2)]
    heavy = costs(6)
    return [{"cases": [*cases, (heavy, 2 * sum(heavy), 3), (costs(5), 7, 1), (costs(4), 2, 4)]}]


def _cut(answer: Callable, group: Group, given: Data) -> Data:
    found: Data = {}
    for case in given["cases"]:
        costs, head, num_stages = case
        result = answer(list(costs), head, num_stages)
        result = [*result] if isinstance(result, Iterator) else result
        found |= _facts(result, case)
        reached = found.get(_name("work", case))
        if SEEN not in found and reached != min(_dearest(cut, case) for cut in _all_cuts(case)):
            found[SEEN] = f"{call(_NAME, case)} gave {result}"
            found[SEEN] += "" if reached is None else f", the stages take {_work(map(int, result), case)}"
    return found


def _facts(result: Any, case: Case) -> Data:
    """By each rule, what has been reached."""
    costs, _, num_stages = case
    counts = _whole_ones(result)
    if counts is None:
        return {_name(_RETURNED, case): _UNEVEN if isinstance(result, Iterable) else kind(result)}
    fits = len(counts) == num_stages and sum(counts) == len(costs)
    if fits and min(counts) > 0:
        scores = {_name(rule, case): int(score(counts, case)) for rule, score in _RULES.items()}
        return {_name(_RETURNED, case): _form(counts)} | scores
    increasing = counts == tuple(sorted({*counts}))
    if increasing and sum(0 < count < len(costs) for count in counts) == num_stages - 1:  # perhaps with 0, or the end
        return {_name(_RETURNED, case): _BORDERS}
    return {_name(_RETURNED, case): _EMPTY if fits else _form(counts)}


def _whole_ones(result: Any) -> tuple[int, ...] | None:
    """The counts, if that is what they are."""
    try:
        counts = tuple(int(count) for count in result)
        return counts if counts == tuple(result) else None
    except (TypeError, ValueError, OverflowError):
        return None


def _form(counts: Sequence[int]) -> str:
    return f"{len(counts)} stages with {sum(counts)} layers"


def _name(what: str, case: Case) -> str:
    return f"{call(_NAME, case)}: {'the most expensive stage' if what == 'work' else what}"


def _reached(rule: str, cases: slice = slice(None)) -> Callable:
    """What is reached by whoever follows this rule, and does it well."""

    def answers(given: list[Data], want: Any = None) -> list[Data]:
        least = {}
        for case in given[0]["cases"][cases]:
            least[_name(rule, case)] = int(min(_RULES[rule](cut, case) for cut in _all_cuts(case)))
        return [least]

    return answers


def _reference(given: list[Data]) -> list[Data]:
    forms = {_name(_RETURNED, case): f"{case[2]} stages with {len(case[0])} layers" for case in given[0]["cases"]}
    return [forms | _reached("work")(given)[0]]


def _said(what: str, cases: slice) -> Callable:
    return lambda given, want: [{_name(_RETURNED, case): what for case in given[0]["cases"][cases]}]


CUT = Exercise(
    id="08.1",
    title=_NAME,
    points=2,
    body=_cut,
    inputs=_cut_inputs,
    reference=_reference,
    ranks=(1,),
    mistakes=(
        Mistake(
            "You return the places where stages begin or end. What was asked for is how many layers each of them gets.",
            _said(_BORDERS, _PLAIN_ONES),
        ),
        Mistake(
            "Where the head costs more than all layers, you leave a stage without a layer. Each stage has one at "
            "least, also the one with the head.",
            _said(_EMPTY, _HEAVY),
        ),
        Mistake(
            "You keep the stages close to each other: the sum of the squares is smallest, and so is the variance. "
            "That is another aim. All wait for the most expensive stage, however the others are.",
            _reached("squares of the work", _TELLING),
        ),
        Mistake(
            "You cut by count: all stages get equally many layers, give or take one. A step waits for the stage with "
            "the most work, so add up costs.",
            _reached("count", _TELLING),
        ),
        Mistake(
            "You cut by count, and the last stage takes what is left over. A step waits for the stage with the most "
            "work, so add up costs.",
            _reached("even, then the rest", _TELLING),
        ),
        Mistake(
            "You fill each stage as long as it stays below the mean. What then is left over piles up in the last "
            "stage. The best cut may give a stage more than the mean, to spare another one: look at all stages "
            "together.",
            _reached("up to the mean", _PLAIN_ONES),
        ),
        Mistake(
            "You fill each stage until it has the mean, so each takes up to a layer too much, and the last gets what "
            "is left. A border that looks good from the left may be bad for the rest: look at all stages together.",
            _reached("over the mean", _PLAIN_ONES),
        ),
        Mistake(
            "You leave the head out. The last stage computes it too, so it should have fewer layers than the others.",
            _reached("work without the head", _TELLING),
        ),
        Mistake(
            "You add the head to the first stage. It comes behind the last layer, so the last stage computes it.",
            _reached("work with the head in front", _TELLING),
        ),
        Mistake(
            "The counts are right, and in the other order: the first is that of the first stage. Whoever fills from "
            "the end has to turn the list round.",
            _reached("work of the stages backwards", _TELLING),
        ),
    ),
)

EXERCISES = (CUT,)
