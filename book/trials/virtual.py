"""A virtual cluster in real time: ranks sleep where its GPUs would compute, and send the same messages.

The problem: a planner is tested on published runs, which cannot be inspected; and on two cores eight ranks cannot
compute at the same time. The idea: they can sleep at the same time. A layer sleeps for the seconds that
`lib.planner.seconds` predicts for it on a virtual GPU, and holds weights and activations of its model size. All else is
real: schedule, messages, sums, gradients in buckets; on links as slow as on the virtual cluster (`comm.link`).

This tests how the planner adds up these seconds, the messages and the sums to a step, with its waits and its overlap.
Read before: `book/trials/sleep.py`, `lib/pipeline/execute.py`, `lib/planner/seconds.py`. Chapter 14.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from book.trials.sleep import SleepLayer
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
from lib.planner.seconds import OPTIMIZER_BYTES, block_s, matmul_s
from lib.planner.training import Cluster, Layout4D, Training

INSTANT = Device(*[1e18] * 6, "a GPU whose first step opens the connections")


def virtual_steps(training: Training, layouts: Sequence[Layout4D], steps: int = 2) -> list[float]:
    """Seconds of a step in each layout: the fastest of `steps`, because further programs only slow a step down.

    It matches a stack with `Recipe(4, 4, 0, 8)`, `overlaps_dp` and shares of 1: weights and gradients are float32,
    activations bfloat16; gradients are sent during the last backward, per half block, as soon as they exist; sums over
    tp are not hidden, and links reach the figures of the data sheet.

    Raises:
        ValueError: a layout with an option that is not rehearsed here.
    """
    pairs = [(layout, _ours(training, layout)) for layout in layouts]
    of_ranks = run(_rounds, training.cluster.gpus, training, pairs, steps)
    slowest = [map(max, zip(*each, strict=True)) for each in zip(*of_ranks, strict=True)]
    return [min(times) for times in zip(*slowest, strict=True)]


def _ours(training: Training, layout: Layout4D) -> Layout:
    """The same layout as a `Layout` of this library."""
    tp, pp, dp, rows, v = layout.tp, layout.pp, layout.dp, layout.rows, layout.stages_per_rank
    rehearsed = Layout4D(tp, 1, pp, dp, rows, v, zero=0, sequence_parallel=tp > 1)
    if layout != rehearsed or training.model.num_layers % (pp * v):
        raise ValueError(
            f"{layout}: use cp=1, zero=0, recompute=none, 1f1b, sequence_parallel with tp of 2 or more, and stages "
            f"that divide {training.model.num_layers} blocks evenly"
        )
    more = {"schedule": "interleaved" if v > 1 else "1f1b", "stages_per_rank": v, "sequence_parallel": tp > 1}
    return Layout(dp, pp, tp, order="pp,dp,tp", microbatches=training.global_batch // dp // rows, **more)


def _rounds(
    world: Group, training: Training, pairs: Sequence[tuple[Layout4D, Layout]], steps: int
) -> list[list[float]]:
    """Rounds of one step in each layout: a disturbance of one step does not recur in every round."""
    cases = [(Mesh(MeshShape(**ours.sizes), world), layout, ours) for layout, ours in pairs]
    instant = replace(training, cluster=replace(training.cluster, device=INSTANT))
    return [[_step_s(one, *case) for case in cases] for one in (instant, *[training] * steps)][1:]


def _step_s(training: Training, mesh: Mesh, layout: Layout4D, ours: Layout) -> float:
    """Seconds of a step on this rank, of new stages."""
    pp, tp = mesh.group("pp"), mesh.group("tp")
    schedule = with_reduce(ours.make_schedule())
    stages = {
        s: Stage(VirtualStage(training, layout, tp, last=s == schedule.num_stages - 1), dtype=torch.bfloat16)
        for s in schedule.stages_on(pp.rank)
    }
    facts = facts_of(stages, mesh, schedule.rank_of)
    gradients = Gradients(facts, bucket_bytes=1)  # one bucket per weight
    updated = OPTIMIZER_BYTES * sum(fact.parameter.numel() for fact in facts)
    shape = ours.microbatches * layout.rows, training.model.context // tp.size, training.model.d_model
    x = torch.zeros(shape, dtype=torch.bfloat16)
    comm.barrier(mesh.world)
    began_s = time.perf_counter()
    with ExitStack() as links:
        for axis in ours.sizes:
            links.enter_context(_link(training.cluster, ours, mesh.group(axis)))
        execute(schedule, stages, pp, x, x, lambda y, _: y.float().sum(), gradients)
        gradients.finish()
    time.sleep(updated / training.cluster.device.memory_Bps)
    return time.perf_counter() - began_s


def _link(cluster: Cluster, ours: Layout, group: Group) -> AbstractContextManager[None]:
    """The link of a node; between nodes, the network cards of all GPUs of the group on a node together."""
    here = group.global_rank // cluster.per_node
    cards = sum(rank // cluster.per_node == here for rank in group.ranks)
    between = ours.crosses_nodes(group.axis, cluster.per_node)
    speed = cards * cluster.device.network_Bps if between else cluster.device.link_Bps
    return comm.link(bandwidth_Bps=min(cluster.device.link_Bps, speed), axis=group.axis)


class VirtualStage(nn.Module):
    """x[b, s/t, h] → the same: blocks whose attention and MLP sleep, then sum over tp; the last stage has the head.

    With sequence parallelism each sum is reduce-scattered, then gathered for the next layer. The two are one all-reduce
    here, except at the ends of a stage, because stages send shards: the same bytes in half the calls.
    """

    def __init__(self, training: Training, layout: Layout4D, tp: Group, last: bool) -> None:
        super().__init__()
        self.tp = tp
        block = block_s(training, layout.tp, 1, layout.rows, layout.sequence_parallel, layout.recompute)
        back_s = block.backward_share * block.computation_s
        half = training.block_parameters // 2 // tp.size, (block.computation_s - back_s) / 2, back_s / 2
        halves = 2 * training.model.num_layers // (layout.pp * layout.stages_per_rank)
        self.halves = nn.ModuleList(SleepLayer(*half) for _ in range(halves))
        size = training.end_parameters // tp.size
        tokens = layout.rows * training.model.context
        head_s = matmul_s(training, 6 * tokens * size, tokens, training.model.d_model)
        self.head = SleepLayer(size, head_s / 3, 2 / 3 * head_s) if last else None

    def forward(self, x: Tensor) -> Tensor:
        over_tp = partial(comm.all_reduce, group=self.tp)
        x = all_gather_reduce_scatter(x, self.tp, 1)
        for layer in self.halves[:-1]:
            x = pair(layer(x), over_tp, over_tp)
        x = reduce_scatter_all_gather(self.halves[-1](x), self.tp, 1)
        return self.head(x) if self.head else x
