"""Which boxes of a whole tensor a rank has.

The problem: a checkpoint that stores what each rank holds can be loaded by the same ranks only. Another layout cuts the
same matrix by columns, along the heads, or anywhere at all: a ZeRO shard is a range of the flattened part.
The idea: whatever a rank has of a tensor is a few *boxes* of it, each an offset and a shape in the whole. Then no rank
has to know how another one cuts: who loads asks for its own boxes, and gets each from the stored ones that overlap it.

Two steps lead there. A range of a flattened tensor is a few boxes of it: rows in part, whole rows, a row in part.

    flat [5, 17) of a [5, 4]       . . . .
                                   . a a a      a: offset (1, 1), shape (1, 3)
                                   b b b b      b: offset (2, 0), shape (2, 4)
                                   b b b b
                                   c . . .      c: offset (4, 0), shape (1, 1)

And a box of a rank's part is moved to where the part lies in the whole; one that spans several sections of a fused
weight is cut where they meet.
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
    """A box of a tensor: where it begins, and how large it is, along each dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The elements [start, stop) of a flattened tensor, as boxes of the tensor, in order; at most 2·dims − 1 of them.

    Example: `boxes_of_range((5, 4), 5, 17)` are the three of the picture above.
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
    """The boxes of a whole tensor that a range of a rank's part is, each with its values: views, to read or to fill.

    Args:
        values: the elements `span` of the flattened part, in any shape, contiguous.
        span: of the flattened part.
        shape: of the part.
        placement, group: how the part lies in the whole.
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
