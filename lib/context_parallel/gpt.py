"""A context-parallel GPT: positions and attention are replaced in place, and all other layers stay as they are.

The problem: a layer that treats tokens independently is right on some of the tokens, but two layers are not: position i
is no longer the i-th token of the rank, and attention needs earlier tokens of other ranks. The idea: only these two
change. Weights are full on every rank, and their gradients are sums over the ranks, as in data parallelism.

Source: Llama Team, 2024, arXiv 2407.21783, section 3.3.2.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from lib.context_parallel.attention import attend, gather_attention, ulysses_attention
from lib.context_parallel.ring import ring_attention
from lib.context_parallel.tokens import positions_of
from lib.cost.token_orders import tokens_of_rank
from lib.masks import HeadsWithMasks, Places
from lib.mesh import Group
from lib.model import GPT, Attention, Embed, Heads


def context_parallel(model: GPT, group: Group, attention: str = "gather", order: str = "contiguous") -> GPT:
    """Change a GPT, perhaps a tensor-parallel one, in place: tokens[B, T/n] → logits[B, T/n, V].

    Args:
        model: changed in place, and returned.
        group: the context-parallel ranks.
        attention: `gather`, `ring` or `ulysses`.
        order: `contiguous`, `zigzag` or `striped` (`lib/cost/token_orders.py`).
    """
    places = token_places(group, order)

    def positions(length: int, device: torch.device) -> Tensor:
        return places(length).to(device)

    for module in list(model.modules()):
        if isinstance(module, Embed):
            module.positions = positions
        elif isinstance(module, Attention):
            inner = next(inside for inside in module.heads.modules() if isinstance(inside, Heads))
            module.heads = ContextHeads(inner, group, attention, order).train(inner.training)
            module.heads.positions = positions
    return model


def token_places(group: Group, order: str, shard: tuple[int, int] = (0, 1)) -> Places:
    """A function from a number of tokens on this rank to their positions.

    Args:
        shard: (number, count) of the shard of these tokens, if they are sharded once more, as in sequence parallelism.
    """
    number, count = shard

    def places(length: int) -> Tensor:
        mine = tokens_of_rank(order, length * count * group.size, group.size, group.rank)
        return positions_of(mine)[number * length : (number + 1) * length]

    return places


class ContextHeads(Heads):
    """The heads that it replaces, whose queries reach the keys and values of all ranks of the group."""

    def __init__(self, heads: Heads, group: Group, attention: str, order: str) -> None:
        super().__init__(heads.widths, heads.d_head, turns=heads.turns)
        self.recompute, self.group, self.kind, self.order = heads.recompute, group, attention, order
        self.masked = heads if isinstance(heads, HeadsWithMasks) else None  # its dropout follows from positions

    def attention(self, q_BHtE: Tensor, k_BKtE: Tensor, v_BKtE: Tensor) -> Tensor:
        tokens = q_BHtE, k_BKtE, v_BKtE, self.group, self.order
        if self.kind == "ring":
            length = self.group.size * q_BHtE.shape[2]
            return ring_attention(*tokens, self.masked.drops(length) if self.masked else None, self.documents)
        across = ulysses_attention if self.kind == "ulysses" else gather_attention
        return across(*tokens, self.masked.attend if self.masked else partial(attend, documents_BT=self.documents))
