"""Mistakes as edits: what people write in place of a piece of the right program, and the hint for it.

The problem: a wrong program differs from the right one in a few words. Written out it costs a function, and as an
argument of the right program it costs that program its clarity.
The idea: a list, in which the hint stands indented below what is wrong.

    op="mean" => op="sum"
        Your gradients are n times too large. Divide by the number of ranks.

- `old => new` replaces a piece that is in the program once, `old =>` removes it. Each is one line; the next line edits
  what the line before has left.
- Without an arrow, the line is the wrong program itself: an expression, among the names of the file.
- `hangs`: this program does not return.
- `or` begins another wrong program with the same hint.
- `in loss, weights:` begins mistakes of which only the results with one of these words in their name must agree, and
  `in all:` ends them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from course.check.exercise import ALL, Mistake


@dataclass(frozen=True)
class Edited:
    """A program as text. It travels to a rank like this, and `load` makes it there, among the names of its module."""

    module: str
    text: str
    expression: str

    def load(self) -> Callable:
        """The program."""
        names = dict(vars(importlib.import_module(self.module)))
        exec(self.text, names)
        return eval(self.expression, names)


def read_mistakes(listed: str, *programs: Callable) -> tuple[Mistake, ...]:
    """The mistakes of a list, in its order.

    Args:
        listed: as the head of this file says.
        programs: the right answer, and what it calls in its file: functions and classes, whose text is edited.

    Raises:
        ValueError: a hint without a program, a program without a hint, or a piece that is not there once.
    """
    found, about = [], ALL
    for alternatives, hint in entries(listed):
        if (head := alternatives[0][0]).startswith("in ") and head.endswith(":"):
            words = alternatives[0].pop(0)[3:-1]
            about = ALL if words == "all" else tuple(words.split(", "))
        for lines in alternatives:
            wrong = _program([line for line in lines if line != "hangs"], programs)
            found.append(Mistake(hint, wrong, about, hangs="hangs" in lines))
    return tuple(found)


def _program(lines: list[str], programs: tuple[Callable, ...]) -> Edited:
    """The wrong program of these lines: one expression, or edits."""
    module, text = programs[0].__module__, "".join(map(inspect.getsource, programs))
    if len(lines) == 1 and "=>" not in lines[0]:
        return Edited(module, "", lines[0])
    if not (lines and all("=>" in line for line in lines)):
        raise ValueError(f"a hint needs edits, or one expression, above it, and not {lines}")
    for line in lines:
        old, _, new = (part.strip() for part in line.partition("=>"))
        if (times := text.count(old)) != 1:
            raise ValueError(f"{line}: the piece is {times} times in the program; write one that is there once")
        text = text.replace(old, new)
    return Edited(module, text, programs[0].__name__)


def entries(listed: str) -> Iterator[tuple[list[list[str]], str]]:
    """The lines above each hint, divided at each `or`, and the hint.

    Raises:
        ValueError: a hint without a line above it, a line without a hint, or neither: indented, but not by 4 spaces.
    """
    alternatives, hint = [[]], []
    for line in [*filter(str.strip, listed.splitlines()), "end"]:
        if line.startswith("    "):
            hint.append(line.strip())
            continue
        if hint:
            if not all(alternatives):
                raise ValueError(f"above the hint {' '.join(hint)!r} a program is missing")
            yield alternatives, " ".join(hint)
            alternatives, hint = [[]], []
        if line == "or":
            alternatives.append([])
        elif line.startswith(" "):
            raise ValueError(f"{line!r}: 4 spaces begin a hint, none a program")
        elif line != "end":
            alternatives[-1].append(line.rstrip())
    if any(alternatives):
        raise ValueError(f"{alternatives[-1]} has no hint below it")
