"""How a user makes each layout: from a model of one process to what this rank trains."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.lib.foreign import clips
from tests.lib.foreign.model import DEPTH, Block
from tests.lib.foreign.own_layers import cut_layers, cut_of, sees_own_tokens


class Ranks(NamedTuple):
    """This rank among those of an axis; without a group it is alone."""

    index: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None


class GradientSum(NamedTuple):
    """Gradients that the user must sum after backward: which, over which ranks, divided by what."""

    of: Callable[[str], bool]
    over: Ranks
    divided_by: int = 1


@dataclass
class Made:
    """What this rank trains.

    Attributes:
        net: has the parameters.
        call: what the loop calls: `net`, or what wraps it.
        dp: the replicas, each of which has its own rows.
        axes, cut: for `watch`.
        clip: (net, largest norm) → the norm.
        stage: of a pipeline.
    """

    net: nn.Module
    call: nn.Module
    dp: Ranks = Ranks()
    tp: Ranks = Ranks()
    axes: Any = None
    cut: Callable | None = None
    sums: list[GradientSum] = field(default_factory=list)
    clip: Callable = clips.by_torch
    stage: PipelineStage | None = None


@cache
def mesh_of(*names: str) -> DeviceMesh:
    """All ranks along one axis, or in rows of two."""
    n = dist.get_world_size()
    return init_device_mesh("cpu", (n,) if len(names) == 1 else (n // 2, 2), mesh_dim_names=names)


def ranks_of(mesh: DeviceMesh, axis: str) -> Ranks:
    group = mesh.get_group(axis)
    return Ranks(group.rank(), group.size(), group)


def one(net: nn.Module) -> Made:
    return Made(net, net)


# Data parallelism.


def ddp(net: nn.Module) -> Made:
    dp = ranks_of(mesh_of("dp"), "dp")
    return Made(net, DistributedDataParallel(net), dp, axes={"dp": (dp.index, dp.size)})


def fsdp1(net: nn.Module) -> Made:
    dp = ranks_of(mesh_of("dp"), "dp")
    wrapped = FullyShardedDataParallel(
        net, use_orig_params=True, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu")
    )
    # FSDP1's own clip refuses float64.
    return Made(net, wrapped, dp, axes={"dp": (dp.index, dp.size)}, clip=clips.by_hand(lambda name: 1, dp.group))


def fsdp2(net: nn.Module, policy: MixedPrecisionPolicy | None = None) -> Made:
    shard_each_block(net, mesh_of("dp"), policy or MixedPrecisionPolicy())
    return Made(net, net, ranks_of(mesh_of("dp"), "dp"))


def shard_each_block(net: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    for block in net.blocks.values():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)


# Tensor parallelism of torch.


def plan(sequence: bool) -> dict:
    """Which layer is cut how. With `sequence`, activations between them are cut along the tokens."""
    between = Shard(1) if sequence else Replicate()
    styles = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "blocks.*.attention.w[qkv]": ColwiseParallel(),
        "blocks.*.attention.wo": RowwiseParallel(output_layouts=between),
        "blocks.*.mlp.gate": ColwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    if sequence:
        gather = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        styles |= {
            "norm": SequenceParallel(),
            "blocks.*.norm[12]": SequenceParallel(),
            "blocks.*.attention": PrepareModuleInput(**gather),
            "blocks.*.mlp": PrepareModuleInput(**gather),
        }
    return styles


def tp(net: nn.Module) -> Made:
    parallelize_module(net, mesh_of("tp"), plan(sequence=False))
    return Made(net, net, tp=ranks_of(mesh_of("tp"), "tp"), clip=clips.of_full)


def sp(net: nn.Module) -> Made:
    parallelize_module(net, mesh_of("tp"), plan(sequence=True))
    return Made(net, net, tp=ranks_of(mesh_of("tp"), "tp"))


def ddp_tp(net: nn.Module) -> Made:
    mesh = mesh_of("dp", "tp")
    dp = ranks_of(mesh, "dp")
    parallelize_module(net, mesh["tp"], plan(sequence=True))
    mean = GradientSum(lambda name: True, dp, divided_by=dp.size)
    return Made(net, net, dp, ranks_of(mesh, "tp"), axes=mesh, sums=[mean])


def fsdp_tp(net: nn.Module) -> Made:
    mesh = mesh_of("dp", "tp")
    parallelize_module(net, mesh["tp"], plan(sequence=True))
    shard_each_block(net, mesh["dp"], MixedPrecisionPolicy())
    return Made(net, net, ranks_of(mesh, "dp"), ranks_of(mesh, "tp"))


# Layers of one's own.


def hand(net: nn.Module) -> Made:
    return by_hand(net, mesh_of("tp"), sequence=False)


def handsp(net: nn.Module) -> Made:
    return by_hand(net, mesh_of("tp"), sequence=True)


def hand_dp(net: nn.Module) -> Made:
    mesh = mesh_of("dp", "tp")
    made = by_hand(net, mesh, sequence=True)
    made.dp = ranks_of(mesh, "dp")
    made.axes["dp"] = (made.dp.index, made.dp.size)
    made.sums.append(GradientSum(lambda name: True, made.dp, divided_by=made.dp.size))
    return made


def by_hand(net: nn.Module, mesh: DeviceMesh, sequence: bool) -> Made:
    tp = ranks_of(mesh, "tp")
    cut_layers(net, tp.group, sequence)
    cut = cut_of(tp.group)
    copies = {name: tp.size if cut(name, p)[1] is None else 1 for name, p in net.named_parameters()}
    return Made(
        net,
        net,
        tp=tp,
        axes={"tp": (tp.index, tp.size)},
        cut=cut,
        sums=[GradientSum(sees_own_tokens, tp)] if sequence else [],
        clip=clips.by_hand(copies.get, tp.group),
    )


# A pipeline of two stages.


def pipeline(net: nn.Module) -> Made:
    ranks = ranks_of(mesh_of("pp"), "pp")
    tied = net.head.weight is net.embed.weight
    first = ranks.index == 0
    for number in range(DEPTH):
        if (number < DEPTH // 2) != first:
            del net.blocks[str(number)]
    if first:
        net.norm = net.head = None
    else:
        net.embed = None
    made = Made(
        net,
        net,
        axes={"pp": (ranks.index, ranks.size)},
        clip=clips.by_hand(lambda name: 1, ranks.group),
        stage=PipelineStage(net, ranks.index, ranks.size, torch.device("cpu")),
    )
    if tied:  # both stages have the weight, under different names
        held = ("embed.weight", "head.weight")
        made.cut = lambda name, tensor: ("embed.weight" if name in held else name, None, 0, 1)
        made.sums = [GradientSum(lambda name: name in held, ranks)]
        made.clip = clips.by_hand(lambda name: ranks.size if name in held else 1, ranks.group)
    return made


LAYOUTS = {
    "one": one,
    "ddp": ddp,
    "fsdp1": fsdp1,
    "fsdp2": fsdp2,
    "tp": tp,
    "sp": sp,
    "ddp_tp": ddp_tp,
    "fsdp_tp": fsdp_tp,
    "pipeline": pipeline,
    "hand": hand,
    "handsp": handsp,
    "hand_dp": hand_dp,
}
