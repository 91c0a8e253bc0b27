"""Bytes of the tensors that a rank keeps: between two steps in a dict, list or optimizer, and for backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def kept_bytes(kept: Any) -> dict[torch.dtype, int]:
    """Bytes of floating-point tensors by dtype, each storage once and in full: a view keeps all of it alive.

    Scalars, such as a number of steps, do not count, and neither does a gradient that a parameter has.
    """
    of_storage: dict[int, Tensor] = {}  # address -> a tensor in it
    for tensor in _tensors(kept):
        if tensor.is_floating_point() and tensor.numel() > 1:
            of_storage[_address(tensor)] = tensor
    total: dict[torch.dtype, int] = {}
    for tensor in of_storage.values():
        total[tensor.dtype] = total.get(tensor.dtype, 0) + tensor.untyped_storage().nbytes()
    return total


def saved_bytes(y: Tensor, *but: Tensor) -> int:
    """Bytes that the autograd function of y keeps for backward, saved or put on its context, without these tensors."""
    function = getattr(y, "grad_fn", None)
    of_context = [getattr(function, "saved_tensors", ()), getattr(function, "__dict__", {})]
    known = {_address(tensor) for tensor in but}
    saved = [tensor for tensor in _tensors(of_context) if _address(tensor) not in known]
    return sum(kept_bytes(saved).values())


def _address(tensor: Tensor) -> int:
    """Where its storage begins: that of a view is that of the whole."""
    return tensor.untyped_storage().data_ptr()


def _tensors(kept: Any) -> list[Tensor]:
    """The tensors in dicts, lists, tuples and optimizers, at any depth."""
    if isinstance(kept, torch.optim.Optimizer):
        kept = [kept.state, kept.param_groups]
    if isinstance(kept, dict):
        kept = [*kept.keys(), *kept.values()]
    if isinstance(kept, (list, tuple)):
        return [tensor for item in kept for tensor in _tensors(item)]
    return [kept] if torch.is_tensor(kept) else []
