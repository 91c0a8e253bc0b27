"""A tensor-parallel step: ours against `parallelize_module`, from the same weights."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.functional import gelu, scaled_dot_product_attention

from lib.mesh import Group
from lib.model import GPT, Block

# ---- theirs ---------------------------------------------------------------------------------------------------------


class _Apart(nn.Module):
    """A block with queries, keys and values in layers of their own: a fused one, `parallelize_module` cuts wrongly."""

    def __init__(self, serial: Block) -> None:
        super().__init__()
        attention = copy.deepcopy(serial.attention)
        self.d_head, self.grouped = attention.d_head, attention.grouped
        self.norm1, self.norm2 = copy.deepcopy(serial.norm1), copy.deepcopy(serial.norm2)
        weights, biases = (x.split(attention.widths) for x in (attention.qkv.weight, attention.qkv.bias))
        self.q, self.k, self.v = (_linear(weight, bias) for weight, bias in zip(weights, biases, strict=True))
        self.out, self.up, self.down = attention.out, *copy.deepcopy([serial.mlp.up, serial.mlp.down])

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (one(y).unflatten(-1, (-1, self.d_head)).transpose(1, 2) for one in (self.q, self.k, self.v))
        y = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    made.weight, made.bias = nn.Parameter(weight.detach().clone()), nn.Parameter(bias.detach().clone())
    return made


class _Parallelized(nn.Module):
    """The GPT with its blocks cut by PyTorch; embedding and head are whole on each rank."""

    def __init__(self, serial: GPT, mesh: DeviceMesh, sequence_parallel: bool) -> None:
        super().__init__()
        self.embed, self.head = copy.deepcopy(serial.embed), copy.deepcopy(serial.head)
        self.blocks = nn.ModuleList(_Apart(block) for block in serial.blocks)
        self.mesh, self.sequence_parallel = mesh, sequence_parallel
        between = Shard(1) if sequence_parallel else Replicate()
        plan = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel(input_layouts=between))
        plan |= dict.fromkeys(("out", "down"), RowwiseParallel(output_layouts=between))
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
        state = {f"embed.{key}": x for key, x in self.embed.state_dict().items()}
        for i, block in enumerate(self.blocks):
            whole = {
                key: x.full_tensor() if isinstance(x, DTensor) else x.detach() for key, x in block.named_parameters()
            }
            for kind in ("weight", "bias"):
                apart = [whole.pop(f"{name}.{kind}") for name in "qkv"]
                state[f"blocks.{i}.attention.qkv.{kind}"] = torch.cat(apart)
            inside = {"out": "attention.out", "up": "mlp.up", "down": "mlp.down"}
            for key, x in whole.items():
                module, kind = key.split(".")
                state[f"blocks.{i}.{inside.get(module, module)}.{kind}"] = x
        return state | {f"head.{key}": x for key, x in self.head.state_dict().items()}


def parallelized(serial: GPT, world: Group, sequence_parallel: bool = False) -> _Parallelized:
    """The GPT as `parallelize_module` cuts it, with a plan as its documentation has it."""
    return _Parallelized(serial, init_device_mesh("cpu", (world.size,)), sequence_parallel)
