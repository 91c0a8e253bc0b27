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
        ValueError: the tokens cannot be split evenly.
    """
    mine = positions_of(tokens_of_rank(order, x.shape[dim], group.size, group.rank), x.device)
    return x.index_select(dim, mine)


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
