"""A transformer block on several ranks: heads are cut, and so is the MLP's width.

The problem: attention has four matrices and a softmax between them. Cut each matrix for itself, and there are four
all-reduces, some of them around a softmax.

The idea: cut by heads. A head's queries, keys and values, its scores and its output meet no other head before the last
matrix. So the fused projection is a column layer of which each rank has whole heads; what they give is a part of the
last matrix's input; and that is a row layer. The MLP is such a pair, too, with GELU in between. A block has two pairs:
two all-reduces forward, two backward.

    x → norm → [qkv column → heads → out row] → + → norm → [up column → GELU → down row] → + → x

With sequence parallelism a rank has a slice of the sequence wherever it is not inside of a pair (`sequence.py`).

Source: Shoeybi et al., Megatron-LM, 2019, arXiv 1909.08053, section 3; Ainslie et al., 2023, arXiv 2305.13245, on
heads of keys and values that are fewer than ranks.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from lib import comm
from lib.conjugate import identity, pair
from lib.layout import Fused, split_size
from lib.mesh import Group
from lib.model import MLP, Attention, Block
from lib.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from lib.tensor_parallel.sequence import dropout, each_rank_its_own, replicated

SEQUENCE_DIM = 1  # of x[B, T, D]


class ParallelMLP(nn.Module):
    """x[B, T, D] → up[D, 4D/n] → GELU → down[4D/n, D] → y[B, T, D]; with sequence parallelism T/n for T outside.

    forward: one all-reduce of y. backward: one all-reduce of x's gradient.
    """

    def __init__(self, serial: MLP, group: Group, sequence_parallel: bool = False) -> None:
        super().__init__()
        dim = SEQUENCE_DIM if sequence_parallel else None
        self.up = ColumnParallelLinear.from_serial(serial.up, group, sequence_dim=dim)
        self.down = RowParallelLinear.from_serial(serial.down, group, sequence_dim=dim)
        self.dropout = dropout(serial.dropout.p, group, sequence_parallel)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.dropout(self.down(gelu(self.up(x_BTD))))


class ParallelAttention(nn.Module):
    """Causal attention of this rank's heads. x[B, T, D] → y[B, T, D]; with sequence parallelism T/n for T outside.

    forward: one all-reduce of y. backward: one all-reduce of x's gradient.

    Args:
        serial: whose weights to take, those of the group's rank 0.
        recompute: keep nothing between `qkv` and `out` for backward, and compute it there again. Sends nothing.

    Raises:
        ValueError: heads that cannot be shared out evenly.
    """

    def __init__(
        self, serial: Attention, group: Group, sequence_parallel: bool = False, recompute: bool = False
    ) -> None:
        super().__init__()
        self.d_head, self.group, self.recompute = serial.d_head, group, recompute
        dim = SEQUENCE_DIM if sequence_parallel else None
        heads, kv_heads, _ = (width // serial.d_head for width in serial.widths)
        self.qkv = QKVParallelLinear.from_serial(
            serial.qkv, group, sequence_dim=dim, heads=heads, kv_heads=kv_heads, d_head=serial.d_head
        )
        self.out = RowParallelLinear.from_serial(serial.out, group, sequence_dim=dim)
        self.p = serial.dropout.p
        self.dropout = dropout(self.p, group, sequence_parallel)

    def forward(self, x_BTD: Tensor) -> Tensor:
        qkv = self.qkv(x_BTD)
        if self.recompute and torch.is_grad_enabled():
            y = checkpoint(self._heads, qkv, use_reentrant=False)
        else:
            y = self._heads(qkv)
        return self.dropout(self.out(y))

    def _heads(self, qkv: Tensor) -> Tensor:
        """[B, T, queries, keys and values of this rank's heads] → [B, T, D/n]."""
        parts = qkv.split(self.qkv.widths, dim=-1)
        q_BhTE, k_BkTE, v_BkTE = (part.unflatten(-1, (-1, self.d_head)).transpose(1, 2) for part in parts)
        drop = self.p if self.training else 0.0
        with each_rank_its_own(self.group) if drop else nullcontext():
            y_BhTE = scaled_dot_product_attention(
                q_BhTE, k_BkTE, v_BkTE, dropout_p=drop, is_causal=True, enable_gqa=self.qkv.grouped
            )
        return y_BhTE.transpose(1, 2).flatten(2)


class QKVParallelLinear(ColumnParallelLinear):
    """Queries, keys and values in one column layer: each rank has the rows of its heads, of all three.

    Where there are fewer heads of keys and values than ranks, neighbours have the same one (`copies` of them). Each
    computes a term of its gradient, for the queries that it serves there. They are summed in backward: one all-reduce
    of all keys' and values' weights, and one of their biases.

    Args:
        heads, kv_heads: of queries, and of keys and values.
        d_head: width of each.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: Group,
        *args,
        heads: int,
        kv_heads: int,
        d_head: int,
        **options,
    ) -> None:
        self.copies = check_heads(heads, kv_heads, group)
        rows = Fused(0, (heads * d_head, kv_heads * d_head, kv_heads * d_head), (1, self.copies, self.copies))
        self.widths = [size for size, _ in rows.sections(group)]
        self.grouped, self.kv_heads = heads != kv_heads, kv_heads
        super().__init__(in_features, out_features, group, *args, rows=rows, **options)

    def _used(self) -> tuple[Tensor, Tensor | None]:
        if self.copies == 1:
            return super()._used()
        weight, bias = (None if p is None else pair(p, identity, self._sum_copies) for p in (self.weight, self.bias))
        return weight, bias

    def _sum_copies(self, gradient: Tensor) -> Tensor:
        """The gradient of this rank's rows, with the terms of the others that have the same keys and values."""
        queries, mine = gradient.split([self.widths[0], 2 * self.widths[1]])
        head = self.group.rank // self.copies
        of_each_head = gradient.new_zeros(self.kv_heads, *mine.shape)
        of_each_head[head] = mine
        return torch.cat([queries, comm.all_reduce(of_each_head, self.group)[head]])


class ParallelBlock(nn.Module):
    """x + attention(norm1(x)), then x + mlp(norm2(x)). x[B, T, D] → x[B, T, D], or [B, T/n, D] → [B, T/n, D].

    forward: two all-reduces of x. backward: two of its gradient. Together 8(n−1)/n · B·T·D elements per rank.
    With `sequence_parallel`: two all-gathers and two reduce-scatters in each direction, the same elements; and two
    all-gathers more in backward, 10(n−1)/n in all, as the column layers keep slices and collect them again.

    Args:
        recompute: of attention, see `ParallelAttention`.
    """

    def __init__(self, serial: Block, group: Group, sequence_parallel: bool = False, recompute: bool = False) -> None:
        super().__init__()
        self.norm1 = replicated(serial.norm1, group, sequence_parallel)
        self.attention = ParallelAttention(serial.attention, group, sequence_parallel, recompute)
        self.norm2 = replicated(serial.norm2, group, sequence_parallel)
        self.mlp = ParallelMLP(serial.mlp, group, sequence_parallel)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
        return x_BTD + self.mlp(self.norm2(x_BTD))


def check_heads(heads: int, kv_heads: int, group: Group) -> int:
    """How many neighbouring ranks have the same keys and values.

    Raises:
        ValueError: heads that cannot be shared out evenly.
    """
    n = group.size
    split_size(heads, group, "num_heads")
    if kv_heads % n and n % kv_heads:
        raise ValueError(
            f"num_kv_heads={kv_heads} cannot be split over {group.axis}={n}, nor {n} ranks over {kv_heads} heads: one "
            "must be a multiple of the other"
        )
    return max(1, n // kv_heads)
