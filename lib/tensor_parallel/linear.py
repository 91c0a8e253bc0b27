"""Two ways to cut a matrix, and why they come in a pair.

The problem: a layer's weight does not fit one device, or takes too long there. Cut it. But a product with a part of a
matrix is not yet the layer's output, and to communicate after every layer is slow.

The idea: a layer x·Wᵀ can be cut in two directions.

    column   each rank has some of the outputs.  x is needed whole, y comes in parts, and nothing is sent
    row      each rank has some of the inputs.   x is needed in parts, y comes as terms of a sum: one all-reduce

What comes out of the first is what goes into the second, and whatever treats each number by itself (GELU) or each head
by itself (attention) fits between the two. So a pair of layers costs one all-reduce. Backward it costs another one, for
the gradient of x: there it is the column layer whose result is a sum.

(Columns and rows are those of Wᵀ, the matrix that x is multiplied with. `nn.Linear` stores W, where they change roles.)

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
from lib.deferred import as_rows, linear_later, queue_here
from lib.mesh import Group
from lib.placement import Placement, Replicate, Shard, distribute, split_size

_ROWS = Shard(0)


class ParallelLinear(nn.Module):
    """What both cuts share: a weight of which this rank has its part.

    Args:
        in_features, out_features: of the whole layer. Its weights are drawn whole, by the group's rank 0.
        group: the tensor-parallel ranks.
        bias: whether to add one.
        sequence_dim: None where activations between the pairs are whole on every rank. Otherwise the dim along which
            they are cut (`lib/tensor_parallel/sequence.py`).

    Attributes:
        placements: parameter → how it lies on the ranks.
        partial_gradients: parameters that are whole on every rank, and whose gradients are terms of a sum.

    Raises:
        ValueError: a size that cannot be cut evenly, or a group along another axis.
    """

    placements: dict[str, Placement]
    partial_gradients: tuple[str, ...] = ()

    def __init__(
        self, in_features: int, out_features: int, group: Group, bias: bool = True, sequence_dim: int | None = None
    ) -> None:
        super().__init__()
        check_axis(group)
        self.in_features, self.out_features = in_features, out_features
        self.group, self.sequence_dim = group, sequence_dim
        self._take(nn.Linear(in_features, out_features, bias))

    @classmethod
    def from_serial(cls, serial: nn.Linear, group: Group, *, agreed: bool = False, **options) -> ParallelLinear:
        """The same layer on the ranks of `group`, with the weights that its rank 0 has; sends nothing if `agreed`."""
        with torch.device("meta"):
            layer = cls(serial.in_features, serial.out_features, group, serial.bias is not None, **options)
        layer._take(serial, agreed)
        return layer

    def _take(self, serial: nn.Linear, agreed: bool = False) -> None:
        for name, placement in self.placements.items():
            setattr(self, name, distribute(getattr(serial, name), placement, self.group, agreed))

    def _used(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias as forward takes them."""
        return self.weight, self.bias

    def extra_repr(self) -> str:
        part = list(self.weight.shape)
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.group.axis}, part {part}"


# ---- column ---------------------------------------------------------------------------------------------------------


class NaiveColumnParallelLinear(ParallelLinear):
    """x[…, D] · W[F/n, D]ᵀ → y[…, F/n]: some of the outputs, with their biases.

    forward: no communication. backward: one all-reduce of x's gradient, 2(n−1)/n · x.
    With `sequence_dim`: x[…, T/n, D] → y[…, T, F/n]. forward: one all-gather, (n−1)/n · x. backward: one
    reduce-scatter, as much.

    Args:
        rows: how the rows of W lie on the ranks. `Fused` where several layers are one.
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
        return self._multiply(x)

    def _multiply(self, x: Tensor) -> Tensor:
        return linear(self._whole(x), *self._used())

    def _whole(self, x: Tensor) -> Tensor:
        if self.sequence_dim is None:
            return identity_all_reduce(x, self.group)
        return all_gather_reduce_scatter(x, self.group, self.sequence_dim)


class ColumnParallelLinear(NaiveColumnParallelLinear):
    """The same, but in backward the gradient of x is on its way while that of the weight is computed.

    Under `torch.autocast` x travels as it is cast. There is no second derivative (`create_graph=True`).

    Args:
        regather: with `sequence_dim`, keep only this rank's slice of x for backward and collect x once more there: one
            more all-gather, also under way while something is computed. False keeps x whole.
    """

    def __init__(self, *args, regather: bool = True, **options) -> None:
        self.regather = regather
        super().__init__(*args, **options)

    def _multiply(self, x: Tensor) -> Tensor:
        queue = queue_here()
        if queue is not None:  # put off: then nothing is left for the message to hide behind
            return linear_later(queue, self._whole(x), *self._used())
        x, *used = _as_autocast(x, *self._used())
        (y,) = _ColumnProducts.apply(x, self, *used)
        return y


def column_products(x: Tensor, *layers: ColumnParallelLinear) -> list[Tensor]:
    """What several column layers make of the same x, for the messages of one.

    Queries, keys and values that are three layers would sum three gradients of x, each of its size. Added up on each
    rank first, they are one.

    Raises:
        ValueError: layers on other ranks, or that take x in another way.
    """
    first = layers[0]
    for layer in layers:
        check_whole(x, layer.in_features, layer.group)
        if _how(layer) != _how(first):
            raise ValueError(
                f"column layers of the same x must take it in the same way, but one is {_how(first)}, and one "
                f"{_how(layer)}: call them one by one, or make them alike"
            )
    queue = queue_here()
    if queue is not None:
        whole = first._whole(x)
        return [linear_later(queue, whole, *layer._used()) for layer in layers]
    x, *used = _as_autocast(x, *(one for layer in layers for one in layer._used()))
    return list(_ColumnProducts.apply(x, first, *used))


def _how(layer: ColumnParallelLinear) -> str:
    return f"on ranks {layer.group.ranks} with sequence_dim={layer.sequence_dim}, regather={layer.regather}"


def _as_autocast(*tensors: Tensor | None) -> Iterator[Tensor | None]:
    """As torch.autocast, where it is on, gives them to a product; in a Function autograd would not see that it does."""
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
        # Without a base, or nobody could work on it in place.
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
            pairs = zip(gradients, weights, strict=True)
            term, *others = (gradient @ weight.conj() for gradient, weight in pairs)
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
            wanted = zip(gradients, of_used[::2], of_used[1::2], strict=True)
            for gradient, of_weight, of_bias in wanted:
                rows = as_rows(gradient)
                of_weights.append(rows.T @ as_rows(x).conj() if of_weight else None)
                of_weights.append(rows.sum(0) if of_bias else None)
        return summing.wait() if of_x else None, None, *of_weights


# ---- row ------------------------------------------------------------------------------------------------------------


class RowParallelLinear(ParallelLinear):
    """x[…, D/n] · W[F, D/n]ᵀ → a term of y, summed over the ranks → y[…, F]. The bias is added once, to the sum.

    forward: one all-reduce, 2(n−1)/n · y. backward: no communication.
    With `sequence_dim`: → y[…, T/n, F]. forward: one reduce-scatter, (n−1)/n · y. backward: one all-gather, as much.
    """

    def __init__(
        self, in_features: int, out_features: int, group: Group, bias: bool = True, sequence_dim: int | None = None
    ) -> None:
        split_size(in_features, group, "in_features")
        self.placements = {"weight": Shard(1), "bias": Replicate()}
        if sequence_dim is not None:
            self.partial_gradients = ("bias",)  # each rank adds it to its tokens only
        super().__init__(in_features, out_features, group, bias, sequence_dim)

    def forward(self, x: Tensor) -> Tensor:
        check_part(x, self.in_features, self.group)
        term = linear(x, self.weight)
        if self.sequence_dim is None:
            y = all_reduce_identity(term, self.group)
        else:
            split_size(term.shape[self.sequence_dim], self.group, "sequence")
            y = reduce_scatter_all_gather(term, self.group, self.sequence_dim)
        # Under autocast y has another dtype than the bias.
        return y if self.bias is None else y + self.bias.to(y.dtype)


# ---- wrong use ------------------------------------------------------------------------------------------------------


def check_axis(group: Group) -> None:
    """Raises ValueError where a group is not one of tensor-parallel ranks."""
    if group.axis not in ("tp", "world"):
        raise ValueError(
            f"this layer is cut over the tensor-parallel ranks, but got a group along {group.axis!r}: use "
            'mesh.group("tp")'
        )


def check_first(what: str, instead: str) -> None:
    """Raises RuntimeError in a backward that would have to be differentiated itself.

    `once_differentiable` does so only where the gradient that comes in depends on something, and else takes what it
    computes for constants.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(f"{what} has no second derivative, which create_graph=True asks for: use {instead}")


def check_whole(x: Tensor, features: int, group: Group) -> None:
    """Raises ValueError where x[…, features] is expected and something else comes."""
    if x.shape[-1] == features:
        return
    if x.shape[-1] * group.size == features:
        raise ValueError(
            f"x has {x.shape[-1]} features, one of {group.size} parts of {features}, but is needed whole here: take "
            "RowParallelLinear in the place of this one, or put lib.conjugate.all_gather_split before it"
        )
    raise ValueError(f"x has shape {list(x.shape)}, but this layer takes {features} features")


def check_part(x: Tensor, features: int, group: Group) -> None:
    """Raises ValueError where this rank's part of x[…, features] is expected and something else comes."""
    if x.shape[-1] * group.size == features:
        return
    if x.shape[-1] == features:
        raise ValueError(
            f"x has all {features} features, but this rank works on {features // group.size} of them: take a "
            "ColumnParallelLinear before this layer, or lib.conjugate.split_all_gather"
        )
    raise ValueError(
        f"x has shape {list(x.shape)}, but this rank takes {features // group.size} of {features} features"
    )
