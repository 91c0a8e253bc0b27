"""Seconds that a layout takes at least: a bound that is quick to compute, so that a search tries few layouts."""

from __future__ import annotations

from functools import lru_cache

from lib.planner.seconds import block_s, head_s, stage_layers
from lib.planner.training import Layout4D, Training

ROUNDING = 1e-9  # of a sum of floats in a different order; chosen far above it


def least_step_s(training: Training, layout: Layout4D, is_1f1b: bool) -> float:
    """Seconds that a layout takes at least, with any stage of ZeRO and pieces of the loss: its blocks and its head.

    With `is_1f1b` also the bubble; without, two blocks fewer may be on the rank with the head, as in ZB-V. More
    recomputation takes more.
    """
    pp, v = layout.pp, layout.stages_per_rank
    of = training, layout.tp, layout.cp, layout.rows, layout.sequence_parallel, layout.recompute, layout.every
    block_total_s, head_total_s = _block_and_head_s(*of, layout.attention)
    layers, with_head = stage_layers(training.model.num_layers, pp, v, "1f1b" if is_1f1b else "zb-v")
    stage_s = layers * block_total_s
    m, waits = layout.microbatches(training.global_batch), (pp - 1) / v if is_1f1b else 0
    return (1 - ROUNDING) * (m * max(stage_s, with_head * block_total_s + head_total_s) + waits * stage_s)


@lru_cache(maxsize=4096)
def _block_and_head_s(
    training: Training, tp: int, cp: int, rows: int, slices: bool, recompute: str, every: int, attention: str
) -> tuple[float, float]:
    """Seconds of a microbatch in a block, and in the head with its loss in one piece."""
    block = block_s(training, tp, cp, rows, slices, recompute, every, attention)
    return block.total, head_s(training, tp, cp, rows, 1)
