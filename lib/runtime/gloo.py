"""Collectives that gloo does badly, from messages that it does well.

The all-gather of gloo needs a buffer and a copy; its reduce is a reduce-scatter and a gather, which moves S bytes more;
its reduce-scatter is an all-reduce.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from lib.runtime.group import Group
from lib.runtime.shapes import copy_over

# Stored now, because `record_torch_calls` replaces them by recorded versions for direct calls of torch.distributed.
_broadcast, _isend, _irecv, _work_wait = dist.broadcast, dist.isend, dist.irecv, dist.Work.wait

_PIECE_BYTES = 2**20  # of a reduce: small, so that all links of the chain are busy at the same time


def is_native(group: Group, op: str = "sum") -> bool:
    """Whether to use the collectives of the backend; gloo sends or copies too much, and max and min drop NaN."""
    return group.size > 1 and op not in ("max", "min") and dist.get_backend(group.pg) == "nccl"


def fold_into(out: Tensor, parts: Tensor, add: Callable) -> None:
    """Reduce `parts` along dim 0 into `out`, one at a time: twice as fast as parts.sum(0)."""
    if len(parts) > 1:
        add(parts[0], parts[1], out=out)
    else:
        copy_over(out, parts[0])
    for part in parts[2:]:
        add(out, part, out=out)


def broadcasts(whole: Tensor, part: Tensor, ranks: Group, group: object, async_op: bool) -> tuple[dist.Work, ...]:
    """Broadcast each shard directly to its place."""
    places = whole.view(ranks.size, *part.shape)
    if places[ranks.rank].data_ptr() != part.data_ptr():
        copy_over(places[ranks.rank], part)
    each = zip(places, ranks.ranks, strict=True)
    return tuple(_broadcast(place, src, group=group, async_op=async_op) for place, src in each)


def chain(x: Tensor, ranks: Group, dst: int, add: Callable, group: object, async_op: bool) -> None:
    """Receive a piece from the neighbour, add it to `x`, and send the sum on towards `dst`, piece by piece."""
    far, near = (ranks.ranks[(ranks.rank + step) % ranks.size] for step in (1, -1))
    place = (ranks.rank - dst) % ranks.size  # links between here and the end of the chain
    # A separate tag, so that no message of the caller can come in between.
    pieces = x.view(-1).split(max(1, _PIECE_BYTES // x.element_size()))
    got = [torch.empty_like(piece) for piece in pieces] if place < ranks.size - 1 else []
    coming = [_irecv(piece, far, group=group, tag=1) for piece in got]
    going = []
    for i, piece in enumerate(pieces):
        if got:
            _work_wait(coming[i])
            add(piece, got[i], out=piece)
        if place:
            going.append(_isend(piece, near, group=group, tag=1))
    for work in going:
        _work_wait(work)
