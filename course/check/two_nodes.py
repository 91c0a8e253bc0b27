"""Two nodes with a network card for each GPU, or with one: which layouts are near the best, for exercise 16.6."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from course.check.exercise import kind
from course.check.refusals import NOTHING_BINDS, binds, layout_of
from lib.planner import Choices, Cluster, Layout4D, Training, best_layouts, step_s
from lib.planner.search import layout_text
from lib.planner.training import GPUS, PRESET_MODELS, stack_for

NEAR = 0.03  # a layout may take so much longer than the best one
HOLDS, NOTHING, NO_LAYOUT = "near the best", "nothing", "no layout"


@cache
def two_nodes() -> tuple[Training, Training]:
    """13B on two nodes of eight H100, 32 sequences a step; with eight cards of 50 GB/s in a node, then with one."""
    device, stack = GPUS["h100"], stack_for("megatron-lm", "h100")

    def training(cards: int) -> Training:
        of_a_gpu = replace(device, network_Bps=50e9 * cards / 8)  # all eight send at the same time
        return Training(PRESET_MODELS["llama-13b"], Cluster(of_a_gpu, 16), stack, 32)

    return training(8), training(1)


def judged(training: Training, result: Any) -> tuple[str, str]:
    """What is to be said of this layout, and the figures that show it.

    If it is slower than the best, that is the kind of time that it has most more of.
    """
    if result is None:
        return NOTHING, ""
    if (layout := layout_of(result)) is None:
        return NO_LAYOUT, f"got {kind(result)}"
    binding, why = binds(training, layout)
    if binding != NOTHING_BINDS:
        return binding, why
    best = best_of(training)
    mine, least = step_s(training, layout), step_s(training, best)
    late = mine.total / least.total - 1
    if late <= NEAR:
        return HOLDS, ""
    more = {name: seconds - getattr(least, name) for name, seconds in mine._asdict().items()}
    most = max(more, key=more.get)
    figures = f"{layout_text(layout)}: {mine.total:.2f} s a step, {late:.0%} more than the best"
    return f"slower: {most}", f"{figures}; {more[most]:.2f} s more for {most}."


@cache
def best_of(training: Training) -> Layout4D:
    """The layout with the fewest seconds among all that fit."""
    return best_layouts(training, Choices())[0].layout
