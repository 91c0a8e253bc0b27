"""A tensor-parallel step: our blocks against those that `parallelize_module` cuts, embedding and head whole in both."""

from __future__ import annotations

import copy
import statistics
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from benchmarks.apart import apart, together
from benchmarks.data_parallel import CONFIG, ROWS_PER_RANK
from benchmarks.table import between_barriers, paired, ratio, show, three
from book.trials import wire_audit
from lib import data, run
from lib.conjugate import all_gather_split, split_all_gather
from lib.data_parallel.bucketed_gradients import Gradients
from lib.mesh import Group, Mesh, MeshShape
from lib.model import GPT, mean_loss
from lib.parallel import facts_of
from lib.tensor_parallel.gpt import SEQUENCE_DIM, tensor_parallel

# ---- theirs ---------------------------------------------------------------------------------------------------------


class _Parallelized(nn.Module):
    """The GPT with its blocks cut by PyTorch; embedding and head are whole on each rank."""

    def __init__(self, serial: GPT, mesh: DeviceMesh, sequence_parallel: bool) -> None:
        super().__init__()
        copied = apart(copy.deepcopy(serial))
        self.embed, self.blocks, self.head = copied.embed, copied.blocks, copied.head
        self.mesh, self.sequence_parallel = mesh, sequence_parallel
        between = Shard(1) if sequence_parallel else Replicate()
        plan = dict.fromkeys(("attention.[qkv]", "mlp.up"), ColwiseParallel(input_layouts=between))
        plan |= dict.fromkeys(("attention.out", "mlp.down"), RowwiseParallel(output_layouts=between))
        if sequence_parallel:
            plan |= dict.fromkeys(("norm1", "norm2"), SequenceParallel())
        for block in self.blocks:
            parallelize_module(block, mesh, plan)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.sequence_parallel:
            x = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(1)])
            x = x.to_local()
        for block in self.blocks:
            x = block(x)
        if self.sequence_parallel:
            x = DTensor.from_local(x, self.mesh, [Shard(1)], run_check=False).full_tensor()
        return self.head(x)

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """By the names of the serial GPT."""
        named = self.state_dict().items()
        return together({name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in named})


def parallelized(serial: GPT, world: Group, sequence_parallel: bool = False) -> _Parallelized:
    """The GPT as `parallelize_module` cuts it, with a plan as its documentation has it."""
    return _Parallelized(serial, init_device_mesh("cpu", (world.size,)), sequence_parallel)


# ---- side by side ---------------------------------------------------------------------------------------------------

Step = Callable[[], None]


class _Ours(nn.Module):
    """The GPT with our blocks; embedding and head are whole on each rank, as in `_Parallelized`."""

    def __init__(self, serial: GPT, group: Group, sequence_parallel: bool) -> None:
        super().__init__()
        self.embed, self.head = copy.deepcopy(serial.embed), copy.deepcopy(serial.head)
        for layer in (*self.embed.modules(), *self.head.modules()):
            layer.partial_gradients = ()  # each rank has all tokens there
        self.blocks = tensor_parallel(copy.deepcopy(serial.blocks), group, sequence_parallel)
        self.group, self.sequence_parallel = group, sequence_parallel

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.sequence_parallel:
            x = split_all_gather(x, self.group, SEQUENCE_DIM)
        for block in self.blocks:
            x = block(x)
        if self.sequence_parallel:
            x = all_gather_split(x, self.group, SEQUENCE_DIM)
        return self.head(x)


def _ours(sequence_parallel: bool, world: Group) -> Step:
    model = _Ours(GPT(CONFIG), world, sequence_parallel)
    return partial(_step, model, Gradients(facts_of(model, Mesh(MeshShape(tp=world.size), world))).finish)


def _theirs(sequence_parallel: bool, world: Group) -> Step:
    return partial(_step, parallelized(GPT(CONFIG), world, sequence_parallel), lambda: None)


SIDES = {
    "ours": partial(_ours, False),
    "parallelize_module": partial(_theirs, False),
    "ours, sequence parallel": partial(_ours, True),
    "parallelize_module, sequence parallel": partial(_theirs, True),
}
PAIRS = [tuple(list(SIDES)[:2]), tuple(list(SIDES)[2:])]


def _made(name: str, world: Group) -> Step:
    torch.manual_seed(0)
    step = SIDES[name](world)
    model = step.args[0]
    inputs, targets = data.batch(data.load().train, 0, global_batch=ROWS_PER_RANK, context=CONFIG.context)
    return partial(step, torch.optim.AdamW(model.parameters(), lr=1e-3), inputs, targets)


def _step(model, finish, optimizer, x, y) -> None:
    optimizer.zero_grad()
    mean_loss(model(x), y).backward()
    finish()
    optimizer.step()


def _measure(world: Group, rounds: int, backwards: bool) -> dict[str, list[float]]:
    names = list(SIDES)[:: -1 if backwards else 1]
    sides = {name: partial(between_barriers, world, _made(name, world)) for name in names}
    paired(sides, 3)
    return paired(sides, rounds)


def main(fresh: int = 4, rounds: int = 9) -> None:
    """`fresh` times new processes and models, as where they lie in memory moves a ratio by a few hundredths."""
    rows = [("ranks", "ours", "ms", "ours / theirs, time", "MB sent", "ours / theirs, bytes")]
    for n in (2, 4):
        times: dict[str, list[float]] = {}
        for i in range(fresh):
            for side, values in run(_measure, n, rounds, i % 2 == 1, timeout_s=600)[0].items():
                times.setdefault(side, []).extend(values)
        sent = {
            name: statistics.mean(wire_audit.sent_in_a_step(partial(_made, name), n)) if wire_audit.available() else 0
            for name in SIDES
        }
        for ours, theirs in PAIRS:
            sizes = ("Linux only",) * 2
            if wire_audit.available():
                sizes = f"{sent[ours] / 1e6:.2f}", f"{sent[ours] / sent[theirs]:.2f}"
            ms = f"{1e3 * statistics.median(times[ours]):.0f}"
            rows.append((f"{n}", ours, ms, three(ratio(times[theirs], times[ours])), *sizes))
    show(f"Tensor-parallel step ({fresh * rounds} pairs, reach 0.9 of the time and 0.67 of the bytes), AdamW", rows)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
