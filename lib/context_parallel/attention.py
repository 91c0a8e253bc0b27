"""Attention of the tokens of a rank to those of all ranks, in two ways: gather keys and values, or exchange heads.

The problem: a rank has the queries, keys and values of some tokens, and causal attention needs, for each query, the
keys and values of all earlier tokens.

The idea of `gather_attention`: bring the keys and values here. With grouped queries they are a small part of x. Each
rank uses them differently, so in backward their gradients are partial sums, and the conjugate is a reduce-scatter.

The idea of `ulysses_attention`: heads are independent, so exchange tokens for heads. One all-to-all turns some tokens
of all heads into all tokens of some heads; attention is then that of one process; a second all-to-all turns it back.

Shapes: B rows, H query heads, K heads of keys and values on this rank, t = T/n of the T tokens, E width of a head.

Source: Llama Team, 2024, arXiv 2407.21783, section 3.3.2 (gather); Jacobs et al., 2023, arXiv 2309.14509 (Ulysses).
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lib import comm
from lib.conjugate import all_gather_reduce_scatter, pair
from lib.context_parallel.tokens import by_ranks, check_qkv, in_sequence
from lib.cost.sizes import shares_heads
from lib.cost.token_orders import tokens_of_rank
from lib.documents import check_documents, seen_keys
from lib.mesh import Group

Attend = Callable[[Tensor, Tensor, Tensor, range, range, int], Tensor]  # `attend`, or one with dropout


def attend(
    q_BHtE: Tensor,
    k_BKSE: Tensor,
    v_BKSE: Tensor,
    queries: range,
    keys: range,
    length: int = 0,
    documents_BT: Tensor | None = None,
) -> Tensor:
    """Softmax(q · kᵀ/√E) · v, with a causal mask, of queries and keys at these positions. → y[B, H, t, E].

    Args:
        documents_BT: number of the document of each token of the sequence, if a query attends to its own alone.
    """
    grouped = q_BHtE.shape[1] != k_BKSE.shape[1]
    if queries == keys and documents_BT is None:
        return scaled_dot_product_attention(q_BHtE, k_BKSE, v_BKSE, is_causal=True, enable_gqa=grouped)
    if length:
        check_documents(documents_BT, len(q_BHtE), length)
    seen = seen_keys(queries, keys, documents_BT, q_BHtE.device)
    return scaled_dot_product_attention(q_BHtE, k_BKSE, v_BKSE, attn_mask=seen, enable_gqa=grouped)


def gather_attention(
    q_BHtE: Tensor,
    k_BKtE: Tensor,
    v_BKtE: Tensor,
    group: Group,
    order: str = "contiguous",
    attend: Attend = attend,
) -> Tensor:
    """Attention of this rank's queries to all earlier keys, which are gathered. → y[B, H, t, E].

    forward: one all-gather of keys and values, (n−1)/n · 2·B·K·T·E elements. backward: one reduce-scatter, the same.

    Args:
        attend: attention of one process: `partial(attend, documents_BT=…)` for several documents in a row.

    Raises:
        ValueError: queries, keys and values that do not fit together.
    """
    check_qkv(q_BHtE, k_BKtE, v_BKtE)
    length = group.size * q_BHtE.shape[2]
    kv_TBKE = in_sequence(_gathered(k_BKtE, v_BKtE, group), group, order, 0)
    k_BKTE, v_BKTE = (x_TBKE.permute(1, 2, 0, 3) for x_TBKE in kv_TBKE.chunk(2, 2))
    mine = tokens_of_rank(order, length, group.size, group.rank)
    q_parts, y_parts = q_BHtE.transpose(1, 2).split([len(each) for each in mine], 1), []
    for queries, q_BtHE in zip(mine, q_parts, strict=True):
        end = queries[-1] + 1 if queries else 0  # no query of this range sees a key behind it
        keys, values = k_BKTE[:, :, :end], v_BKTE[:, :, :end]
        y_parts.append(attend(q_BtHE.transpose(1, 2), keys, values, queries, range(end), length).transpose(1, 2))
    return (torch.cat(y_parts, 1) if len(y_parts) > 1 else y_parts[0]).transpose(1, 2)


def _gathered(k_BKtE: Tensor, v_BKtE: Tensor, group: Group) -> Tensor:
    """Keys and values of all ranks, side by side, tokens first, so that ranks follow each other. → kv[T, B, 2K, E]."""
    kv_tBKE = torch.cat([x.permute(2, 0, 1, 3) for x in (k_BKtE, v_BKtE)], 2)
    return all_gather_reduce_scatter(kv_tBKE, group, 0)


def ulysses_attention(
    q_BHtE: Tensor,
    k_BKtE: Tensor,
    v_BKtE: Tensor,
    group: Group,
    order: str = "contiguous",
    attend: Attend = attend,
) -> Tensor:
    """Attention of all tokens, for the heads of this rank, then back to its tokens with all heads. → y[B, H, t, E].

    forward: four all-to-alls, of queries, keys, values and y, 2(1 + K/H)(n−1)/n² · B·T·H·E elements. backward: the
    same. If there are fewer heads of keys and values than ranks, each is copied n/K times before it is sent.

    Raises:
        ValueError: heads that the ranks cannot share evenly, or tensors that do not fit together.
    """
    check_qkv(q_BHtE, k_BKtE, v_BKtE)
    n, heads, kv_heads = group.size, q_BHtE.shape[1], k_BKtE.shape[1]
    if not shares_heads(heads, kv_heads, n):
        raise ValueError(
            f"{heads} query heads and {kv_heads} of keys and values cannot be split over {n} ranks: the ranks must "
            "divide the first, and divide the second or be a multiple of it"
        )
    every = range(n * q_BHtE.shape[2])
    parts = (_exchange(_copied(x, n).transpose(1, 2), group, 2, 1) for x in (q_BHtE, k_BKtE, v_BKtE))
    y_BhTE = attend(*(in_sequence(x, group, order, 1).transpose(1, 2) for x in parts), every, every, len(every))
    return _exchange(by_ranks(y_BhTE.transpose(1, 2), group, order, 1), group, 1, 2).transpose(1, 2)


def _copied(x_BKtE: Tensor, n: int) -> Tensor:
    """At least n heads: each is copied if there are fewer."""
    return x_BKtE if x_BKtE.shape[1] >= n else x_BKtE.repeat_interleave(n // x_BKtE.shape[1], 1)


def _exchange(x: Tensor, group: Group, split_dim: int, concat_dim: int) -> Tensor:
    """x[S/n], a shard along `concat_dim` → [S/n], a shard along `split_dim`. The reverse is also its conjugate."""
    return pair(
        x,
        lambda t: comm.all_to_all(t, group, split_dim, concat_dim),
        lambda g: comm.all_to_all(g, group, concat_dim, split_dim),
    )
