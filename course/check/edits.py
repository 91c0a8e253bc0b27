"""Mistakes as edits: the usual wrong text for a piece of the right program, and the hint for it.

The problem: a wrong program differs from the right one in a few words. Written out it costs a function, and as an
argument of the right program it costs that program its clarity.
The idea: a list. The hint is indented below the wrong text, and the repair is indented below the hint.

    op="mean" => op="sum"
        Your gradients are n times too large.
            Divide by the number of ranks.

- `old => new` replaces a piece that is in the program once, `old =>` removes it, and `=> new` replaces the piece of the
  edit above. Each is one line; the next line edits the result of the line before.
- `returns result / 2`: the program returns that, of its `result` and its arguments.
- Another line is the wrong program itself: an expression, among the names of the file.
- `hangs`: this program does not return.
- `or` begins a further wrong program with the same hint, on this line or on the next.
- `in loss, weights:` begins mistakes of which only the results with one of these words in their name must agree, and
  `in all:` ends them. On the line of a program it counts for this hint alone.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from course.check.exercise import ALL, Exercise, Mistake, each_call, formula

HINT, REPAIR = 4, 8  # spaces before a line
_SCOPE = re.compile(r"in ([^=:]+): (.+)")  # on the line of a program: words, and the rest of the line


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
    if "title" not in more:
        more["title"] = right[0].__name__
    programs = edited or right[:1]
    also_right = read_mistakes(names.get("ALSO_RIGHT", ""), *programs)
    made = Exercise(
        **_fields(names, more, same_as),
        points=points,
        right=(*right, *(listed.wrong for listed in also_right)),
        mistakes=read_mistakes(names.get("MISTAKES", ""), *programs),
        solution=_whole(programs),
        equivalent=read_mistakes(names.get("EQUIVALENT", ""), *programs),
    )
    return replace(made, solution=None) if made.is_fixed else made  # a table may be computed in any way


def _fields(names: Mapping[str, Any], more: Mapping[str, Any], same_as: Callable | None) -> dict[str, Any]:
    """The fields of an exercise that are not its programs: those which its file has a name for, then `more`."""
    fields = {"id": names["__doc__"].partition(":")[0]}
    fields |= {name: names[name] for name in ("inputs", "body", "reference", "compared") if name in names}
    fields |= more
    facts = names.get("FACTS")
    if facts:
        fields["reference"] = lambda inputs: [of_rank | facts for of_rank in names["reference"](inputs)]
    if "body" not in fields:
        fields |= {"body": each_call(fields["title"]), "ranks": (1,)}
    if same_as:
        fields["reference"] = formula(fields["title"], same_as)
    return fields


def read_mistakes(listed: str, *programs: Callable) -> tuple[Mistake, ...]:
    """The mistakes of a list, in its order.

    Args:
        listed: as the head of this file says.
        programs: the right answer, and what it calls in its file: functions and classes, whose text is edited.

    Raises:
        ValueError: a hint without a program, a program without a hint, or a piece that is not there once.
    """
    program = _whole(programs)
    mistakes = []
    about_from_here, old = ALL, ""
    for wrong_programs, hint, repair in entries(listed):
        first = wrong_programs[0]
        about = about_from_here
        scope = _SCOPE.match(first[0])
        if _begins_scope(first[0]):
            about = about_from_here = _words(first.pop(0)[len("in ") : -len(":")])
        elif scope:
            about, first[0] = _words(scope[1]), scope[2]
        for lines in wrong_programs:
            edits, others = [], []
            for line in lines:
                if "=>" in line:
                    piece, new = _sides(line)
                    old = piece or old
                    edits.append((old, new))
                elif line != "hangs":
                    others.append(line)
            wrong = _changed(program, edits, others)
            mistakes.append(Mistake(hint, wrong, about, "hangs" in lines, repair))
    return tuple(mistakes)


def _whole(programs: Sequence[Callable]) -> Edited:
    """The first of these programs, with the text of all."""
    text = "".join(map(inspect.getsource, programs))
    return Edited(programs[0].__module__, text, programs[0].__name__)


def _begins_scope(line: str) -> bool:
    """Whether this is `in loss, weights:`, for the mistakes below it."""
    return line.startswith("in ") and line.endswith(":") and "=>" not in line


def _words(listed: str) -> tuple[str, ...]:
    return ALL if listed == "all" else tuple(listed.split(", "))


def _sides(line: str) -> tuple[str, str]:
    """The old piece, "" if it is the one of the edit above, and the new piece."""
    piece, _, new = line.partition("=>")
    return piece.strip(), new.strip()


def _changed(program: Edited, edits: list[tuple[str, str]], others: list[str]) -> Edited:
    """The wrong program of these edits, in their order, and of the remaining lines.

    Raises:
        ValueError: they are neither one expression nor edits, with one `returns` at most; or a piece is not there once.
    """
    returns = [line.removeprefix("returns ") for line in others if line.startswith("returns ")]
    if len(others) == 1 and not edits and not returns:
        return replace(program, text="", expression=others[0])
    has_expression = len(others) > len(returns)
    has_no_change = not edits and not returns
    if has_expression or has_no_change or len(returns) > 1:
        raise ValueError(f"a hint needs edits, or one expression, above it, and not {others}")
    text = program.text
    for old, new in edits:
        text = _replaced_once(text, old, new)
    changed = replace(program, text=text)
    return replace(changed, returns=returns[0]) if returns else changed


def _replaced_once(text: str, old: str, new: str) -> str:
    times = text.count(old) if old else 0
    if times == 1:
        return text.replace(old, new)
    there = f"{times} times in the program" if old else "not given, nor in an edit above"
    raise ValueError(f"{old} => {new}: the piece is {there}; write one that is there once")


class Entry(NamedTuple):
    """A hint of a list, with the programs above it and the repair below."""

    programs: list[list[str]]  # the lines of each, between two `or`
    hint: str
    repair: str


def entries(listed: str) -> Iterator[Entry]:
    """Each hint of a list, with the lines above it, divided at each `or`, and the repair below it.

    Raises:
        ValueError: a hint without a line above it, a line without a hint, a repair without a hint; or none of them:
            indented, but not by 4 or 8 spaces.
    """
    programs, hint, repair = [[]], [], []
    for line in filter(str.strip, listed.splitlines()):
        indent = len(line) - len(line.lstrip(" "))
        if indent == REPAIR and hint:
            repair.append(line.strip())
        elif indent == HINT and not repair:
            hint.append(line.strip())
        else:
            if hint:  # the entry above this line is whole
                yield _entry(programs, hint, repair)
                programs, hint, repair = [[]], [], []
            _put(line, programs)
    if hint:
        yield _entry(programs, hint, repair)
    elif any(programs):
        raise ValueError(f"{programs[-1]} has no hint below it")


def _entry(programs: list[list[str]], hint: list[str], repair: list[str]) -> Entry:
    said = " ".join(hint)
    if not all(programs):
        raise ValueError(f"above the hint {said!r} a program is missing")
    return Entry(programs, said, " ".join(repair))


def _put(line: str, programs: list[list[str]]) -> None:
    """Add a line to the last program, or after `or` to a new one."""
    if line == "or":
        programs.append([])
    elif line.startswith("or "):
        programs.append([line.removeprefix("or ")])
    elif line.startswith(" "):
        raise ValueError(f"{line!r}: no space begins a program, 4 a hint, and 8 below it what to do")
    else:
        programs[-1].append(line.rstrip())
