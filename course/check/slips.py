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
    wrong = {
        name: None  # in order
        for g, w in zip(got, expected, strict=True)
        for name, x in w.items()
        if not same(g, {name: x}, tolerances)
    }
    if words := _precision(got, expected, wrong):
        return words
    for words, changed in slips(len(expected)):
        try:
            slipped = [{name: changed(x) for name, x in w.items() if name in wrong} for w in expected]
        except TypeError:  # of a word, or of a list that has no end
            continue
        if all(same(g, s) for g, s in zip(got, slipped, strict=True)):
            return f"{_which(wrong, {name: None for w in expected for name in w})} {words}."
    return ""


def _which(wrong: Collection[str], judged: Collection[str]) -> str:
    """Subject of a sentence about the wrong results, which never means a right one."""
    if len(wrong) == 1:
        return f"The value of {next(iter(wrong))} is"
    return "Each value is" if len(wrong) == len(judged) else f"Each of the {len(wrong)} values that are wrong is"


def _precision(got: list[Data], expected: list[Data], wrong: Collection[str]) -> str:
    """The sentence for results that are right, but for the digits that float32 has lost."""
    found = [
        (name, *pair)
        for g, w in zip(got, expected, strict=True)
        for name in wrong
        if name in w
        for pair in tensor_pairs(g.get(name), w[name])
    ]
    if not found or not all(same_in_float32(have, right) for _, have, right in found):
        return ""
    for name, have, right in found:
        if have.dtype != right.dtype:
            is_now, must_be = (str(x.dtype).removeprefix("torch.") for x in (have, right))
            return f"Your tensor is {is_now}: {name} must be {must_be}, like what was given. {BY_DEFAULT}"
    name, have, right = next(one for one in found if not torch.equal(*one[1:]))
    if torch.equal(have, right.float().to(right.dtype)):
        return f"Your tensor is float32 on the way, and half of the digits are lost: {name}. {BY_DEFAULT}"
    if same({"": have}, {"": right}):
        return f"{name}: right in nine digits, and not in all. What is only moved keeps each bit."
    return f"{name}: right in six digits, and not in nine. Is a tensor float32 on the way? {BY_DEFAULT}"


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
        return [_all(change, one) for one in x]
    if isinstance(x, dict):
        return {name: _all(change, one) for name, one in x.items()}
    if isinstance(x, bool) or not isinstance(x, (int, float, Tensor)):
        raise TypeError
    return change(x)


def _ends(kept: slice, x: Any) -> Any:
    if not isinstance(x, (list, tuple, Tensor)) or isinstance(x, Tensor) and not x.dim() or len(x) < 2:
        raise TypeError
    return x[kept]
