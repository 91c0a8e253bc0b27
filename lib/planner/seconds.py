"""Seconds of a step, by kind.

The idea, in ten lines (M microbatches of r = b·s/c tokens on a rank, W weights of a block):

    matmuls      6 · r · W/t · (1 + w₀/r + w₀·t/h)  ÷  (peak · share)
    attention    4 · r · s · h/t forward, half of it where it is fused and causal; 2 or 2.5 times that backward
    memory       2A forward and 3A backward for the A bytes that a block keeps, ÷ the memory's bandwidth
    tp           4 sums of x (6 with full recomputation), ÷ the link
    stage        (L/p) · (matmuls + attention + memory + tp) + messages to the neighbours
    step         M · the slowest stage, head included  +  (p − 1)/v · a stage
    dp           sum of the gradients, gather of the parameters; less what backward hides
    optimizer    30 bytes per parameter that a rank updates, ÷ the memory's bandwidth

Each line is a formula of the papers; the shares are the stack's, and two of them are calibrated. Chapter 14 holds the
sum against published runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from lib.cost.bubble import v_wait_s, zero_bubble_wait_s
from lib.cost.comm import wire_bytes
from lib.cost.memory import activation_bytes
from lib.planner.training import Layout4D, Training

OPTIMIZER_BYTES = 30  # read and written per parameter: gradient, master copy and both averages, the weight


class Seconds(NamedTuple):
    """Of a step, on the rank that everybody waits for."""

    matmuls: float  # of the blocks and the head, with what is computed again
    attention: float
    memory: float
    tp: float
    cp: float
    pp: float  # messages between stages
    dp: float  # what is not hidden
    bubble: float
    optimizer: float

    @property
    def total(self) -> float:
        return sum(self)


def step_s(training: Training, layout: Layout4D) -> Seconds:
    """Seconds of a step by kind.

    Raises:
        ValueError: a number of GPUs that is not the cluster's.
    """
    tp, cp, pp, dp, rows, v, zero, slices, recompute, schedule = layout
    model, cluster, stack = training.model, training.cluster, training.stack
    if layout.gpus != cluster.gpus:
        given = f"tp {tp} x cp {cp} x pp {pp} x dp {dp}"
        raise ValueError(f"{given} are {layout.gpus} GPUs, the cluster has {cluster.gpus}")
    tokens = rows * model.context / cp
    block = block_s(training, tp, cp, rows, slices, recompute)
    layers, with_head = stage_layers(model.num_layers, pp, v, schedule)
    head = matmul_s(training, 6 * tokens * training.end_parameters / tp, tokens, model.d_model)

    message = 2 * tokens * model.d_model / tp
    inside = tp * cp * dp * pp <= cluster.per_node
    link = cluster.bandwidth(stack, 1 if inside else pp, tp * cp * dp, stack.message_share)
    messages = 2 * v * message / link * (stack.exposed_pp if v > 1 else 1) if pp > 1 else 0.0
    of_block = sum(block)
    stage = layers * of_block + messages
    slowest = max(layers * of_block, with_head * of_block + head) + messages
    ends = slowest - messages - layers * of_block  # of the head, what the other stages wait for
    m = layout.microbatches(training.global_batch)

    replicas = dp * cp
    mine = training.block_parameters * model.num_layers / pp / tp + training.end_parameters / tp
    if zero == 3:  # for each microbatch two gathers of the parameters and a sum of the gradients, all in 16 bit
        exposed = stack.exposed_zero3 * m * _over_dp_s(training, 3 * 2 * mine, replicas, tp)
    else:  # the sum of the gradients, or its first half and the gather of the parameters
        second = stack.recipe.weight_bytes if zero else stack.recipe.gradient_bytes
        times = m if zero == 2 else 1  # who keeps a piece of the gradients has to sum each microbatch's
        exposed = _over_dp_s(training, (times * stack.recipe.gradient_bytes + second) * mine, replicas, tp)
        if stack.overlaps_dp:
            exposed = max(0.0, exposed - times * layers * backward_s(block))
    updated = mine / (replicas if zero else 1)
    optimizer = OPTIMIZER_BYTES * updated / (stack.memory_share * cluster.device.memory_Bps)
    matmuls, attention, memory, sums, context = (m * layers * s for s in block)
    if schedule == "1f1b":
        bubble = (pp - 1) / v * stage
    else:
        weights = layers * block[0] / 3  # of a rank: the gradients that no rank waits for
        other = (stage - weights) / 2
        bubble = v_wait_s(pp, other, weights) if schedule == "zb-v" else zero_bubble_wait_s(pp, other, other, weights)
    return Seconds(matmuls + m * ends, attention, memory, sums, context, m * messages, exposed, bubble, optimizer)


def has_even_stages(layers: int, stages: int) -> bool:
    """Whether so many stages have the same number of layers, or would, were embedding and head two more of them."""
    return layers % stages == 0 or (layers + 2) % stages == 0


def stage_layers(layers: int, pp: int, v: int, schedule: str = "1f1b") -> tuple[float, float]:
    """Blocks of a rank in the middle, and of one that has the embedding or the head; ZB-V has both on one.

    Where only the layers with two more divide, the first and the last stage have one less (as Llama 3's 126 on 16
    ranks); where neither does, all have the mean.
    """
    if layers % (pp * v) and has_even_stages(layers, pp * v):
        most = (layers + 2) // pp
        return most, most - (2 if schedule == "zb-v" else 1)
    return layers / pp, layers / pp


def matmul_s(training: Training, flops: float, rows: float, columns: float) -> float:
    """Seconds of so many operations in matmuls of so many rows and columns on a rank: few of either are slow."""
    stack = training.stack
    slower = 1 + stack.half_width / rows + stack.half_width / columns
    return flops * slower / (training.cluster.device.peak_flops * stack.matmul_share)


def backward_s(block: Sequence[float]) -> float:
    """Of what `block_s` says, the seconds that compute backward: 2 of 3 of the products, 3 of 5 of the traffic."""
    return 2 / 3 * (block[0] + block[1]) + 3 / 5 * block[2]


@lru_cache(maxsize=4096)
def block_s(
    training: Training, tp: int, cp: int, rows: int, slices: bool, recompute: str
) -> tuple[float, float, float, float, float]:
    """A block and microbatch, forward and backward: matmuls, attention, memory, sums over tp, gathers over cp."""
    model, stack, device = training.model, training.stack, training.cluster.device
    s, h, full = model.context, model.d_model, recompute == "full"
    tokens = rows * s / cp
    matmuls = matmul_s(training, (8 if full else 6) * tokens * model.num_block_weights / tp, tokens, h / tp)

    fused = stack.fused_attention
    scores = 4 * tokens * s * h / tp * (0.5 if fused else 1)
    passes = (3.5 if fused else 3) + (1 if full or (recompute == "selective" and not fused) else 0)
    attention = passes * scores / (device.peak_flops * (stack.attention_share if fused else stack.matmul_share))

    kept = {"tp": tp, "sequence_parallel": slices}
    linear = activation_bytes(model, rows, "selective", **kept) / cp
    matrix = 0.0 if fused else activation_bytes(model, rows, **kept) / cp - linear
    moved = (7 if full else 5) * (linear + matrix)
    if recompute == "selective":
        moved += 2 * matrix
    memory = moved / (stack.memory_share * device.memory_Bps)

    sums = (6 if full else 4) * wire_bytes("all_reduce", 2 * tokens * h, tp)
    if tp > training.cluster.per_node:  # what hides a sum behind a matmul works inside a node, on its small messages
        over_tp = sums / training.cluster.bandwidth(stack, tp, 1, stack.message_share)
    else:
        over_tp = stack.exposed_tp * sums / training.cluster.bandwidth(stack, tp, 1) if tp > 1 else 0.0
    keys = (4 if full else 3) * wire_bytes("all_gather", 2 * 2 * rows * s * model.d_kv / tp, cp)
    over_cp = stack.exposed_tp * keys / training.cluster.bandwidth(stack, cp, tp) if cp > 1 else 0.0
    return matmuls, attention, memory, over_tp, over_cp


def _over_dp_s(training: Training, gathered_bytes: float, replicas: int, tp: int) -> float:
    """A gather of so many bytes among the data-parallel ranks; a scatter takes as long, an all-reduce is both."""
    if replicas == 1:
        return 0.0
    sent = wire_bytes("all_gather", gathered_bytes, replicas)
    return sent / training.cluster.bandwidth(training.stack, replicas, tp)
