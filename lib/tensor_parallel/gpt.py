"""A tensor-parallel GPT: each layer is replaced in place by this rank's shard of it.

The problem: a second model of sharded layers, with different names and loss, must be kept equal to the first. And
attention has four matrices with a softmax between them: sharding each matrix separately costs four all-reduces.
The idea: only the layers change. Heads are independent until the last matrix, so a block is sharded by heads and by the
width of the MLP: two column-row pairs, two all-reduces in forward and two in backward. The ends are sharded by
vocabulary entries: the output of the embedding is summed, and the logits of the head, a column layer, stay sharded,
which is enough for the loss (`vocab.py`). The result is still a GPT, with the serial names of parameters.

    model = tensor_parallel(GPT(config), mesh.group("tp"))
    loss = vocab_parallel_loss(model(tokens), targets, mesh.group("tp"))
    loss.backward()
    optimizer.step()              # any optimizer, on this rank's shards

Every rank must get the same tokens, and with dropout the same seed.

Source: Shoeybi et al., Megatron-LM, 2019, arXiv 1909.08053, section 3; Ainslie et al., 2023, arXiv 2305.13245, on fewer
heads of keys and values than ranks.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from lib import comm
from lib.conjugate import identity, pair
from lib.cost.sizes import check_kv_heads, check_recompute
from lib.mesh import Group
from lib.model import GPT, MLP, Attention, Block, Embed, Head, Heads
from lib.placement import Fused, Shard, check_apart, parts, split_size, unshard
from lib.recompute import recomputed
from lib.tensor_parallel.custom_layers import BETWEEN, check_layers, is_shardable, is_table, is_tokenwise, unsharded
from lib.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from lib.tensor_parallel.sequence import dropout, each_rank_its_own, mark_partial, slice_of_rank
from lib.tensor_parallel.vocab import VocabParallelEmbedding

SEQUENCE_DIM = 1  # of x[B, T, D]
Model = TypeVar("Model", bound=nn.Module)


def tensor_parallel(model: Model, group: Group, sequence_parallel: bool = False, again: str = "none") -> Model:
    """Shard a GPT, or a block, an attention, an MLP, in place; the values are those of rank 0 of the group.

    A GPT: tokens[B, T] → logits[B, T, V/n]. A block, x[B, T, D] → x[B, T, D]. forward: two all-reduces of x. backward:
    two of its gradient. Together 8(n−1)/n · B·T·D elements per rank. With `sequence_parallel`, x[B, T/n, D] →
    x[B, T/n, D]: two all-gathers and two reduce-scatters in each direction, the same elements; and two more all-gathers
    in backward, 10(n−1)/n in all, because column layers keep shards of their input and gather them again.

    A custom layer stays full on each rank, or is refused (`custom_layers.py`).

    Args:
        model: changed in place, and returned; its parameters become this rank's shards.
        group: the tensor-parallel ranks.
        sequence_parallel: shard the sequence between the parallel layers, see `sequence.py`.
        again: activations that backward recomputes: `none`; `selective`, those between the projections of attention;
            `full`, all of each block except its input, including its communication.

    Raises:
        ValueError: a size cannot be split evenly, the model is already sharded, has no layer to shard or one that may
            be wrong on shards, or parameters share memory.

    Source: Korthikanti et al. 2022, section 5 (`again`).
    """
    check_recompute(again)
    check_layers(model, group.size, sequence_parallel)
    shardable = [module for module in model.modules() if is_shardable(module, group.size)]
    for module in shardable:
        if isinstance(module, Attention):
            _copies_of_heads(module.heads, group)
    check_apart(model)
    comm.broadcast_coalesced((*model.parameters(), *model.buffers()), group)
    before = dict(model.named_parameters(remove_duplicate=False))
    if sequence_parallel:
        _shard_sequence(model, group)
    how = {"agreed": True, "sequence_dim": SEQUENCE_DIM if sequence_parallel else None}
    for module in shardable:
        match module:
            case Embed():
                module.token = VocabParallelEmbedding.from_serial(module.token, group, **how)
            case Attention():
                heads, copies = module.heads, _copies_of_heads(module.heads, group)
                rows = Fused(0, tuple(heads.widths), (1, copies, copies))
                module.qkv = QKVParallelLinear.from_serial(module.qkv, group, rows=rows, **how)
                heads.widths, heads.recompute = module.qkv.widths, recomputed if again == "selective" else None
                module.heads = OwnDropout(heads, group).train(heads.training)
                module.out = RowParallelLinear.from_serial(module.out, group, **how)
            case MLP():
                width = module.down.in_features
                rows = Shard(0) if module.up.out_features == width else Fused(0, (width, width), (1, 1))  # gate, up
                module.up = ColumnParallelLinear.from_serial(module.up, group, rows=rows, **how)
                module.down = RowParallelLinear.from_serial(module.down, group, **how)
            case Head():
                module.linear = ColumnParallelLinear.from_serial(module.linear, group, **how)
    for module in model.modules():
        if isinstance(module, Block):
            module.recompute = recomputed if again == "full" else None
    after, names = parts(model), {id(p): name for name, p in reversed(before.items())}
    for other, first in ((name, names[id(p)]) for name, p in before.items() if names[id(p)] != name):  # tied
        if after[first][1] != after[other][1]:
            raise ValueError(f"{first} and {other} are one parameter, but sharded differently: make each its own")
        where, _, name = other.rpartition(".")
        setattr(model.get_submodule(where), name, after[first][0])
    return model


def _shard_sequence(model: nn.Module, group: Group) -> None:
    """Prepare what stays between the pairs for a shard of the sequence: partial gradients, dropout, positions."""
    for _, module, place in unsharded(model, group.size):
        if place == BETWEEN and is_tokenwise(module) and not hasattr(module, "partial_gradients"):
            mark_partial(module)
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if type(child) is nn.Dropout:
                setattr(module, name, dropout(child.p, group, sequence_parallel=True).train(child.training))
        if isinstance(module, Embed) and is_shardable(module, group.size) and is_table(module.position):
            module.position = SlicedPositions(module.position, group)
            mark_partial(module.position)
        elif isinstance(module, GPT):
            module.sequence_slices = group.size


def _copies_of_heads(whole: Heads, group: Group) -> int:
    """The number of neighbouring ranks that have the same keys and values; ValueError if heads cannot be split."""
    n = group.size
    heads, kv_heads, _ = (width // whole.d_head for width in whole.widths)
    split_size(heads, group, "num_heads")
    return max(1, n // check_kv_heads(kv_heads, n, group.axis))


class QKVParallelLinear(ColumnParallelLinear):
    """Queries, keys and values in one column layer: each rank has the rows of its heads in all three.

    With fewer heads of keys and values than ranks, neighbouring ranks have the same head (`copies` of it). Each
    computes a partial gradient from its own queries. Backward sums these: one all-reduce for the weights of all keys
    and values, and one for their biases.

    Args:
        rows: sections of queries, keys and values, with `copies` of the last two; `widths` are those on this rank.
    """

    def __init__(self, *args, rows: Fused, **options) -> None:
        super().__init__(*args, rows=rows, **options)
        self.copies, self.widths = rows.copies[1], [size for size, _ in rows.sections(self.group)]

    def _used(self) -> tuple[Tensor, Tensor | None]:
        if self.copies == 1:
            return super()._used()
        weight, bias = (None if p is None else pair(p, identity, self._sum_copies) for p in (self.weight, self.bias))
        return weight, bias

    def _sum_copies(self, gradient: Tensor) -> Tensor:
        """Sum the gradient of this rank's keys and values with those of ranks that have the same heads."""
        queries, mine = gradient.split([self.widths[0], 2 * self.widths[1]])
        head = self.group.rank // self.copies
        of_each_head = gradient.new_zeros(self.group.size // self.copies, *mine.shape)
        of_each_head[head] = mine
        return torch.cat([queries, comm.all_reduce(of_each_head, self.group)[head]])


class OwnDropout(nn.Module):
    """Heads with different dropout on each rank, because the heads are different."""

    def __init__(self, heads: Heads, group: Group) -> None:
        super().__init__()
        self.heads, self.group = heads, group

    def forward(self, qkv: Tensor) -> Tensor:
        if not (self.training and self.heads.p):
            return self.heads(qkv)
        with each_rank_its_own(self.group):
            return self.heads(qkv)


class SlicedPositions(nn.Embedding):
    """Position embedding of this rank's shard of the sequence. positions[T] → [T/n, D]."""

    def __init__(self, serial: nn.Embedding, group: Group) -> None:
        super().__init__(serial.num_embeddings, serial.embedding_dim, _weight=serial.weight)
        self.weight, self.group = serial.weight, group

    def forward(self, positions_T: Tensor) -> Tensor:
        return embedding(positions_T[slice_of_rank(len(positions_T), self.group)], self.weight)


@torch.no_grad()
def full_state_dict(model: nn.Module, group: Group) -> dict[str, Tensor]:
    """The serial model's `state_dict`, on every rank."""
    return {name: unshard(p, placement, group) for name, (p, placement) in parts(model).items()}
