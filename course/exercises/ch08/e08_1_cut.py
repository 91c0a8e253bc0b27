"""08.1: cut layers of given costs into stages, so that the most expensive stage is as cheap as possible."""

from collections.abc import Iterable, Iterator
from itertools import combinations, pairwise

import torch

from course.check.compare import SEEN
from course.check.edits import exercise
from course.check.exercise import call, kind, whole
from lib.pipeline.balance import balanced

FORM, WORK, COUNTS = "what was returned", "the most expensive stage", "counts of layers"
HEADLESS_WORK = "work without the head"
PLAIN, HEAVY = "without a head", "with a heavy head"
EMPTY, BORDERS, UNEVEN = "a stage without a layer", "where stages begin or end", "counts that are not whole"


def inputs(generator, n):
    _, _, squares, count, rest, below, above, nearest, headless, front, turned = (
        m.wrong.load() for m in EXERCISE.mistakes
    )
    always_wrong = [squares, count, rest, turned]

    def costs(count):
        return [whole(generator, 1, 20) for _ in range(count)]

    def telling(wrong, heads):
        """A case that tells these wrong programs apart: each cuts in its own way, and with a head one forgets it."""
        while True:
            case = costs(11), whole(generator, *heads), 4
            least = min(most_expensive(cut, case) for cut in all_cuts(case))
            cuts = {tuple(program(*case)) for program in wrong}
            without_head = [RULES[HEADLESS_WORK](cut, case) for cut in cuts]
            apart = len(cuts) == len(wrong) and (not case[1] or without_head.count(min(without_head)) == 1)
            if apart and all(len(cut) == 4 and most_expensive(cut, case) > least for cut in cuts):
                return case

    plain = [telling([*always_wrong, below, above, nearest], (0, 1)) for _ in range(2)]  # which people fill in or not
    headed = [telling([*always_wrong, headless, front], (15, 45)) for _ in range(2)]
    heavy = costs(6)
    return [{"cases": [*plain, *headed, (heavy, 2 * sum(heavy), 3), (costs(5), 7, 1), (costs(4), 2, 4)]}]


def all_cuts(case):
    costs, _, num_stages = case
    for borders in combinations(range(1, len(costs)), num_stages - 1):
        yield tuple(end - begin for begin, end in pairwise((0, *borders, len(costs))))


def work_of(counts, case):
    costs, head, _ = case
    left = iter(costs)
    work = [sum(next(left) for _ in range(count)) for count in counts]
    return [*work[:-1], work[-1] + head]


def most_expensive(counts, case):
    return max(work_of(counts, case))


RULES = {  # which people make as small as can be; of several best cuts any may come
    WORK: most_expensive,
    "spread of the counts": lambda counts, case: max(counts) - min(counts),
    "squares of the work": lambda counts, case: sum(work**2 for work in work_of(counts, case)),
    HEADLESS_WORK: lambda counts, case: most_expensive(counts, (case[0], 0, case[2])),
    "work with the head in front": lambda counts, case: most_expensive(counts[::-1], (case[0][::-1], *case[1:])),
    "work of the stages backwards": lambda counts, case: most_expensive(counts[::-1], case),
}


def body(answer, group, given):
    found = {}
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


def facts_of(result, case):
    costs, head, num_stages = case
    counts, name = whole_numbers(result), form_name(case)
    if counts is None:
        return {name: UNEVEN if isinstance(result, Iterable) else kind(result)}
    fits = len(counts) == num_stages and sum(counts) == len(costs)
    form = f"{len(counts)} stages with {sum(counts)} layers"
    if fits and min(counts) > 0:
        scores = {rule: RULES[rule](counts, case) for rule in (RULES if len(costs) == 11 else [WORK])}
        return {name: form} | scores | ({} if head else {COUNTS: str(counts)})
    increasing = counts == tuple(sorted({*counts}))
    if increasing and sum(0 < count < len(costs) for count in counts) == num_stages - 1:  # perhaps with 0, or the end
        return {name: BORDERS}
    return {name: EMPTY if fits else form}


def form_name(case):
    costs, head, _ = case
    return f"{FORM} {PLAIN}" if not head else f"{FORM} {HEAVY}" if head > sum(costs) else FORM


def whole_numbers(result):
    try:
        counts = tuple(int(count) for count in result)
        return counts if counts == tuple(result) else None
    except (TypeError, ValueError, OverflowError):
        return None


def reference(given):
    """Any of the best cuts is right."""
    found = {}
    for case in given[0]["cases"]:
        title = call("cut", case)
        found[f"{title}: {form_name(case)}"] = f"{case[2]} stages with {len(case[0])} layers"
        found[f"{title}: {WORK}"] = min(most_expensive(cut, case) for cut in all_cuts(case))
    return [found]


def cut(costs, head, num_stages):
    def best(costs, stages):
        if stages == 1:
            return sum(costs) + head, [len(costs)]
        ways = []
        for count in range(1, len(costs) - stages + 2):
            most, rest = best(costs[count:], stages - 1)
            ways.append((max(sum(costs[:count]), most), [count, *rest]))
        return min(ways)

    return best(costs, num_stages)[1]


def by_dynamic_programming(costs, head, num_stages):
    costs = [*costs[:-1], costs[-1] + head]
    return torch.tensor([len(part) for part in balanced(costs, num_stages)])


def by_count(costs, head, num_stages):
    return [len(part) for part in torch.arange(len(costs)).tensor_split(num_stages)]


def filled(is_full):
    """Stages filled from the first on, each until it is full: a function of its work, the next cost, and the mean."""

    def program(costs, head, num_stages):
        mean, stages = (sum(costs) + head) / num_stages, [[]]
        for cost in costs:
            if is_full(sum(stages[-1]), cost, mean) and len(stages) < num_stages:
                stages.append([])
            stages[-1].append(cost)
        return [len(stage) for stage in stages]

    return program


def at_the_shares(costs, head, num_stages):
    """Each boundary where the sum so far is nearest to k/p of all."""
    sums, borders = [sum(costs[:k]) for k in range(len(costs) + 1)], [0]
    for k in range(1, num_stages):
        left = range(borders[-1] + 1, len(costs) - num_stages + k + 1)
        share = (sums[-1] + head) * k / num_stages
        borders.append(min(left, key=lambda border: abs(sums[border] - share)))
    return [end - begin for begin, end in pairwise([*borders, len(costs)])]


MISTAKES = """
in without a head:
returns [sum(result[:k]) for k in range(1, num_stages + 1)]
    You return the places where stages begin or end.
        Return how many layers each of them gets.

in with a heavy head:
range(1, len(costs) - stages + 2) => range(len(costs) + 1)
    Where the head is heavier than all layers, you leave a stage empty.
        Each has a layer at least, also the head's.

in squares:
sum(costs) + head => (sum(costs) + head) ** 2
max(sum(costs[:count]), most) => sum(costs[:count]) ** 2 + most
    You make the work of the stages similar: the sum of the squares is smallest, and so is the variance.
        That is a different aim. All wait for the most expensive stage, however cheap the others are.

in spread:
by_count
    You cut by count, give or take one layer.
        A step waits for the stage with the most work, so add up costs.

in counts of layers:
lambda costs, head, p: [len(costs) // p] * (p - 1) + [len(costs) - len(costs) // p * (p - 1)]
    You cut by count, and the last stage takes the rest. A step waits for the stage with the most work.
        Add up costs.
filled(lambda work, cost, mean: work + cost > mean)
    You fill each stage as long as it stays below the mean. The remaining layers pile up in the last stage. The best cut
    may give a stage more than the mean, to spare a different one.
        Look at all stages together.
filled(lambda work, cost, mean: work >= mean)
    You fill each stage until it has the mean, so each takes up to a layer too much, and the last gets the rest. A
    boundary that looks good from the left may be bad for the rest.
        Look at all stages together.

at_the_shares
    You put each boundary where the sum of the costs is nearest to its share of the total, k/p. Two boundaries that are
    each a little off may meet at one stage.
        Look at all stages together.

in without the head:
sum(costs) + head => sum(costs)
    You leave the head out.
        The last stage also computes it, so it should have fewer layers than the others.

in in front:
sum(costs) + head => sum(costs)
sum(costs[:count]) => sum(costs[:count]) + head * (stages == num_stages)
    You add the head to the first stage.
        It comes after the last layer, so the last stage computes it.

in backwards:
returns result[::-1]
    The counts are right, in the wrong order: the first is the first stage's.
        If you fill from the end, reverse them.
"""

ALSO_RIGHT = """
return best(costs, num_stages)[1] => yield from best(costs, num_stages)[1]
    An iterator.
"""

EXERCISE = exercise(globals(), points=2, right=(cut, by_dynamic_programming), ranks=(1,))
