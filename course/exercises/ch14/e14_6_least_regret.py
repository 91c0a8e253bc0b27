"""14.6: one layout for two possible cases of a cluster, and a number and a reason for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from course.check.exercise import SEEN, Data, Exercise, Mistake, known_number, several, whole, word
from course.check.refusals import KEPT, MODEL_STATES, NODE, NOTHING_BINDS, PIPELINE_ZERO3, binds, layout_of
from lib.mesh import Group
from lib.planner import Choices, Cluster, Layout4D, Training, best_layouts, fits, memory_bytes, step_s
from lib.planner.search import all_layouts, layout_text, why_slower
from lib.planner.seconds import Seconds
from lib.planner.training import GPUS, PRESET_MODELS, stack_for

NEAR, TRIED = 0.01, 3
PARTS = CHOICE, LOSS, REASON = ("the layout", "the number", "the reason")
HOLDS = "right"
REFUSED = {NODE: NODE, PIPELINE_ZERO3: PIPELINE_ZERO3, MODEL_STATES: "does not fit", KEPT: "does not fit"}


class Clusters(NamedTuple):
    """A cluster in two cases, which differ in the GB/s of the network and in the fraction of tp sums exposed."""

    model: str
    gpus: int
    million_tokens: int
    network: tuple[float, float]
    exposed_tp: tuple[float, float]


MEANS_DIFFER = Clusters("llama-7b", 128, 1, (2.5, 50), (0, 1))  # here the least mean is a bad choice
CLUSTERS = (
    Clusters("llama-7b", 64, 2, (50, 2.5), (1, 0.3)),
    Clusters("llama-13b", 256, 1, (2.5, 50), (0, 1)),
    Clusters("llama-13b", 128, 1, (5, 50), (1, 0.3)),
    Clusters("llama-70b", 256, 2, (50, 2.5), (1, 0)),
    Clusters("gpt-175b", 256, 2, (50, 2.5), (1, 0.3)),
)


@cache
def either_way(cluster: Clusters) -> tuple[Training, ...]:
    """The same training in both cases of the cluster; cached, because further caches are keyed by this pair."""
    shape, device, stack = PRESET_MODELS[cluster.model], GPUS["h100"], stack_for("megatron", "h100")
    batch = cluster.million_tokens * 2**20 // shape.context
    return tuple(
        Training(
            shape,
            Cluster(replace(device, network_Bps=gigabytes * 1e9), cluster.gpus),
            replace(stack, exposed_tp=exposed),
            batch,
        )
        for gigabytes, exposed in zip(cluster.network, cluster.exposed_tp, strict=True)
    )


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    rng = random.Random(whole(generator, 0, 2**40))
    return [{"clusters": rng.sample([MEANS_DIFFER, *rng.sample(CLUSTERS, TRIED - 1)], TRIED)}]


class Regrets(NamedTuple):
    """Of all layouts that fit: their regrets in both cases, and the best of each."""

    of: dict[Layout4D, tuple[float, float]]
    bests: tuple[Layout4D, Layout4D]

    @property
    def least(self) -> float:
        return min(map(max, self.of.values()))


@cache
def regrets(trainings: tuple[Training, Training]) -> Regrets:
    able = [one for one in all_layouts(trainings[0], Choices()) if all(fits(run, one) for run in trainings)]
    times = [{one: step_s(run, one).total for one in able} for run in trainings]
    bests = [min(seconds, key=seconds.get) for seconds in times]
    pairs = list(zip(times, bests, strict=True))
    return Regrets({one: tuple(s[one] / s[best] - 1 for s, best in pairs) for one in able}, tuple(bests))


def lost(trainings: tuple[Training, Training]) -> dict[str, float]:
    """Seconds by kind that the first's best takes longer than the second's, in the second training."""
    first, second = (step_s(trainings[1], best)._asdict() for best in regrets(trainings).bests)
    return {kind: first[kind] - second[kind] for kind in first}


def body(answer: Callable, group: Group, given: Data) -> Data:
    found: Data = {CHOICE: HOLDS, REASON: HOLDS, LOSS: []}
    for cluster in given["clusters"]:
        trainings = either_way(cluster)
        layout, loss, reason = several(answer(either_way(cluster)), len(PARTS))
        judged = regrets(trainings)
        found[LOSS].append(known_number(loss, [judged.of[judged.bests[0]][1]]))
        for part, (verdict, figures) in {
            CHOICE: of_layout(trainings, layout),
            REASON: of_reason(trainings, word(reason)),
        }.items():
            if found[part] == HOLDS and verdict != HOLDS:
                title = f"{cluster.model} on {cluster.gpus} GPUs, {cluster.million_tokens} Mi tokens"
                found |= {part: verdict, part + SEEN: f"{title}\n{figures}" if figures else ""}
    return found


def of_layout(trainings: tuple[Training, Training], result: Any) -> tuple[str, str]:
    """A verdict, and the figures that show it."""
    layout = layout_of(result)
    if layout is None:
        return "nothing" if result is None else "no layout", ""
    for run in trainings:
        word, why = binds(run, layout)
        if word != NOTHING_BINDS:
            return REFUSED.get(word, "uncut"), why
    judged = regrets(trainings)
    seconds = [
        [step_s(run, one).total for one in (layout, best)] for run, best in zip(trainings, judged.bests, strict=True)
    ]
    mine = [own / best - 1 for own, best in seconds]
    if max(mine) <= judged.least + NEAR:
        return HOLDS, ""
    figures = (
        f"{layout_text(layout)}: {mine[0]:.1%} slower than the best of the first case, {mine[1]:.1%} of the second.\n"
        f"With a different layout the larger of the two is {judged.least:.1%}."
    )
    least_mean = min(judged.of, key=lambda one: sum(judged.of[one]))
    named = dict(zip((least_mean, *judged.bests), ("least mean", "first's best", "second's best"), strict=True))
    return named.get(layout, "a larger regret"), figures


def of_reason(trainings: tuple[Training, Training], reason: Any) -> tuple[str, str]:
    if not isinstance(reason, str) or reason not in Seconds._fields:
        return "nothing" if reason is None else "no kind", f"{reason!r} is none of {', '.join(Seconds._fields)}."
    seconds = lost(trainings)
    if reason == max(seconds, key=seconds.get):
        return HOLDS, ""
    first = regrets(trainings).bests[0]
    return "the largest" if reason == largest(
        trainings
    ) else "a different kind", f"Best in the first case: {layout_text(first)}"


# ---- right programs -------------------------------------------------------------------------------------------------


def by_search(trainings):
    layouts = [one for one in all_layouts(trainings[0], Choices()) if all(fits(run, one) for run in trainings)]
    seconds = [{one: step_s(run, one) for one in layouts} for run in trainings]
    bests = [min(found, key=lambda one: found[one].total) for found in seconds]
    pairs = list(zip(seconds, bests, strict=True))
    first, second = (seconds[1][best] for best in bests)
    more = [a - b for a, b in zip(first, second, strict=True)]
    chosen = min(layouts, key=lambda one: max(found[one].total / found[best].total for found, best in pairs))
    return tuple(chosen), np.float64(first.total / second.total - 1), np.str_(Seconds._fields[more.index(max(more))])


def by_lists(trainings):
    """By the planner's own lists; rounded."""
    lists = [{one.layout: one for one in best_layouts(run, best=100_000)} for run in trainings]
    bests = [next(iter(found)) for found in lists]
    pairs = list(zip(lists, bests, strict=True))
    layout = min(
        lists[0], key=lambda one: max(found[one].seconds.total / found[best].seconds.total for found, best in pairs)
    )
    first, second = (lists[1][best] for best in bests)
    loss = first.seconds.total / second.seconds.total - 1
    return [layout, float(f"{loss:.3g}"), why_slower(second, first).rpartition("more for ")[2]]


# ---- wrong programs -------------------------------------------------------------------------------------------------


def answer(layout=None, loss=None, reason=None):
    """The right answer, with something else in one place: functions of the trainings."""

    def program(trainings):
        judged, seconds = regrets(trainings), lost(trainings)
        return (
            layout(trainings) if layout else min(judged.of, key=lambda one: max(judged.of[one])),
            loss(trainings) if loss else judged.of[judged.bests[0]][1],
            reason(trainings) if reason else max(seconds, key=seconds.get),
        )

    return program


def chosen(**fields):
    """The right layout, with these fields."""
    return lambda trainings: answer()(trainings)[0]._replace(**fields)


def across_nodes(trainings):
    return Layout4D(16, 1, 1, trainings[0].cluster.gpus // 16, 1, 1, 1, True)


def pipelined_zero3(trainings):
    return Layout4D(1, 1, 4, trainings[0].cluster.gpus // 4, 1, 1, 3)


def too_large(trainings):
    able = [one for one in all_layouts(trainings[0], Choices()) if one.tp <= 8 and not fits(trainings[0], one)]
    return max(able, key=lambda one: memory_bytes(trainings[0], one).total)


def slowest(trainings):
    of = regrets(trainings).of
    return max((one for one in of if one.tp <= 8), key=lambda one: of[one][0])


def largest(trainings):
    """The kind that takes most of the time of the first's best."""
    seconds = step_s(trainings[1], regrets(trainings).bests[0])._asdict()
    return max(seconds, key=seconds.get)


def loss_as(change):
    return lambda trainings: change(answer()(trainings)[1])


def in_seconds(trainings):
    first, second = (step_s(trainings[1], best).total for best in regrets(trainings).bests)
    return first - second


def layouts(hint: str, layout: Callable) -> Mistake:
    return Mistake(hint, answer(layout), about=(CHOICE,))


def losses(hint: str, loss: Callable) -> Mistake:
    return Mistake(hint, answer(loss=loss), about=(LOSS,))


def reasons(hint: str, reason: Callable) -> Mistake:
    return Mistake(hint, answer(reason=reason), about=(REASON,))


EXERCISE = Exercise(
    id="14.6",
    title="least_regret",
    points=3,
    body=body,
    inputs=inputs,
    ranks=(1,),
    parts=PARTS,
    right=(answer(), by_search, by_lists),
    mistakes=(
        Mistake("Return three things: a layout, a fraction, and the name of a kind of time.", lambda trainings: None),
        layouts(
            "The first of the three is no Layout4D with cp = 1 that the planner would list.", lambda trainings: "tp 8"
        ),
        layouts(
            "The planner refuses this layout: tp · pp · dp is the number of GPUs, and heads, layers and sequences are "
            "shared out evenly.",
            chosen(dp=3),
        ),
        layouts(
            "tp reaches over several nodes. Its sums then go over the network, which may be the slow one.",
            across_nodes,
        ),
        layouts("ZeRO-3 gathers weights for every microbatch; here it goes with dp alone.", pipelined_zero3),
        layouts("The layout does not fit. Drop such layouts before you compare seconds.", too_large),
        layouts(
            "That is the best layout for the first case. In the second it loses far more than it gains in the first: "
            "for each layout look at the larger of its two regrets.",
            lambda trainings: regrets(trainings).bests[0],
        ),
        layouts(
            "That is the best layout for the second case. In the first it loses far more than it gains in the second: "
            "for each layout look at the larger of its two regrets.",
            lambda trainings: regrets(trainings).bests[1],
        ),
        layouts(
            "You take the layout with the least mean of both regrets. It may be good in one case and bad in the "
            "second: take the layout whose larger regret is least.",
            lambda trainings: min(regrets(trainings).of, key=lambda one: sum(regrets(trainings).of[one])),
        ),
        layouts(
            "Your layout is possible, and it fits. But there is a layout whose larger regret is smaller.", slowest
        ),
        losses(
            "That is in per cent. Return a fraction: 0.1 if it takes a tenth longer.",
            loss_as(lambda x: 100 * x),
        ),
        losses("That is the ratio of the two times. Subtract 1.", loss_as(lambda x: 1 + x)),
        losses(
            "You divide by the seconds of the slower layout. A regret is relative to the best layout.",
            loss_as(lambda x: x / (1 + x)),
        ),
        losses("That is in seconds. Divide by the seconds of the best layout.", in_seconds),
        losses(
            "That is the loss of the second's best in the first training. Return the reverse: the loss of the first's "
            "best in the second training.",
            lambda trainings: regrets(trainings).of[regrets(trainings).bests[1]][0],
        ),
        losses(
            "That is the larger regret of your layout. Defend it: how much would the first's best have lost?",
            lambda trainings: regrets(trainings).least,
        ),
        reasons("The reason is the name of a kind of time, such as `tp`.", lambda trainings: "network"),
        reasons(
            "The reason is not the kind that takes most of the time: matmuls take most of it in any layout. Take the "
            "differences between two layouts, and the largest of them.",
            largest,
        ),
        reasons(
            "That is not the reason. Compare two layouts in the second case: the one that is best in the first case, "
            "and the one that is best in the second. For which kind does the former take longer?",
            lambda trainings: "optimizer",
        ),
    ),
)
