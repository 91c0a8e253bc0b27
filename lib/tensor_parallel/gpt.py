"""A model on several ranks: its layers replaced in place, each by this rank's part of it.

The problem: what works for one layer has to be done to all of a model, and whoever writes a second model for it, with
other names and another loss, has two models to keep equal.
The idea: nothing but the layers changes. Inside a block the heads are cut, and the MLP's width; two column-row pairs,
two all-reduces forward and two backward. At the ends it is the vocabulary: the embedding is cut by words and its output
summed; the head is a column layer over words, whose output stays in parts, as the loss needs no more (`vocab.py`).
What comes out is a GPT still, with the parameters' serial names.

    model = tensor_parallel(GPT(config), mesh.group("tp"))
    loss = vocab_parallel_loss(model(tokens), targets, mesh.group("tp"))
    loss.backward()
    optimizer.step()              # any optimizer, on this rank's parts

With `sequence_parallel` the gradients of what stands between the pairs are terms of a sum over these ranks, too
(`partial_gradients` of a module): `lib.parallel.facts_of` knows, and `Gradients` sums them.

Every rank must be given the same tokens, and have the same seed where there is dropout.

Source: Shoeybi et al., Megatron-LM, 2019, arXiv 1909.08053, section 3.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from lib import comm
from lib.cost.sizes import check_recompute
from lib.mesh import Group
from lib.model import GPT, MLP, Attention, Block, Embed, Head
from lib.placement import Fused, Shard, parts, unshard
from lib.tensor_parallel.heads import OwnDropout, QKVParallelLinear, copies_of_heads
from lib.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from lib.tensor_parallel.sequence import dropout, see_slices, slice_of_rank
from lib.tensor_parallel.vocab import VocabParallelEmbedding

SEQUENCE_DIM = 1  # of x[B, T, D]
Model = TypeVar("Model", bound=nn.Module)


def tensor_parallel(model: Model, group: Group, sequence_parallel: bool = False, again: str = "none") -> Model:
    """Keep this rank's parts of a GPT, or of a block, an attention, an MLP; the values are those of the group's rank 0.

    A block, x[B, T, D] → x[B, T, D]. forward: two all-reduces of x. backward: two of its gradient. Together
    8(n−1)/n · B·T·D elements per rank. With `sequence_parallel`, x[B, T/n, D] → x[B, T/n, D]: two all-gathers and two
    reduce-scatters in each direction, the same elements; and two all-gathers more in backward, 10(n−1)/n in all, as
    the column layers keep slices and collect them again.

    A GPT: tokens[B, T] → logits[B, T, V/n].

    Args:
        model: changed in place. Afterwards its parameters are this rank's parts.
        group: the tensor-parallel ranks.
        sequence_parallel: slices of the sequence between the parallel layers, see `sequence.py`.
        again: what backward computes again instead of keeping it: `none`; `selective`, what is between the projections
            of attention; `full`, each block, of which only the input is kept, and which sends again.

    Returns:
        The model.

    Raises:
        ValueError: something cannot be cut evenly, or is cut already.

    Source: of `again`, Korthikanti et al. 2022, section 5.
    """
    check_recompute(again)
    _check(model, group)
    comm.agree(model.parameters(), group)
    how = {"agreed": True, "sequence_dim": SEQUENCE_DIM if sequence_parallel else None}
    tied = isinstance(model, GPT) and model.head.linear.weight is model.embed.token.weight
    for module in list(model.modules()):
        match module:
            case Embed():
                module.token = VocabParallelEmbedding.from_serial(module.token, group, **how)
                if sequence_parallel and module.position is not None:
                    module.position = SlicedPositions(module.position, group)
                    see_slices(module.position)
                module.dropout = dropout(module.dropout.p, group, sequence_parallel)
            case Attention():
                heads, copies = module.heads, copies_of_heads(module.heads, group)
                rows = Fused(0, tuple(heads.widths), (1, copies, copies))
                module.qkv = QKVParallelLinear.from_serial(module.qkv, group, rows=rows, **how)
                heads.widths, heads.recompute = module.qkv.widths, again == "selective"
                module.heads = OwnDropout(heads, group)
                module.out = RowParallelLinear.from_serial(module.out, group, **how)
                module.dropout = dropout(module.dropout.p, group, sequence_parallel)
            case MLP():
                width = module.down.in_features
                rows = Shard(0) if module.up.out_features == width else Fused(0, (width, width), (1, 1))  # gate, up
                module.up = ColumnParallelLinear.from_serial(module.up, group, rows=rows, **how)
                module.down = RowParallelLinear.from_serial(module.down, group, **how)
                module.dropout = dropout(module.dropout.p, group, sequence_parallel)
            case Block():
                module.recompute = again == "full"
                if sequence_parallel:
                    see_slices(module.norm1)
                    see_slices(module.norm2)
            case Head():
                if sequence_parallel:
                    see_slices(module.norm)
                module.linear = ColumnParallelLinear.from_serial(module.linear, group, **how)
    if isinstance(model, GPT) and sequence_parallel:
        model.sequence_slices = group.size
    if tied:
        model.head.linear.weight = model.embed.token.weight
    return model


def _check(model: nn.Module, group: Group) -> None:
    """Before anything is changed: whether heads can be shared out, and nothing is in parts already."""
    for module in model.modules():
        if isinstance(module, Attention):
            if isinstance(module.qkv, QKVParallelLinear):
                raise ValueError("this model is in parts already: cut a whole one, such as GPT(config)")
            copies_of_heads(module.heads, group)


class SlicedPositions(nn.Embedding):
    """Position embedding of this rank's slice of the sequence. positions[T] → [T/n, D]."""

    def __init__(self, serial: nn.Embedding, group: Group) -> None:
        super().__init__(serial.num_embeddings, serial.embedding_dim, _weight=serial.weight)
        self.weight, self.group = serial.weight, group

    def forward(self, positions_T: Tensor) -> Tensor:
        return embedding(positions_T[slice_of_rank(len(positions_T), self.group)], self.weight)


@torch.no_grad()
def full_state_dict(model: nn.Module, group: Group) -> dict[str, Tensor]:
    """The serial model's `state_dict`, on every rank."""
    return {name: unshard(p, placement, group) for name, (p, placement) in parts(model).items()}
