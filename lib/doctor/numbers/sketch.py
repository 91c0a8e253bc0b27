"""A tensor in 64 numbers, from which its share of another and its distance from it can still be read.

The problem: all gradients, weights and updates of a 7B model are 108 GB a step in float32.
The idea: a count sketch (Charikar, Chen and Farach-Colton 2002). Each element is added to one of 64 sums, with a sign;
which sum and which sign is drawn from the tensor's shape and the element's position in the whole tensor, so every
layout draws the same. Sums are linear: those of shards add up to those of the whole tensor, and the sums of a
difference are the difference of the sums. Products and distances of sketches are right on average, to about a tenth.
"""

import zlib

import torch
from torch import Tensor

from lib.doctor.numbers.region import CHUNK, Region

SUMS = 64
_MASK = 0xFFFFFFFF
_MULTIPLIER = 0x45D9F3B  # of a mixing function for 32 bits, as C. Wellons found it: each bit depends on each


def mixed(numbers: Tensor) -> Tensor:
    """Numbers of 32 bits that look random, one for each integer; int64."""
    z = numbers & _MASK
    for _ in range(2):
        z = ((z ^ (z >> 16)) * _MULTIPLIER) & _MASK
    return z ^ (z >> 16)


def draws_of(region: Region) -> Tensor:
    """For each element of a region, in its order: twice the number of its sum, plus 1 if it is subtracted; uint8.

    The shape of the whole tensor seeds them. Its name could not: a tied weight has two.
    """
    seed, found = zlib.crc32(repr(region.shape).encode()), [torch.empty(0, dtype=torch.uint8)]
    for positions in region.chunks_of_positions():
        # Of a position beyond 32 bits, the upper half changes the seed.
        drawn = mixed(positions ^ mixed((positions >> 32) + seed))
        found.append((drawn % (2 * SUMS)).to(torch.uint8))
    return torch.cat(found)


def sums_of(values: Tensor, draws: Tensor) -> Tensor:
    """The 64 sums of these elements, float64; both on the CPU: a GPU adds in any order."""
    found = torch.zeros(SUMS, dtype=torch.float64)
    for some, drawn in zip(values.flatten().split(CHUNK), draws.split(CHUNK), strict=True):
        drawn = drawn.long()
        found.index_add_(0, drawn >> 1, some.double() * (1 - 2 * (drawn & 1)))
    return found
