"""The boxes of a full tensor that a rank has.

The problem: a checkpoint with the tensors of each rank can be loaded only by the same ranks. A different layout splits
the same matrix by columns, along the heads, or anywhere: a ZeRO shard is a range of the flattened shard.
The idea: any shard of a tensor is a few *boxes* of it, each an offset and a shape in the full tensor. A rank reads its
own boxes, each from the stored boxes that overlap it, and needs no layout of the saved run.

A range of a flattened tensor is a few boxes: part of a row, full rows, part of a row.

    flat [5, 17) of a [5, 4]       . . . .
                                   . a a a      a: offset (1, 1), shape (1, 3)
                                   b b b b      b: offset (2, 0), shape (2, 4)
                                   b b b b
                                   c . . .      c: offset (4, 0), shape (1, 1)

Then each box of a shard is moved to its offset in the full tensor; a box that spans several sections of a fused weight
is split at their boundaries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lib.mesh import Group
from lib.placement import Placement, sections


class Box(NamedTuple):
    """A box of a tensor: its start and its size along each dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def behind(self, rows: int) -> Box:
        """The same box with so many rows before it, along dim 0."""
        return self._replace(offset=(self.offset[0] + rows, *self.offset[1:]))


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The elements [start, stop) of a flattened tensor, as boxes of the tensor, in order; at most 2·dims − 1 of them.

    Example: `boxes_of_range((5, 4), 5, 17)` are the three boxes of the picture above.
    """
    if not shape:
        yield from [Box((), ())] * (stop - start)
        return
    row = math.prod(shape[1:])
    while start < stop:
        i, inside = divmod(start, row)
        if whole_rows := (stop - start) // row if inside == 0 else 0:
            yield Box((i, *(0 for _ in shape[1:])), (whole_rows, *shape[1:]))
            start += whole_rows * row
        else:
            of_row = min(row - inside, stop - start)
            for box in boxes_of_range(shape[1:], inside, inside + of_row):
                yield Box((i, *box.offset), (1, *box.shape))
            start += of_row


def boxes_of_part(
    values: Tensor, span: slice, shape: torch.Size, placement: Placement, group: Group
) -> Iterator[tuple[Box, Tensor]]:
    """The boxes of a full tensor for a range of the shard of a rank, each with its values: views, to read or to fill.

    Args:
        values: the elements `span` of the flattened shard of this `shape`, in any shape, contiguous.
        placement, group: the placement of the shard in the full tensor.
    """
    pieces = sections(placement, shape, group)
    flat = values.detach().view(-1)
    for box in boxes_of_range(shape, span.start, span.stop):
        here, flat = flat[: math.prod(box.shape)].view(box.shape), flat[math.prod(box.shape) :]
        if not pieces:
            yield box, here
        for dim, in_part, in_whole, size in pieces:
            low = max(in_part, box.offset[dim])
            high = min(in_part + size, box.offset[dim] + box.shape[dim])
            if low < high:
                offset, extent = list(box.offset), list(box.shape)
                offset[dim], extent[dim] = low - in_part + in_whole, high - low
                yield Box(tuple(offset), tuple(extent)), here.narrow(dim, low - box.offset[dim], high - low)
