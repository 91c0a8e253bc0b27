"""An exercise: its inputs, the code around an answer in a rank, right programs and wrong programs.

The problem: "assert failed" teaches nothing, and the learner's code could change a check in the same process.
The idea: ranks run the learner's function and return data, nothing else. The judge makes the inputs and compares the
results with a single-process reference. If they differ, the judge runs the usual *wrong* programs on the same inputs:
the first whose results are all seen is the learner's mistake, and has the hint.
"""

from __future__ import annotations

import inspect
import operator
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from course.check.compare import Data, Tolerances, results_of_part

DTYPE = torch.float64
EPS = 1e-6  # of PyTorch's clip
Shapes = dict[str, tuple[int, ...]]
AS_NEEDED, MORE = "what is needed", "more than that"  # the bytes that a rank sent
ALL = ("",)  # words: one is in each name
ROWS = string.ascii_uppercase  # the letters of variants
COPIED = "This is right for"  # the beginning of the hint for an answer to a different row


@dataclass(frozen=True)
class Mistake:
    """A wrong program that people write.

    It is recognised by construction: after a FAIL the judge runs it on the inputs of the answer, and compares.

    Args:
        hint: what is wrong, one or two sentences: what an answer is told first.
        wrong: the program, called like the answer. Where a rank may return anything, it returns `ANYTHING`.
        about: only the entries whose names contain one of these words must agree; by default all entries.
        hangs: the program does not return; the calls that its ranks wait in tell that it is this mistake.
        repair: what to do: for `hint()`, and when the mistake is met again; "" where the hint has said it all.
    """

    hint: str
    wrong: Callable
    about: tuple[str, ...] = ALL
    hangs: bool = False
    repair: str = ""

    @property
    def words(self) -> str:
        """The hint and the repair, as a grader or a rubric has them."""
        return f"{self.hint} {self.repair}".strip()

    def predicted(self, looks_like: Data, part: str = "") -> Data:
        """Of a rank's results with this mistake, those that it is about, in this part of the exercise."""
        found = results_of_part(looks_like, part)
        return {name: value for name, value in found.items() if any(word in name for word in self.about)}


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    Args:
        id: chapter and number, `"03.1"`.
        title: name of the function that the learner writes.
        points: of all cases together; each case has an equal fraction.
        body: the code of a rank: `body(answer, group, inputs of this rank)` returns its results.
        inputs: (generator, number of ranks) -> the inputs of each rank, new at each call.
        right: programs that differ and are right; at least two, the shortest first.
        mistakes: a FAIL prints the hint of the first that fits.
        reference: inputs -> the results of each rank, computed by one process; None: the results of the first right
            program.
        compared: (results of a rank, its inputs) -> the results that the judge compares. It runs in the process of the
            judge, so that no answer can reach the right results; `body` runs in the process of the answer.
        withheld: entries of the inputs that ranks do not get, for `compared` and `reference`.
        ranks: number of ranks of each case; 2 is left out where a wrong program is right with two.
        parts: words; for each, the entries whose names contain it are a case with its own points.
        tolerances: word → tolerance of the tensors in entries whose names contain it, relative to the largest element;
            0 where data is moved and not computed, so that each bit must agree.
        timeout_s: for one case.
        task: of a variant: how it differs from the task in the book, in Markdown; its first paragraph is in a hint.
        row: the letter of a variant; "" is the exercise of the book.
        solution: the text of the solution, for `course.check.mutants`; None: it has none, such as a table.
        equivalent: mutants of the solution that do the same, each with the reason as its hint.
        variants: of the exercise, for a course in which not all students have the same task; see `with_variants`.
    """

    id: str
    title: str
    points: float
    body: Callable[[Callable, Any, Data], Data]
    inputs: Callable[[torch.Generator, int], list[Data]]
    mistakes: tuple[Mistake, ...]
    right: tuple[Callable, ...] = ()
    reference: Callable[[list[Data]], list[Data]] | None = None
    compared: Callable[[Data, Data], Data] | None = None
    withheld: tuple[str, ...] = ()
    ranks: tuple[int, ...] = (3, 4)
    parts: tuple[str, ...] = ("",)
    tolerances: Tolerances = field(default_factory=dict)
    timeout_s: float = 5
    task: str = ""
    row: str = ""
    solution: Any = None
    equivalent: tuple[Mistake, ...] = ()
    variants: tuple[Exercise, ...] = ()

    @property
    def rows(self) -> dict[str, Exercise]:
        """Letter -> variant; "" is the exercise itself."""
        return {one.row: one for one in (self, *self.variants)}

    @property
    def chapter(self) -> str:
        """Its number in two digits, `"03"`."""
        return self.id.partition(".")[0]

    @property
    def is_fixed(self) -> bool:
        """Whether an answer has no arguments: then what is expected is the solution itself, and never printed."""
        first = self.right[0] if self.right else None
        return inspect.isfunction(first) and not inspect.signature(first).parameters


def with_variants(exercise: Exercise, *variants: Exercise) -> Exercise:
    """The exercise with variants, which get the letters A, B, ... in this order.

    In each variant, an answer to the book's task is a mistake with its own hint, and so is one to another variant's.
    """
    lettered = [replace(one, row=row) for row, one in zip(ROWS, variants, strict=False)]

    def knows_others(one: Exercise) -> Exercise:
        others = [other for other in (exercise, *lettered) if other is not one]
        in_short, *_ = one.task.split("\n\n")
        copied = (
            Mistake(
                f"{COPIED} {f'row {other.row}' if other.row else 'the task in the book'}. You have row "
                f"{one.row}: {in_short}",
                other.right[0],
            )
            for other in others
        )
        return replace(one, mistakes=(*copied, *one.mistakes))

    return replace(exercise, variants=tuple(map(knows_others, lettered)))


# ---- helpers for exercises -------------------------------------------------------------------------------------------


def random(generator: torch.Generator, *shape: int) -> Tensor:
    """Normally distributed elements in float64; without a shape a scalar, a tensor of shape ()."""
    return torch.randn(shape, generator=generator, dtype=DTYPE)


def drawn(generator: torch.Generator, n: int, alike: Shapes, own: Shapes) -> list[Data]:
    """The inputs of n ranks: random tensors of these shapes, equal on all ranks and different on each."""

    def tensors(shapes: Shapes) -> Data:
        return {name: random(generator, *shape) for name, shape in shapes.items()}

    equal = tensors(alike)
    return [equal | tensors(own) for _ in range(n)]


def whole(generator: torch.Generator, low: int, high: int) -> int:
    """An integer from `low` up to, not including, `high`."""
    return int(torch.randint(low, high, (), generator=generator))


def shards_of(whole: Tensor, n: int) -> list[Tensor]:
    """n equal shards of a flat tensor, with zeros at its end."""
    return list(pad(whole, (0, -len(whole) % n)).chunk(n))


def everywhere(data: Data, given: list[Data]) -> list[Data]:
    """The same data on every rank."""
    return [data] * len(given)


def after_backward(y: Any, gradient: Tensor, **leaves: Tensor) -> Data:
    """y, and the gradients of the leaves after backward from y with this gradient: zeros where none arrived.

    A `y` that is no tensor of the shape of `gradient` is alone, and one without a graph has no gradients.
    """
    if not isinstance(y, Tensor) or y.shape != gradient.shape:
        return {"y": y}
    found: Data = {"y": y.detach().clone()}
    if not y.requires_grad:
        return found | {f"gradient of {name}": "none: y has no graph" for name in leaves}
    y.backward(gradient)
    grads = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}
    return found | {f"gradient of {name}": grad for name, grad in grads.items()}


def without_eps(clipped: Iterable[Tensor], given: Iterable[Tensor], norm: Any, max_norm: float) -> float:
    """The factor that undoes the eps which `torch.nn.utils.clip_grad_norm_` adds to the norm: with it a clip is right,
    too. 1 where these tensors were not clipped so.
    """
    try:
        with_eps = max_norm / (float(norm) + EPS)
        if all(torch.allclose(x, with_eps * g, rtol=1e-9, atol=0) for x, g in zip(clipped, given, strict=True)):
            return (float(norm) + EPS) / float(norm)
    except (TypeError, ValueError, RuntimeError):  # no number was returned, or no such tensors
        pass
    return 1.0


def several(result: Any, count: int) -> tuple:
    """So many results; None for each if an answer returned anything else."""
    result = _row(result)
    fits = isinstance(result, (tuple, list)) and len(result) == count
    return tuple(result) if fits else (None,) * count


def kind(result: Any) -> str:
    """The kind and number of results, in words."""
    result = _row(result)
    return f"{len(result)} results" if isinstance(result, (tuple, list)) else type(result).__name__


def _row(result: Any) -> Any:
    """A one-dimensional tensor or array as a list; anything else unchanged."""
    return result.tolist() if getattr(result, "ndim", None) == 1 else result


def word(found: Any) -> Any:
    """A word in lower case, without spaces around it; anything else unchanged."""
    return found.strip().lower() if isinstance(found, str) else found


def rounded(found: Any, digits: int | None = None, unit: float = 1) -> Any:
    """A number in these units, whole or to so many decimal digits; anything else unchanged."""
    try:
        return round(float(found) / unit, digits)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return found


def known_number(found: Any, numbers: Iterable[float], slack: float = 0.01) -> Any:
    """The number of these that was found, within `slack`; without one, the found value unchanged."""
    try:
        found = found if isinstance(found, str) else float(found)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    if not isinstance(found, float):
        return found
    return next((x for x in numbers if abs(found - x) <= slack * abs(x)), found)


def ranks_in(written: Any) -> Any:
    """Ranks as integers, in the written order, of a set in ascending order; the name of the type, if they are none."""
    try:
        return [
            operator.index(rank) for rank in (sorted(written) if isinstance(written, (set, frozenset)) else written)
        ]
    except TypeError:
        return type(written).__name__


def call(name: str, arguments: Sequence) -> str:
    """The text of a call: the name of an entry."""
    return f"{name}({', '.join(map(repr, arguments))})"


def each_call(name: str) -> Callable:
    """A body that calls the answer for each of the cases given."""

    def body(answer: Callable, group: Any, given: Data) -> Data:
        return {call(name, case): answer(*case) for case in given["cases"]}

    return body


def formula(name: str, of: Callable) -> Callable:
    """A reference to `each_call`: the results of a function of the same arguments."""
    return lambda given: [{call(name, case): of(*case) for case in g["cases"]} for g in given]


def each_result(name: str, *whats: str) -> Callable:
    """A body that calls the answer for each of the cases given, where an answer returns several results: `whats`."""

    def body(answer: Callable, group: Any, given: Data) -> Data:
        found: Data = {}
        for case in given["cases"]:
            result, title = answer(*case), call(name, case)
            found[f"{title}: what was returned"] = kind(result)
            found |= {f"{title}: {what}": x for what, x in zip(whats, several(result, len(whats)), strict=True)}
        return found

    return body
