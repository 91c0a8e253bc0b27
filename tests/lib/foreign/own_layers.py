"""Tensor-parallel layers of a user's own, as Megatron and picotron have them, and what the user says of their cuts.

With sequence parallelism the activations between a row and the next column are cut as well, along the tokens; norms and
the biases of rows then see the tokens of one rank only, and their gradients must be summed over the ranks.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import embedding, linear

COLUMNS = ("wq", "wk", "wv", "gate", "up")
ROWS = ("wo", "down")
TOKENS = 1  # the dimension of the tokens in [b, T, width]


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    shards = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(shards, x.contiguous(), group=group)
    return torch.cat(shards, TOKENS)


def own_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return x.chunk(group.size(), TOKENS)[group.rank()].contiguous()


class Copy(Function):
    """Megatron's f: nothing in forward, a sum in backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient, ctx.group), None


class Sum(Function):
    """Megatron's g: a sum in forward, nothing in backward."""

    @staticmethod
    def forward(ctx, x, group):
        return summed(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Gather(Function):
    """All tokens in forward; in backward a sum, of which each rank keeps its tokens."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return own_tokens(summed(gradient, ctx.group), ctx.group), None


class Scatter(Function):
    """A sum in forward, of which each rank keeps its tokens; all tokens in backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return own_tokens(summed(x, group), group)

    @staticmethod
    def backward(ctx, gradient):
        return gathered(gradient, ctx.group), None


class GatherForAll(Function):
    """All tokens in forward. All ranks do the same with them, so that in backward each takes its own, without a sum."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return own_tokens(gradient, ctx.group), None


class Column(nn.Module):
    """Some rows of the weight of a linear layer: of each of its `pieces` (gate and up) the same fraction."""

    def __init__(self, full: nn.Linear, group: dist.ProcessGroup, sequence: bool, pieces: int = 1):
        super().__init__()
        self.group, self.enter = group, Gather if sequence else Copy
        self.weight = nn.Parameter(self.own_rows(full.weight, pieces))
        self.bias = None if full.bias is None else nn.Parameter(self.own_rows(full.bias, pieces))

    def own_rows(self, full: Tensor, pieces: int) -> Tensor:
        return torch.cat([piece.chunk(self.group.size())[self.group.rank()] for piece in full.detach().chunk(pieces)])

    def forward(self, x: Tensor) -> Tensor:
        return linear(self.enter.apply(x, self.group), self.weight, self.bias)


class Row(nn.Module):
    """Some columns of the weight of a linear layer, and its whole bias, which is added to the sum."""

    def __init__(self, full: nn.Linear, group: dist.ProcessGroup, sequence: bool):
        super().__init__()
        self.group, self.leave = group, Scatter if sequence else Sum
        self.weight = nn.Parameter(full.weight.detach().chunk(group.size(), 1)[group.rank()].clone())
        self.bias = None if full.bias is None else nn.Parameter(full.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        y = self.leave.apply(linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias


class Vocabulary(nn.Module):
    """Some entries of an embedding; the others give zeros, until the sum."""

    def __init__(self, full: nn.Embedding, group: dist.ProcessGroup, sequence: bool):
        super().__init__()
        self.group, self.leave = group, Scatter if sequence else Sum
        self.weight = nn.Parameter(full.weight.detach().chunk(group.size())[group.rank()].clone())
        self.first = group.rank() * len(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        elsewhere = (x < self.first) | (x >= self.first + len(self.weight))
        y = embedding((x - self.first).masked_fill(elsewhere, 0), self.weight)
        return self.leave.apply(self.masked(y, elsewhere[..., None]), self.group)

    def masked(self, y: Tensor, elsewhere: Tensor) -> Tensor:
        return y.masked_fill(elsewhere, 0)


class Head(nn.Module):
    """The whole head on every rank, for all tokens."""

    def __init__(self, full: nn.Linear, group: dist.ProcessGroup, sequence: bool):
        super().__init__()
        self.group, self.sequence = group, sequence
        self.weight = nn.Parameter(full.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return linear(GatherForAll.apply(x, self.group) if self.sequence else x, self.weight)


def cut_layers(net: nn.Module, group: dist.ProcessGroup, sequence: bool) -> None:
    """Replace the layers of a Llama by this rank's."""
    net.embed = Vocabulary(net.embed, group, sequence)
    net.head = Head(net.head, group, sequence)
    for block in net.blocks.values():
        for part in (block.attention, block.mlp):
            for name, layer in list(part.named_children()):
                if name in COLUMNS:
                    setattr(part, name, Column(layer, group, sequence))
                elif name == "gate_up":
                    setattr(part, name, Column(layer, group, sequence, pieces=2))
                elif name in ROWS:
                    setattr(part, name, Row(layer, group, sequence))


def cut_of(group: dist.ProcessGroup) -> Callable:
    """What the user tells `watch`: how a tensor of this rank is cut from the full one."""
    index, of = group.rank(), group.size()

    def cut(name: str, tensor: Tensor) -> tuple:
        layer = name.split(".")[-2]
        if layer == "gate_up":
            rows = len(tensor) // 2
            gate, up = index * rows, (of + index) * rows
            return name, 0, [(gate, gate + rows), (up, up + rows)], of * len(tensor)
        if layer in COLUMNS or layer == "embed":
            return name, 0, index, of
        if layer in ROWS and tensor.ndim == 2:
            return name, 1, index, of
        return name, None, 0, 1

    return cut


def sees_own_tokens(name: str) -> bool:
    """Whether sequence parallelism leaves this parameter with the gradient of one rank's tokens."""
    return "norm" in name or name.endswith(("wo.bias", "down.bias"))
