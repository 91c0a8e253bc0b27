"""Bytes on the rank with the highest peak, by kind.

Model states by the stage of ZeRO (`lib.cost.held`); activations of the blocks of a rank, times the microbatches in
flight at the peak (`lib.cost.bubble.kept_by`); the logits. The first rank of a pipeline keeps the most microbatches,
the last rank the logits, and the second may have a layer more than both: the highest peak of the three counts.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from lib.cost.bubble import kept_by
from lib.cost.held import activation_bytes, state_bytes
from lib.planner.seconds import stage_layers
from lib.planner.training import Layout4D, Training


class Bytes(NamedTuple):
    """On one rank, at the peak of a step."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    gathered: float  # a block that ZeRO-3 unsharded, and its gradients

    @property
    def total(self) -> float:
        return sum(self)


def memory_bytes(training: Training, layout: Layout4D) -> Bytes:
    """By kind, on the rank with the highest peak among the first, second and last of the pipeline."""
    ranks = sorted({0, min(1, layout.pp - 1), layout.pp - 1})
    return max((_of_rank(training, layout, rank) for rank in ranks), key=sum)


def fits(training: Training, layout: Layout4D) -> bool:
    """Whether the rank with the highest peak stays within the memory of a GPU."""
    return memory_bytes(training, layout).total <= training.room_bytes


def _of_rank(training: Training, layout: Layout4D, rank: int) -> Bytes:
    tp, cp, pp, dp, rows, v, zero, slices, recompute, schedule = layout
    model, stack, is_v = training.model, training.stack, schedule == "zb-v"
    has_embedding, has_head = rank == 0, rank == (0 if is_v else pp - 1)
    blocks = stage_layers(model.num_layers, pp, v, schedule)[has_embedding or has_head]
    ends = has_embedding + (has_head and not (has_embedding and model.tied))
    held = (blocks * training.block_parameters + ends * training.end_parameters) / tp
    state = state_bytes(held, stack.recipe, zero=zero, dp=dp * cp)
    m = max(1, int(layout.microbatches(training.global_batch)))
    in_flight = min(m, pp) if is_v else kept_by(rank, pp, m, v)
    kept = in_flight * blocks * _block_bytes(training, tp, cp, rows, slices, recompute)
    if recompute == "full":  # the inside of one block, while backward recomputes it
        kept += _block_bytes(training, tp, cp, rows, slices, "none")
    logits = stack.logits_bytes * rows * model.context / cp * model.vocab_size / tp if has_head else 0.0
    gathered = 2 * (stack.recipe.weight_bytes + 2) * training.block_parameters / tp if zero == 3 else 0.0
    return Bytes(*state.values(), stack.spare_activations * kept, logits, gathered)


@lru_cache(maxsize=4096)
def _block_bytes(training: Training, tp: int, cp: int, rows: int, slices: bool, recompute: str) -> float:
    """Bytes that a block keeps for backward; fused attention keeps no matrix."""
    if recompute == "none" and training.stack.fused_attention:
        recompute = "selective"
    bytes_ = activation_bytes(training.model, rows, recompute, tp=tp, sequence_parallel=slices) / cp
    return bytes_ / tp if recompute == "full" and slices else bytes_
