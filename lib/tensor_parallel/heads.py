"""The fused projection of queries, keys and values, sharded by heads.

The problem: attention has four matrices and a softmax between them. Sharding each matrix separately costs four
all-reduces, some of them around the softmax.

The idea: shard by heads. Heads are independent until the last matrix. So the fused projection is a column layer in
which each rank has full heads; their outputs are a shard of the input of the last matrix, which is a row layer.

Source: Shoeybi et al., Megatron-LM, 2019, arXiv 1909.08053, section 3; Ainslie et al., 2023, arXiv 2305.13245, on fewer
heads of keys and values than ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lib import comm
from lib.conjugate import identity, pair
from lib.cost.sizes import check_kv_heads
from lib.mesh import Group
from lib.model import Heads
from lib.placement import Fused, split_size
from lib.tensor_parallel.linear import ColumnParallelLinear
from lib.tensor_parallel.sequence import each_rank_its_own


class QKVParallelLinear(ColumnParallelLinear):
    """Queries, keys and values in one column layer: each rank has the rows of its heads in all three.

    With fewer heads of keys and values than ranks, neighbouring ranks have the same head (`copies` of it). Each
    computes a partial gradient from its own queries. Backward sums these: one all-reduce for the weights of all keys
    and values, and one for their biases.

    Args:
        rows: sections of queries, keys and values, with `copies` of the last two.

    Attributes:
        widths: widths of queries, keys and values on this rank.
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


def copies_of_heads(whole: Heads, group: Group) -> int:
    """The number of neighbouring ranks that have the same keys and values.

    Raises:
        ValueError: heads that cannot be split evenly.
    """
    n = group.size
    heads, kv_heads, _ = (width // whole.d_head for width in whole.widths)
    split_size(heads, group, "num_heads")
    return max(1, n // check_kv_heads(kv_heads, n, group.axis))
