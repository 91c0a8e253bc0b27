"""Seconds of a step, by kind.

The idea, in ten lines (m microbatches of r = b·s/c tokens on a rank, W weights of a block):

    matmuls      6 · r · W/t · (1 + w₀/r + w₀·t/h)  ÷  (peak · share)
    attention    4 · r · s · h/t forward, half of it where it is fused and causal; 2 or 2.5 times that backward
    memory       2A forward and 3A backward for the A bytes that a block keeps, 2 for each recomputed, ÷ bandwidth
    tp           4 all-reduces of x (up to 6 with recomputation), ÷ the link
    stage        (l/p) · (matmuls + attention + memory + tp) + messages to the neighbours
    step         m · the slowest stage, head included  +  (p − 1)/v · a stage
    dp           reduction of gradients, all-gather of parameters; less the part that backward hides
    optimizer    30 bytes per parameter that a rank updates, ÷ memory bandwidth

Each line is a formula of the papers; the stack has the shares. Chapter 14 compares the sum with published runs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from lib.cost.bubble import v_wait_s, zero_bubble_wait_s
from lib.cost.comm import wire_bytes
from lib.cost.held import activation_bytes
from lib.cost.sizes import recomputed_weights
from lib.planner.training import Layout4D, Training

# Of a block: two in forward, two in backward; what backward recomputes, it gathers and sums again.
TP_SUMS = {"none": 4, "selective": 4, "mlp": 5, "ops": 5, "full": 6}
OPTIMIZER_BYTES = 30  # read and written per parameter: gradient, master copy and both moments, the weight


class Seconds(NamedTuple):
    """Seconds of a step, on the slowest rank."""

    matmuls: float  # of the blocks and the head, with recomputation
    attention: float
    memory: float
    tp: float
    cp: float
    pp: float  # messages between stages
    dp: float  # exposed communication
    bubble: float
    optimizer: float

    @property
    def total(self) -> float:
        return sum(self)


def step_s(training: Training, layout: Layout4D) -> Seconds:
    """Seconds of a step by kind.

    Raises:
        ValueError: the layout and the cluster have different numbers of GPUs, or such a training has no seconds.
    """
    if training.no_seconds:
        raise ValueError(training.no_seconds)
    tp, cp, pp, dp, rows, v = layout.tp, layout.cp, layout.pp, layout.dp, layout.rows, layout.stages_per_rank
    model, cluster, stack, shards = training.model, training.cluster, training.stack, layout.shards
    if layout.gpus != cluster.gpus:
        given = f"tp {tp} x cp {cp} x pp {pp} x dp {dp}"
        raise ValueError(f"{given} are {layout.gpus} GPUs, the cluster has {cluster.gpus}")
    tokens = rows * model.context / cp
    block = block_s(training, tp, cp, rows, layout.sequence_parallel, layout.recompute, layout.every)
    layers, with_head = stage_layers(model.num_layers, pp, v, layout.schedule)
    head = matmul_s(training, 6 * tokens * training.end_parameters / tp, tokens / layout.loss_chunks, model.d_model)

    message = 2 * tokens * model.d_model / tp
    inside = tp * cp * dp * pp <= cluster.per_node
    link = cluster.bandwidth(stack, 1 if inside else pp, tp * cp * dp, stack.message_share)
    messages = 2 * v * message / link * (stack.exposed_pp if v > 1 else 1) if pp > 1 else 0.0
    of_block = sum(block)
    stage = layers * of_block + messages
    ends = max(0.0, head - (layers - with_head) * of_block)  # time of the head for which all stages wait
    m = layout.microbatches(training.global_batch)

    mine = training.block_parameters * model.num_layers / pp / tp + training.end_parameters / tp
    gather = _gather_s(training, mine, shards, tp)  # of a byte per parameter; a reduce-scatter takes the same time
    copy = 2 * _gather_s(training, mine / shards, layout.replicas, tp * shards)  # an all-reduce of a shard is both
    if layout.zero == 3:
        # Per microbatch two all-gathers of parameters and a reduce-scatter of gradients, all in 16 bit.
        exposed = stack.exposed_zero3 * m * 2 * (3 * gather + copy)
    else:  # an all-reduce of gradients, or a reduce-scatter of gradients and an all-gather of parameters
        gradient = stack.recipe.gradient_bytes
        times = m if layout.zero == 2 else 1  # a rank that keeps a shard of gradients reduces each microbatch
        exposed = (
            times * gradient * (gather + copy) + (stack.recipe.weight_bytes if layout.zero else gradient) * gather
        )
        if stack.overlaps_dp:
            exposed = max(0.0, exposed - times * layers * backward_s(block))
    updated = mine / (shards if layout.zero else 1)
    optimizer = OPTIMIZER_BYTES * updated / (stack.memory_share * cluster.device.memory_Bps)
    matmuls, attention, memory, sums, context = (m * layers * s for s in block)
    if layout.schedule == "1f1b":
        bubble = (pp - 1) / v * stage
    else:
        weights = layers * block[0] / 3  # of a rank: the weight gradients, for which no rank waits
        other = (stage - weights) / 2
        bubble = (
            v_wait_s(pp, other, weights)
            if layout.schedule == "zb-v"
            else zero_bubble_wait_s(pp, other, other, weights)
        )
    return Seconds(matmuls + m * ends, attention, memory, sums, context, m * messages, exposed, bubble, optimizer)


def has_even_stages(layers: int, stages: int) -> bool:
    """Whether all stages have the same number of layers, perhaps with embedding and head counted as two layers."""
    return layers % stages == 0 or (layers + 2) % stages == 0


def stage_layers(layers: int, pp: int, v: int, schedule: str = "1f1b") -> tuple[float, float]:
    """Blocks of a rank in the middle, and of a rank with the embedding or the head; in ZB-V one rank has both.

    If only layers + 2 is a multiple of the stages, the first and the last stage have one block less (126 blocks of
    Llama 3 on 16 ranks). If neither is, all ranks have the mean.
    """
    if layers % (pp * v) and has_even_stages(layers, pp * v):
        most = (layers + 2) // pp
        return most, most - (2 if schedule == "zb-v" else 1)
    return layers / pp, layers / pp


def matmul_s(training: Training, flops: float, rows: float, columns: float) -> float:
    """Seconds of operations in matmuls of so many rows and columns on a rank; few of either make matmuls slow."""
    stack = training.stack
    slower = 1 + stack.half_width / rows + stack.half_width / columns
    return flops * slower / (training.cluster.device.peak_flops * stack.matmul_share)


def backward_s(block: tuple[float, ...]) -> float:
    """The seconds of backward in the result of `block_s`: 2/3 of the matmuls, 3/5 of the memory traffic."""
    return 2 / 3 * (block[0] + block[1]) + 3 / 5 * block[2]


@lru_cache(maxsize=4096)
def block_kept_bytes(
    training: Training, tp: int, cp: int, rows: int, slices: bool, recompute: str, every: int = 1
) -> float:
    """Bytes of a microbatch that a block keeps for backward; the mean over blocks if not every block is recomputed."""
    if every > 1:
        whole, kept = (block_kept_bytes(training, tp, cp, rows, slices, how) for how in ("none", recompute))
        return whole + (kept - whole) / every
    fused = {"fused_attention": training.stack.fused_attention, "fused_swiglu": training.stack.fused_swiglu}
    return activation_bytes(training.model, rows, recompute, tp=tp, sequence_parallel=slices, **fused) / cp


@lru_cache(maxsize=4096)
def block_s(
    training: Training, tp: int, cp: int, rows: int, slices: bool, recompute: str, every: int = 1
) -> tuple[float, ...]:
    """A block and microbatch, forward and backward: matmuls, attention, memory, sums over tp, gathers over cp.

    What backward recomputes is computed, written and read once more; the mean over blocks if that is not every block.
    """
    if every > 1:
        plain, again = (block_s(training, tp, cp, rows, slices, how) for how in ("none", recompute))
        return tuple(a + (b - a) / every for a, b in zip(plain, again, strict=True))
    model, stack, device = training.model, training.stack, training.cluster.device
    s, full = model.context, recompute == "full"
    tokens = rows * s / cp
    weights = 6 * model.num_block_weights + 2 * recomputed_weights(model, recompute)
    matmuls = matmul_s(training, weights * tokens / tp, tokens, model.d_model / tp)

    fused = stack.fused_attention
    scores = 4 * tokens * s * model.d_q / tp * (0.5 if fused else 1)
    passes = (3.5 if fused else 3) + (1 if full or (recompute == "selective" and not fused) else 0)
    attention = passes * scores / (device.peak_flops * (stack.attention_share if fused else stack.matmul_share))
    if not stack.balanced_cp:
        attention *= (2 * cp - 1) / cp

    whole, kept = (block_kept_bytes(training, tp, cp, rows, slices, how) for how in ("none", recompute))
    memory = stack.traffic * (5 * whole + 2 * (whole - kept)) / (stack.memory_share * device.memory_Bps)

    sums = TP_SUMS[recompute] * wire_bytes("all_reduce", 2 * tokens * model.d_model, tp)
    outside = tp > training.cluster.per_node  # overlap with matmuls works only inside a node, on small messages
    share, exposed = (stack.message_share, 1.0) if outside else (None, stack.exposed_tp)
    over_tp = exposed * sums / training.cluster.bandwidth(stack, tp, 1, share)
    keys = (4 if full else 3) * wire_bytes("all_gather", 2 * 2 * rows * s * model.d_kv / tp, cp)
    over_cp = stack.exposed_tp * keys / training.cluster.bandwidth(stack, cp, tp)
    return matmuls, attention, memory, over_tp, over_cp


def _gather_s(training: Training, gathered_bytes: float, ranks: int, stride: int) -> float:
    return wire_bytes("all_gather", gathered_bytes, ranks) / training.cluster.bandwidth(training.stack, ranks, stride)
