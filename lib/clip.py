"""Clipping by the norm of a whole of which each rank has some."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from lib import comm
from lib.mesh import Group


def scale_to_norm(
    gradients: Iterable[Tensor],
    square: Tensor,
    group: Group,
    max_norm: float,
) -> Tensor:
    """Scale gradients so that the norm over all ranks is at most `max_norm`.

    One all-reduce of a number. Without it each rank would have a norm of its
    own, and scale by another factor.

    Args:
        gradients: scaled in place.
        square: of the norm of what counts on this rank; what several ranks
            have counts on one of them.

    Returns:
        The norm that it was, [].
    """
    with comm.label("norm"):
        norm = comm.all_reduce(square, group).sqrt()
    for gradient in gradients:
        gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
