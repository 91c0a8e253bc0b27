"""Communication in a forward pass, and what it must do in the backward pass: six pairs.

The problem: autograd sees one rank. If a tensor is used on n ranks, each computes a gradient for it, and the true one
is the sum of all; nobody adds them up. The forward is right, the gradients of the last layer are right, the loss falls,
and everything before that layer learns from a part of its gradient.

The idea: each communication is a linear map of all ranks' tensors together, and its backward is the transposed map,
which is a communication again. The names say both, what happens forward and what happens backward:

    identity_all_reduce         whole on each rank           → whole, and each rank does something else with it
    all_reduce_identity         a term of a sum on each      → whole on each rank
    all_gather_reduce_scatter   a slice on each              → whole, and each rank does something else with it
    reduce_scatter_all_gather   a term of a sum on each      → a slice on each
    split_all_gather            whole on each rank           → a slice on each
    all_gather_split            a slice on each              → whole on each rank

The second is the first one backward, the fourth the third, the sixth the fifth.

"Does something else with it" is what asks for a sum in backward. Where all ranks go on to do the same, each already has
the true gradient, and a sum would make it n times too large.

Source: Shoeybi et al., Megatron-LM, 2019, arXiv 1909.08053, section 3 (the first pair is its f and g); Korthikanti et
al., 2022, arXiv 2205.05198, section 4.2.2 (the second pair).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lib import comm
from lib.mesh import Group
from lib.placement import Shard, shard

Map = Callable[[Tensor], Tensor]


class _Pair(torch.autograd.Function):
    """`there` forward, `back` backward; backward of that is `there` again."""

    @staticmethod
    def forward(ctx, x: Tensor, there: Map, back: Map) -> Tensor:
        ctx.there, ctx.back = there, back
        return there(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        return _Pair.apply(gradient, ctx.back, ctx.there), None, None


def pair(x: Tensor, there: Map, back: Map) -> Tensor:
    """there(x), and `back` of its gradient; the two must be each other's transpose (`verify.assert_adjoint`)."""
    return _Pair.apply(x, there, back)


def identity_all_reduce(x: Tensor, group: Group) -> Tensor:
    """x[S] → [S]. forward: nothing. backward: all-reduce, 2(n−1)/n · S."""
    return pair(x, identity, _all_reduce(group))


def all_reduce_identity(x: Tensor, group: Group) -> Tensor:
    """x[S] → [S]. forward: all-reduce, 2(n−1)/n · S. backward: nothing."""
    return pair(x, _all_reduce(group), identity)


def all_gather_reduce_scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """x[S/n] → [S], put together along `dim`. forward: all-gather, (n−1)/n · S. backward: reduce-scatter, as much."""
    return pair(x, _all_gather(group, dim), _reduce_scatter(group, dim))


def reduce_scatter_all_gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """x[S] → [S/n], cut along `dim`. forward: reduce-scatter, (n−1)/n · S. backward: all-gather, as much."""
    return pair(x, _reduce_scatter(group, dim), _all_gather(group, dim))


def split_all_gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """x[S] → [S/n], cut along `dim`. forward: nothing to send. backward: all-gather, (n−1)/n · S."""
    return pair(x, _split(group, dim), _all_gather(group, dim))


def all_gather_split(x: Tensor, group: Group, dim: int) -> Tensor:
    """x[S/n] → [S], put together along `dim`. forward: all-gather, (n−1)/n · S. backward: nothing to send."""
    return pair(x, _all_gather(group, dim), _split(group, dim))


def identity(x: Tensor) -> Tensor:
    """x, as another tensor with the same memory."""
    return x.view_as(x)


def _all_reduce(group: Group) -> Map:
    return partial(comm.all_reduce, group=group)


def _all_gather(group: Group, dim: int) -> Map:
    return partial(comm.all_gather, group=group, dim=dim)


def _reduce_scatter(group: Group, dim: int) -> Map:
    return partial(comm.reduce_scatter, group=group, dim=dim)


def _split(group: Group, dim: int) -> Map:
    return partial(shard, placement=Shard(dim), group=group)
