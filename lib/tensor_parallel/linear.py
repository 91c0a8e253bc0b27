"""Column- and row-parallel linear layers: two ways to shard a matrix, used as a pair.

The problem: the weight of a layer does not fit on one device, or its matmul takes too long there. But a matmul with a
shard is not the output of the layer, and communication after every layer is slow.

The idea: a layer x·Wᵀ can be sharded in two directions.

    column   each rank has some of the outputs.  x is replicated, y is sharded: no communication
    row      each rank has some of the inputs.   x is sharded, y is partial sums: one all-reduce

The output of the first has the layout of the input of the second, and an elementwise function (GELU) or one per head
(attention) fits between them. So a pair of layers costs one all-reduce in forward. Backward costs one more, for the
gradient of x, which the column layer computes as partial sums.

(Columns and rows are those of Wᵀ, by which x is multiplied. `nn.Linear` stores W, where they swap.)

Source: Shoeybi et al., Megatron-LM, 2019, arXiv 1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from lib import comm, trace
from lib.conjugate import (
    all_gather_reduce_scatter,
    all_reduce_identity,
    identity_all_reduce,
    reduce_scatter_all_gather,
)
from lib.deferred import linear_later, queue_here, weight_gradients
from lib.mesh import Group, check_group
from lib.placement import Placement, Replicate, Shard, distribute, split_size
from lib.tensor_parallel.wrong_use import check_first, check_kind, check_part, check_whole

_ROWS = Shard(0)


class ParallelLayer(nn.Module):
    """Base of the layers with a weight of which this rank has a shard.

    Args:
        serial: the full layer. Rank 0 of the group draws the full weights.
        group: the tensor-parallel ranks.
        sequence_dim: dim along which activations between the pairs are sharded (`lib/tensor_parallel/sequence.py`);
            None if they are replicated.

    Attributes:
        shards: the class of serial layers that it shards.
        placements: parameter → its placement on the ranks.
        partial_gradients: replicated parameters whose gradients are partial sums.

    Raises:
        TypeError: a serial layer of a different kind, or one with a `forward` of its own; a group of torch.
        ValueError: a size that cannot be split evenly, or a group along a different axis.
    """

    shards: type[nn.Module]
    placements: dict[str, Placement]
    partial_gradients: tuple[str, ...] = ()

    def __init__(self, serial: nn.Module, group: Group, sequence_dim: int | None) -> None:
        super().__init__()
        check_group(group)
        if group.axis not in ("tp", "world"):
            raise ValueError(
                f"this layer is sharded over tensor-parallel ranks, but got a group along {group.axis!r}: use "
                'mesh.group("tp")'
            )
        self.group, self.sequence_dim = group, sequence_dim
        self._take(serial)

    @classmethod
    def from_serial(cls, serial: nn.Module, group: Group, *, agreed: bool = False, **options) -> ParallelLayer:
        """Shard a serial layer, with the weights of rank 0 of the group; sends nothing if `agreed`."""
        check_kind(serial, cls.shards, cls.__name__)
        with torch.device("meta"):
            layer = cls(**cls._sizes(serial), group=group, **options)
        layer._take(serial, agreed)
        return layer

    def _take(self, serial: nn.Module, agreed: bool = False) -> None:
        for name, placement in self.placements.items():
            setattr(self, name, distribute(getattr(serial, name), placement, self.group, agreed))

    def _sum(self, term: Tensor) -> Tensor:
        """Sum the partial outputs of the ranks; with `sequence_dim`, to this rank's shard of the sequence."""
        if self.sequence_dim is None:
            return all_reduce_identity(term, self.group)
        split_size(term.shape[self.sequence_dim], self.group, "sequence")
        return reduce_scatter_all_gather(term, self.group, self.sequence_dim)


class ParallelLinear(ParallelLayer):
    """Base of both linear layers.

    Args:
        in_features, out_features, bias: of the full layer.
        group, sequence_dim: as for `ParallelLayer`.
    """

    shards = nn.Linear

    def __init__(
        self, in_features: int, out_features: int, group: Group, bias: bool = True, sequence_dim: int | None = None
    ) -> None:
        super().__init__(nn.Linear(in_features, out_features, bias), group, sequence_dim)
        self.in_features, self.out_features = in_features, out_features

    @staticmethod
    def _sizes(serial: nn.Linear) -> dict[str, int]:
        return {
            "in_features": serial.in_features,
            "out_features": serial.out_features,
            "bias": serial.bias is not None,
        }

    def _used(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias as used in forward."""
        return self.weight, self.bias

    def extra_repr(self) -> str:
        """What `print` says of the layer: features of the full layer, the axis, and the shape of this rank's shard."""
        part = list(self.weight.shape)
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.group.axis}, part {part}"


class NaiveColumnParallelLinear(ParallelLinear):
    """x[…, D] · W[F/n, D]ᵀ → y[…, F/n]: a shard of the outputs, with their biases.

    forward: no communication. backward: one all-reduce of the gradient of x, 2(n−1)/n · x. With `sequence_dim`: x[…,
    T/n, D] → y[…, T, F/n]. forward: one all-gather, (n−1)/n · x. backward: one reduce-scatter, the same bytes.

    Args:
        rows: placement of the rows of W; `Fused` if several layers are fused.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: Group,
        bias: bool = True,
        sequence_dim: int | None = None,
        rows: Placement = _ROWS,
    ) -> None:
        if rows == _ROWS:
            split_size(out_features, group, "out_features")
        self.placements = {"weight": rows, "bias": rows}
        super().__init__(in_features, out_features, group, bias, sequence_dim)

    def forward(self, x: Tensor) -> Tensor:
        check_whole(x, self.in_features, self.group)
        return linear(self._whole(x), *self._used())

    def _whole(self, x: Tensor) -> Tensor:
        if self.sequence_dim is None:
            return identity_all_reduce(x, self.group)
        return all_gather_reduce_scatter(x, self.group, self.sequence_dim)


class ColumnParallelLinear(NaiveColumnParallelLinear):
    """A column layer whose backward overlaps the all-reduce of ∂x with the matmul of the weight gradient.

    Under `torch.autocast`, x is sent in the cast dtype. There is no second derivative (`create_graph=True`).

    Args:
        in_features, out_features, bias: of the full layer: D, F, and whether there is one.
        group, sequence_dim: as for `ParallelLayer`.
        rows: as for `NaiveColumnParallelLinear`.
        regather: with `sequence_dim`, keep only this rank's shard of x for backward and gather x again there: one more
            all-gather, also overlapped. False keeps the full x.

    Raises:
        ValueError: F that cannot be split evenly, or a group along a different axis.

    Example:
        import torch

        from lib.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear

        up, down = ColumnParallelLinear(8, 16, world), RowParallelLinear(16, 8, world)
        x = torch.ones(2, 8)  # equal on all ranks
        y = down(up(x).relu())  # and so is y
        assert up.weight.shape == (8, 8) and y.shape == (2, 8)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: Group,
        bias: bool = True,
        sequence_dim: int | None = None,
        rows: Placement = _ROWS,
        *,
        regather: bool = True,
    ) -> None:
        self.regather = regather
        super().__init__(in_features, out_features, group, bias, sequence_dim, rows)

    def forward(self, x: Tensor) -> Tensor:
        """x[…, D], equal on all ranks, or with `sequence_dim` its shard → y[…, F/n].

        Raises:
            ValueError: x does not have D features.
        """
        return column_products(x, self)[0]


def column_products(x: Tensor, *layers: ColumnParallelLinear) -> list[Tensor]:
    """Apply several column layers to the same x, with the communication of one.

    Three separate layers for queries, keys and values would all-reduce three gradients of x. Here each rank adds them
    first, for one all-reduce.

    Raises:
        ValueError: layers with different groups or options.
    """
    first = layers[0]
    for layer in layers:
        check_whole(x, layer.in_features, layer.group)
        if _how(layer) != _how(first):
            raise ValueError(
                f"column layers of the same x must have the same options, but one is {_how(first)}, and one "
                f"{_how(layer)}: call them one by one, or make them equal"
            )
    queue = queue_here()
    if queue is not None:  # deferred: then nothing is left to overlap with
        whole = first._whole(x)
        return [linear_later(queue, whole, *layer._used()) for layer in layers]
    x, *used = _as_autocast(x, *(operand for layer in layers for operand in layer._used()))
    return list(_ColumnProducts.apply(x, first, *used))


def _how(layer: ColumnParallelLinear) -> str:
    return f"on ranks {layer.group.ranks} with sequence_dim={layer.sequence_dim}, regather={layer.regather}"


def _as_autocast(*tensors: Tensor | None) -> Iterator[Tensor | None]:
    """Cast as torch.autocast does, if it is on; inside a Function autograd would not record the cast."""
    device = tensors[0].device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    for x in tensors:
        is_cast = x is not None and dtype and x.is_floating_point() and x.dtype != torch.float64
        yield x.to(dtype) if is_cast else x


class _ColumnProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, layer: ColumnParallelLinear, *used: Tensor | None) -> tuple[Tensor, ...]:
        whole = x if layer.sequence_dim is None else comm.all_gather(x, layer.group, layer.sequence_dim)
        weights, biases = used[::2], used[1::2]
        ctx.layer = layer
        ctx.save_for_backward(x if layer.regather else whole, *weights)
        # Without a base, or it could not be changed in place.
        return tuple(linear(whole, *of_layer).detach() for of_layer in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple:
        check_first("ColumnParallelLinear", "NaiveColumnParallelLinear")
        layer, (x, *weights) = ctx.layer, ctx.saved_tensors
        group, dim = layer.group, layer.sequence_dim
        of_x, _, *of_used = ctx.needs_input_grad
        collects = any(of_used[::2]) and dim is not None and layer.regather
        coming = comm.all_gather_start(x, group, dim) if collects else None
        if of_x:
            term, *others = (gradient @ weight.conj() for gradient, weight in zip(gradients, weights, strict=True))
            for other in others:
                term += other
            if dim is None:
                summing = comm.all_reduce_start(term, group, out=term)
            else:
                summing = comm.reduce_scatter_start(term, group, dim)
        if coming is not None:
            x = coming.wait()
        of_weights: list[Tensor | None] = []
        with trace.span("weight"):
            for gradient, *wanted in zip(gradients, of_used[::2], of_used[1::2], strict=True):
                of_weights += weight_gradients(gradient, x, *wanted)
        return summing.wait() if of_x else None, None, *of_weights


class RowParallelLinear(ParallelLinear):
    """x[…, D/n] · W[F, D/n]ᵀ → a partial y, summed over the ranks → y[…, F]. The bias is added once, to the sum.

    forward: one all-reduce, 2(n−1)/n · y. backward: no communication. With `sequence_dim`: → y[…, T/n, F]. forward: one
    reduce-scatter, (n−1)/n · y. backward: one all-gather, the same bytes.

    Args:
        in_features, out_features, bias: of the full layer: D, F, and whether there is one.
        group, sequence_dim: as for `ParallelLayer`.

    Raises:
        ValueError: D that cannot be split evenly, or a group along a different axis.
    """

    def __init__(
        self, in_features: int, out_features: int, group: Group, bias: bool = True, sequence_dim: int | None = None
    ) -> None:
        split_size(in_features, group, "in_features")
        self.placements = {"weight": Shard(1), "bias": Replicate()}
        if sequence_dim is not None:
            self.partial_gradients = ("bias",)  # each rank adds it only to its tokens
        super().__init__(in_features, out_features, group, bias, sequence_dim)

    def forward(self, x: Tensor) -> Tensor:
        """x[…, D/n] → y[…, F], equal on all ranks, or with `sequence_dim` its shard.

        Raises:
            ValueError: x does not have D/n features, or its sequence cannot be split.
        """
        check_part(x, self.in_features, self.group)
        y = self._sum(linear(x, self.weight))
        # Under autocast the dtype of y differs from that of the bias.
        return y if self.bias is None else y + self.bias.to(y.dtype)
