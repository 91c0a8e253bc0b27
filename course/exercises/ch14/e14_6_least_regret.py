"""14.6: one layout for two possible cases of a cluster, and a number and a reason for it."""

import random
from collections import namedtuple
from dataclasses import replace
from functools import cache

import numpy as np

from course.check.compare import SEEN
from course.check.edits import exercise
from course.check.exercise import known_number, several, whole, word
from course.check.refusals import KEPT, MODEL_STATES, NODE, NOTHING_BINDS, PIPELINE_ZERO3, binds, layout_of
from lib import planner
from lib.planner import Choices, Cluster, Layout4D, Training, best_layouts, memory_bytes
from lib.planner.search import all_layouts, layout_text, why_slower
from lib.planner.seconds import Seconds
from lib.planner.training import GPUS, PRESET_MODELS, stack_for

NEAR, TRIED = 0.01, 3
PARTS = CHOICE, LOSS, REASON = ("the layout", "the number", "the reason")
HOLDS, TOLD = "right", "what was returned"
REFUSED = {NODE: NODE, PIPELINE_ZERO3: PIPELINE_ZERO3, MODEL_STATES: "does not fit", KEPT: "does not fit"}

# A cluster in two cases, which differ in the GB/s of the network and in the fraction of tp sums exposed.
Clusters = namedtuple("Clusters", "model gpus million_tokens network exposed_tp")
MEANS_DIFFER = Clusters("llama-7b", 128, 1, (2.5, 50), (0, 1))  # here the least mean is a bad choice
CLUSTERS = (
    Clusters("llama-7b", 64, 2, (50, 2.5), (1, 0.3)),
    Clusters("llama-13b", 256, 1, (2.5, 50), (0, 1)),
    Clusters("llama-13b", 128, 1, (5, 50), (1, 0.3)),
    Clusters("llama-70b", 256, 2, (50, 2.5), (1, 0)),
    Clusters("gpt-175b", 256, 2, (50, 2.5), (1, 0.3)),
)


@cache  # wrong programs ask for the same again
def fits(training, layout):
    return planner.fits(training, layout)


@cache
def step_s(training, layout):
    return planner.step_s(training, layout)


@cache
def either_way(cluster):
    """The same training in both cases of the cluster; cached, because further caches are keyed by this pair."""
    shape, device, stack = PRESET_MODELS[cluster.model], GPUS["h100"], stack_for("megatron-lm", "h100")
    batch = cluster.million_tokens * 2**20 // shape.context
    return tuple(
        Training(
            shape,
            Cluster(replace(device, network_Bps=gigabytes * 1e9), cluster.gpus),
            replace(stack, exposed_tp=exposed),
            batch,
        )
        for gigabytes, exposed in zip(cluster.network, cluster.exposed_tp)
    )


def inputs(generator, n):
    rng = random.Random(whole(generator, 0, 2**40))
    return [{"clusters": rng.sample([MEANS_DIFFER, *rng.sample(CLUSTERS, TRIED - 1)], TRIED)}]


# Of all layouts that fit: their regrets in both cases, the best of each, and the least of the larger regrets.
Regrets = namedtuple("Regrets", "of bests least")


@cache
def regrets(trainings):
    able = [one for one in all_layouts(trainings[0], Choices()) if all(fits(run, one) for run in trainings)]
    times = [{one: step_s(run, one).total for one in able} for run in trainings]
    bests = [min(seconds, key=seconds.get) for seconds in times]
    pairs = list(zip(times, bests))
    of = {one: tuple(s[one] / s[best] - 1 for s, best in pairs) for one in able}
    return Regrets(of, tuple(bests), min(map(max, of.values())))


def lost(trainings):
    """Seconds by kind that the first's best takes longer than the second's, in the second training."""
    first, second = (step_s(trainings[1], best)._asdict() for best in regrets(trainings).bests)
    return {kind: first[kind] - second[kind] for kind in first}


def body(answer, group, given):
    return {TOLD: [told(answer(either_way(cluster))) for cluster in given["clusters"]]}


def told(result):
    """A layout as a list, or what there is in its place; a number; and a reason as it is."""
    layout, loss, reason = several(result, len(PARTS))
    found = layout_of(layout)
    return [[*found] if found else "nothing" if layout is None else "no layout", known_number(loss, ()), reason]


def compared(found, given):
    verdicts = {CHOICE: HOLDS, REASON: HOLDS, LOSS: []}
    for cluster, (layout, loss, reason) in zip(given["clusters"], found[TOLD], strict=True):
        trainings = either_way(cluster)
        judged = regrets(trainings)
        verdicts[LOSS].append(known_number(loss, [judged.of[judged.bests[0]][1]]))
        each = {CHOICE: of_layout(trainings, layout), REASON: of_reason(trainings, word(reason))}
        for part, (verdict, figures) in each.items():
            if verdicts[part] == HOLDS and verdict != HOLDS:
                title = f"{cluster.model} on {cluster.gpus} GPUs, {cluster.million_tokens} Mi tokens"
                verdicts |= {part: verdict, part + SEEN: f"{title}\n{figures}" if figures else ""}
    return verdicts


def of_layout(trainings, result):
    """A verdict, and the figures that show it."""
    if isinstance(result, str):
        return result, ""
    layout = Layout4D(*result)
    for run in trainings:
        word, why = binds(run, layout)
        if word != NOTHING_BINDS:
            return REFUSED.get(word, "uncut"), why
    judged = regrets(trainings)
    mine = [step_s(run, layout).total / step_s(run, best).total - 1 for run, best in zip(trainings, judged.bests)]
    if max(mine) <= judged.least + NEAR:
        return HOLDS, ""
    figures = (
        f"{layout_text(layout)}: {mine[0]:.1%} slower than the best of the first case, {mine[1]:.1%} of the second.\n"
        f"With a different layout the larger of the two is {judged.least:.1%}."
    )
    least_mean = min(judged.of, key=lambda one: sum(judged.of[one]))
    named = dict(zip((least_mean, *judged.bests), ("least mean", "first's best", "second's best"), strict=True))
    return named.get(layout, "a larger regret"), figures


def of_reason(trainings, reason):
    if not isinstance(reason, str) or reason not in Seconds._fields:
        return "nothing" if reason is None else "no kind", f"{reason!r} is none of {', '.join(Seconds._fields)}."
    seconds = lost(trainings)
    if reason == max(seconds, key=seconds.get):
        return HOLDS, ""
    first = f"Best in the first case: {layout_text(regrets(trainings).bests[0])}"
    return "the largest" if reason == largest(trainings) else "a different kind", first


def largest(trainings):
    """The kind that takes most of the time of the first's best."""
    seconds = step_s(trainings[1], regrets(trainings).bests[0])._asdict()
    return max(seconds, key=seconds.get)


def least_regret(trainings):
    layouts = [one for one in all_layouts(trainings[0], Choices()) if all(fits(run, one) for run in trainings)]
    seconds = [{one: step_s(run, one) for one in layouts} for run in trainings]
    bests = [min(found, key=lambda one: found[one].total) for found in seconds]

    def larger_regret(one):
        return max(found[one].total / found[best].total for found, best in zip(seconds, bests))

    first, second = (seconds[1][best] for best in bests)
    lost = {kind: first._asdict()[kind] - second._asdict()[kind] for kind in Seconds._fields}
    loss = first.total / second.total - 1
    layout = min(layouts, key=larger_regret)
    return layout, loss, max(lost, key=lost.get)


def by_lists(trainings):
    """By the planner's own lists; rounded, a plain tuple, and a text of numpy's."""
    lists = [{one.layout: one for one in best_layouts(run, Choices(headroom=0), best=100_000)} for run in trainings]
    bests = [next(iter(found)) for found in lists]
    pairs = list(zip(lists, bests))
    layout = min(
        lists[0], key=lambda one: max(found[one].seconds.total / found[b].seconds.total for found, b in pairs)
    )
    first, second = (lists[1][best] for best in bests)
    loss = first.seconds.total / second.seconds.total - 1
    return [tuple(layout), float(f"{loss:.3g}"), np.str_(why_slower(second, first).rpartition("more for ")[2])]


def too_large(training):
    able = [one for one in all_layouts(training, Choices()) if one.tp <= 8 and not fits(training, one)]
    return max(able, key=lambda one: memory_bytes(training, one).total)


def nearest(layouts, larger_regret, over):
    """The layout with the largest regret up to 0.01 above the least, or with the least above that."""
    most = min(map(larger_regret, layouts)) + NEAR
    able = [one for one in layouts if (larger_regret(one) > most) == over]
    return (min if over else max)(able, key=larger_regret)


ALSO_RIGHT = """
min(layouts, key=larger_regret) => nearest(layouts, larger_regret, over=False)
    As far from the least as is allowed.
"""

MISTAKES = """
returns None
    Return three things: a layout, a fraction, and the name of a kind of time.

in the layout:
min(layouts, key=larger_regret) => "tp 8"
    The first of the three is no layout that the planner would list.
        Return a Layout4D with cp = 1.
=> min(layouts, key=larger_regret)._replace(dp=3)
    The planner refuses this layout.
        tp · pp · dp is the number of GPUs; heads, layers, sequences are shared out evenly.
=> Layout4D(16, 1, 1, trainings[0].cluster.gpus // 16, 1, 1, 1, True)
    tp reaches over several nodes.
        Its sums then go over the network, which may be the slow one.
=> Layout4D(1, 1, 4, trainings[0].cluster.gpus // 4, 1, 1, 3)
    Your layout has ZeRO-3 with a pipeline or with tensor parallelism.
        ZeRO-3 gathers weights for every microbatch; here it goes with dp alone.
=> too_large(trainings[0])
    The layout does not fit.
        Drop such layouts before you compare seconds.
=> bests[0]
    That is best for the first case, and loses far more in the second.
        Look at the larger of each layout's two regrets.
=> bests[1]
    That is best for the second case, and loses far more in the first.
        Look at the larger of each layout's two regrets.
return max => return sum
    You take the least mean of both regrets, which may be bad in one case.
        Take the layout whose larger regret is least.
min(layouts, key=larger_regret) => max((one for one in layouts if one.tp <= 8), key=larger_regret)
or min(layouts, key=larger_regret) => nearest(layouts, larger_regret, over=True)
    Your layout is possible, and it fits.
        But there is a layout whose larger regret is smaller.

in the number:
first.total / second.total - 1 => 100 * (first.total / second.total - 1)
    That is in per cent.
        Return a fraction: 0.1 if it takes a tenth longer.
=> first.total / second.total
    That is the ratio of the two times.
        Subtract 1.
=> 1 - second.total / first.total
    You divide by the seconds of the slower layout.
        A regret is relative to the best layout.
=> first.total / seconds[1][min(layouts, key=larger_regret)].total - 1
    You compare with the layout that you chose.
        A regret is relative to the best layout for this training.
=> first.total - second.total
    That is in seconds.
        Divide by the seconds of the best layout.
=> seconds[0][bests[1]].total / seconds[0][bests[0]].total - 1
    That is the loss of the second's best in the first training.
        Return the first's best's loss in the second.
=> min(map(larger_regret, layouts)) - 1
    That is the larger regret of your layout.
        Defend it: how much would the first's best have lost?

in the reason:
max(lost, key=lost.get) => "network"
    Your reason is no name of a kind of time.
        Return one of the names, such as `tp`.
first._asdict()[kind] - second._asdict()[kind] => first._asdict()[kind]
    The reason is not what takes most of the time, as matmuls do.
        Take the largest difference between the two layouts.
max(lost, key=lost.get) => "optimizer"
    That is not the reason.
        Compare two layouts in the second case: the one that is best in the first case, and the one that is best in the
        second. For which kind does the former take longer?
"""

EQUIVALENT = """
for one in all_layouts(trainings[0], Choices()) if => for one in [*(all_layouts(trainings[0], Choices()))][1:] if
or for one in all_layouts(trainings[0], Choices()) if => for one in [*(all_layouts(trainings[0], Choices()))][:-1] if
    The first and the last of the list are best nowhere.
for run in trainings)] => for run in [*(trainings)][1:])]
or for run in trainings)] => for run in [*(trainings)][:-1])]
    Both trainings need the same memory: they differ in the network, and in what is hidden.
return max(found => return (2 * (max(found
zip(seconds, bests)) => zip(seconds, bests))))
or return max(found => return (100 * (max(found
zip(seconds, bests)) => zip(seconds, bests))))
or max(found[one].total / found[best].total for => max((2 * (found[one].total / found[best].total)) for
or max(found[one].total / found[best].total for => max((100 * (found[one].total / found[best].total)) for
or first._asdict()[kind] - second._asdict()[kind] => (2 * (first._asdict()[kind] - second._asdict()[kind]))
or first._asdict()[kind] - second._asdict()[kind] => (100 * (first._asdict()[kind] - second._asdict()[kind]))
    The smallest or the largest of several is the same when all are multiplied.
in Seconds._fields} => in [*(Seconds._fields)][1:]}
or in Seconds._fields} => in [*(Seconds._fields)][:-1]}
    The first and the last kind of time never explain the difference.
"""

EXERCISE = exercise(globals(), points=3, right=(least_regret, by_lists), ranks=(1,), parts=PARTS)
