"""A step of dp · pp · tp: `parallelize` against PyTorch's own three, put together as torchtitan does it."""

from __future__ import annotations

import copy
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks import data_parallel
from benchmarks.apart import apart, together
from benchmarks.table import between_barriers, paired, ratio, show, three
from book.trials import wire_audit
from lib import data, run, trace
from lib.layout import Layout
from lib.memory import MemoryTracker
from lib.mesh import Group, Mesh, MeshShape
from lib.model import GPT, mean_loss
from lib.parallel import parallelize
from lib.parallel_model import ParallelModel
from lib.pipeline.stage import GPTStage, cut

CONFIG = replace(data_parallel.CONFIG, tied=False)  # a weight on two stages is beyond PyTorch's pipelines
ADAMW = partial(torch.optim.AdamW, lr=1e-3)
MICROBATCHES, ROWS, MAX_NORM = 4, 16, 1.0

# ---- theirs ---------------------------------------------------------------------------------------------------------


def composed(stage: GPTStage, mesh: DeviceMesh, microbatches: int) -> Schedule1F1B:
    """PyTorch's own 3D: matrices cut over tp, optimizer state and gradients over dp, the stages a pipeline over pp."""
    tokens = Shard(1)  # of x[B, T, D]: between matrices each rank has a slice of the sequence
    collect = PrepareModuleInput(input_layouts=tokens, desired_input_layouts=Replicate())
    block = {"*.norm?": SequenceParallel(), "*.attention": collect, "*.mlp": collect}
    block |= dict.fromkeys(("*.attention.[qkv]", "*.mlp.up"), ColwiseParallel())
    block |= dict.fromkeys(("*.attention.out", "*.mlp.down"), RowwiseParallel(output_layouts=tokens))
    words = RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens)
    places = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
    logits = ColwiseParallel(input_layouts=tokens, use_local_output=False)
    plans = {"embed": {"token": words, "position": places}, "blocks": block}
    plans |= {"head": {"norm": SequenceParallel(), "linear": logits}}
    for name, part in stage.named_children():
        parallelize_module(part, mesh["tp"], plans[name])
    for part in (*stage.blocks.values(), stage):
        fully_shard(part, mesh=mesh["dp"], reshard_after_forward=False)
    pp = mesh["pp"]
    there = PipelineStage(stage, pp.get_local_rank(), pp.size(), torch.device("cpu"), group=pp.get_group())
    return Schedule1F1B(there, microbatches, loss_fn=mean_loss)


def clip(stage: nn.Module, mesh: DeviceMesh, max_norm: float) -> None:
    """A `DTensor` knows its norm over dp and tp; over the stages somebody has to add up."""
    square = nn.utils.get_total_norm([p.grad for p in stage.parameters()]).full_tensor() ** 2
    dist.all_reduce(square, group=mesh["pp"].get_group())
    nn.utils.clip_grads_with_norm_(stage.parameters(), max_norm, square.sqrt())


class Theirs:
    """One rank's part of a GPT by `composed`, with the step and the state dict of a `ParallelModel`."""

    def __init__(self, model: GPT, world: Group, layout: Layout) -> None:
        self.mesh = init_device_mesh("cpu", tuple(layout.sizes.values()), mesh_dim_names=tuple(layout.sizes))
        self.dp, self.pp, self.tp = (self.mesh[axis] for axis in ("dp", "pp", "tp"))
        self.stage = cut(apart(copy.deepcopy(model)), layout.pp)[self.pp.get_local_rank()]
        self.schedule = composed(self.stage, self.mesh, layout.microbatches)
        self.optimizer = ADAMW(self.stage.parameters())

    def step(self, inputs: Tensor, targets: Tensor, max_norm: float) -> Tensor:
        """The mean loss before the step, equal on all ranks; rows are as many in each microbatch, and all count."""
        mine = data.rows_of_rank(len(inputs), self.dp.get_local_rank(), self.dp.size())
        given = (inputs[mine],) if self.stage.embed else ()
        wanted = {"target": targets[mine], "losses": []} if self.stage.head else {}
        self.optimizer.zero_grad()
        with loss_parallel():
            self.schedule.step(*given, **wanted, return_outputs=False)
        clip(self.stage, self.mesh, max_norm)
        self.optimizer.step()
        terms = [x.detach().full_tensor().double() for x in wanted.get("losses", ())]
        loss = torch.stack(terms).mean() if terms else torch.zeros((), dtype=torch.float64)
        dist.all_reduce(loss)
        return loss / (self.dp.size() * self.tp.size())

    def full_state_dict(self) -> dict[str, Tensor]:
        """Of this rank's stage, by the names of the serial GPT."""
        return together({name: p.detach().full_tensor() for name, p in self.stage.named_parameters()})

    def memory(self) -> MemoryTracker:
        return MemoryTracker(self.stage, self.optimizer)


def ours(model: GPT, world: Group, layout: Layout) -> ParallelModel:
    return parallelize(copy.deepcopy(model), Mesh(MeshShape(**layout.sizes), world), layout, ADAMW)


# ---- side by side ---------------------------------------------------------------------------------------------------

SIDES = {  # PyTorch's has slices of the sequence and shares out optimizer state, so the like of it comes first
    "ours, sequence parallel": (ours, {"zero": 1, "sequence_parallel": True}),
    "ours": (ours, {"zero": 1}),
    "theirs": (Theirs, {}),
}


def _made(name: str, dp: int, pp: int, tp: int, world: Group) -> ParallelModel | Theirs:
    make, more = SIDES[name]
    torch.manual_seed(0)
    return make(GPT(CONFIG), world, Layout(dp, pp, tp, microbatches=MICROBATCHES, **more))


def _step_of(side: ParallelModel | Theirs) -> Callable[[], Tensor]:
    return partial(side.step, *data.batch(data.load().train, 0, global_batch=ROWS, context=CONFIG.context), MAX_NORM)


def _made_step(name: str, dp: int, pp: int, tp: int, world: Group) -> Callable[[], Tensor]:
    return _step_of(_made(name, dp, pp, tp, world))


def _times(world: Group, sizes: tuple[int, int, int], rounds: int, backwards: bool) -> dict[str, list[float]]:
    names = list(SIDES)[:: -1 if backwards else 1]
    sides = {name: partial(between_barriers, world, _made_step(name, *sizes, world)) for name in names}
    paired(sides, 3)
    return paired(sides, rounds)


def _counted_and_peak(world: Group, name: str, sizes: tuple[int, int, int]) -> tuple[float, int]:
    """Bytes that this rank sends in a step, by the formulas of `lib.cost`, and those that its tensors take at most."""
    side = _made(name, *sizes, world)
    step = _step_of(side)
    step()  # makes the optimizer's state
    with trace.record(world.rank) as recorded:
        step()
    with side.memory() as memory:
        step()
    return recorded.wire_bytes, memory.peak["total"]


def main(fresh: int = 3, rounds: int = 9) -> None:
    """`fresh` times new processes and models, as where they lie in memory moves a ratio by a few hundredths."""
    heading = "ms", "ours / theirs, time", "MB sent", "by formulas", "MB of the fullest rank"
    rows = [("dp · pp · tp", "side", *heading)]
    for sizes in ((2, 1, 2), (2, 2, 2)):
        n = math.prod(sizes)
        times: dict[str, list[float]] = {}
        for i in range(fresh):
            for side, values in run(_times, n, sizes, rounds, i % 2 == 1, timeout_s=600)[0].items():
                times.setdefault(side, []).extend(values)
        for name in SIDES:
            counted, peaks = zip(*run(_counted_and_peak, n, name, sizes, timeout_s=600), strict=True)
            sent = "Linux only"
            if wire_audit.available():
                each = wire_audit.sent_in_a_step(partial(_made_step, name, *sizes), n)
                sent = f"{statistics.mean(each) / 1e6:.2f}"
            rows.append(
                (
                    "{} · {} · {}".format(*sizes),
                    name,
                    f"{1e3 * statistics.median(times[name]):.0f}",
                    three(ratio(times["theirs"], times[name])),
                    sent,
                    f"{statistics.mean(counted) / 1e6:.2f}",
                    f"{max(peaks) / 1e6:.1f}",
                )
            )
    show(f"A step in all three dimensions ({fresh * rounds} pairs, reach 0.95), AdamW, clipped", rows)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
