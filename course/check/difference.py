"""The first result that differs from the right one, in words."""

from __future__ import annotations

import textwrap
from typing import Any

import torch

from course.check.exercise import Data, is_dense, same


def filled(hint: str) -> str:
    """A sentence for the learner, in lines."""
    return textwrap.fill(hint, 96, break_on_hyphens=False)


def difference(got: list[Data], expected: list[Data]) -> str:
    """The first entry that differs, in words."""
    for rank, (mine, right) in enumerate(zip(got, expected, strict=True)):
        for name, value in right.items():
            if not same(mine, {name: value}):
                index, value, found = _first_difference(mine.get(name), value)
                place = f"{name}, at {index}," if index else name
                who = f"Rank {rank}: " if len(got) > 1 else ""
                digits = 10 if _short(value) == _short(found) else 4
                value, found = (_short(x, digits) for x in (value, found))
                return f"{who}{place} is not right.\n  expected  {value}\n  got       {found}"
    return "The result is not right."


def _first_difference(got: Any, expected: Any, index: str = "") -> tuple[str, Any, Any]:
    """Down to the first item of a list, or row of a matrix, that differs when printed: its index, expected, got."""
    lists = isinstance(expected, (list, tuple)) and isinstance(got, (list, tuple)) and len(expected) == len(got)
    tensors = is_dense(expected) and is_dense(got) and expected.shape == got.shape
    looks_right = tensors and expected.dim() and _short(got) == _short(expected)  # the first elements are equal
    if lists or (tensors and expected.dim() > 1) or looks_right:
        for i, (g, w) in enumerate(zip(got, expected, strict=True)):
            if not same({"": g}, {"": w}):
                return _first_difference(g, w, f"{index}[{i}]")
    return index, expected, got


def _short(value: object, digits: int = 4) -> str:
    if value is None:
        return "None: is a `return` missing? (Functions of torch.distributed work in place and return None.)"
    try:
        if isinstance(value, torch.Tensor):
            numbers = ", ".join(f"{x:.{digits}g}" for x in value.flatten()[:4].tolist())
            return f"{list(value.shape)}: {numbers}{', …' if value.numel() > 4 else ''}" if value.dim() else numbers
        if isinstance(value, (list, tuple)):
            more = "; …" * (len(value) > 3)
            return f"{type(value).__name__} of {len(value)}: {'; '.join(_short(v, digits) for v in value[:3])}{more}"
        return repr(value)[:200]
    except Exception:  # a sparse tensor, an integer of five thousand digits
        return f"a {type(value).__name__} that cannot be printed here"
