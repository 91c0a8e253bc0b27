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
    for rank, (results, right) in enumerate(zip(got, expected, strict=True)):
        for name, value in right.items():
            if not same(results, {name: value}, tolerances):
                who = f"Rank {rank}: " if len(got) > 1 else ""
                may_be_none = any(right_one is None for right_one in right.values())
                of_items = {"": tolerance_of(name, tolerances)}
                return who + _in_words(name, results.get(name), value, of_items, is_fixed, may_be_none)
    return "The result is not right."


def _in_words(name: str, got: Any, expected: Any, tolerances: Tolerances, is_fixed: bool, may_be_none: bool) -> str:
    """Where an entry differs, what is expected there, and what was got."""
    index, expected, got = _first_difference(got, expected, tolerances)
    place = f"{name}, at {index}," if index else name
    digits = _digits_to_differ(expected, got)
    wanted, found = _short(expected, digits), _short(got, digits)
    if found == "None" and wanted != "None" and not may_be_none:
        found += MISSING
    is_solution = is_fixed and not re.fullmatch(r"'\d+ results'", wanted)
    lines = [f"{place} is not right.", f"  expected  {wanted}", f"  got       {found}"]
    if is_solution:
        del lines[1]
    return "\n".join(lines)


def _digits_to_differ(value: Any, other: Any) -> int:
    """The fewest digits with which two values that differ are not printed alike."""
    for digits in (4, 10):
        if _short(value, digits) != _short(other, digits):
            return digits
    return 17


def _first_difference(got: Any, expected: Any, tolerances: Tolerances, index: str = "") -> tuple[str, Any, Any]:
    """Down to the first item of a list, or row of a matrix, that differs when printed: its index, expected, got."""
    lists = isinstance(expected, (list, tuple)) and isinstance(got, (list, tuple)) and len(expected) == len(got)
    tensors = is_dense(expected) and is_dense(got) and expected.shape == got.shape
    looks_right = tensors and expected.dim() and _short(got) == _short(expected)  # the first elements are equal
    if lists or (tensors and expected.dim() > 1) or looks_right:
        for i, (item, right) in enumerate(zip(got, expected, strict=True)):
            if not same({"": item}, {"": right}, tolerances):
                return _first_difference(item, right, tolerances, f"{index}[{i}]")
    return index, expected, got


def _short(value: object, digits: int = 4) -> str:
    """A value, or its first elements, with so many digits."""
    try:
        if isinstance(value, torch.Tensor):
            numbers = ", ".join(f"{x:.{digits}g}" for x in value.flatten()[:4].tolist())
            more = ", …" if value.numel() > 4 else ""
            return f"{list(value.shape)}: {numbers}{more}" if value.dim() else numbers
        if isinstance(value, (list, tuple)):
            items = "; ".join(_short(item, digits) for item in value[:3])
            more = "; …" if len(value) > 3 else ""
            return f"{type(value).__name__} of {len(value)}: {items}{more}"
        return repr(value)[:200]
    except Exception:  # a sparse tensor, an integer of five thousand digits
        return f"a {type(value).__name__} that cannot be printed here"
