"""Bytes that a rank holds at the peak of a step, by kind, from formulas.

The problem: of a pipeline no two ranks hold the same, and the fullest decides. The idea: count one rank; the fullest is
the first, which keeps the most microbatches, the second, or the last, which has the logits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from lib.cost.adapters import ADAPTER_RECIPE
from lib.cost.bubble import kept_by
from lib.cost.held import state_bytes
from lib.cost.sizes import OPTIMIZERS, recipe_of_optimizer
from lib.planner.kept_of_block import block_kept_bytes
from lib.planner.seconds import keeps_whole_gradients, stage_layers
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


def least_bytes(training: Training, layout: Layout4D) -> float:
    """Bytes below the highest peak: the states of as many blocks as a rank has in the mean, and nothing else."""
    share = False, False, training.model.num_layers / layout.pp, 0.0
    return sum(_on_gpu(training, layout, _state_of(training, layout, share)))


def fits(training: Training, layout: Layout4D) -> bool:
    """Whether the rank with the highest peak stays within the memory of a GPU."""
    return memory_bytes(training, layout).total <= training.room_bytes


def bytes_of_rank(training: Training, layout: Layout4D, rank: int) -> Bytes:
    """By kind, on a rank at this place in the pipeline.

    Of adapters the r values per token between their matrices, below 1 % of the activations, are left out.
    """
    tp, cp, rows = layout.tp, layout.cp, layout.rows
    model, stack = training.model, training.stack
    share = share_of_rank(training, layout, rank)
    _, has_head, blocks, in_flight = share
    tp_of_words = tp if stack.splits_vocabulary else 1  # of the logits
    state = _on_gpu(training, layout, _state_of(training, layout, share))
    of_block = training, tp, cp, rows, layout.sequence_parallel
    kept = in_flight * blocks * block_kept_bytes(*of_block, layout.recompute, layout.every, layout.attention)
    # What a block recomputes, while its backward runs; beside the input from which it is all recomputed.
    left = 0 if layout.recompute == "full" else block_kept_bytes(*of_block, layout.recompute, 1, layout.attention)
    kept += block_kept_bytes(*of_block, "none", 1, layout.attention) - left
    logits = 0.0
    if has_head:
        at_a_time = rows * model.context / cp / layout.loss_chunks  # tokens
        logits = stack.logits_bytes * at_a_time * model.vocab_size / tp_of_words
    gathered = _gathered_bytes(training, layout, has_head)
    return Bytes(*state, stack.spare_activations * kept, logits, gathered)


class HeldParameters(NamedTuple):
    """Parameters of a rank, before data-parallel ranks shard them."""

    blocks: float
    embedding: float
    head: float  # nothing where it is the embedding's
    adapters: float

    @property
    def trained(self) -> float:
        return self.adapters or self.blocks + self.embedding + self.head


def parameters_of_rank(training: Training, layout: Layout4D, rank: int) -> HeldParameters:
    """Of blocks, embedding, head and adapters, on a rank at this place in the pipeline."""
    has_embedding, has_head, blocks, _ = share_of_rank(training, layout, rank)
    return held_parameters(training, layout.tp, has_embedding, has_head, blocks)


def held_parameters(
    training: Training, tp: int, has_embedding: bool, has_head: bool, blocks: float
) -> HeldParameters:
    """Of so many blocks, with the embedding and the head, on each of tp ranks."""
    embedding = has_embedding * training.end_parameters / (tp if training.stack.splits_vocabulary else 1)
    head = (has_head and not (has_embedding and training.model.tied)) * training.end_parameters / tp
    adapters = blocks * training.adapters.block_parameters(training.model, tp) if training.adapters else 0.0
    return HeldParameters(blocks * training.block_parameters / tp, embedding, head, adapters)


State = tuple[float, float, float]  # bytes of parameters, gradients, optimizer


def state_of_rank(training: Training, layout: Layout4D, rank: int) -> State:
    """Bytes of parameters, gradients and optimizer, wherever they are: on the GPU, or offloaded to the host."""
    return _state_of(training, layout, share_of_rank(training, layout, rank))


def _state_of(training: Training, layout: Layout4D, share: tuple[bool, bool, float, float]) -> State:
    whole = keeps_whole_gradients(training, layout)
    return _state(training, layout.tp, layout.zero, layout.shards, whole, *share[:3])


@lru_cache(maxsize=4096)
def _state(
    training: Training,
    tp: int,
    zero: int,
    shards: int,
    whole: bool,
    has_embedding: bool,
    has_head: bool,
    blocks: float,
) -> State:
    """Many layouts of a search have the same."""
    return state_of_held(
        training, held_parameters(training, tp, has_embedding, has_head, blocks), zero, shards, whole
    )


def state_of_held(training: Training, held: HeldParameters, zero: int, shards: int, whole: bool) -> State:
    """Bytes of parameters, gradients and optimizer that a rank has of these parameters.

    Args:
        shards: data-parallel ranks that share them by stage `zero`.
        whole: the gradients are not shared, for which `lib.planner.seconds.stay_whole` has the reason.
    """
    recipe = training.stack.recipe
    if training.adapters:
        recipe = recipe_of_optimizer(ADAPTER_RECIPE, training.optimizer)
    parameters, gradients, optimizer = state_bytes(held.trained, recipe, zero=zero, dp=shards).values()
    if training.adapters:
        frozen = held.blocks * training.adapters.base_bytes + 2 * (held.embedding + held.head)
        parameters += frozen / (shards if zero == 3 else 1)
    else:
        of_block, of_embedding, of_head = OPTIMIZERS[training.optimizer]
        more = held.embedding * (of_embedding - of_block) + held.head * (of_head - of_block)
        optimizer += more / (shards if zero else 1)
    if whole:
        gradients = held.trained * training.stack.whole_gradient_bytes
    return parameters, gradients, optimizer


def _on_gpu(training: Training, layout: Layout4D, state: State) -> State:
    """Without the kinds that are offloaded."""
    if not training.offload:
        return state
    parameters, gradients, _ = state
    if training.offload == "optimizer":
        return parameters, gradients, 0.0
    return 0.0, gradients if keeps_whole_gradients(training, layout) else 0.0, 0.0


def host_bytes(training: Training, layout: Layout4D) -> float:
    """Of the memory of the host, for the rank that offloads most."""
    states = [state_of_rank(training, layout, rank) for rank in {0, layout.pp - 1}]
    return max(sum(state) - sum(_on_gpu(training, layout, state)) for state in states)


def _gathered_bytes(training: Training, layout: Layout4D, has_head: bool) -> float:
    """Weights that are whole for a while: units of ZeRO-3, with their gradients; a matrix of 4 bits back in 16."""
    adapters, model, weight, unpacked = training.adapters, training.model, training.stack.recipe.weight_bytes, 0.0
    of_block = of_head = weight + 2
    if adapters:
        of_block, of_head = adapters.base_bytes, 2
        unpacked = 2.0 * model.d_model * model.mlp_width / layout.tp if adapters.base == "4bit" else 0.0
    if layout.zero < 3:
        return unpacked
    head = has_head * of_head * training.end_parameters
    return max(2 * of_block * training.block_parameters, head) / layout.tp + unpacked


def share_of_rank(training: Training, layout: Layout4D, rank: int) -> tuple[bool, bool, float, float]:
    """Whether a rank has the embedding, and the head; its blocks; and the microbatches in flight at its peak."""
    pp, v, is_v = layout.pp, layout.stages_per_rank, layout.schedule == "zb-v"
    embeds, heads = rank == 0, rank == (0 if is_v else pp - 1)
    blocks = stage_layers(training.model.num_layers, pp, v, layout.schedule)[embeds or heads]
    m = max(1, int(layout.microbatches(training.global_batch)))
    return embeds, heads, blocks, min(m, pp) if is_v else kept_by(rank, pp, m, v)
