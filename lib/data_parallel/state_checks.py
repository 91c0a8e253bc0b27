"""Checks of a state before it is loaded: its keys, and the shapes and kinds of its tensors."""

import copy
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def fitting(x: object, name: str, like: Tensor) -> Tensor:
    """The tensor, or a ValueError if its shape differs, or its kind: integers, reals, complex numbers."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__} instead of a tensor")
    if x.shape != like.shape:
        raise ValueError(f"{name} has shape {list(x.shape)} instead of {list(like.shape)}")
    if x.is_floating_point() != like.is_floating_point() or x.is_complex() != like.is_complex():
        raise ValueError(f"{name} is {str(x.dtype)[6:]} instead of {str(like.dtype)[6:]}: convert it first")
    return x


def check_state(
    optimizer: Optimizer, p: Tensor, name: str, saved: dict[str, Tensor], shape: torch.Size
) -> dict[str, Any] | None:
    """Check the saved state of a parameter, if any, against `state_after_step`, which is returned.

    Tensors as large as the parameter have `shape` in the saved state.

    Raises:
        KeyError, ValueError: a key is missing; one is unknown, or a tensor has a different shape or kind.
    """
    like = state_after_step(optimizer, p)
    if like is None:
        return None
    given, wanted = ({f"{name}.{key}": x for key, x in of.items() if isinstance(x, Tensor)} for of in (saved, like))
    check_keys(wanted.keys() - given.keys() if given else (), given.keys() - wanted.keys())
    for key, x in given.items():
        fitting(x, key, wanted[key].new_empty(shape) if wanted[key].shape == p.shape else wanted[key])
    return like


def state_after_step(optimizer: Optimizer, p: Tensor) -> dict[str, Any] | None:
    """The state of a parameter after a step, on the meta device; None if this optimizer cannot step there."""
    probe, twin = copy.copy(optimizer), nn.Parameter(torch.empty_like(p, device="meta"))
    group = next((group for group in optimizer.param_groups if any(p is held for held in group["params"])), None)
    if group is None:
        return None
    probe.state, probe.param_groups, twin.grad = defaultdict(dict), [group | {"params": [twin]}], twin.detach()
    try:
        type(optimizer).step(probe)
    except Exception:  # any error of an optimizer from a different library
        return None
    return probe.state[twin]


def check_keys(missing: Iterable[str], unexpected: Iterable[str] = ()) -> None:
    """Raise KeyError if keys of a state are missing, ValueError if there are others."""
    for names, kind, what in ((missing, KeyError, "has no"), (unexpected, ValueError, "also has")):
        if first := sorted(names):
            more = ", …" if len(first) > 3 else ""
            raise kind(f"this state {what} {', '.join(first[:3])}{more}: it is of a different model, or incomplete")
