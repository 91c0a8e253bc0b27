"""Checks of an optimizer that steps pieces of parameters instead of the parameters.

The problem: an optimizer takes what it is given. One that holds `model.parameters()` steps tensors that no rank uses;
one that makes groups by `id(p)` or `p.ndim` puts each piece into the wrong group; one that needs full matrices computes
something with a piece. None of them raises an error.
The idea: the function that makes the optimizer is called before, with small or empty tensors, and compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lib.data_parallel.flat import MakeOptimizer
from lib.placement import parameter_like


def check_for_pieces(optimizer: MakeOptimizer, named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Check that a function for the optimizer, and its optimizer, do the same with pieces as with these parameters.

    Raises:
        ValueError: see `check_groups` and `check_elementwise`.
    """
    trained = list(named)
    check_groups(optimizer, trained)
    check_elementwise(optimizer, trained)


def check_owned(optimizer: Optimizer, owned: Iterable[nn.Parameter]) -> None:
    """Raise ValueError if an optimizer holds other tensors than these: their steps would not reach the model."""
    pieces = {id(piece) for piece in owned}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    others = [p for p in held if id(p) not in pieces]
    if others:
        raise ValueError(
            f"{len(others)} of {len(held)} tensors in the optimizer are not what this wrapper steps, such as one of "
            f"shape {list(others[0].shape)}, so its step would not reach the model: make it, and groups that are added "
            "later, from the pairs of name and piece that your function is called with, as "
            "partial(torch.optim.AdamW, lr=3e-4) does, and not from model.parameters()"
        )


def check_groups(optimizer: MakeOptimizer, named: Iterable[tuple[str, nn.Parameter]], are_flat: bool = True) -> None:
    """Check that a function for the optimizer treats pieces of parameters as it treats the parameters.

    Pieces are new tensors with the names and the attributes of the parameters, but not with their identity or, if they
    are flat, their shape.

    Raises:
        TypeError: an optimizer instead of a function.
        ValueError: a piece would be in a group with other settings, or in none; the optimizer holds other tensors.
    """
    if not callable(optimizer):
        name = type(optimizer).__name__
        raise TypeError(
            f"optimizer must be a function that makes one, but got an object of class {name}: each rank steps pieces, "
            f"which exist only later. Pass partial({name}, lr=...), with your settings"
        )
    full = list(named)
    pieces = [(name, parameter_like(p, p.new_empty(0) if are_flat else torch.empty_like(p))) for name, p in full]
    if not full:
        return
    wanted = _settings_of(optimizer(full), full)
    try:
        of_pieces = optimizer(pieces)
    except Exception as error:  # any error of an optimizer from a different library
        raise _not_for_pieces(f"it raised: {error}") from error
    check_owned(of_pieces, (piece for _, piece in pieces))
    given = _settings_of(of_pieces, pieces)
    for name, _ in full:
        if wanted.get(name) != given.get(name):
            raise ValueError(
                f"your function for the optimizer gives {name} the settings {wanted.get(name)} as a full parameter, "
                f"and {given.get(name)} as the piece that a rank steps: pieces are new, flat tensors with the names "
                "and attributes of parameters; make groups by name or by attribute, not by id(p), p.ndim or p.shape"
            )


def _settings_of(optimizer: Optimizer, named: list[tuple[str, nn.Parameter]]) -> dict[str, str]:
    """Name → the settings of its group, for each parameter that the optimizer holds."""
    names = {id(p): name for name, p in named}
    by_name = {}
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        by_name.update((names.get(id(p), ""), _shown(settings)) for p in group["params"])
    return by_name


def _shown(settings: dict[str, object]) -> str:
    """Settings that can be compared: functions and other objects of two calls never are equal."""
    plain = (int, float, str, tuple, list, Tensor, type(None))
    return ", ".join(f"{key}={value}" for key, value in settings.items() if isinstance(value, plain))


def check_elementwise(optimizer: MakeOptimizer, named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Check that an optimizer is elementwise: on small parameters, and on their two flat halves, updates must be equal.

    They have the names, attributes and numbers of dims of the real parameters, one for each kind of name
    (`blocks.0.up.weight` and `blocks.7.up.weight` are one kind). The learning rate is 0.1, because a small rate would
    hide differences.

    Args:
        named: the parameters that it will step.

    Raises:
        ValueError: updates differ, or the optimizer raises an error: it needs full parameters.
    """
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, dtype=torch.float64, generator=generator)
    kinds = {(re.sub(r"\d+", "", name), p.dim(), str(vars(p))): (name, p) for name, p in named}
    start = [(name, p, draw((2, 2, *[1] * (p.dim() - 2))[: p.dim()])) for name, p in kinds.values()]
    if not start:
        return
    ways = (torch.clone, partial(_half, 0), partial(_half, 1))  # the halves are on different ranks
    sides = [[(name, parameter_like(p, way(x))) for name, p, x in start] for way in ways]
    places = [p.data_ptr() for side in sides for _, p in side]
    why = ""
    try:
        optimizers = [optimizer(side) for side in sides]
        for group in (group for made in optimizers for group in made.param_groups if "lr" in group):
            group["lr"] = torch.full_like(group["lr"], 0.1) if isinstance(group["lr"], Tensor) else 0.1
        for _ in range(2):
            gradients = [draw(x.shape) for _, _, x in start]
            for way, side, made in zip(ways, sides, optimizers, strict=True):
                for (_, p), gradient in zip(side, gradients, strict=True):
                    p.grad = way(gradient)
                made.step()
        for (name, _, before), (_, whole), (_, first), (_, second) in zip(start, *sides, strict=True):
            update = (whole.detach() - before).flatten()
            of_halves = torch.cat([first.detach(), second.detach()]) - before.flatten()
            if not (update - of_halves).norm() <= 1e-5 * update.norm():  # some optimizers compute in float32
                why = f"its steps on two halves of {name} differ from its step on the full tensor"
        if places != [p.data_ptr() for side in sides for _, p in side]:
            why = "it replaces p.data by a new tensor instead of writing into it"
    except Exception as error:  # any error of an optimizer from a different library
        why = f"it raised: {error}"
    if why:
        raise _not_for_pieces(why)


def _not_for_pieces(why: str) -> ValueError:
    return ValueError(
        f"this optimizer cannot work on pieces of parameters ({why}); use an elementwise optimizer, such as SGD, Adam "
        "or AdamW; make groups by name, because all pieces are flat"
    )


def _half(i: int, x: Tensor) -> Tensor:
    return x.flatten().tensor_split(2)[i].clone()
