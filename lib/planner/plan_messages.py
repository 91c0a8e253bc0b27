"""What a rank of a `Plan` sends in a step, by kind and axis, exactly; and how much of it leaves a node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product

from lib.cost.comm import attention_calls, block_calls, embed_calls, head_calls, wire_bytes
from lib.cost.mixture import WIDE
from lib.layout import TOKEN_AXES
from lib.pipeline.schedules.action import RECVS, SENDS, Op
from lib.planner.plan import Bucketful, Plan

Traffic = dict[tuple[str, str], tuple[int, float]]  # as `lib.trace.Trace.traffic`: (kind, axis) → calls, wire bytes
Sends = Iterator[tuple[str, str, int, float, int]]  # kind, axis, ranks of the group, payload bytes, calls


def step_traffic(plan: Plan, place: int, ep_rank: int = 0) -> Traffic:
    """All that a rank at this place in the pipeline sends in a step, by cause; ranks along d, c and t send the same.

    If experts cannot be shared evenly, those that share them do not: then the rank must be named.
    """
    total: Traffic = {}
    causes = _layer_sends, _expert_sends, _context_sends, _message_sends, _gradient_sends, _scalar_sends
    for cause in causes:
        of_rank = (plan, place, ep_rank) if cause in (_expert_sends, _gradient_sends) else (plan, place)
        for kind, axis, n, payload, calls in cause(*of_rank):
            if n > 1 and calls:  # a group of one sends nothing
                before = total.get((kind, axis), (0, 0.0))
                total[kind, axis] = before[0] + calls, before[1] + calls * wire_bytes(kind, payload, n)
    return total


def _layer_sends(plan: Plan, place: int) -> Sends:
    """Of tensor-parallel layers: 8(t−1)/t·bsh per block and microbatch, 10(t−1)/t·bsh with sequence parallelism.

    Column layers gather their input again for a full backward, and keep it for a backward that is split into I and W.
    """
    layout, sizes = plan.layout, (plan.own, plan.rows, plan.itemsize)
    slices = {"sequence_parallel": layout.sequence_parallel}
    for stage in plan.schedule.stages_on(place):
        halves = sum(of == stage for of, _ in plan.schedule.in_halves)
        for regather, microbatches in ((False, halves), (True, layout.microbatches - halves)):
            calls = embed_calls(*sizes, **slices) if stage == 0 else Counter()
            for layer in plan.layers[stage]:
                if layer == plan.shape.num_layers:
                    calls += head_calls(*sizes, **slices, regather=regather)
                elif plan.model.has_experts(layer):
                    of_block = plan.rows, plan.itemsize, layout.tp, layout.recompute
                    calls += plan.mixture.block_calls(*of_block, **slices, regather=regather)
                else:
                    calls += block_calls(*sizes, layout.tp, layout.recompute, **slices, regather=regather)
            for (kind, payload), n in calls.items():
                yield kind, "tp", layout.tp, payload, microbatches * n


def _expert_sends(plan: Plan, place: int, ep_rank: int) -> Sends:
    """Rows, to the ranks of their experts and home; loads, which ranks gather, balance, and move biases by."""
    layout, mixture, layers = plan.layout, plan.mixture, plan.expert_layers(place)
    if not layers:
        return
    for (kind, payload), n in mixture.calls(plan.rows, plan.itemsize, ep_rank, layout.recompute).items():
        yield kind, "ep", layout.ep, payload, layout.microbatches * layers * n
    sliced = ("tp",) if layout.sequence_parallel else ()
    of_sequence, of_batch = plan.group("cp", *sliced), plan.group(*TOKEN_AXES, *sliced)
    balanced = of_sequence if mixture.balance == "sequence" else of_batch
    for (kind, payload), n in mixture.balance_calls(plan.rows, layout.recompute).items():
        yield kind, *balanced, payload, layout.microbatches * layers * n
    yield "all_reduce", *of_batch, WIDE * mixture.num_experts, layers * mixture.has_bias


def _context_sends(plan: Plan, place: int) -> Sends:
    """Of attention across context-parallel ranks, in each block for each microbatch."""
    layout = plan.layout
    sizes = plan.shape, plan.rows, plan.itemsize, layout.tp, layout.cp
    blocks = len(plan._blocks(place))
    for (kind, payload), n in attention_calls(*sizes, layout.attention, layout.recompute).items():
        yield kind, "cp", layout.cp, payload, layout.microbatches * blocks * n


def _message_sends(plan: Plan, place: int) -> Sends:
    """Between stages: bsh per boundary, direction, microbatch; bsh/t with sequence parallelism. Receives are free."""
    slices = plan.layout.tp if plan.layout.sequence_parallel else 1
    payload = plan.rows * plan.own.context // slices * plan.shape.d_model * plan.itemsize
    for kind, ops in (("send", SENDS), ("recv", RECVS)):
        calls = sum(action.op in ops for action in plan.schedule.actions[place])
        yield kind, "pp", plan.layout.pp, payload, calls


def _gradient_sends(plan: Plan, place: int, ep_rank: int) -> Sends:
    """Sums of gradients, and the gather of parameters: 2(d−1)/d·Ψ/(t·p), zero=2 its first half per microbatch.

    zero=3 gathers each unit twice per microbatch and reduce-scatters its gradients once. With sequence parallelism some
    buckets are reduced over d·t ranks; a tied embedding is reduced over both ends of the pipeline; gradients of experts
    over the ranks with the same experts.

    Source: Rajbhandari et al. 2020 (ZeRO), section 7.
    """
    zero = plan.layout.zero
    for bucket in plan.buckets(place, ep_rank):
        group = plan.axis(*bucket.axes), bucket.ranks, bucket.size * plan.itemsize
        if zero == 0:
            yield "all_reduce", *group, 1
        else:
            yield "reduce_scatter", *group, bucket.weights[0].is_trained * _num_sums(plan, place, bucket)
            yield "all_gather", *group, 2 * plan.layout.microbatches if zero == 3 else 1


def _num_sums(plan: Plan, place: int, bucket: Bucketful) -> int:
    """How often a bucket is summed in a step: once, and from zero=2 on after each microbatch.

    A tied embedding waits for the backwards of all stages that use it. If one of these stages is on another rank, it
    is summed once, at the end.
    """
    if plan.layout.zero < 2 or bucket.crosses:
        return 1
    sums, through = 0, set()
    for stage, op, _ in plan.schedule.actions[place]:
        if op == Op.REDUCE and stage in bucket.stages:
            through.add(stage)
            if through == set(bucket.stages):
                sums, through = sums + 1, set()
    return sums + bool(through)


def _scalar_sends(plan: Plan, place: int) -> Sends:
    """In float64: m losses over the pipeline, one over replicas; for clipping a norm over a replica or all ranks."""
    layout = plan.layout
    yield "broadcast", "pp", layout.pp, 8 * layout.microbatches, 1
    yield "all_reduce", plan.axis(*TOKEN_AXES), layout.dp * layout.cp, 8, 1
    is_over_all = layout.zero or layout.ep > 1
    yield "all_reduce", *(("world", layout.num_ranks) if is_over_all else plan.group("pp", "tp")), 8, 1


def bytes_out_of_a_node(plan: Plan, ranks_per_node: int) -> dict[tuple[str, str], float]:
    """(kind, axis) → bytes per step that leave the node that sends most of it, and that its network card carries.

    Consecutive ranks share a node. A collective is a ring in the order of ranks, as in gloo: a rank sends out of its
    node if the next rank is on another. With t ranks on two nodes that is one rank of each node, not t/2 of them. Only
    an all-to-all has no ring: each rank sends as much to each.
    """
    layout, most = plan.layout, {}
    of_each = {at: step_traffic(plan, *at) for at in product(range(layout.pp), plan.ep_places)}
    sent_of = [of_each[plan.place(rank), plan.ep_place(rank)] for rank in range(layout.num_ranks)]
    for key in sorted({key for traffic in of_each.values() for key in traffic if key[0] != "recv"}):
        out: Counter[int] = Counter()
        for group in _groups(plan, key[1]):
            ring = [rank for rank in group if key in sent_of[rank]]
            for rank, after in zip(ring, ring[1:] + ring[:1], strict=True):
                calls, sent = sent_of[rank][key]
                to: dict[int, float] = {after: calls}
                if key[0] == "send":
                    to = _receivers(plan, rank, group)
                elif key[0] == "all_to_all_rows":
                    me = ring.index(rank)  # no rank of them sends nothing: each has experts
                    rows = {
                        other: plan.mixture.exchanged(plan.rows, me, i) for i, other in enumerate(ring) if i != me
                    }
                    to = {other: calls * n / sum(rows.values()) for other, n in rows.items()}
                elif key[0] == "all_to_all":
                    to = {other: calls / (len(ring) - 1) for other in ring if other != rank}
                node = rank // ranks_per_node
                out[node] += sent / calls * sum(n for other, n in to.items() if other // ranks_per_node != node)
        most[key] = max(out.values(), default=0.0)
    return most


def _groups(plan: Plan, axis: str) -> list[list[int]]:
    """The groups along an axis, several joined by ×, or the world, or of the ranks that share or that copy experts."""
    if axis in ("ep", "edp"):
        ep, near = plan.layout.ep, axis == "ep"
        planes = _groups(plan, "×".join(TOKEN_AXES))
        folds = range(plan.layout.edp if near else ep)
        return [ranks[i * ep : i * ep + ep] if near else ranks[i::ep] for ranks in planes for i in folds]
    along = plan.layout.sizes if axis == "world" else axis.split("×")
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(plan.layout.num_ranks):
        here = plan.layout.coordinates(rank)
        groups.setdefault(tuple(i for name, i in here.items() if name not in along), []).append(rank)
    return list(groups.values())


def _receivers(plan: Plan, rank: int, pipeline: list[int]) -> Counter[int]:
    """The ranks to which a rank of a pipeline sends in a step, and how often."""
    return Counter(
        pipeline[plan.schedule.rank_of[stage + (1 if op == Op.SEND_F else -1)]]
        for stage, op, _ in plan.schedule.actions[plan.place(rank)]
        if op in SENDS
    )
