"""Chapter 14, one layout for a cluster that may turn out in two ways: exercise 14.6."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from lib.check.choosing.refusals import KEPT, MODEL_STATES, NODE, NOTHING_BINDS, PIPELINE_ZERO3, binds, layout_of
from lib.check.exercise import SEEN, Data, Exercise, Mistake, but, several, whole
from lib.mesh import Group
from lib.planner import Choices, Cluster, Layout4D, Training, step_s
from lib.planner.memory import fits
from lib.planner.presets import GPUS, PRESET_MODELS, stack_for
from lib.planner.search import all_layouts, layout_text
from lib.planner.seconds import Seconds

_NAME = "least_regret"
_NEAR, _TRIED = 0.01, 3
_FOUND, _HOLDS = "what the planner says", "a good choice, for the right reason"
_NO_PAIR, _NO_LAYOUT, _UNCUT, _ACROSS, _WITH_ZERO3, _FULL = "no pair", "no layout", "uncut", "nodes", "zero-3", "full"
_FIRST, _SECOND, _MEAN, _REGRETS = (
    "the first's best",
    "the second's best",
    "the least mean",
    "another layout is better",
)
_NO_KIND, _LARGEST, _OTHER_KIND = "no kind", "the largest kind", "another kind"
_REFUSED = {NODE: _ACROSS, PIPELINE_ZERO3: _WITH_ZERO3, MODEL_STATES: _FULL, KEPT: _FULL}


class _Cluster(NamedTuple):
    """What is certain, and what it may turn out to be: GB/s of the network, and the fraction of tp sums exposed."""

    model: str
    gpus: int
    million_tokens: int
    network: tuple[float, float]
    exposed_tp: tuple[float, float]


_MEANS_DIFFER = _Cluster("llama-7b", 128, 1, (2.5, 50), (0, 1))  # here the least mean is a bad choice
_CLUSTERS = (
    _Cluster("llama-7b", 64, 2, (50, 2.5), (1, 0.3)),
    _Cluster("llama-13b", 256, 1, (2.5, 50), (0, 1)),
    _Cluster("llama-13b", 128, 1, (5, 50), (1, 0.3)),
    _Cluster("llama-70b", 256, 2, (50, 2.5), (1, 0)),
    _Cluster("gpt-175b", 256, 2, (50, 2.5), (1, 0.3)),
)


def either_way(cluster: _Cluster) -> tuple[Training, Training]:
    """The same training on what the cluster may turn out to be."""
    shape, device, stack = PRESET_MODELS[cluster.model], GPUS["h100"], stack_for("megatron", "h100")
    batch = cluster.million_tokens * 2**20 // shape.context
    one, other = (
        Training(
            shape,
            Cluster(replace(device, network_Bps=gigabytes * 1e9), cluster.gpus),
            replace(stack, exposed_tp=exposed),
            batch,
        )
        for gigabytes, exposed in zip(cluster.network, cluster.exposed_tp, strict=True)
    )
    return one, other


class _Judged(NamedTuple):
    """Of all layouts that fit: their regrets, in both cases; the best of each; and what the first's best loses on."""

    regrets: dict[Layout4D, tuple[float, float]]
    bests: tuple[Layout4D, Layout4D]
    reason: str
    largest: str

    @property
    def least(self) -> float:
        return min(map(max, self.regrets.values()))

    @property
    def least_mean(self) -> Layout4D:
        return min(self.regrets, key=lambda layout: sum(self.regrets[layout]))


def _judged(trainings: Sequence[Training]) -> _Judged:
    able = [one for one in all_layouts(trainings[0], Choices()) if all(fits(run, one) for run in trainings)]
    times = [{one: step_s(run, one) for one in able} for run in trainings]
    first, second = (min(able, key=lambda one: seconds[one].total) for seconds in times)
    regrets = {
        one: (times[0][one].total / times[0][first].total - 1, times[1][one].total / times[1][second].total - 1)
        for one in able
    }
    pairs = zip(Seconds._fields, times[1][first], times[1][second], strict=True)
    lost = {what: mine - best for what, mine, best in pairs}
    largest = max(Seconds._fields, key=lambda what: getattr(times[1][first], what))
    return _Judged(regrets, (first, second), max(lost, key=lambda what: lost[what]), largest)


def _told(trainings: Sequence[Training], result: Any) -> tuple[str, str]:
    """What is to be said of one answer, and the figures that show it."""
    layout, reason = several(result, 2)
    if reason is None:
        return _NO_PAIR, ""
    layout = layout_of(layout)
    if layout is None:
        return _NO_LAYOUT, ""
    for run in trainings:
        word, why = binds(run, layout)
        if word != NOTHING_BINDS:
            return _REFUSED.get(word, _UNCUT), why
    judged = _judged(trainings)
    mine = [
        step_s(run, layout).total / step_s(run, best).total - 1
        for run, best in zip(trainings, judged.bests, strict=True)
    ]
    figures = (
        f"{layout_text(layout)}: {mine[0]:.1%} slower than the best of the first case, {mine[1]:.1%} of the second"
    )
    if max(mine) > judged.least + _NEAR:
        named = {judged.least_mean: _MEAN, judged.bests[0]: _FIRST, judged.bests[1]: _SECOND}
        told = named.get(layout, _REGRETS)
        return told, f"{figures}.\nWith another layout the larger of the two is {judged.least:.1%}."
    if reason not in Seconds._fields:
        return _NO_KIND, f"{reason!r} is none of {', '.join(Seconds._fields)}."
    if reason != judged.reason:
        told = _LARGEST if reason == judged.largest else _OTHER_KIND
        return told, f"Best in the first case: {layout_text(judged.bests[0])}"
    return _HOLDS, ""


def _drawn_inputs(generator: torch.Generator, n: int) -> list[Data]:
    rng = random.Random(whole(generator, 0, 2**40))
    drawn = [_MEANS_DIFFER, *rng.sample(_CLUSTERS, _TRIED - 1)]
    return [{"clusters": rng.sample(drawn, _TRIED)}]


def _least_regret(answer: Callable, group: Group, given: Data) -> Data:
    for cluster in given["clusters"]:
        told, figures = _told(either_way(cluster), answer(either_way(cluster)))
        if told != _HOLDS:
            title = f"{cluster.model} on {cluster.gpus} GPUs, {cluster.million_tokens} Mi tokens"
            return {_FOUND: told, SEEN: f"{title}\n{figures}" if figures else ""}
    return {_FOUND: _HOLDS}


def _says(told: str, hint: str) -> Mistake:
    return Mistake(hint, but(**{_FOUND: told}))


LEAST_REGRET = Exercise(
    id="14.6",
    title=_NAME,
    points=3,
    body=_least_regret,
    inputs=_drawn_inputs,
    reference=lambda given: [{_FOUND: _HOLDS}],
    ranks=(1,),
    mistakes=(
        _says(_NO_PAIR, "Return two things: a layout, and the name of a kind of time."),
        _says(_NO_LAYOUT, "The first of the two is no Layout4D with cp = 1 that the planner would list."),
        _says(
            _UNCUT,
            "The planner refuses this layout: tp · pp · dp is the number of GPUs, and heads, layers and sequences are "
            "shared out evenly.",
        ),
        _says(
            _ACROSS, "tp reaches over several nodes. Its sums then go over the network, which may be the slow one."
        ),
        _says(_WITH_ZERO3, "ZeRO-3 gathers weights for every microbatch; here it goes with dp alone."),
        _says(_FULL, "The layout does not fit. Drop what does not fit before you compare seconds."),
        _says(
            _FIRST,
            "That is the best layout for the first case. In the second it loses far more than it gains in the first: "
            "for each layout look at the larger of its two regrets.",
        ),
        _says(
            _SECOND,
            "That is the best layout for the second case. In the first it loses far more than it gains in the second: "
            "for each layout look at the larger of its two regrets.",
        ),
        _says(
            _MEAN,
            "You take the layout with the least mean of both regrets. It may be good in one case and bad in the "
            "other; asked for is the least of the larger ones.",
        ),
        _says(_REGRETS, "It can be, and it fits. But there is a layout whose larger regret is smaller."),
        _says(_NO_KIND, "The layout is right. The reason is the name of a kind of time, such as `tp`."),
        _says(
            _LARGEST,
            "The layout is right. The reason is not the kind that takes most of the time: matmuls take most of it in "
            "any layout. Take the differences between two layouts, and the largest of them.",
        ),
        _says(
            _OTHER_KIND,
            "The layout is right, the reason is another. Compare two layouts in the second case: the one that is best "
            "in the first case, and the one that is best in the second. For which kind does the former take longer?",
        ),
    ),
)

EXERCISES = (LEAST_REGRET,)
