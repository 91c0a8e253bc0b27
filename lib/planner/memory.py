"""Bytes that a rank holds at the peak of a step, by kind, from formulas.

The problem: of a pipeline no two ranks hold the same, and the fullest decides. The idea: count one rank; the fullest is
the first, which keeps the most microbatches, the second, or the last, which has the logits.
"""

from __future__ import annotations

from typing import NamedTuple

from lib.cost.bubble import kept_by
from lib.cost.held import state_bytes
from lib.planner.seconds import block_kept_bytes, stage_layers
from lib.planner.training import Layout4D, Training


class Bytes(NamedTuple):
    """On one rank, at the peak of a step."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    gathered: float  # two blocks that ZeRO-3 unsharded, or the head if that is larger; and their gradients

    @property
    def total(self) -> float:
        return sum(self)


def memory_bytes(training: Training, layout: Layout4D) -> Bytes:
    """By kind, on the rank with the highest peak.

    The first rank of a pipeline keeps the most microbatches, the last rank the logits, and the second may have a layer
    more than both: it is one of these three.
    """
    ranks = sorted({0, min(1, layout.pp - 1), layout.pp - 1})
    return max((bytes_of_rank(training, layout, rank) for rank in ranks), key=sum)


def fits(training: Training, layout: Layout4D) -> bool:
    """Whether the rank with the highest peak stays within the memory of a GPU."""
    return memory_bytes(training, layout).total <= training.room_bytes


def bytes_of_rank(training: Training, layout: Layout4D, rank: int) -> Bytes:
    """By kind, on a rank at this place in the pipeline."""
    tp, cp, rows, zero = layout.tp, layout.cp, layout.rows, layout.zero
    model, stack = training.model, training.stack
    has_embedding, has_head, blocks, in_flight = share_of_rank(training, layout, rank)
    tp_of_words = tp if stack.splits_vocabulary else 1  # of the embedding, and of the logits
    embedding = has_embedding * training.end_parameters / tp_of_words
    head = (has_head and not (has_embedding and model.tied)) * training.end_parameters / tp
    held = blocks * training.block_parameters / tp + embedding + head
    state = state_bytes(held, stack.recipe, zero=zero, dp=layout.shards)
    if keeps_whole_gradients(training, layout):
        state["gradient"] = held * stack.whole_gradient_bytes
    of_block = training, tp, cp, rows, layout.sequence_parallel
    kept = in_flight * blocks * block_kept_bytes(*of_block, layout.recompute, layout.every)
    # What a block recomputes, while its backward runs; beside the input from which it is all recomputed.
    left = 0 if layout.recompute == "full" else block_kept_bytes(*of_block, layout.recompute)
    kept += block_kept_bytes(*of_block, "none") - left
    logits = 0.0
    if has_head:
        at_a_time = rows * model.context / cp / layout.loss_chunks  # tokens
        logits = stack.logits_bytes * at_a_time * model.vocab_size / tp_of_words
    gathered = 0.0
    if zero == 3:
        units = max(2 * training.block_parameters, has_head * training.end_parameters) / tp
        gathered = (stack.recipe.weight_bytes + 2) * units
    return Bytes(*state.values(), stack.spare_activations * kept, logits, gathered)


def keeps_whole_gradients(training: Training, layout: Layout4D) -> bool:
    """Whether a rank that shards gradients keeps them whole until the last microbatch of a step.

    Whole gradients replace the shards: the last microbatch turns them into shards, unit by unit.

    Source: PyTorch's `fully_shard`, `post_backward` in `_fsdp_param_group.py` (torch 2.13): without a sum it returns
    before the reduce-scatter, and keeps `unsharded_accumulated_grad` in the dtype of the sum.
    """
    is_sharded = layout.zero >= 2 and layout.shards > 1
    return is_sharded and training.stack.whole_gradient_bytes > 0 and layout.microbatches(training.global_batch) > 1


def share_of_rank(training: Training, layout: Layout4D, rank: int) -> tuple[bool, bool, float, float]:
    """Whether a rank has the embedding, and the head; its blocks; and the microbatches in flight at its peak."""
    pp, v, is_v = layout.pp, layout.stages_per_rank, layout.schedule == "zb-v"
    embeds, heads = rank == 0, rank == (0 if is_v else pp - 1)
    blocks = stage_layers(training.model.num_layers, pp, v, layout.schedule)[embeds or heads]
    m = max(1, int(layout.microbatches(training.global_batch)))
    return embeds, heads, blocks, min(m, pp) if is_v else kept_by(rank, pp, m, v)
