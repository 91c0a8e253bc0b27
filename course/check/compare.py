"""Whether results are the expected ones: in their dtype, and to more digits than float32 has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

Data = dict[str, Any]  # tensors, numbers and strings by name: the inputs or the results of one rank
SEEN = "what was seen"  # name of a result, or the end of its name: a text to print below the verdict
ANYTHING = "a result that may be right or wrong"  # of a wrong program
TENSOR_TOLERANCE = 1e-9  # of the largest element; float32 has 6e-8
Tolerances = Mapping[str, float]  # by a word in the name of a result
NUMBER_TOLERANCE = 1e-6  # of the number, which may have been computed in any precision


def results_of_part(found: Data, part: str = "") -> Data:
    """The results of a rank that are judged in this part of the exercise: a text for the reader is shown alone."""
    return {name: value for name, value in found.items() if part in name and not name.endswith(SEEN)}


def same(got: Data, expected: Data, tolerances: Tolerances = MappingProxyType({})) -> bool:
    """Whether `got` has all entries of `expected`: tensors in their dtype and to nine digits, single numbers to six.

    float32 has seven digits. `tolerances` has those of tensors in an entry whose name contains a word: 0 is each bit.
    An answer may return anything. A value that cannot be compared, such as a sparse tensor or `10**400`, differs.
    """
    try:
        return all(
            name in got and _same(got[name], value, tolerance_of(name, tolerances))
            for name, value in expected.items()
        )
    except Exception:
        return False


def tolerance_of(name: str, tolerances: Tolerances) -> float:
    """Of the tensors in the result with this name."""
    return next((found for word, found in tolerances.items() if word in name), TENSOR_TOLERANCE)


def same_in_float32(got: Any, expected: Any) -> bool:
    """Whether these are tensors that agree to the six digits of float32, in any dtypes."""
    tensors = isinstance(got, Tensor) and isinstance(expected, Tensor) and expected.is_floating_point()
    return tensors and got.is_floating_point() and _same(got.to(expected.dtype), expected, NUMBER_TOLERANCE)


def tensor_pairs(got: Any, expected: Any) -> Iterator[tuple[Any, Tensor]]:
    """What was found, and the expected tensor, for each that is in such a result; a result of another form as it is."""
    if isinstance(expected, dict) and isinstance(got, dict):
        got, expected = [got.get(name) for name in expected], [*expected.values()]
    if not isinstance(expected, (list, tuple)):
        yield got, expected
    elif isinstance(got, (list, tuple)) and len(got) == len(expected):
        for one, other in zip(got, expected, strict=True):
            yield from tensor_pairs(one, other)
    else:
        yield got, expected


def _same(got: Any, expected: Any, tolerance: float) -> bool:
    if isinstance(expected, str) and expected == ANYTHING:
        return True
    if isinstance(expected, (list, tuple)):
        return (
            isinstance(got, (list, tuple))
            and len(got) == len(expected)
            and all(_same(g, w, tolerance) for g, w in zip(got, expected, strict=True))
        )
    if isinstance(expected, dict):
        return (
            isinstance(got, dict)
            and got.keys() == expected.keys()
            and all(_same(got[name], value, tolerance) for name, value in expected.items())
        )
    if isinstance(expected, Tensor):
        if type(got) in (int, float) and not expected.dim():
            got = torch.tensor(got, dtype=expected.dtype)
        if not isinstance(got, Tensor) or got.shape != expected.shape or got.is_complex():
            return False
        if expected.is_floating_point() and got.dtype != expected.dtype:
            return False
        got, expected = got.detach().double(), expected.detach().double()
        slack = tolerance * max(expected.nan_to_num().abs().max().item() if expected.numel() else 0.0, 1e-12)
        return torch.allclose(got, expected, rtol=0, atol=slack, equal_nan=True)
    if isinstance(expected, float):  # `got` is a number, or a tensor or array of one element
        got = got.detach() if isinstance(got, Tensor) else got
        number = float("nan") if isinstance(got, str) else float(got)
        return abs(number - expected) <= NUMBER_TOLERANCE * max(abs(expected), 1e-12)
    return bool(got == expected)


def is_dense(x: Any) -> bool:
    """Whether this is a tensor whose elements can be read one by one."""
    return isinstance(x, Tensor) and x.layout == torch.strided and not (x.is_meta or x.is_nested or x.is_quantized)


def plain(x: Any) -> Any:
    """Plain data: an object of a class that an answer defines could compare itself."""
    if isinstance(x, Tensor) and not is_dense(x):
        return f"a tensor that is not dense, with layout {x.layout} on {x.device}"
    if isinstance(x, Tensor):
        return x.detach().as_subclass(Tensor).clone()
    if isinstance(x, (list, tuple)):
        return type(x)(map(plain, x)) if type(x) in (list, tuple) else [plain(y) for y in x]
    if isinstance(x, dict):
        return {plain(name): plain(value) for name, value in x.items()}
    if type(x) is int and x.bit_length() > 1024:  # no float, and too long to print
        return f"a whole number of {x.bit_length()} bits"
    if x is None or type(x) in (bool, int, float, str):
        return x
    if hasattr(x, "item") and getattr(x, "ndim", None) == 0:  # a number of numpy
        return plain(x.item())
    return f"a {type(x).__name__}"
