"""The first result that differs from the right one, in words."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import torch

from course.check.compare import Data, Tolerances, is_dense, same, tolerance_of

MISSING = ": is a `return` missing? (Functions of torch.distributed work in place and return None.)"


def filled(hint: str) -> str:
    """A sentence for the learner, in lines."""
    return textwrap.fill(hint, 96, break_on_hyphens=False)


def difference(got: list[Data], expected: list[Data], tolerances: Tolerances, is_fixed: bool = False) -> str:
    """The first entry that differs, in words; without what is expected where that is the solution.

    How many results are expected, the task has said.
    """
    for rank, (mine, right) in enumerate(zip(got, expected, strict=True)):
        for name, value in right.items():
            if not same(mine, {name: value}, tolerances):
                of_items = {"": tolerance_of(name, tolerances)}
                index, value, found = _first_difference(mine.get(name), value, of_items)
                place = f"{name}, at {index}," if index else name
                who = f"Rank {rank}: " if len(got) > 1 else ""
                digits = next((n for n in (4, 10) if _short(value, n) != _short(found, n)), 17)
                value, found = (_short(x, digits) for x in (value, found))
                may_be_none = any(one is None for one in right.values())  # then a None is an answer, too
                found += MISSING if found == "None" != value and not may_be_none else ""
                is_solution = is_fixed and not re.fullmatch(r"'\d+ results'", value)
                wanted = "" if is_solution else f"\n  expected  {value}"
                return f"{who}{place} is not right.{wanted}\n  got       {found}"
    return "The result is not right."


def _first_difference(got: Any, expected: Any, tolerances: Tolerances, index: str = "") -> tuple[str, Any, Any]:
    """Down to the first item of a list, or row of a matrix, that differs when printed: its index, expected, got."""
    lists = isinstance(expected, (list, tuple)) and isinstance(got, (list, tuple)) and len(expected) == len(got)
    tensors = is_dense(expected) and is_dense(got) and expected.shape == got.shape
    looks_right = tensors and expected.dim() and _short(got) == _short(expected)  # the first elements are equal
    if lists or (tensors and expected.dim() > 1) or looks_right:
        for i, (g, w) in enumerate(zip(got, expected, strict=True)):
            if not same({"": g}, {"": w}, tolerances):
                return _first_difference(g, w, tolerances, f"{index}[{i}]")
    return index, expected, got


def _short(value: object, digits: int = 4) -> str:
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
