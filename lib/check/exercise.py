"""What an exercise is: data, and three functions that only the judge calls.

The problem: "assert failed" teaches nothing, and a check that runs beside the learner's code can be fooled by it.
The idea: ranks run the learner's function and return data, nothing else. The judge made the inputs, knows the serial
answer, and knows what the usual *wrong* answers look like in numbers: exactly n times too large, or the part of one
rank. So it can say which mistake it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DTYPE = torch.float64
Data = dict[str, Any]  # tensors, numbers and strings by name: what one rank gets, or gives back
SEEN = "what was seen"  # in what a rank gives back: a text to be shown below the verdict, such as a picture


@dataclass(frozen=True)
class Mistake:
    """A wrong answer that people give.

    Args:
        hint: what it is and what to do, one or two sentences.
        answers: (inputs, reference) to what each rank would return; only the entries given are compared, so an empty
            one stands for a rank that may return anything.
    """

    hint: str
    answers: Callable[[list[Data], list[Data]], list[Data]]


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    Args:
        id: chapter and number, `"03.1"`.
        title: name of the function that the learner writes.
        points: for all cases right; they are spread evenly over them.
        body: what a rank does: `body(answer, group, inputs of this rank)` returns data.
        inputs: (generator, number of ranks) to what each rank gets, other numbers at each call.
        reference: inputs to what each rank must return.
        mistakes: the first one that fits is named.
        ranks: number of ranks of each case; 2 is left out where a wrong answer is right with two.
        timeout_s: for one case.
    """

    id: str
    title: str
    points: int
    body: Callable[[Callable, Any, Data], Data]
    inputs: Callable[[torch.Generator, int], list[Data]]
    reference: Callable[[list[Data]], list[Data]]
    mistakes: tuple[Mistake, ...]
    ranks: tuple[int, ...] = (3, 4)
    timeout_s: float = 5


def same(got: Data, wanted: Data, tolerance: float = 1e-6) -> bool:
    """Whether `got` has all entries of `wanted`, tensors to `tolerance` of their largest element."""
    return all(name in got and _same(got[name], want, tolerance) for name, want in wanted.items())


def _same(got: Any, want: Any, tolerance: float) -> bool:
    if isinstance(want, (list, tuple)):
        return (
            isinstance(got, (list, tuple))
            and len(got) == len(want)
            and all(_same(g, w, tolerance) for g, w in zip(got, want, strict=True))
        )
    if isinstance(want, Tensor):
        if not isinstance(got, Tensor) or got.shape != want.shape or got.is_complex():
            return False
        got, want = got.detach().double(), want.detach().double()
        slack = tolerance * max(want.nan_to_num().abs().max().item() if want.numel() else 0.0, 1e-12)
        return torch.allclose(got, want, rtol=0, atol=slack, equal_nan=True)
    if isinstance(want, float):
        try:  # a number, or a tensor or array of one
            got = got.detach() if isinstance(got, Tensor) else got
            number = float("nan") if isinstance(got, str) else float(got)
        except (TypeError, ValueError, RuntimeError):
            return False
        return abs(number - want) <= tolerance * max(abs(want), 1e-12)
    try:
        return bool(got == want)
    except (TypeError, ValueError, RuntimeError):  # an array, where there should be none
        return False


# ---- what exercises are made of -------------------------------------------------------------------------------------


def random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=DTYPE)


def whole(generator: torch.Generator, low: int, high: int) -> int:
    """A whole number from `low` up to, not including, `high`."""
    return int(torch.randint(low, high, (), generator=generator))


def means_of(name: str, given: list[Data]) -> list[Tensor]:
    """The means over ranks of the tensors that each has under this name."""
    return [torch.stack(same).mean(0) for same in zip(*(g[name] for g in given), strict=True)]


def everywhere(data: Data, given: list[Data]) -> list[Data]:
    """The same data on every rank."""
    return [data] * len(given)


def summed(x: Tensor) -> Tensor:
    """What an all-reduce makes of all ranks' tensors, [n, …] → [n, …]."""
    return x.sum(0, keepdim=True).expand_as(x)


def but(**entries: Any) -> Callable:
    """What ranks return when all is right but these entries: the right numbers, come by in another way."""
    return lambda given, want: [w | entries for w in want]


def scaled(factor: Callable[[int], float]) -> Callable:
    """What ranks return when all gradients are the right ones times `factor(n)`."""
    return lambda given, want: [{"gradients": [g * factor(len(given)) for g in w["gradients"]]} for w in want]


def several(result: Any, count: int) -> tuple:
    """So many results; as many times None if an answer has returned something else."""
    result = _row(result)
    fits = isinstance(result, (tuple, list)) and len(result) == count
    return tuple(result) if fits else (None,) * count


def kind(result: Any) -> str:
    """What an answer has returned, in words."""
    result = _row(result)
    return f"{len(result)} results" if isinstance(result, (tuple, list)) else type(result).__name__


def _row(result: Any) -> Any:
    """Numbers in a row of torch's or numpy's, as a list."""
    return result.tolist() if getattr(result, "ndim", None) == 1 else result


def call(name: str, arguments: Sequence) -> str:
    """A call as it is written, which names an entry."""
    return f"{name}({', '.join(map(repr, arguments))})"


def each_call(name: str) -> Callable:
    """A body that calls the answer for each of the cases given."""

    def body(answer: Callable, group: Any, given: Data) -> Data:
        return {call(name, case): answer(*case) for case in given["cases"]}

    return body


def formula(name: str, of: Callable) -> Callable:
    """What a function of the same arguments would return; used as reference and as mistake."""
    return lambda given, want=None: [{call(name, case): of(*case) for case in g["cases"]} for g in given]


def each_result(name: str, *whats: str) -> Callable:
    """A body that calls the answer for each of the cases given; it returns several results, which are called so."""

    def body(answer: Callable, group: Any, given: Data) -> Data:
        found: Data = {}
        for case in given["cases"]:
            result, title = answer(*case), call(name, case)
            found[f"{title}: what was returned"] = kind(result)
            found |= {f"{title}: {what}": x for what, x in zip(whats, several(result, len(whats)), strict=True)}
        return found

    return body


def results(name: str, whats: dict[str, Callable]) -> Callable:
    """All results, each by a function of the same arguments; used as reference."""

    def reference(given: list[Data]) -> list[Data]:
        found: Data = {}
        for case in given[0]["cases"]:
            title = call(name, case)
            found[f"{title}: what was returned"] = f"{len(whats)} results"
            found |= {f"{title}: {what}": float(of(*case)) for what, of in whats.items()}
        return [found]

    return reference


def result(name: str, what: str, of: Callable, where: Callable[..., bool] = lambda *case: True) -> Callable:
    """One of the results, computed so, of the cases that are looked at; the others may be anything."""
    return lambda given, want=None: [
        {f"{call(name, case)}: {what}": float(of(*case)) for case in given[0]["cases"] if where(*case)}
    ]
