"""A cluster that is not here, in real time: ranks sleep where its GPUs would compute, and send all that is sent there.

The problem: a planner is held against runs that others have published, into which one cannot look; and on two cores
eight ranks cannot compute at the same time. The idea: they can sleep at the same time. A layer sleeps for the seconds
that `lib.planner.seconds` gives it on a virtual GPU, and holds weights and activations of its model's size. All else is
real: schedule, messages, sums, gradients in buckets; on links as slow as the virtual cluster's (`comm.link`).

So the rest of the planner is put to the test: how these seconds, the messages and the sums add up to a step, what waits
for what, and what is hidden.

Read before: `lib/sleep.py`, `lib/pipeline/execute.py`, `lib/planner/seconds.py`. Chapter 14.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from lib import comm
from lib.conjugate import all_gather_reduce_scatter, pair, reduce_scatter_all_gather
from lib.cost.hardware import Device
from lib.data_parallel.bucketed_gradients import Gradients
from lib.launch import run
from lib.layout import Layout
from lib.mesh import Group, Mesh, MeshShape
from lib.parallel import facts_of
from lib.pipeline.execute import execute
from lib.pipeline.schedules.with_reduce import with_reduce
from lib.pipeline.stage import Stage
from lib.planner.seconds import OPTIMIZER_BYTES, backward_s, block_s, matmul_s
from lib.planner.training import Cluster, Layout4D, Training
from lib.sleep import SleepLayer

INSTANT = Device(*[1e18] * 6, "a GPU whose first step opens the connections")


def virtual_steps(training: Training, layouts: Sequence[Layout4D], steps: int = 2) -> list[float]:
    """Seconds of a step in each layout: of so many, the fastest, as other programs can only make one longer.

    Weights and gradients are float32, activations bfloat16: what a stack with `Recipe(4, 4, 0, 8)` is charged for. With
    `overlaps_dp` gradients leave half a block at a time, otherwise all at the end.

    Raises:
        ValueError: a layout with something that is not rehearsed here, or stages that differ in their blocks.
    """
    as_ours = [_ours(training, layout) for layout in layouts]
    of_ranks = run(_all_steps, training.cluster.gpus, training, layouts, as_ours, steps)
    return [min(map(_lasts_s, zip(*times, strict=True))) for times in zip(*of_ranks, strict=True)]


def _lasts_s(of_ranks: Iterable[tuple[float, float]]) -> float:
    """From when the first rank began until the last was through."""
    begins, ends = zip(*of_ranks, strict=True)
    return max(ends) - min(begins)


def _ours(training: Training, layout: Layout4D) -> Layout:
    """The same in our library's words."""
    if layout.cp > 1 or layout.zero or layout.recompute != "none" or layout.sequence_parallel != (layout.tp > 1):
        raise ValueError(f"{layout}: use cp=1, zero=0, recompute=none, and sequence_parallel with tp of 2 or more")
    if training.model.num_layers % (layout.pp * layout.stages_per_rank):
        raise ValueError(f"{layout}: {training.model.num_layers} blocks cannot be cut into stages of as many each")
    return Layout(
        layout.dp,
        layout.pp,
        layout.tp,
        order="pp,dp,tp",
        schedule="interleaved" if layout.stages_per_rank > 1 else "1f1b",
        stages_per_rank=layout.stages_per_rank,
        microbatches=training.global_batch // layout.dp // layout.rows,
        sequence_parallel=layout.sequence_parallel,
    )


def _all_steps(
    world: Group, training: Training, layouts: Sequence[Layout4D], as_ours: Sequence[Layout], steps: int
) -> list[list[tuple[float, float]]]:
    """Of each layout and step: when this rank began, and when it was through."""
    times = []
    instant = replace(training, cluster=replace(training.cluster, device=INSTANT))
    for layout, ours in zip(layouts, as_ours, strict=True):
        mesh = Mesh(MeshShape(**ours.sizes), world)
        _steps(mesh, instant, layout, ours, 1)
        times.append(_steps(mesh, training, layout, ours, steps))
    return times


def _steps(mesh: Mesh, training: Training, layout: Layout4D, ours: Layout, steps: int) -> list[tuple[float, float]]:
    model, stack = training.model, training.stack
    pp, tp = mesh.group("pp"), mesh.group("tp")
    schedule = with_reduce(ours.make_schedule())
    blocks = model.num_layers // schedule.num_stages
    stages = {
        s: Stage(_layers(training, layout, tp, blocks, last=s == schedule.num_stages - 1), dtype=torch.bfloat16)
        for s, rank in enumerate(schedule.rank_of)
        if rank == pp.rank
    }
    facts = facts_of(stages, mesh, schedule.rank_of)
    weights = sum(fact.parameter.numel() for fact in facts)
    gradients = Gradients(facts, bucket_bytes=1 if stack.overlaps_dp else 4 * weights)
    update_s = OPTIMIZER_BYTES * weights / (stack.memory_share * training.cluster.device.memory_Bps)
    x = torch.zeros(ours.microbatches * layout.rows, model.context // tp.size, model.d_model, dtype=torch.bfloat16)
    times = []
    for _ in range(steps):
        comm.barrier(mesh.world)
        began_s = time.perf_counter()
        with ExitStack() as links:
            for axis in ours.sizes:
                links.enter_context(_link(training.cluster, ours, mesh.group(axis)))
            execute(schedule, stages, pp, x, x, lambda y, _: y.float().sum(), gradients)
            gradients.finish()
        time.sleep(update_s)
        times.append((began_s, time.perf_counter()))
        for bucket in gradients.buckets:
            bucket.after_step()
    return times


def _link(cluster: Cluster, ours: Layout, group: Group):
    """As fast as the node's; between nodes, as fast as the network cards of the group's GPUs on a node."""
    device, here = cluster.device, group.ranks[group.rank] // cluster.per_node
    cards = sum(rank // cluster.per_node == here for rank in group.ranks)
    crosses = ours.crosses_nodes(group.axis, cluster.per_node)
    speed = min(device.link_Bps, cards * device.network_Bps) if crosses else device.link_Bps
    return comm.link(bandwidth_Bps=speed, axis=group.axis)


def _layers(training: Training, layout: Layout4D, tp: Group, blocks: int, last: bool) -> nn.Sequential:
    """Of a stage, x[b, s/t, h] → the same: attention and MLP of each block with a sum behind each; last, the head.

    With sequence parallelism a sum is a scatter, and a gather begins what follows. The two are one all-reduce here, but
    at the ends of a stage, between which slices travel: half the calls for the same bytes.
    """
    block = block_s(training, layout.tp, 1, layout.rows, layout.sequence_parallel, layout.recompute)
    back_s = backward_s(block)
    forward_s = sum(block[:3]) - back_s
    size = training.block_parameters // tp.size // 2
    layers: list[nn.Module] = [_Sends(partial(all_gather_reduce_scatter, group=tp, dim=1))]
    for _ in range(2 * blocks):
        layers += [SleepLayer(size, forward_s / 2, back_s / 2), _Sends(partial(_sum_both_ways, group=tp))]
    layers[-1] = _Sends(partial(reduce_scatter_all_gather, group=tp, dim=1))
    if last:
        tokens = layout.rows * training.model.context
        head_s = matmul_s(training, 6 * tokens * training.end_parameters / tp.size, tokens)
        layers.append(SleepLayer(training.end_parameters // tp.size, head_s / 3, 2 / 3 * head_s))
    return nn.Sequential(*layers)


def _sum_both_ways(x: Tensor, group: Group) -> Tensor:
    """A scatter and a gather, forward as backward."""
    return pair(x, partial(comm.all_reduce, group=group), partial(comm.all_reduce, group=group))


class _Sends(nn.Module):
    """A communication as a layer."""

    def __init__(self, sends: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.forward = sends
