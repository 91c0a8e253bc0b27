"""Two facts per parameter, and nothing else, are what techniques must know of each other.

The problem: each technique is right alone and wrong together. A clip that sums over the stages forgets the parts of the
matrices; an average over the data-parallel ranks forgets that a norm's gradient is a sum over slices of the sequence,
too. If every technique knew every other one, each new one would be written into all of them.
The idea: a parameter carries what others must know.

    how its value is cut             so that a norm counts each number once, and a checkpoint finds the whole
    over which ranks its gradient    so that whoever sums gradients, whole or scattered, takes the right ranks,
      is a sum                       each once

Who cuts a model says the first (`placements`, `partial_gradients` of a module); who knows the mesh derives the second
(`lib/parallel.py`); who sums, shards, clips or saves reads them here. All gradients are terms of sums: a loss is
divided by the global count before backward, never by a number of ranks after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from lib import comm
from lib.mesh import Group
from lib.placement import Placement, Replicate, copies_of


@dataclass(frozen=True, eq=False)
class Fact:
    """What there is to know of one parameter on this rank.

    Args:
        name: in the serial model.
        parameter: this rank's part of it.
        sum_over: the ranks whose gradients of it, added up, are the gradient.
        placement: how its value lies on the ranks of `cut_over`.
        cut_over: the tensor-parallel ranks.
        copies: ranks that have the same part, among those over which a norm is summed and which do not cut it:
            data-parallel ones, and the other stage of a tied weight.
        stages: those of this rank that use it; its gradient is there when the last backward of each is through.
        crosses: stages of other ranks use it, too: whoever waits for its sum while a pipeline is at work may wait for a
            rank that waits for him.
    """

    name: str
    parameter: nn.Parameter
    sum_over: Group
    placement: Placement = Replicate()
    cut_over: Group = Group()
    copies: int = 1
    stages: tuple[int, ...] = (0,)
    crosses: bool = False

    @cached_property
    def held_by(self) -> int | Tensor:
        """How many ranks have each number of this rank's part; a tensor where its sections differ."""
        return copies_of(self.placement, self.parameter.shape, self.cut_over) * self.copies

    def square(self, gradient: Tensor, piece: slice | None = None, owners: int = 1) -> Tensor:
        """This rank's share in the square of the gradient's norm, []: shares of all ranks add up to the square.

        Squares are taken in float32 at least.

        Args:
            gradient: whole, or the flat `piece` of it that this rank has.
            owners: ranks that share out the pieces of each copy among them: `sum_over.size` if they do.
        """
        wide = torch.promote_types(gradient.dtype, torch.float32)
        if isinstance(self.held_by, int):
            return torch.linalg.vector_norm(gradient, dtype=wide) ** 2 * (owners / self.held_by)
        each = self.held_by.expand(self.parameter.shape).reshape(-1)[piece or slice(None)].to(gradient.device)
        return (gradient.reshape(-1).to(wide).square() / each).sum() * owners


@torch.no_grad()
def clip(
    gradients: Iterable[Tensor],
    squares: Sequence[Tensor],
    world: Group,
    max_norm: float,
) -> Tensor:
    """Scale gradients to a norm of at most `max_norm`; return what it was.

    The norm is that of the whole model's gradients, []. At most one all-reduce of one number, in every layout. Without
    it each rank would have a norm of its own, and scale by another factor.

    Args:
        gradients: all that this rank holds; scaled in place.
        squares: this rank's share of each one's (`Fact.square`), at least one.
        world: ranks that together hold all of the model.
    """
    mine = torch.stack(list(squares)).sum()
    with comm.label("norm"):
        norm = comm.all_reduce(mine, world).sqrt()
    for gradient in gradients:
        gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
