"""The tokens of a rank: taken from full sequences, and full sequences put together again."""

import torch
from torch import Tensor

from lib.conjugate import pair
from lib.cost.token_orders import tokens_of_rank
from lib.documents import positions_in
from lib.mesh import Group


def positions_of(ranges: list[range], device: torch.device | None = None) -> Tensor:
    """The positions in these ranges, one after the other, int64[t]."""
    return torch.cat([positions_in(each, device) for each in ranges])


def take_tokens(x: Tensor, group: Group, order: str = "contiguous", dim: int = 1) -> Tensor:
    """This rank's tokens of full sequences: x[B, T, …] → [B, T/n, …], in the order of `tokens_of_rank`.

    Inputs and targets are cut alike: the target of a rank's last token is the first token of a different rank, so a
    rank that shifts its own tokens loses it.

    Raises:
        ValueError: the tokens cannot be split evenly, or x has no dim of tokens.
    """
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"a tensor of shape {list(x.shape)} has no dim {dim} of tokens to split: give [B, T]")
    mine = positions_of(tokens_of_rank(order, x.shape[dim], group.size, group.rank), x.device)
    return x.index_select(dim, mine)


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check that queries, keys and values are of the same tokens: q[B, H, t, E] and twice [B, K, t, E].

    Raises:
        ValueError: they are not, K does not divide H, or their dtypes differ.
    """
    shapes = [list(x.shape) for x in (q, k, v)]
    if k.shape != v.shape or q.dim() != 4 or k.dim() != 4 or q.shape[::2] + q.shape[3:] != k.shape[::2] + k.shape[3:]:
        raise ValueError(
            "queries, keys and values have shapes {}, {} and {}: attention over ranks takes [B, H, t, E] and twice "
            "[B, K, t, E], of the same t tokens".format(*shapes)
        )
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} of keys and values: use a divisor")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"queries are {q.dtype}, keys {k.dtype} and values {v.dtype}: use one dtype")


def in_sequence(x: Tensor, group: Group, order: str, dim: int) -> Tensor:
    """The tokens of all ranks, rank after rank along `dim`, in the order of the sequence: [S] → [S]."""
    if order == "contiguous":
        return x
    places = _rank_after_rank(x.shape[dim], group, order, x.device)
    return pair(x, lambda t: t.index_select(dim, places.argsort()), lambda g: g.index_select(dim, places))


def by_ranks(x: Tensor, group: Group, order: str, dim: int) -> Tensor:
    """The inverse of `in_sequence`: tokens in the order of the sequence → rank after rank, [S] → [S]."""
    if order == "contiguous":
        return x
    places = _rank_after_rank(x.shape[dim], group, order, x.device)
    return pair(x, lambda t: t.index_select(dim, places), lambda g: g.index_select(dim, places.argsort()))


def _rank_after_rank(length: int, group: Group, order: str, device: torch.device) -> Tensor:
    ranges = [each for rank in range(group.size) for each in tokens_of_rank(order, length, group.size, rank)]
    return positions_of(ranges, device)
