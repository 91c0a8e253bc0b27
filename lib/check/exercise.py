"""What an exercise is: its inputs, what a rank does with an answer, right programs and wrong ones.

The problem: "assert failed" teaches nothing, and a check that runs beside the learner's code can be fooled by it.
The idea: ranks run the learner's function and return data, nothing else. The judge makes the inputs and compares what
comes back with one process. If it differs, the judge runs the usual *wrong* programs on the same inputs: the one that
returns the same names the mistake.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

DTYPE = torch.float64
Data = dict[str, Any]  # tensors, numbers and strings by name: what one rank gets, or gives back
SEEN = "what was seen"  # in what a rank gives back, perhaps behind a part: a text to be shown below the verdict
AS_NEEDED, MORE = "what is needed", "more than that"  # how much a rank has sent
ANYTHING = "anything"  # in what a wrong program returns: right or wrong, it does not matter


@dataclass(frozen=True)
class Mistake:
    """A wrong program that people write.

    It is recognised by construction: after a FAIL the judge runs it on the numbers that the answer had, and compares.

    Args:
        hint: what the mistake is and what to do, one or two sentences.
        wrong: the program, called as the answer is. Where a rank may return anything, it returns `ANYTHING`.
        about: only the entries whose names contain one of these words must agree; all, unless told.
        hangs: it does not return; it is recognised by the calls that its ranks wait in.
    """

    hint: str
    wrong: Callable
    about: tuple[str, ...] = ("",)
    hangs: bool = False

    def fits(self, got: Data, looks_like: Data, part: str = "") -> bool:
        """Whether what a rank has returned is what it returns with this mistake, in this part of the exercise."""
        names = {name for name in looks_like if part in name and any(word in name for word in self.about)}
        names = {name for name in names if not name.endswith(SEEN)}
        return bool(names) and same(got, {name: looks_like[name] for name in names})


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    Args:
        id: chapter and number, `"03.1"`.
        title: name of the function that the learner writes.
        points: for all cases right; they are spread evenly over them.
        body: what a rank does: `body(answer, group, inputs of this rank)` returns data.
        inputs: (generator, number of ranks) to what each rank gets, other numbers at each call.
        right: programs that differ and are right; at least two, the shortest first.
        mistakes: the first one that fits is named.
        reference: inputs to what each rank must return, computed by one process; None: what the first right program
            returns.
        ranks: number of ranks of each case; 2 is left out where a wrong program is right with two.
        parts: words; entries whose names contain the first are judged, and give points, apart from the rest, and so on.
        timeout_s: for one case.
    """

    id: str
    title: str
    points: float
    body: Callable[[Callable, Any, Data], Data]
    inputs: Callable[[torch.Generator, int], list[Data]]
    mistakes: tuple[Mistake, ...]
    right: tuple[Callable, ...] = ()
    reference: Callable[[list[Data]], list[Data]] | None = None
    ranks: tuple[int, ...] = (3, 4)
    parts: tuple[str, ...] = ("",)
    timeout_s: float = 5

    @property
    def chapter(self) -> str:
        """Its number in two digits, `"03"`."""
        return self.id.partition(".")[0]


def same(got: Data, wanted: Data, tolerance: float = 1e-6) -> bool:
    """Whether `got` has all entries of `wanted`, tensors to `tolerance` of their largest element.

    An answer may return anything. What cannot be compared, such as a sparse tensor or `10**400`, is not the same.
    """
    try:
        return all(name in got and _same(got[name], want, tolerance) for name, want in wanted.items())
    except Exception:
        return False


def _same(got: Any, want: Any, tolerance: float) -> bool:
    if isinstance(want, str) and want == ANYTHING:
        return True
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
    if isinstance(want, float):  # `got` is a number, or a tensor or array of one
        got = got.detach() if isinstance(got, Tensor) else got
        number = float("nan") if isinstance(got, str) else float(got)
        return abs(number - want) <= tolerance * max(abs(want), 1e-12)
    return bool(got == want)


def is_dense(x: Any) -> bool:
    """Whether this is a tensor whose elements can be read one by one."""
    return isinstance(x, Tensor) and x.layout == torch.strided and not (x.is_meta or x.is_nested or x.is_quantized)


def plain(x: Any) -> Any:
    """Data that is no more than data: an object of a class that an answer defines would compare itself."""
    if isinstance(x, Tensor) and not is_dense(x):
        return f"a tensor that is not dense, with layout {x.layout} on {x.device}"
    if isinstance(x, Tensor):
        return x.detach().as_subclass(Tensor).clone()
    if isinstance(x, (list, tuple)):
        return type(x)(map(plain, x)) if type(x) in (list, tuple) else [plain(y) for y in x]
    if isinstance(x, dict):
        return {plain(name): plain(value) for name, value in x.items()}
    if type(x) is int and x.bit_length() > 1024:  # no float, and too long to be printed
        return f"a whole number of {x.bit_length()} bits"
    if x is None or type(x) in (bool, int, float, str):
        return x
    if hasattr(x, "item") and getattr(x, "ndim", None) == 0:  # a number of numpy's
        return plain(x.item())
    return f"a {type(x).__name__}"


# ---- what exercises are made of -------------------------------------------------------------------------------------


def random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=DTYPE)


def whole(generator: torch.Generator, low: int, high: int) -> int:
    """A whole number from `low` up to, not including, `high`."""
    return int(torch.randint(low, high, (), generator=generator))


def shards_of(whole: Tensor, n: int) -> list[Tensor]:
    """n equal shards of a flat tensor, with zeros at its end."""
    return list(pad(whole, (0, -len(whole) % n)).chunk(n))


def means_of(name: str, given: list[Data]) -> list[Tensor]:
    """The means over ranks of the tensors that each has under this name."""
    return [torch.stack(same).mean(0) for same in zip(*(g[name] for g in given), strict=True)]


def everywhere(data: Data, given: list[Data]) -> list[Data]:
    """The same data on every rank."""
    return [data] * len(given)


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


def word(found: Any) -> Any:
    """A word in lower case, without spaces around it; anything else as it is."""
    return found.strip().lower() if isinstance(found, str) else found


def known_number(found: Any, numbers: Iterable[float], slack: float = 0.01) -> Any:
    """The one of these numbers that was found, rounded; what was found, if it is none of them."""
    try:
        found = found if isinstance(found, str) else float(found)
    except (TypeError, ValueError, RuntimeError):
        pass
    if not isinstance(found, float):
        return found
    return next((x for x in numbers if abs(found - x) <= slack * abs(x)), found)


def ranks_in(written: Any) -> Any:
    """Ranks as whole numbers, in the order in which they were written, of a set ascending; else what it is instead."""
    try:
        return [
            operator.index(rank) for rank in (sorted(written) if isinstance(written, (set, frozenset)) else written)
        ]
    except TypeError:
        return type(written).__name__


def call(name: str, arguments: Sequence) -> str:
    """A call as it is written, which names an entry."""
    return f"{name}({', '.join(map(repr, arguments))})"


def each_call(name: str) -> Callable:
    """A body that calls the answer for each of the cases given."""

    def body(answer: Callable, group: Any, given: Data) -> Data:
        return {call(name, case): answer(*case) for case in given["cases"]}

    return body


def formula(name: str, of: Callable) -> Callable:
    """What a function of the same arguments would return; used as reference."""
    return lambda given: [{call(name, case): of(*case) for case in g["cases"]} for g in given]


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
