"""08.1: cut layers of given costs into stages, so that the most expensive stage is as cheap as possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import combinations, pairwise
from typing import Any

import torch

from course.check.exercise import SEEN, Data, Exercise, Mistake, call, kind, whole
from lib.mesh import Group
from lib.pipeline.balance import balanced

Case = tuple[list[int], int, int]  # cost of each layer, of the head, number of stages
FORM, WORK, COUNTS = "what was returned", "the most expensive stage", "counts of layers"
HEADLESS_WORK = "work without the head"
PLAIN, HEAVY = "without a head", "with a heavy head"
EMPTY, BORDERS, UNEVEN = "a stage without a layer", "where stages begin or end", "counts that are not whole"


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    def costs(count: int) -> list[int]:
        return [whole(generator, 1, 20) for _ in range(count)]

    def telling(wrong: Sequence[Callable], heads: tuple[int, int]) -> Case:
        """A case that tells these wrong programs apart: each cuts in its own way, and with a head one forgets it."""
        while True:
            case = costs(11), whole(generator, *heads), 4
            least = min(most_expensive(cut, case) for cut in all_cuts(case))
            cuts = {tuple(program(*case)) for program in wrong}
            headless = [RULES[HEADLESS_WORK](cut, case) for cut in cuts]
            apart = len(cuts) == len(wrong) and (not case[1] or headless.count(min(headless)) == 1)
            if apart and all(len(cut) == 4 and most_expensive(cut, case) > least for cut in cuts):
                return case

    plain = [telling(ALWAYS_WRONG + FILLED, (0, 1)) for _ in range(2)]  # without a head, which people fill in or not
    headed = [telling(ALWAYS_WRONG + HEADLESS, (15, 45)) for _ in range(2)]
    heavy = costs(6)
    return [{"cases": [*plain, *headed, (heavy, 2 * sum(heavy), 3), (costs(5), 7, 1), (costs(4), 2, 4)]}]


def all_cuts(case: Case) -> Iterator[tuple[int, ...]]:
    costs, _, num_stages = case
    for borders in combinations(range(1, len(costs)), num_stages - 1):
        yield tuple(end - begin for begin, end in pairwise((0, *borders, len(costs))))


def work_of(counts: Iterable[int], case: Case) -> list[int]:
    costs, head, _ = case
    left = iter(costs)
    work = [sum(next(left) for _ in range(count)) for count in counts]
    return [*work[:-1], work[-1] + head]


def most_expensive(counts: Sequence[int], case: Case) -> int:
    return max(work_of(counts, case))


RULES: dict[str, Callable] = {  # which people make as small as can be; of several best cuts any may come
    WORK: most_expensive,
    "spread of the counts": lambda counts, case: max(counts) - min(counts),
    "squares of the work": lambda counts, case: sum(work**2 for work in work_of(counts, case)),
    HEADLESS_WORK: lambda counts, case: most_expensive(counts, (case[0], 0, case[2])),
    "work with the head in front": lambda counts, case: most_expensive(counts[::-1], (case[0][::-1], *case[1:])),
    "work of the stages backwards": lambda counts, case: most_expensive(counts[::-1], case),
}


def body(answer: Callable, group: Group, given: Data) -> Data:
    found: Data = {}
    for case in given["cases"]:
        costs, head, num_stages = case
        result = answer(list(costs), head, num_stages)
        result = [*result] if isinstance(result, Iterator) else result
        facts, title = facts_of(result, case), call("cut", case)
        found |= {f"{title}: {what}": fact for what, fact in facts.items()}
        if SEEN not in found and facts.get(WORK) != min(most_expensive(cut, case) for cut in all_cuts(case)):
            found[SEEN] = f"{title} gave {result}"
            found[SEEN] += f", the stages take {work_of(map(int, result), case)}" if WORK in facts else ""
    return found


def facts_of(result: Any, case: Case) -> Data:
    costs, head, num_stages = case
    counts, name = whole_numbers(result), form_name(case)
    if counts is None:
        return {name: UNEVEN if isinstance(result, Iterable) else kind(result)}
    fits = len(counts) == num_stages and sum(counts) == len(costs)
    form = f"{len(counts)} stages with {sum(counts)} layers"
    if fits and min(counts) > 0:
        telling = RULES if len(costs) == 11 else (WORK,)
        scores = {rule: RULES[rule](counts, case) for rule in telling}
        return {name: form} | scores | ({} if head else {COUNTS: list(counts)})
    increasing = counts == tuple(sorted({*counts}))
    if increasing and sum(0 < count < len(costs) for count in counts) == num_stages - 1:  # perhaps with 0, or the end
        return {name: BORDERS}
    return {name: EMPTY if fits else form}


def form_name(case: Case) -> str:
    costs, head, _ = case
    return f"{FORM} {PLAIN}" if not head else f"{FORM} {HEAVY}" if head > sum(costs) else FORM


def whole_numbers(result: Any) -> tuple[int, ...] | None:
    try:
        counts = tuple(int(count) for count in result)
        return counts if counts == tuple(result) else None
    except (TypeError, ValueError, OverflowError):
        return None


def reference(given: list[Data]) -> list[Data]:
    """Any of the best cuts is right."""
    found: Data = {}
    for case in given[0]["cases"]:
        title, least = call("cut", case), min(most_expensive(cut, case) for cut in all_cuts(case))
        found |= {
            f"{title}: {form_name(case)}": f"{case[2]} stages with {len(case[0])} layers",
            f"{title}: {WORK}": least,
        }
    return [found]


# ---- cuts, right and wrong ------------------------------------------------------------------------------------------


def best_by(score: Callable) -> Callable:
    """The cut with the smallest score: a function of the work of its stages, without the head, and of the head."""

    def program(costs, head, num_stages):
        cuts = all_cuts((costs, head, num_stages))
        return [*min(cuts, key=lambda counts: score(work_of(counts, (costs, 0, num_stages)), head))]

    return program


def with_head(work, head):
    return [*work[:-1], work[-1] + head]


def by_dynamic_programming(costs, head, num_stages):
    costs = [*costs[:-1], costs[-1] + head]
    return torch.tensor([len(part) for part in balanced(costs, num_stages)])


def by_a_limit(costs, head, num_stages):
    """The smallest limit with which stages can be filled from the end; each keeps a layer for every stage to come."""

    def filled(limit):
        counts, work = [1], costs[-1] + head
        for place, cost in reversed([*enumerate(costs[:-1])]):
            stages_to_come = num_stages - len(counts)
            if stages_to_come and (work + cost > limit or place + 1 == stages_to_come):
                counts, work = [0, *counts], 0
            counts[0] += 1
            work += cost
            if work > limit:
                return None
        return counts if costs[-1] + head <= limit else None

    return next(filter(None, map(filled, range(sum(costs) + head + 1))))


def allows_empty_stages(costs, head, num_stages):
    @cache
    def best(first, stages):
        if stages == 1:
            return sum(costs[first:]) + head, [len(costs) - first]
        ways = []
        for end in range(first, len(costs) + 1):
            most, rest = best(end, stages - 1)
            ways.append((max(sum(costs[first:end]), most), [end - first, *rest]))
        return min(ways)

    return best(0, num_stages)[1]


def by_count(costs, head, num_stages):
    return [len(part) for part in torch.arange(len(costs)).tensor_split(num_stages)]


def last_takes_the_rest(costs, head, num_stages):
    each = len(costs) // num_stages
    return [each] * (num_stages - 1) + [len(costs) - (num_stages - 1) * each]


def filled_to_the_mean(costs, head, num_stages, over=False):
    mean, stages = (sum(costs) + head) / num_stages, [[]]
    for cost in costs:
        full = sum(stages[-1]) >= mean if over else sum(stages[-1]) + cost > mean
        if full and len(stages) < num_stages:
            stages.append([])
        stages[-1].append(cost)
    return [len(stage) for stage in stages]


def filled_over_the_mean(*case):
    return filled_to_the_mean(*case, over=True)


def ends_of_stages(*case):
    return torch.tensor(by_count(*case)).cumsum(0).tolist()


def turned_round(costs, head, num_stages):
    return by_a_limit(costs, head, num_stages)[::-1]


by_squares = best_by(lambda work, head: sum(w * w for w in with_head(work, head)))
without_head = best_by(lambda work, head: max(work))
head_in_front = best_by(lambda work, head: max([work[0] + head, *work[1:]]))
ALWAYS_WRONG = (by_squares, by_count, last_takes_the_rest, turned_round)
FILLED = (filled_to_the_mean, filled_over_the_mean)
HEADLESS = (without_head, head_in_front)

EXERCISE = Exercise(
    id="08.1",
    title="cut",
    points=2,
    body=body,
    inputs=inputs,
    reference=reference,
    ranks=(1,),
    right=(best_by(lambda work, head: max(with_head(work, head))), by_dynamic_programming, by_a_limit),
    mistakes=(
        Mistake(
            "You return the places where stages begin or end. Return how many layers each of them gets.",
            ends_of_stages,
            about=(PLAIN,),
        ),
        Mistake(
            "Where the head costs more than all layers, you leave a stage without a layer. Each stage has one at "
            "least, also the one with the head.",
            allows_empty_stages,
            about=(HEAVY,),
        ),
        Mistake(
            "You make the work of the stages similar: the sum of the squares is smallest, and so is the variance. That "
            "is a different aim. All wait for the most expensive stage, however cheap the others are.",
            by_squares,
            about=("squares",),
        ),
        Mistake(
            "You cut by count: all stages get equally many layers, give or take one. A step waits for the stage with "
            "the most work, so add up costs.",
            by_count,
            about=("spread",),
        ),
        Mistake(
            "You cut by count, and the last stage takes the remaining layers. A step waits for the stage with the most "
            "work, so add up costs.",
            last_takes_the_rest,
            about=(COUNTS,),
        ),
        Mistake(
            "You fill each stage as long as it stays below the mean. The remaining layers pile up in the last stage. "
            "The best cut may give a stage more than the mean, to spare a different one: look at all stages together.",
            filled_to_the_mean,
            about=(COUNTS,),
        ),
        Mistake(
            "You fill each stage until it has the mean, so each takes up to a layer too much, and the last gets the "
            "rest. A boundary that looks good from the left may be bad for the rest: look at all stages together.",
            filled_over_the_mean,
            about=(COUNTS,),
        ),
        Mistake(
            "You leave the head out. The last stage also computes it, so it should have fewer layers than the others.",
            without_head,
            about=("without the head",),
        ),
        Mistake(
            "You add the head to the first stage. It comes after the last layer, so the last stage computes it.",
            head_in_front,
            about=("in front",),
        ),
        Mistake(
            "The counts are right, in the wrong order: the first belongs to the first stage. If you fill from the end, "
            "reverse the list.",
            turned_round,
            about=("backwards",),
        ),
    ),
)
