"""Slips that every exercise knows: a factor, one too many, the first or the last one forgotten.

They need no list, because they are mistakes in the results and not in a program: where no wrong program fits, each is
applied to the right results, and compared with what was found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from course.check.exercise import Data, same

FACTORS = (-1, 2, 1 / 2, 3, 4, 1 / 4, 8, 1 / 8, 100, 1 / 100, 1e3, 1e-3, 1024, 1 / 1024, 1e6, 1e-6, 1e9, 1e-9)


def named_slip(got: list[Data], expected: list[Data]) -> str:
    """The sentence for the slip that makes of the expected results those that were found; "" if none does."""
    wrong = {name for g, w in zip(got, expected, strict=True) for name, x in w.items() if not same(g, {name: x})}
    for words, changed in slips(len(expected)):
        try:
            slipped = [{name: changed(x) for name, x in w.items() if name in wrong} for w in expected]
        except TypeError:  # of a word, or of a list that has no end
            continue
        if all(same(g, s) for g, s in zip(got, slipped, strict=True)):
            return f"{'Each value is' if len(wrong) > 1 else f'The value of {wrong.pop()} is'} {words}."
    return ""


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
