"""A context-parallel GPT: positions and attention are replaced in place, and all other layers stay as they are.

The problem: a layer that treats tokens independently is right on some of the tokens, but two layers are not: position i
is no longer the i-th token of the rank, and attention needs earlier tokens of other ranks. The idea: only these two
change. Weights are full on every rank, and their gradients are sums over the ranks, as in data parallelism.

Source: Llama Team, 2024, arXiv 2407.21783, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from lib.context_parallel.attention import attend, gather_attention, ulysses_attention
from lib.context_parallel.ring import ring_attention
from lib.context_parallel.tokens import positions_of
from lib.cost.token_orders import TOKEN_ORDERS, tokens_of_rank
from lib.masks import HeadsWithMasks, Places, RowDropout, set_on
from lib.mesh import Group
from lib.model import GPT, Attention, Embed, Heads
from lib.moe import ExpertOptions, MoE
from lib.tensor_parallel.custom_layers import METHODS, is_sharded
from lib.tensor_parallel.tokenwise import check_tokenwise

WAYS = {"gather": gather_attention, "ring": ring_attention, "ulysses": ulysses_attention}
Positions = Callable[..., Tensor]  # (length, device=…) → the positions of so many tokens


def context_parallel(model: GPT, group: Group, attention: str = "gather", order: str = "contiguous") -> GPT:
    """Change a GPT, perhaps a tensor-parallel one, in place: tokens[B, T/n] → logits[B, T/n, V].

    Positions of your own, set on the embedding or on heads, are asked for all tokens of a sequence.

    Args:
        model: changed in place, and returned.
        group: the context-parallel ranks.
        attention: `gather`, `ring` or `ulysses`.
        order: `contiguous`, `zigzag` or `striped` (`lib/cost/token_orders.py`).

    Raises:
        ValueError: a layer that would compute otherwise on some tokens of a sequence, or an unknown way or order.
    """
    _check(model, attention, order)
    places = token_places(group, order)

    def here(positions: Positions) -> Positions:
        """Of the positions in a full sequence, those of this rank's tokens."""
        return lambda length, device=None: positions(length * group.size, device=device)[places(length).to(device)]

    for module in list(model.modules()):
        if isinstance(module, Embed):
            own = module.positions
            del module.positions  # it may be a layer
            module.parts, module.positions = group.size, here(own)
        elif isinstance(module, Attention):
            inner = _inside(module)
            module.heads = ContextHeads(inner, group, attention, order).train(inner.training)
            module.heads.positions = here(inner.positions)
    return model


def _inside(attention: Attention) -> Heads | None:
    return next((inside for inside in attention.heads.modules() if isinstance(inside, Heads)), None)


def _check(model: GPT, attention: str, order: str) -> None:
    """Check, before anything changes, that a model is right on some tokens of each sequence."""
    for name, value, known in (("attention", attention, WAYS), ("order", order, TOKEN_ORDERS)):
        if value not in known:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(known)}")
    kinds = {type(module) for module in model.modules()}
    if ContextHeads in kinds:
        raise ValueError("this model already gets some tokens of each sequence: give one that gets all")
    if model.finds_documents and model.config.document_end is not None:
        raise ValueError(
            f"document_end={model.config.document_end} would be looked for in this rank's tokens alone: use "
            "parallelize, or set model.finds_documents = False, and call see_documents of lib/documents.py with the "
            "documents of all tokens before each forward"
        )
    if not is_sharded(model) and kinds.isdisjoint({HeadsWithMasks, RowDropout}):  # else who changed it has checked it
        check_tokenwise(model)
        _check_loads(model)
    for name, module in model.named_modules():
        said = f"{name} ({type(module).__name__})"
        if isinstance(module, (nn.Dropout, Heads)) and module.p:
            raise ValueError(f"{said} would drop other elements than in one process: use parallelize, or p=0")
        if isinstance(module, Attention) and not _is_causal(_inside(module)):
            raise ValueError(f"{said} has heads of its own, which would be replaced: use Heads of lib/model.py")


def _check_loads(model: GPT) -> None:
    for name, module in model.named_modules():
        options = module.options if isinstance(module, MoE) else ExpertOptions()
        if options.balance or options.bias_rate or options.capacity_factor is not None:
            raise ValueError(f"{name} (MoE) would count the loads of this rank's tokens alone: use parallelize")


def _is_causal(heads: Heads | None) -> bool:
    """Whether heads compute with the methods that we know."""
    kind = HeadsWithMasks if isinstance(heads, HeadsWithMasks) else Heads
    methods = {name: getattr(getattr(heads, name, None), "__func__", None) for name in METHODS[Heads]}
    return methods == {name: getattr(kind, name) for name in methods}


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
        super().__init__(heads.widths, heads.d_head)
        vars(self).update(set_on(heads))
        self.group, self.kind, self.order = group, attention, order
        self.masked = heads if isinstance(heads, HeadsWithMasks) else None  # its dropout follows from positions

    def attention(self, q_BHtE: Tensor, k_BKtE: Tensor, v_BKtE: Tensor) -> Tensor:
        tokens = q_BHtE, k_BKtE, v_BKtE, self.group, self.order
        if self.kind == "ring":
            length = self.group.size * q_BHtE.shape[2]
            return ring_attention(*tokens, self.masked.drops(length) if self.masked else None, self.documents)
        of_one = self.masked.attend if self.masked else partial(attend, documents_BT=self.documents)
        return WAYS[self.kind](*tokens, of_one)
