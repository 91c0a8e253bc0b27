"""Seconds of a step, by kind.

The idea, in ten lines (m microbatches of r = b·s/c tokens on a rank, W weights of a block):

    matmuls      6 · r · W/t · (1 + w₀/r + w₀·t/h)  ÷  (peak · share)
    attention    4 · r · s · h/t forward, half of it where it is fused and causal; 2 or 2.5 times that backward
    memory       2A forward and 3A backward for the A bytes that a block keeps, 2 for each recomputed, ÷ bandwidth
    tp, cp       4 sums of x (up to 6 with recomputation); keys and values (`lib.planner.context`); less what hides
    stage        (l/p) · (matmuls + attention + memory + tp + cp) + messages to the neighbours that do not hide
    step         m · the slowest stage, head included  +  (p − 1)/v · a stage
    dp           reduction of gradients, all-gather of parameters; less the part that hides
    optimizer    30 bytes per parameter that a rank updates, ÷ memory bandwidth

Each line is a formula of the papers; the stack has the shares, and `lib.planner.messages` what hides. Chapter 14
compares the sum with published runs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from lib.cost.bubble import v_wait_s, zero_bubble_wait_s
from lib.cost.sizes import recomputed_weights
from lib.planner.context import over_cp
from lib.planner.kept_of_block import block_kept_bytes, kept_of_own_tokens  # noqa: F401 the old place of the first
from lib.planner.messages import NONE, AxisWait, Messages, between_stages, hide, of_collective
from lib.planner.training import Layout4D, Training

# Of a block: two in forward, two in backward; what backward recomputes, it gathers and sums again.
TP_SUMS = {"none": 4, "selective": 4, "mlp": 5, "ops": 5, "full": 6}
OPTIMIZER_BYTES = 30  # read and written per parameter: gradient, master copy and both moments, the weight
# Elements of a message of gradients or parameters; sharded, it has a million for each rank, or its ring would be slow.
# Source: Megatron-LM, `DistributedDataParallelConfig.bucket_size` (commit d98e8a64).
BUCKET, BUCKET_OF_A_RANK = 40e6, 1e6


class BlockTime(NamedTuple):
    """Seconds of a block and microbatch, forward and backward."""

    matmuls: float
    attention: float
    memory: float  # with the pauses of a block so small that its kernels cannot be launched in time
    weights_s: float  # of the matmuls, the gradients of weights: as many FLOPs as forward has
    forward_s: float  # of all three; the rest is in backward, recomputation included
    tp: AxisWait
    cp: AxisWait

    @property
    def computation_s(self) -> float:
        return self.matmuls + self.attention + self.memory

    @property
    def total(self) -> float:
        return self.computation_s + self.tp.exposed_s + self.cp.exposed_s

    @property
    def left_s(self) -> float:
        """Computation that has hidden nothing yet."""
        return self.computation_s - self.tp.hidden_s - self.cp.hidden_s

    @property
    def backward_share(self) -> float:
        """Of the computation: two thirds of the matmuls, and three quarters where all of forward runs again."""
        return 1 - self.forward_s / self.computation_s

    def towards(self, other: BlockTime, part: float) -> BlockTime:
        """The mean of this block and a second one, which weighs `part`."""
        computed = (a + (b - a) * part for a, b in zip(self[:5], other[:5], strict=True))
        waits = (a.times(1 - part) + b.times(part) for a, b in zip(self[5:], other[5:], strict=True))
        return BlockTime(*computed, *waits)


class Seconds(NamedTuple):
    """Seconds of a step, on the slowest rank; of messages those that computation does not hide."""

    matmuls: float  # of the blocks and the head, with recomputation
    attention: float
    memory: float
    tp: float
    cp: float
    pp: float  # between stages
    dp: float
    bubble: float
    optimizer: float

    @property
    def total(self) -> float:
        return sum(self)


def step_s(training: Training, layout: Layout4D) -> Seconds:
    """Seconds of a step by kind; of messages those that ranks wait for.

    Raises:
        ValueError: the layout and the cluster have different numbers of GPUs, or such a training has no seconds.
    """
    return step_and_waits(training, layout)[0]


def step_and_waits(training: Training, layout: Layout4D) -> tuple[Seconds, dict[str, AxisWait]]:
    """As `step_s`; and of each axis the messages of a rank, and what computation hides of them."""
    if training.no_seconds:
        raise ValueError(training.no_seconds)
    tp, cp, pp, dp, rows, v = layout.tp, layout.cp, layout.pp, layout.dp, layout.rows, layout.stages_per_rank
    model, cluster, stack = training.model, training.cluster, training.stack
    if layout.gpus != cluster.gpus:
        given = f"tp {tp} x cp {cp} x pp {pp} x dp {dp}"
        raise ValueError(f"{given} are {layout.gpus} GPUs, the cluster has {cluster.gpus}")
    m = layout.microbatches(training.global_batch)
    of_block = training, tp, cp, rows, layout.sequence_parallel, layout.recompute, layout.every, layout.attention
    block = block_s(*of_block)
    layers, with_head = stage_layers(model.num_layers, pp, v, layout.schedule)

    mine = _own_parameters(training, layout)
    moved = mine * (stack.copied_bytes if layout.zero == 3 else 0)
    copies = moved / (stack.memory_share * cluster.device.memory_Bps)
    stage = layers * block.total + copies
    head = head_s(training, tp, cp, rows, layout.loss_chunks)
    ends = max(0.0, head - (layers - with_head) * block.total)  # time of the head for which all stages wait

    over_pp, fill_s = _over_pp(training, layout, layers, block, ends)
    left_s = max(0.0, layers * block.left_s - over_pp.hidden_s)  # of a microbatch
    over_dp = _over_dp(training, layout, mine, layers, left_s, block.backward_share)
    updated = mine / (layout.shards if layout.zero else 1)
    if layout.schedule == "1f1b":
        bubble = (pp - 1) / v * stage
    else:
        weights = layers * block.weights_s  # of a rank, for which no rank waits
        other = (stage - weights) / 2
        bubble = (
            v_wait_s(pp, other, weights)
            if layout.schedule == "zb-v"
            else zero_bubble_wait_s(pp, other, other, weights)
        )
    waits = {
        "tp": block.tp.times(m * layers),
        "cp": block.cp.times(m * layers),
        "pp": over_pp.times(m),
        "dp": over_dp,
    }
    seconds = Seconds(
        matmuls=m * (layers * block.matmuls + ends),
        attention=m * layers * block.attention,
        memory=m * (layers * block.memory + copies),
        **{axis: wait.exposed_s for axis, wait in waits.items()},
        bubble=bubble + fill_s,
        optimizer=OPTIMIZER_BYTES * updated / (stack.memory_share * cluster.device.memory_Bps),
    )
    return seconds, waits


def head_s(training: Training, tp: int, cp: int, rows: int, loss_chunks: int) -> float:
    """Seconds of a microbatch in the head."""
    tokens = rows * training.model.context / cp
    flops = 6 * tokens * training.end_parameters / tp
    return matmul_s(training, flops, tokens / loss_chunks, training.model.d_model)


def _over_pp(
    training: Training, layout: Layout4D, layers: float, block: BlockTime, ends_s: float
) -> tuple[AxisWait, float]:
    """The messages of a microbatch between the stages of a rank and their neighbours; and those that fill a pipeline.

    Under 1F1B each microbatch waits twice for the mean over the p hops of a round, whichever rank it is on; in a zero
    bubble the gradients of weights, for which no rank waits, run meanwhile. Messages hide behind the blocks, and while
    all stages wait for the head, `ends_s`. To fill and empty it, messages pass all
    hops twice for each stage of a rank; in ZB-H1 four times, in ZB-V five times.

    Source: chapter 10c, for 1F1B; the others read off `lib.pipeline.simulate` (`tests/lib/test_planner_waits.py`).
    """
    v, tokens = layout.stages_per_rank, layout.rows * training.model.context / layout.cp
    payload = 2 * tokens * training.model.d_model / layout.tp
    one, hops_s = between_stages(training, payload, layout.pp, layout.tp * layout.cp * layout.dp)
    sent, left_s = one.times(2 * v), layers * block.left_s + ends_s
    if layout.schedule != "1f1b":
        weights_s = layers * block.weights_s * (1 - block.tp.hidden_s / block.matmuls)
        return hide(sent, min(left_s, weights_s)), (5 if layout.schedule == "zb-v" else 4) * hops_s
    mean = hops_s / layout.pp / one.seconds if layout.pp > 1 else 0.0
    return hide(sent, left_s, mean * (training.stack.exposed_pp if v > 1 else 1.0)), 2 * v * hops_s


def _own_parameters(training: Training, layout: Layout4D) -> float:
    """Ψ/(t·p): those that a rank computes with; with embedding or head, or both where one rank has both untied."""
    has_both = layout.pp == 1 or layout.schedule == "zb-v"
    ends = 2 if has_both and not training.model.tied else 1
    blocks = training.block_parameters * training.model.num_layers / layout.pp
    return (blocks + ends * training.end_parameters) / layout.tp


def keeps_whole_gradients(training: Training, layout: Layout4D) -> bool:
    """Whether a rank that shards gradients keeps them whole until the last microbatch of a step."""
    return stay_whole(training, layout.zero, layout.shards, layout.microbatches(training.global_batch))


def stay_whole(training: Training, zero: int, shards: int, microbatches: float) -> bool:
    """Whether gradients stay whole over so many microbatches, on each of these data-parallel ranks.

    Whole gradients replace the shards: the last microbatch turns them into shards, unit by unit.

    Source: PyTorch's `fully_shard`, `post_backward` in `_fsdp_param_group.py` (torch 2.13): without a sum it returns
    before the reduce-scatter, and keeps `unsharded_accumulated_grad` in the dtype of the sum.
    """
    return zero >= 2 and shards > 1 and training.stack.whole_gradient_bytes > 0 and microbatches > 1


def _over_dp(
    training: Training, layout: Layout4D, mine: float, layers: float, left_s: float, of_backward: float
) -> AxisWait:
    """Gradients and parameters in a step, over the data-parallel ranks.

    Args:
        mine: parameters that a rank computes with.
        left_s: computation of a microbatch that has hidden nothing yet, of which a part, `of_backward`, is in backward.
    """
    stack, recipe = training.stack, training.stack.recipe
    m = layout.microbatches(training.global_batch)

    def gather(itemsize: int, calls: float) -> Messages:  # a reduce-scatter takes the same time
        return of_collective(training, "all_gather", itemsize * mine, layout.shards, layout.tp, calls)

    def over_copies(itemsize: int, calls: float) -> Messages:
        payload = itemsize * mine / layout.shards
        return of_collective(training, "all_reduce", payload, layout.replicas, layout.tp * layout.shards, calls)

    forward_s, backward_s = (1 - of_backward) * left_s, of_backward * left_s
    if layout.zero == 3:  # per microbatch two all-gathers of parameters and a reduction of gradients
        units, share = layers + 1, stack.exposed_zero3
        once = gather(2, units)
        summed = gather(stack.reduced_bytes, units) + over_copies(stack.reduced_bytes, units)
        forward, backward = hide(once, forward_s, share), hide(once + summed, backward_s, share)
        if keeps_whole_gradients(training, layout):  # the last microbatch alone reduces
            return forward.times(m) + hide(once, backward_s, share).times(m - 1) + backward
        return forward.times(m) + backward.times(m)
    if not layout.zero:
        calls = max(1.0, mine / BUCKET)
        all_of_it = of_collective(
            training, "all_reduce", recipe.gradient_bytes * mine, layout.shards, layout.tp, calls
        )
        return hide(all_of_it, backward_s if stack.overlaps_dp else 0.0)
    calls = max(1.0, mine / max(BUCKET, BUCKET_OF_A_RANK * layout.shards))
    times = m if layout.zero == 2 and not keeps_whole_gradients(training, layout) else 1
    reduction = gather(recipe.gradient_bytes, calls) + over_copies(recipe.gradient_bytes, calls)
    reduce = hide(reduction, backward_s if stack.overlaps_dp else 0.0).times(times)
    return reduce + hide(gather(recipe.weight_bytes, calls), forward_s if stack.overlaps_dp else 0.0)


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


@lru_cache(maxsize=4096)
def block_s(
    training: Training, tp: int, cp: int, rows: int, slices: bool, recompute: str, every: int = 1, way: str = ""
) -> BlockTime:
    """A block and microbatch, forward and backward, with this `way` of attention over cp, or that of the software.

    A recomputed product is computed, written and read again; the mean over blocks if that is not every block.
    """
    if every > 1:
        plain, again = (block_s(training, tp, cp, rows, slices, how, 1, way) for how in ("none", recompute))
        return plain.towards(again, 1 / every)
    model, stack, device = training.model, training.stack, training.cluster.device
    s, full = model.context, recompute == "full"
    tokens = rows * s / cp
    recomputed = recomputed_weights(model, recompute)
    if stack.stops_early and recompute in ("full", "mlp"):
        recomputed -= model.d_model * model.mlp_width
    weights = model.num_block_weights
    once = matmul_s(training, 2 * weights * tokens / tp, tokens, model.d_model / tp) / stack.fp8_speedup
    matmuls = (3 + recomputed / weights) * once

    fused = stack.fused_attention
    scores = 4 * tokens * s * model.d_q / tp * (0.5 if fused else 1)
    passes = (3.5 if fused else 3) + (1 if full or (recompute == "selective" and not fused) else 0)
    attention = passes * scores / (device.peak_flops * (stack.attention_share if fused else stack.matmul_share))
    way = way or stack.cp_attention
    if not stack.balanced_cp and way != "ulysses":  # whose ranks have all tokens
        attention *= (2 * cp - 1) / cp

    whole, kept = (kept_of_own_tokens(training, tp, cp, rows, slices, how) for how in ("none", recompute))
    moved = 5 * whole + 2 * (whole - kept)
    memory = stack.traffic * moved / (stack.memory_share * device.memory_Bps)
    memory = max(memory, stack.launch_s - matmuls - attention)
    forward = once + attention / passes + memory * 2 * whole / moved  # pauses are where the traffic is

    of_tp = _over_tp(training, tp, tokens, slices, recompute, matmuls, once)
    of_cp = over_cp(training, way, tp, cp, rows, attention, passes, full)
    return BlockTime(matmuls, attention, memory, once, forward, of_tp, of_cp)


def _over_tp(
    training: Training, tp: int, tokens: float, slices: bool, recompute: str, matmuls_s: float, weights_s: float
) -> AxisWait:
    """The sums of a block over tensor-parallel ranks, forward and backward.

    With sequence parallelism a sum is a gather and a scatter, each in pieces during the matmul before or after it.
    Without, it is an all-reduce: nothing runs beside it in forward, and in backward the gradient of the weights,
    `weights_s` of the matmuls. The second gather of column layers hides there as well.
    """
    if tp == 1:
        return hide(NONE, matmuls_s)
    stack, x = training.stack, 2 * tokens * training.model.d_model
    skipped = stack.stops_early and recompute == "full"  # the sum behind the matmul that is not computed again
    exposed = 1.0 if tp > training.cluster.per_node else stack.exposed_tp  # pieces overlap only inside a node
    if not slices:
        number = TP_SUMS[recompute] - skipped
        sums = of_collective(training, "all_reduce", x, tp, 1).times(number)
        return hide(sums, weights_s, max(exposed, 1 - 2 / number))
    half = of_collective(training, "all_gather", x, tp, 1)
    apart = (3 if training.model.gated else 2) * (3 if recompute == "full" else 2) * stack.gathers_apart
    sums = half.times(2 * TP_SUMS[recompute] - skipped + apart)
    sent = sums + half.times(2 if stack.regathers else 0)
    return hide(sent, matmuls_s if exposed < 1 else weights_s, exposed * sums.seconds / sent.seconds)
