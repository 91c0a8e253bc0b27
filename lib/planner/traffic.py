"""Messages of a rank in one step: calls and bytes of each kind on each axis, as a trace counts them.

One function per cause. Each gives (kind, axis) → [calls, wire bytes], and a step is their sum. The counts of a rank
depend only on its place in the pipeline: all ranks along d and t send the same.
"""

from __future__ import annotations

from collections import Counter

from lib.cost.calls import Calls, block_calls, embed_calls, head_calls
from lib.cost.comm import wire_bytes
from lib.pipeline.schedules.action import ALL, RECVS, SENDS, Op
from lib.planner.plan import Bucketful, Plan

Traffic = dict[tuple[str, str], tuple[int, float]]  # as `lib.trace.Trace.traffic`: (kind, axis) → calls, wire bytes


def step_traffic(plan: Plan, place: int) -> Traffic:
    """Everything that a rank at this place in the pipeline sends in a step."""
    causes = (layer_traffic, message_traffic, gradient_traffic, loss_traffic, norm_traffic)
    total: Traffic = {}
    for cause in causes:
        for key, (calls, sent) in cause(plan, place).items():
            before = total.get(key, (0, 0.0))
            total[key] = before[0] + calls, before[1] + sent
    return total


def layer_traffic(plan: Plan, place: int) -> Traffic:
    """Of tensor-parallel layers: 8(t−1)/t·bsh per block and microbatch, 10(t−1)/t·bsh with sequence parallelism.

    Column layers gather their input again for a full backward, and keep it for a backward that is split into I and W.
    """
    layout = plan.layout
    each = []
    for stage in plan.stages(place):
        halves = sum(of == stage for of, _ in plan.schedule.in_halves)
        for regather, microbatches in ((False, halves), (True, layout.microbatches - halves)):
            calls = _stage_calls(plan, stage, regather).items()
            each += [(kind, "tp", layout.tp, payload, microbatches * n) for (kind, payload), n in calls]
    return _table(each)


def _stage_calls(plan: Plan, stage: int, regather: bool) -> Calls:
    """Calls of a microbatch, forward and backward."""
    shape, rows, itemsize, layout = plan.shape, plan.rows, plan.itemsize, plan.layout
    how = {"sequence_parallel": layout.sequence_parallel}
    calls = embed_calls(shape, rows, itemsize, **how) if stage == 0 else Counter()
    how |= {"regather": regather}
    for layer in plan.layers[stage]:
        if layer == shape.num_layers:
            calls += head_calls(shape, rows, itemsize, **how)
        else:
            calls += block_calls(shape, rows, itemsize, layout.tp, **how, recompute=layout.recompute)
    return calls


def message_traffic(plan: Plan, place: int) -> Traffic:
    """Between stages: bsh per boundary, direction, microbatch; bsh/t with sequence parallelism. Receives are free."""
    slices = plan.layout.tp if plan.layout.sequence_parallel else 1
    payload = plan.rows * plan.shape.context // slices * plan.shape.d_model * plan.itemsize
    ops = [action.op for action in plan.schedule.actions[place]]
    sends, receives = (sum(op in some for op in ops) for some in (SENDS, RECVS))
    return _table([("send", "pp", plan.layout.pp, payload, sends), ("recv", "pp", plan.layout.pp, payload, receives)])


def gradient_traffic(plan: Plan, place: int) -> Traffic:
    """Sums of gradients, and the gather of parameters: 2(d−1)/d·Ψ/(t·p), zero=2 its first half per microbatch.

    zero=3 gathers each unit twice per microbatch and reduce-scatters its gradients once. With sequence parallelism some
    buckets are reduced over d·t ranks; a tied embedding is reduced over both ends of the pipeline.

    Source: Rajbhandari et al. 2020 (ZeRO), section 7.
    """
    zero, m = plan.layout.zero, plan.layout.microbatches
    each = []
    for bucket in plan.buckets(place):
        axis, n = plan.axis(*bucket.axes), bucket.ranks
        payload = bucket.size(zero > 0) * plan.itemsize
        if zero == 0:
            each.append(("all_reduce", axis, n, payload, 1))
        else:
            each.append(("reduce_scatter", axis, n, payload, num_sums(plan, place, bucket)))
            each.append(("all_gather", axis, n, payload, 2 * m if zero == 3 else 1))
    return _table(each)


def num_sums(plan: Plan, place: int, bucket: Bucketful) -> int:
    """How often a bucket is summed in a step: once, and from zero=2 on after each microbatch.

    A tied embedding waits for the backwards of all stages that use it. If one of these stages is on another rank, it
    is summed once, at the end.
    """
    if plan.layout.zero < 2 or bucket.crosses:
        return 1
    sums, through, left_over = 0, set(), False
    for stage, op, microbatch in plan.schedule.actions[place]:
        if op == Op.REDUCE and stage in bucket.stages and microbatch != ALL:
            through.add(stage)
            left_over = True
            if through == set(bucket.stages):
                sums, through, left_over = sums + 1, set(), False
    return sums + left_over


def loss_traffic(plan: Plan, place: int) -> Traffic:
    """The rank with the losses broadcasts m of them over the pipeline, and replicas all-reduce one; all are float64."""
    layout = plan.layout
    losses = ("broadcast", "pp", layout.pp, 8 * layout.microbatches, 1)
    return _table([losses, ("all_reduce", "dp", layout.dp, 8, 1)])


def norm_traffic(plan: Plan, place: int) -> Traffic:
    """For clipping: one float64, over the ranks of one replica; over all ranks if replicas shard gradients."""
    layout = plan.layout
    if layout.zero:
        return _table([("all_reduce", "world", layout.num_ranks, 8, 1)])
    return _table([("all_reduce", plan.axis("pp", "tp"), layout.pp * layout.tp, 8, 1)])


def _table(each: list[tuple[str, str, int, float, int]]) -> Traffic:
    """Of (kind, axis, ranks, payload bytes, calls); a group of one sends nothing."""
    table: Traffic = {}
    for kind, axis, n, payload, calls in each:
        if n > 1 and calls:
            before = table.get((kind, axis), (0, 0.0))
            table[kind, axis] = before[0] + calls, before[1] + calls * wire_bytes(kind, payload, n)
    return table
