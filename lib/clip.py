"""Gradient clipping: one norm over the full model, on every rank, in every layout.

The problem: the gradient of the full model is on no rank. A rank that clips by the norm of what it holds scales its
shards by a factor of its own; a sum over all ranks counts replicated parameters several times.
The idea: squares add up. Each rank has its share of each square (`Fact.square`, which divides by the number of ranks
that hold an element), one all-reduce of one number adds the shares, and all ranks scale by the same factor.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lib import comm
from lib.launch import device
from lib.mesh import Group


@torch.no_grad()
def clip(gradients: Iterable[Tensor], squares: Sequence[Tensor], world: Group, max_norm: float) -> Tensor:
    """Scale gradients so that the norm over the full model is at most `max_norm`; return the norm before, [].

    Args:
        gradients: all gradients on this rank; scaled in place.
        squares: this rank's share of each square (`Fact.square`).
        world: ranks that together hold the full model.
    """
    nothing = torch.zeros((), dtype=torch.float64, device=device())  # ranks may hold no gradient, or other dtypes
    with comm.label("norm"):
        norm = comm.all_reduce(torch.stack([nothing, *squares]).sum(), world).sqrt()
    for gradient in gradients:
        gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm.to(squares[0].dtype) if squares else norm
