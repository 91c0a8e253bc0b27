"""Mistakes as edits: the usual wrong text for a piece of the right program, and the hint for it.

The problem: a wrong program differs from the right one in a few words. Written out it costs a function, and as an
argument of the right program it costs that program its clarity.
The idea: a list. The hint is indented below the wrong text, and the repair is indented below the hint.

    op="mean" => op="sum"
        Your gradients are n times too large.
            Divide by the number of ranks.

- `old => new` replaces a piece that is in the program once, `old =>` removes it, and `=> new` replaces the piece of the
  edit above. Each is one line; the next line edits what the line before has left.
- `returns result / 2`: the program returns that, of its `result` and its arguments.
- Another line is the wrong program itself: an expression, among the names of the file.
- `hangs`: this program does not return.
- `or` begins another wrong program with the same hint, on this line or on the next.
- `in loss, weights:` begins mistakes of which only the results with one of these words in their name must agree, and
  `in all:` ends them. On the line of a program it counts for this hint alone.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from course.check.exercise import ALL, Exercise, Mistake, each_call, formula

HINT, REPAIR = " " * 4, " " * 8  # before a line


@dataclass(frozen=True)
class Edited:
    """A program as text. It travels to a rank like this, and `load` makes it there, among the names of its module."""

    module: str
    text: str
    expression: str
    returns: str = "result"

    def load(self) -> Callable:
        """The program."""
        names = dict(vars(importlib.import_module(self.module)))
        exec(self.text, names)
        program = eval(self.expression, names)
        if self.returns == "result":
            return program

        def returning(*args: Any) -> Any:
            given = inspect.signature(program).bind(*args).arguments
            return eval(self.returns, names | given | {"result": program(*args)})

        return returning


def exercise(
    names: Mapping[str, Any],
    *,
    points: float,
    right: Sequence[Callable],
    edited: Sequence[Callable] = (),
    same_as: Callable | None = None,
    **more: Any,
) -> Exercise:
    """The exercise of a file, where `inputs`, `body`, `compared`, `reference` and a list `MISTAKES` have these names.

    `FACTS` are results that are right on every rank and with all inputs: `reference` leaves them out. `ALSO_RIGHT` has
    further right programs, in the form of a list of mistakes: each has a remark as its hint. `EQUIVALENT` has
    the mutants of the solution that no check could notice: each has the reason as its hint. Without a `body`
    one process calls the answer for each of the `cases` in its inputs.

    Args:
        names: `globals()`; the docstring of the file begins with the id.
        right: right programs, first the solution, which is called as its function.
        edited: the programs whose text is edited, first the answer; by default the solution.
        same_as: without a `body`, a function with the right results for the same arguments.
        more: further fields of an `Exercise`.
    """
    given = {name: names[name] for name in ("inputs", "body", "reference", "compared") if name in names}
    title = more.pop("title", None) or right[0].__name__
    named = {"id": names["__doc__"].partition(":")[0], "title": title} | given | more
    if facts := names.get("FACTS"):
        named["reference"] = lambda inputs: [of_rank | facts for of_rank in given["reference"](inputs)]
    if "body" not in named:
        named |= {"body": each_call(named["title"]), "ranks": (1,)}
    if same_as:
        named["reference"] = formula(named["title"], same_as)
    also_right, mistakes = (
        read_mistakes(names.get(listed, ""), *(edited or right[:1])) for listed in ("ALSO_RIGHT", "MISTAKES")
    )
    rights = (*right, *(one.wrong for one in also_right))
    programs = edited or right[:1]
    solution = Edited(programs[0].__module__, _text_of(programs), programs[0].__name__)
    equivalent = read_mistakes(names.get("EQUIVALENT", ""), *programs)
    made = Exercise(**named, points=points, right=rights, mistakes=mistakes, solution=solution, equivalent=equivalent)
    return replace(made, solution=None) if made.is_fixed else made  # a table may be computed in any way


def read_mistakes(listed: str, *programs: Callable) -> tuple[Mistake, ...]:
    """The mistakes of a list, in its order.

    Args:
        listed: as the head of this file says.
        programs: the right answer, and what it calls in its file: functions and classes, whose text is edited.

    Raises:
        ValueError: a hint without a program, a program without a hint, or a piece that is not there once.
    """
    module, text = programs[0].__module__, _text_of(programs)
    found, about, old = [], ALL, ""
    for alternatives, hint, repair in entries(listed):
        head, here = alternatives[0][0], about
        if head.startswith("in ") and head.endswith(":") and "=>" not in head:
            about = here = _words(head[3:-1])
            alternatives[0].pop(0)
        elif scope := re.match(r"in ([^=:]+): (.+)", head):
            here, alternatives[0][0] = _words(scope[1]), scope[2]
        for lines in alternatives:
            edits = []
            for line in (line for line in lines if "=>" in line):
                piece, _, new = (part.strip() for part in line.partition("=>"))
                old = piece or old
                edits.append((old, new))
            others = [line for line in lines if "=>" not in line and line != "hangs"]
            edited, expression, *returns = _program(text, programs[0].__name__, edits, others)
            wrong = Edited(module, edited, expression, *returns)
            found.append(Mistake(hint, wrong, here, "hangs" in lines, repair))
    return tuple(found)


def _text_of(programs: Sequence[Callable]) -> str:
    return "".join(map(inspect.getsource, programs))


def _words(listed: str) -> tuple[str, ...]:
    return ALL if listed == "all" else tuple(listed.split(", "))


def _program(text: str, name: str, edits: list[tuple[str, str]], others: list[str]) -> tuple[str, ...]:
    """The text of a wrong program, the expression that gives it, and what it returns, if a line says so."""
    returns = [line.removeprefix("returns ") for line in others if line.startswith("returns ")]
    if len(others) == 1 and not edits and not returns:
        return "", others[0]
    if len(others) > len(returns) or len(returns) > 1 or not (edits or returns):
        raise ValueError(f"a hint needs edits, or one expression, above it, and not {others}")
    for old, new in edits:
        if not old or (times := text.count(old)) != 1:
            there = f"{times} times in the program" if old else "not given, nor in an edit above"
            raise ValueError(f"{old} => {new}: the piece is {there}; write one that is there once")
        text = text.replace(old, new)
    return text, name, *returns


def entries(listed: str) -> Iterator[tuple[list[list[str]], str, str]]:
    """The lines above each hint, divided at each `or`, the hint, and the repair.

    Raises:
        ValueError: a hint without a line above it, a line without a hint, a repair without a hint; or none of them:
            indented, but not by 4 or 8 spaces.
    """
    alternatives, hint, repair = [[]], [], []
    for line in [*filter(str.strip, listed.splitlines()), "end"]:
        if line.startswith(REPAIR) and not line.startswith(f"{REPAIR} ") and hint:
            repair.append(line.strip())
            continue
        if line.startswith(HINT) and not line.startswith(f"{HINT} ") and not repair:
            hint.append(line.strip())
            continue
        if hint:
            if not all(alternatives):
                raise ValueError(f"above the hint {' '.join(hint)!r} a program is missing")
            yield alternatives, " ".join(hint), " ".join(repair)
            alternatives, hint, repair = [[]], [], []
        if line == "or" or line.startswith("or "):
            alternatives.append([line.removeprefix("or ")] if line != "or" else [])
        elif line.startswith(" "):
            raise ValueError(f"{line!r}: no space begins a program, 4 a hint, and 8 below it what to do")
        elif line != "end":
            alternatives[-1].append(line.rstrip())
    if any(alternatives):
        raise ValueError(f"{alternatives[-1]} has no hint below it")
