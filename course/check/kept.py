"""Bytes of the tensors that a rank keeps: between two steps in a dict, list or optimizer, and for backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def kept_bytes(kept: Any) -> dict[torch.dtype, int]:
    """Bytes of floating-point tensors by dtype, each storage once and in full: a view keeps all of it alive.

    Scalars, such as a number of steps, do not count, and neither does a gradient that a parameter has.
    """
    storages = {x.untyped_storage().data_ptr(): x for x in _tensors(kept) if x.is_floating_point() and x.numel() > 1}
    found: dict[torch.dtype, int] = {}
    for x in storages.values():
        found[x.dtype] = found.get(x.dtype, 0) + x.untyped_storage().nbytes()
    return found


def saved_bytes(y: Tensor, *but: Tensor) -> int:
    """Bytes that the autograd function of y keeps for backward, saved or put on its context, without these tensors."""
    function = getattr(y, "grad_fn", None)
    of_context = [getattr(function, "saved_tensors", ()), getattr(function, "__dict__", {})]
    known = {x.untyped_storage().data_ptr() for x in but}
    return sum(kept_bytes([x for x in _tensors(of_context) if x.untyped_storage().data_ptr() not in known]).values())


def _tensors(kept: Any) -> list[Tensor]:
    if isinstance(kept, torch.optim.Optimizer):
        kept = [kept.state, kept.param_groups]
    if isinstance(kept, dict):
        kept = [*kept.keys(), *kept.values()]
    if isinstance(kept, (list, tuple)):
        return [x for one in kept for x in _tensors(one)]
    return [kept] if torch.is_tensor(kept) else []
