"""Ring attention: keys and values pass around the ranks, and each rank attends to one block of them at a time.

The problem: gathered keys and values are those of the full sequence, on every rank, until backward.
The idea: n − 1 hops instead of one gather. A rank computes with the block that it has while the next one comes, and
forgets it. The softmax of a row over several blocks is merged as they come: each block gives its output and the
logarithm of its sum of exponentials, and both merge exactly.

    o = o · exp(lse − new) + o' · exp(lse' − new),    new = log(exp lse + exp lse')

Backward needs the weights of each block again, so keys and values go round a second time; the weights follow from them
and the stored sum. With them goes the gradient of a block: it starts at the rank after its owner, takes a term at each
rank, and after n − 1 hops is at its owner, which adds its own.

A rank keeps its queries, keys, values, output and lse, and nothing of other ranks. Here a block is written out; on a
GPU a fused kernel computes it, and returns the same two tensors.

Shapes: as in `attention.py`; G = H/K query heads share a head of keys and values.

Source: Liu, Zaharia & Abbeel, 2023, arXiv 2310.01889; for the merge, Milakov & Gimelshein, 2018, arXiv 1805.02867.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lib import comm
from lib.context_parallel.tokens import check_qkv
from lib.cost.token_orders import AttentionBlock, blocks_of
from lib.documents import check_documents, seen_keys
from lib.mesh import Group

Drop = Callable[[Tensor, range, range], Tensor]  # weights[B, H, t, S] of queries and keys → those that stay, scaled


def ring_attention(
    q_BHtE: Tensor,
    k_BKtE: Tensor,
    v_BKtE: Tensor,
    group: Group,
    order: str = "contiguous",
    drop: Drop | None = None,
    documents_BT: Tensor | None = None,
) -> Tensor:
    """Attention of this rank's queries to all earlier keys, which pass by. → y[B, H, t, E].

    forward: n − 1 shifts of the keys and values of a rank, (n−1)/n · 2·B·K·T·E elements. backward: the same again, and
    n − 1 shifts of their gradients: three times in all.

    Args:
        drop: dropout of the weights of a block; the same each time it is called with the same ranges.
        documents_BT: number of the document of each token of the sequence, if a query attends to its own alone.

    Raises:
        ValueError: queries, keys and values that do not fit together, or documents of different tokens.
    """
    check_qkv(q_BHtE, k_BKtE, v_BKtE)
    check_documents(documents_BT, len(q_BHtE), group.size * q_BHtE.shape[2])
    return _Ring.apply(q_BHtE, k_BKtE, v_BKtE, group, order, _Masks(drop, documents_BT))


class _Masks(NamedTuple):
    """What keeps a query from a key of a block, but for the causal order."""

    drop: Drop | None
    documents: Tensor | None  # [B, T]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, group: Group, order: str, masks: _Masks) -> Tensor:
        q_BKGtE, wide = q.unflatten(1, (k.shape[1], -1)), torch.promote_types(q.dtype, torch.float32)
        o_BKGtE = torch.zeros_like(q_BKGtE, dtype=wide)
        lse_BKGt = o_BKGtE.new_full(o_BKGtE.shape[:-1], -math.inf)
        for owner, kv in _passing(torch.stack([k, v]), group):
            for block in blocks_of(order, group.size * q.shape[2], group.size, group.rank, owner):
                merged = o_BKGtE[..., block.mine, :], lse_BKGt[..., block.mine]
                _merge(*merged, *_attend(block, q_BKGtE, *kv, masks))
            del kv  # before the one after the next comes
        o = o_BKGtE.to(q.dtype).flatten(1, 2)
        ctx.group, ctx.order, ctx.masks = group, order, masks
        ctx.save_for_backward(q, k, v, o, lse_BKGt)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, d_o: Tensor) -> tuple:
        (q, k, v, o, lse), group, order = ctx.saved_tensors, ctx.group, ctx.order
        q_BKGtE, o, d_o = (x.unflatten(1, (k.shape[1], -1)).to(lse.dtype) for x in (q, o, d_o))
        d_q, share = torch.zeros_like(q_BKGtE), (d_o * o).sum(-1, keepdim=True)
        own, travelling = None, None
        for owner, kv in _passing(torch.stack([k, v]), group):
            d_kv = torch.zeros_like(kv, dtype=lse.dtype)
            for block in blocks_of(order, group.size * q.shape[2], group.size, group.rank, owner):
                here = (x[..., block.mine, :] for x in (d_q, q_BKGtE, d_o, share, lse[..., None]))
                _attend_backward(block, d_kv, kv, *here, ctx.masks)
            del kv
            if owner == group.rank:
                own = d_kv
                continue
            if travelling is not None:  # the terms of the ranks between the owner and this one
                d_kv += travelling.wait()
            travelling = comm.shift_start(d_kv.to(k.dtype), group)
        if travelling is not None:  # the last shift brings the gradient of this rank's keys and values home
            own += travelling.wait()
        return d_q.flatten(1, 2).to(q.dtype), *own.to(k.dtype), None, None, None


def _passing(kv: Tensor, group: Group) -> Iterator[tuple[int, Tensor]]:
    """The keys and values of each rank, [2, B, K, t, E], with their owner, first this rank; the next is on its way."""
    n = group.size
    for step in range(n):
        coming = comm.shift_start(kv, group) if step + 1 < n else None
        yield (group.rank - step) % n, kv
        if coming is not None:
            kv = coming.wait()


def _scores(block: AttentionBlock, q_BKGsE: Tensor, k_BKsE: Tensor, documents_BT: Tensor | None) -> Tensor:
    """q · kᵀ/√E of a block, −inf for keys that a query does not attend to."""
    scores = (q_BKGsE @ k_BKsE[:, :, None].transpose(-1, -2)).div_(math.sqrt(q_BKGsE.shape[-1]))
    if block.is_whole and documents_BT is None:
        return scores
    hidden = seen_keys(block.queries, block.keys, documents_BT, scores.device).logical_not_()
    return scores.masked_fill_(hidden if documents_BT is None else hidden[:, None], -math.inf)


def _dropped(weights_BKGtS: Tensor, block: AttentionBlock, drop: Drop | None) -> Tensor:
    if drop is None:
        return weights_BKGtS
    return drop(weights_BKGtS.flatten(1, 2), block.queries, block.keys).view_as(weights_BKGtS)


def _attend(
    block: AttentionBlock, q_BKGtE: Tensor, k_BKtE: Tensor, v_BKtE: Tensor, masks: _Masks
) -> tuple[Tensor, Tensor]:
    """The output of one block alone, and lse, the logarithm of the sum of its exponentials."""
    wide = torch.promote_types(q_BKGtE.dtype, torch.float32)
    q, k, v = q_BKGtE[..., block.mine, :].to(wide), k_BKtE[:, :, block.theirs].to(wide), v_BKtE[:, :, block.theirs]
    scores = _scores(block, q, k, masks.documents)
    lse = scores.logsumexp(-1)
    weights = scores.sub_(_finite(lse)[..., None]).exp_()
    return _dropped(weights, block, masks.drop) @ v[:, :, None].to(wide), lse


def _merge(o: Tensor, lse: Tensor, part: Tensor, lse_part: Tensor) -> None:
    """Merge the output of a block into `o`, in place."""
    new = torch.logaddexp(lse, lse_part)
    o.mul_((lse - _finite(new)).exp()[..., None]).add_(part * (lse_part - _finite(new)).exp()[..., None])
    lse.copy_(new)


def _finite(lse: Tensor) -> Tensor:
    """lse, for a difference: −inf, of a query that attended to no key so far, would give −inf − (−inf), no number."""
    return lse.clamp(min=torch.finfo(lse.dtype).min)


def _attend_backward(
    block: AttentionBlock,
    d_kv: Tensor,
    kv: Tensor,
    d_q: Tensor,
    q: Tensor,
    d_o: Tensor,
    share: Tensor,
    lse: Tensor,
    masks: _Masks,
) -> None:
    """Add the gradients of one block's queries, keys and values; `share` is Σ d_o · o of each query."""
    k, v = kv[:, :, :, block.theirs].to(lse.dtype)
    weights = _scores(block, q, k, masks.documents).sub_(lse).exp_()
    d_scores = _dropped(d_o @ v[:, :, None].transpose(-1, -2), block, masks.drop)
    d_scores = d_scores.sub_(share).mul_(weights).div_(math.sqrt(q.shape[-1]))
    d_q += d_scores @ k[:, :, None]
    d_k, d_v = d_kv[:, :, :, block.theirs]
    d_k += (d_scores.transpose(-1, -2) @ q).sum(2)
    d_v += (_dropped(weights, block, masks.drop).transpose(-1, -2) @ d_o).sum(2)
