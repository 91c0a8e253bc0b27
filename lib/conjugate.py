"""Collectives in a forward pass and their backward: six conjugate pairs, and one of a collective with itself.

The problem: autograd works within one rank. If a tensor is used on n ranks, each computes a partial gradient, and
autograd does not compute their sum: the loss falls, and every earlier layer is trained with a part of its gradient.

The idea: each collective is a linear map of the tensors of all ranks together, and its backward is the transposed map,
which is also a collective. Each name states the forward and the backward:

    identity_all_reduce         replicated       → replicated, and each rank uses it differently
    all_reduce_identity         partial sums     → replicated
    all_gather_reduce_scatter   shards           → replicated, and each rank uses it differently
    reduce_scatter_all_gather   partial sums     → shards
    split_all_gather            replicated       → shards
    all_gather_split            shards           → replicated
    rows_to_ranks               rows by sender   → rows by receiver

The second is the backward of the first, the fourth of the third, the sixth of the fifth. The backward of the last is
itself, with the table of rows transposed: each row is on one rank before and after, so its gradient goes back to where
the row came from, and nothing is summed. "Uses it differently" is the reason for a sum: if all ranks continue with the
same computation, each already has the full gradient.

Source: Shoeybi et al., Megatron-LM, 2019, arXiv 1909.08053, section 3 (the first pair is its f and g); Korthikanti et
al., 2022, arXiv 2205.05198, section 4.2.2 (the second pair).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lib import comm
from lib.mesh import Group
from lib.placement import Shard, shard
from lib.runtime.rows import checked_rows
from lib.runtime.shapes import check_plain

Map = Callable[[Tensor], Tensor]


class _Pair(torch.autograd.Function):
    """`there` in forward, `back` in backward; the backward of the backward is `there`."""

    @staticmethod
    def forward(ctx, x: Tensor, there: Map, back: Map) -> Tensor:
        ctx.there, ctx.back = there, back
        return there(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        return _Pair.apply(gradient, ctx.back, ctx.there), None, None


def pair(x: Tensor, there: Map, back: Map) -> Tensor:
    """Apply `there` to x, and `back`, its transpose (`verify.assert_adjoint`), to the gradient of x."""
    return _Pair.apply(x, there, back)


def identity_all_reduce(x: Tensor, group: Group) -> Tensor:
    """x[S] → [S]. forward: nothing. backward: all-reduce, 2(n−1)/n · S."""
    return pair(x, identity, lambda g: comm.all_reduce(g, group))


def all_reduce_identity(x: Tensor, group: Group) -> Tensor:
    """x[S] → [S]. forward: all-reduce, 2(n−1)/n · S. backward: nothing."""
    return pair(x, lambda t: comm.all_reduce(t, group), identity)


def all_gather_reduce_scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    """x[S/n] → [S], concatenated along `dim`. forward: all-gather, (n−1)/n · S. backward: reduce-scatter, as much."""
    return pair(x, lambda t: comm.all_gather(t, group, dim), lambda g: comm.reduce_scatter(g, group, dim))


def reduce_scatter_all_gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """x[S] → [S/n], split along `dim`. forward: reduce-scatter, (n−1)/n · S. backward: all-gather, the same bytes."""
    return pair(x, lambda t: comm.reduce_scatter(t, group, dim), lambda g: comm.all_gather(g, group, dim))


def split_all_gather(x: Tensor, group: Group, dim: int) -> Tensor:
    """x[S] → [S/n], split along `dim`. forward: nothing to send. backward: all-gather, (n−1)/n · S."""
    return pair(x, lambda t: shard(t, Shard(dim), group), lambda g: comm.all_gather(g, group, dim))


def all_gather_split(x: Tensor, group: Group, dim: int) -> Tensor:
    """x[S/n] → [S], concatenated along `dim`. forward: all-gather, (n−1)/n · S. backward: nothing to send."""
    return pair(x, lambda t: comm.all_gather(t, group, dim), lambda g: shard(g, Shard(dim), group))


def rows_to_ranks(x: Tensor, rows: Sequence[Sequence[int]], group: Group) -> Tensor:
    """x[Σⱼ rows[me][j], …] → [Σᵢ rows[i][me], …]. forward: all-to-all of unequal rows. backward: the same, reversed.

    Args:
        rows: as in `comm.all_to_all_rows`. With `[*zip(*rows)]`, the transposed table, the rows go back.
    """
    table = checked_rows(rows, group.size)
    back = tuple(zip(*table, strict=True))
    return pair(x, lambda t: comm.all_to_all_rows(t, table, group), lambda g: comm.all_to_all_rows(g, back, group))


def identity(x: Tensor) -> Tensor:
    """A new tensor that shares the memory of x. Raises ValueError if no message could carry it."""
    check_plain(x)
    return x.view_as(x)
