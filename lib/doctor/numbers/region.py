"""Which elements of a whole tensor a rank holds: a shard, a copy, several pieces, or a span of it flattened.

The problem: each way of parallel training cuts tensors differently, and two runs must be compared element by element.
The idea: along each dimension a rank holds some indices; a position in the whole tensor, flattened, is their sum, each
times its stride. Any two regions, of any two layouts, then speak of the same positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise, product
from typing import NamedTuple

import torch
from torch import Tensor

Range = tuple[int, int]  # start and stop
CHUNK = 1 << 22  # elements whose positions are computed at once: 32 MiB


class Region(NamedTuple):
    """The elements of a tensor that a rank holds.

    Args:
        shape: of the whole tensor.
        ranges: for each dimension, the ranges of indices that are held, in the order in which they lie here; for the
            whole tensor flattened, if it is cut after flattening.
        flat: whether it is cut after flattening.
    """

    shape: tuple[int, ...]
    ranges: tuple[tuple[Range, ...], ...]
    flat: bool = False

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Region:
        """All of a tensor."""
        return cls(tuple(shape), tuple(((0, size),) for size in shape))

    @classmethod
    def span(cls, shape: tuple[int, ...], start: int, stop: int) -> Region:
        """Some consecutive elements of a flattened tensor."""
        return cls(tuple(shape), (((start, stop),),), flat=True)

    @classmethod
    def along(cls, shape: tuple[int, ...], dim: int, ranges: list[Range]) -> Region:
        """Some indices along one dimension, and all along the others."""
        held = [((0, size),) for size in shape]
        held[dim] = tuple((start, stop) for start, stop in ranges)
        return cls(tuple(shape), tuple(held))

    @property
    def grid(self) -> tuple[int, ...]:
        """The shape along whose dimensions `ranges` count."""
        return (self.of,) if self.flat else self.shape

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of what is held."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.ranges)

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def of(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def is_whole(self) -> bool:
        return self.numel == self.of

    def fault(self) -> str | None:
        """Why this is no region of its tensor, or None."""
        if len(self.ranges) != len(self.grid):
            return f"has ranges along {len(self.ranges)} dimensions of {len(self.grid)}"
        for size, ranges in zip(self.grid, self.ranges, strict=True):
            ordered = sorted(ranges)
            if not all(0 <= start <= stop <= size for start, stop in ranges):
                return f"has indices {list(ranges)} of {size}"
            if any(before[1] > after[0] for before, after in pairwise(ordered)):
                return f"has an index twice, in {list(ranges)}"
        return None

    def take(self, whole: Tensor) -> Tensor:
        """The elements of this region, flattened, out of a flattened whole tensor."""
        held = whole.view(self.grid)
        for dim, ranges in enumerate(self.ranges):
            pieces = [held.narrow(dim, start, stop - start) for start, stop in ranges]
            held = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim) if pieces else held.narrow(dim, 0, 0)
        return held.flatten()

    def put(self, values: Tensor, whole: Tensor) -> None:
        """Write the elements of this region into a flattened whole tensor."""
        held, grid = values.view(self.sizes), whole.view(self.grid)
        for piece in product(*map(_with_offsets, self.ranges)):
            there = tuple(slice(start, stop) for start, stop, _ in piece)
            here = tuple(slice(offset, offset + stop - start) for start, stop, offset in piece)
            grid[there] = held[here]

    def positions(self) -> Tensor:
        """The place of each element in the whole tensor, flattened, in the order in which they lie here; int64."""
        return torch.cat([torch.empty(0, dtype=torch.int64), *self.chunks_of_positions()])

    def chunks_of_positions(self) -> Iterator[Tensor]:
        """The same, up to `CHUNK` elements at a time: all positions of a large tensor take twice its memory."""
        indices = [torch.cat([torch.arange(*one) for one in ranges]) for ranges in self.ranges if ranges]
        for begin in range(0, self.numel, CHUNK):
            rest = torch.arange(begin, min(begin + CHUNK, self.numel))
            found, stride = torch.zeros_like(rest), 1
            for size, held, index in zip(reversed(self.grid), reversed(self.sizes), reversed(indices), strict=True):
                found += index[rest % held] * stride
                rest, stride = rest // held, stride * size
            yield found


def _with_offsets(ranges: tuple[Range, ...]) -> Iterator[tuple[int, int, int]]:
    """Start and stop of each range in the whole tensor, and where it begins in what is held."""
    offset = 0
    for start, stop in ranges:
        yield start, stop, offset
        offset += stop - start


def ranges_of(index: Tensor) -> list[Range]:
    """Ascending runs of a list of indices: [0, 1, 2, 6, 7] → [(0, 3), (6, 8)]."""
    found: list[Range] = []
    for i in index.tolist():
        if found and found[-1][1] == i:
            found[-1] = (found[-1][0], i + 1)
        else:
            found.append((i, i + 1))
    return found
