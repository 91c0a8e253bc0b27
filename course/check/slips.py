"""Slips that every exercise knows: a factor, one too many, the first or the last one forgotten.

They need no list, because they are mistakes in the results and not in a program: where no wrong program fits, each is
applied to the right results, and compared with what was found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from course.check.compare import Data, Tolerances, same, same_in_float32, tensor_pairs

BY_DEFAULT = "A new tensor is float32 unless it is told its dtype."
FACTORS = (-1, 2, 1 / 2, 3, 4, 1 / 4, 8, 1 / 8, 100, 1 / 100, 1e3, 1e-3, 1024, 1 / 1024, 1e6, 1e-6, 1e9, 1e-9)


def named_slip(got: list[Data], expected: list[Data], tolerances: Tolerances = MappingProxyType({})) -> str:
    """The sentence for the slip that makes of the expected results those that were found; "" if none does."""
    wrong = _wrong_names(got, expected, tolerances)
    sentence = _precision(got, expected, wrong)
    if sentence:
        return sentence
    for words, changed in slips(len(expected)):
        try:
            slipped = [_changed(of_rank, wrong, changed) for of_rank in expected]
        except TypeError:  # of a word, or of a list that has no end
            continue
        if all(same(results, as_slipped) for results, as_slipped in zip(got, slipped, strict=True)):
            names = {name for of_rank in expected for name in of_rank}
            return f"{_which(wrong, names)} {words}."
    return ""


def _wrong_names(got: list[Data], expected: list[Data], tolerances: Tolerances) -> list[str]:
    """The names of the results that are wrong on some rank, each once, in order."""
    wrong: dict[str, None] = {}
    for results, right in zip(got, expected, strict=True):
        for name, value in right.items():
            if not same(results, {name: value}, tolerances):
                wrong[name] = None
    return [*wrong]


def _changed(right: Data, names: Collection[str], change: Callable[[Any], Any]) -> Data:
    """The right results with these names, each changed."""
    return {name: change(value) for name, value in right.items() if name in names}


def _which(wrong: Collection[str], judged: Collection[str]) -> str:
    """Subject of a sentence about the wrong results, which never means a right one."""
    if len(wrong) == 1:
        (name,) = wrong
        return f"The value of {name} is"
    if len(wrong) == len(judged):
        return "Each value is"
    return f"Each of the {len(wrong)} values that are wrong is"


def _precision(got: list[Data], expected: list[Data], wrong: Collection[str]) -> str:
    """The sentence for results that are right, but for the digits that float32 has lost."""
    pairs = []  # name of a result, a tensor in it, the right one
    for results, right_ones in zip(got, expected, strict=True):
        for name in wrong:
            if name in right_ones:
                pairs += [(name, *pair) for pair in tensor_pairs(results.get(name), right_ones[name])]
    if not pairs or not all(same_in_float32(have, right) for _, have, right in pairs):
        return ""
    for name, have, right in pairs:
        if have.dtype != right.dtype:
            is_now, must_be = _dtype(have), _dtype(right)
            return f"Your tensor is {is_now}: {name} must be {must_be}, like what was given. {BY_DEFAULT}"
    differing = [pair for pair in pairs if not torch.equal(pair[1], pair[2])]
    if not differing:  # what is wrong is no tensor, such as a key too many
        return ""
    name, have, right = differing[0]
    if torch.equal(have, right.float().to(right.dtype)):
        return f"Your tensor is float32 on the way, and half of the digits are lost: {name}. {BY_DEFAULT}"
    if same({"": have}, {"": right}):
        return f"{name}: right in nine digits, and not in all. What is only moved keeps each bit."
    return f"{name}: right in six digits, and not in nine. Is a tensor float32 on the way? {BY_DEFAULT}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def slips(ranks: int) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """What to say of each slip on so many ranks, and what it makes of a right value, or `TypeError`."""
    if ranks > 1:
        yield (
            f"{ranks} times the right one, and there are {ranks} ranks: a sum in place of a mean",
            partial(_all, lambda x: x * ranks),
        )
        yield (
            f"1/{ranks} of the right one, and there are {ranks} ranks: a mean in place of a sum",
            partial(_all, lambda x: x / ranks),
        )
    for factor in FACTORS:
        yield f"{factor:g} times the right one", partial(_all, lambda x, factor=factor: x * factor)
    yield "1 more than the right one", partial(_all, lambda x: x + 1)
    yield "1 less than the right one", partial(_all, lambda x: x - 1)
    yield "right, but the first is missing", partial(_ends, slice(1, None))
    yield "right, but the last is missing", partial(_ends, slice(-1))


def _all(change: Callable, x: Any) -> Any:
    """Each number of a value."""
    if isinstance(x, (list, tuple)):
        return [_all(change, item) for item in x]
    if isinstance(x, dict):
        return {name: _all(change, item) for name, item in x.items()}
    if isinstance(x, bool) or not isinstance(x, (int, float, Tensor)):
        raise TypeError
    return change(x)


def _ends(kept: slice, x: Any) -> Any:
    """A list, or the rows of a tensor, without the first or the last."""
    is_scalar = isinstance(x, Tensor) and x.dim() == 0
    if not isinstance(x, (list, tuple, Tensor)) or is_scalar or len(x) < 2:
        raise TypeError
    return x[kept]
