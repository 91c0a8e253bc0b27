"""Functions of a notebook file, without running the notebook.

The problem: a check in a terminal could run the saved notebook, with every effect of its cells. The idea: read the
file, and keep only definitions: imports, functions, classes and constants, and each further statement that
gives or fills a name that the answer needs. Prints, tests at top level and magics are skipped, so they cannot fail.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import linecache
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from course.check.cells import MOST_CODE, NotebookError, defined_in, printable, read_cells, source
from course.check.magics import is_command, not_python, parse
from course.check.statements import Statement, names_of, needed_for, said_by

_QUESTION = re.compile(r"\*\*([\w-]+)\*\* \(")
_LOST = re.compile(r"NameError: name '(\w+)' is not defined")
_RUNS_A_FILE = re.compile(r"^[ \t]*+%run[ \t]++(?!-)(\S+)", re.MULTILINE)
_STARTS_RANKS = ("course.check", "lib.launch")  # modules whose functions start ranks: a rank starts none
_NOT_RUN = (
    "which is not run: no command of IPython is, nothing that waits for an input, and nothing that starts ranks. "
    "Compute it in your function, or in a function that yours calls."
)
_KNOWN_MODULES = ("torch", "lib", "math", "numpy", "typing")  # whose names are no answers
_WRITE_IT = "write the function itself in the notebook"
YOUR_ANSWER = "*Your answer.*"  # what is in the place of an answer in words
PROGRESS = "## Your progress"  # the section after the last question


@dataclass(frozen=True)
class Notebook:
    """The content of a notebook that is never run.

    Args:
        name: of the file.
        cells: (title, text) of each code cell that parses.
        checks: (exercise id, the answer's name or expression, row or "") for each `check(...)` in it.
        notes: a sentence for each cell that could not be read.
        texts: question -> the answer in words that a person grades; "" if there is none.
        questions: question -> its own cell, in which somebody may have written the answer.
        names: of functions, classes and values, and whether each is more than a stub.
        elsewhere: name -> the place of its import, or of a definition that is not read, and why.
        files: the files that the notebook reads definitions from, and where.
        again: name -> the place of a definition below the last check of that name.
        asked: exercise -> points, of a homework's notebook.
    """

    name: str
    cells: tuple[tuple[str, str], ...]
    checks: tuple[tuple[str, str, str], ...] = ()
    notes: tuple[str, ...] = ()
    texts: dict[str, str] = field(default_factory=dict)
    asked: dict[str, float] = field(default_factory=dict)
    questions: dict[str, str] = field(default_factory=dict)
    names: dict[str, bool] = field(default_factory=dict)
    elsewhere: dict[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    again: dict[str, str] = field(default_factory=dict)

    def statements(self) -> list[Statement]:
        """Those of all cells that parse, in their order."""
        return [Statement(title, node) for title, text in self.cells for node in parse(text).body]

    def reason(self, wanted: str, hint: str = "") -> str:
        """Why the answer `wanted` may not be as in the notebook: a line for each name that is lost or not filled."""
        statements = self.statements()
        given = {name: s for s in statements for name in s.gives}
        lost = {name: given[name] for name in _LOST.findall(hint) if name in given}
        starts = _starting(statements)
        why = {name: _why_lost(name, s, starts) for name, s in lost.items()}
        for_answer = {id(s): s for s in needed_for(statements, _names_in(wanted))}
        for s in (s for s in for_answer.values() if not _may_run(s, starts)):
            for name in s.gives | s.fills:
                why.setdefault(name, f"{name} comes from {s.where}, {_NOT_RUN}")
        data = {name for s in for_answer.values() if not (s.is_function or s.is_import) for name in s.gives}
        own = {name for s in statements if s.is_function for name in s.gives}
        for s in (s for s in statements if id(s) not in for_answer and s.calls & own):
            for name in s.passes & data:
                why.setdefault(name, f"{name} is passed to {min(s.calls & own)} in {s.where}, which is not run.")
        return "\n".join(why.values())

    def where_else(self, name: str) -> str:
        """A sentence about a definition of this name that is not read; "" if there is none."""
        if name in self.elsewhere:
            return f"{name} is {self.elsewhere[name]}."
        return f"It may be in {', or in '.join(self.files)}: {_WRITE_IT}." if self.files else ""

    def defines(self, name: str) -> bool:
        """Whether one of its cells gives something that name; an import does not."""
        return name in self.names

    def checked(self, exercise_id: str) -> str:
        """The answer that its last check of this exercise names, if the notebook has all names in it."""
        found = [answer for asked, answer, _ in self.checks if asked == exercise_id]
        given = self.names.keys() | self.elsewhere.keys() | {*dir(builtins)}
        begun = bool(found) and self.names.get(found[-1], True) and _names_in(found[-1]) <= given
        return found[-1] if begun else ""

    def define(self, wanted: str = "") -> tuple[dict[str, Any], list[str]]:
        """Name -> object, and a sentence for each statement that raised an error.

        What is defined again below the last check of an answer does not change this answer.

        Args:
            wanted: an answer; statements that it needs are run.
        """
        names, failed = self._run(wanted)
        return names, [f"{s.where}: {error}" for s, error in failed]

    def _run(self, wanted: str) -> tuple[dict[str, Any], list[tuple[Statement, str]]]:
        names: dict[str, Any] = {}
        failed = []
        for title, text in self.cells:
            linecache.cache[title] = (len(text), None, text.splitlines(keepends=True), title)
        statements = self.statements()
        starts, said = _starting(statements), said_by(statements)
        also = {
            id(s) for s in needed_for(statements, _names_in(wanted)) if not s.is_definition and _may_run(s, starts)
        }
        checked = [k for k, s in enumerate(statements) if wanted and any(x == wanted for _, x, _ in _checks(s, said))]
        for k, s in enumerate(statements):
            if not s.is_definition and id(s) not in also:
                continue
            is_below = bool(checked) and k > checked[-1] and not (s.is_function and wanted in s.gives)
            if is_below and names.keys() & (s.gives | s.fills):
                continue
            # `if __name__ == "__main__":` holds in a notebook.
            names["__name__"] = f"notebook {self.name}" if s.is_definition else "__main__"
            try:
                exec(s.code, names)
            except Exception as error:
                failed.append((s, f"{type(error).__name__}: {error}"))
        return names, failed


@dataclass(frozen=True)
class Answer:
    """A notebook's function or class, which only ranks define; `name` may be an expression, as in its check."""

    notebook: Notebook
    name: str

    def load(self) -> Callable:
        """Run the definitions and all that this answer needs, and return this function or class.

        Raises:
            NameError: it cannot be defined, or a line that it needs fails.
        """
        names, failed = self.notebook._run(self.name)
        notes = [f"{s.where}: {error}" for s, error in failed]
        if computed := [note for (s, _), note in zip(failed, notes, strict=True) if not s.is_definition]:
            raise NameError(f"{self.name} needs a line that fails where it is run alone: {'; '.join(computed)}")
        try:
            answer = eval(self.name, names)
        except Exception as error:
            answer, notes = (
                None,
                [*notes] if isinstance(error, NameError) else [*notes, f"{type(error).__name__}: {error}"],
            )
        if not callable(answer):
            raise NameError("; ".join([f"{self.name} is not defined", *notes]))
        return answer


def read_notebook(path: str) -> Notebook:
    """The definitions of a notebook's file.

    Raises:
        NotebookError: no such file, a folder, not a notebook's JSON, or more than `MOST_CODE` letters.
    """
    every, about, notes = read_cells(path)
    name = printable(Path(path).name)
    code = [source(cell) for cell in every if cell.get("cell_type") == "code"]
    if (letters := sum(map(len, code))) > MOST_CODE:
        raise NotebookError(f"{path} has {letters:,} letters of code, and {MOST_CODE:,} are read")
    cells: list[tuple[str, str]] = []
    statements: list[Statement] = []
    names: dict[str, bool] = {}
    files: list[str] = []
    elsewhere = _in_text(every, name)
    for number, text in enumerate(code, 1):
        title = f"{name}, code cell {number}"
        try:
            here = [Statement(title, node) for node in parse(text).body]
            may_have_stubs = "NotImplementedError" in text
            for s in here:
                if s.is_import:
                    elsewhere |= dict.fromkeys(s.gives, f"imported in {s.where}: {_WRITE_IT}")
                else:
                    names |= dict.fromkeys(s.gives, not (may_have_stubs and s.has_stub))
            statements += here
            cells.append((title, text))
            files += [f"{file}, which {title} runs" for file in _RUNS_A_FILE.findall(text)]
            if what := not_python(text):
                lost = f"in {title}, which begins with {what}: its names are lost"
                elsewhere |= dict.fromkeys(defined_in(text), lost)
            continue
        except SyntaxError as error:
            notes.append(f"{title}, line {error.lineno} does not parse: {error.msg}")
        except (ValueError, RecursionError, MemoryError) as error:
            notes.append(f"{title} does not parse: {error}")
        elsewhere |= dict.fromkeys(defined_in(text), f"in {title}, which does not parse")
    said = said_by(statements)
    checks = [one for s in statements for one in _checks(s, said)]
    unknown = (s for s in statements if "*" in s.gives and not str(s.node.module).startswith(_KNOWN_MODULES))
    files += [f"{s.node.module}, of which {s.where} imports all" for s in unknown]
    asked = about.get("exercises")
    asked = {i: x for i, x in asked.items() if isinstance(x, (int, float))} if isinstance(asked, dict) else {}
    texts, questions = _texts(every)
    last = {answer: k for k, s in enumerate(statements) for _, answer, _ in _checks(s, said)}
    below = (s for k, s in enumerate(statements) if s.is_function and any(k > last.get(name, k) for name in s.gives))
    again = {name: s.where for s in below for name in s.gives}
    read = tuple(cells), tuple(checks), tuple(notes), texts, asked, questions, names, elsewhere, tuple(files), again
    return Notebook(name, *read)


def _in_text(cells: list[dict], name: str) -> dict[str, str]:
    """Name -> its place, of definitions in cells that are no code."""
    found: dict[str, str] = {}
    for number, cell in enumerate(cells, 1):
        if (kind := cell.get("cell_type")) != "code" and len(text := source(cell)) <= MOST_CODE:
            called = {"markdown": "a Markdown cell", "raw": "a raw cell"}.get(kind, "no cell of code")
            found |= dict.fromkeys(
                defined_in(text), f"in {name}, cell {number}, which is {called}: change its type to Code"
            )
    return found


def _why_lost(name: str, given: Statement, starts: set[str]) -> str:
    if given.is_import:
        return (
            f"{name} is imported in {given.where}, which fails here: is that package installed where it is checked?"
        )
    return f"{name} comes from {given.where}, " + ("which failed." if _may_run(given, starts) else _NOT_RUN)


def _starting(statements: list[Statement]) -> set[str]:
    """The names of imported functions that start ranks."""
    imports = (s for s in statements if isinstance(s.node, ast.ImportFrom))
    return {name for s in imports if str(s.node.module).startswith(_STARTS_RANKS) for name in s.gives}


def _may_run(statement: Statement, starts: set[str]) -> bool:
    """Whether a statement needs neither IPython, nor a person, nor ranks."""
    needs = statement.needs
    return statement.is_definition or not (
        statement.waits or needs & starts or "input" in needs or any(map(is_command, needs))
    )


def _names_in(expression: str) -> set[str]:
    return names_of(compile(expression, "", "eval")) if expression else set()


def _texts(cells: list[dict]) -> tuple[dict[str, str], dict[str, str]]:
    """Question -> the Markdown below it, and its own; a student may add cells, an editor may lose the `grade_id`."""
    found: dict[str, list[str]] = {}
    questions: dict[str, str] = {}
    name = ""
    for cell in (cell for cell in cells if cell.get("cell_type") == "markdown"):
        text, about = source(cell), cell.get("metadata")
        marks = about.get("nbgrader") if isinstance(about, dict) else None
        if asked := _QUESTION.match(text):
            name = asked[1]
            questions[name] = text
            continue
        if text.startswith(PROGRESS):
            name = ""
        is_marked = isinstance(marks, dict) and marks.get("solution") is True
        if key := str(marks.get("grade_id")) if is_marked else name:
            found.setdefault(key, []).append("" if text.strip() == YOUR_ANSWER else text)
    return {name: "\n\n".join(filter(None, texts)) for name, texts in found.items()}, questions


def _checks(statement: Statement, said: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """`check("03.1", average_gradients)` anywhere in a statement; `said`: name -> its text."""

    def text_of(node: ast.expr | None) -> str:
        if isinstance(node, ast.Name):
            return said.get(node.id, "")
        return str(node.value) if isinstance(node, ast.Constant) else ""

    found = []
    for call in (node for node in ast.walk(statement.node) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        given = dict(zip(("exercise", "answer", "seed", "points", "row"), call.args, strict=False))
        given |= {word.arg: word.value for word in call.keywords if word.arg}
        if name == "check" and "answer" in given and (asked := text_of(given.get("exercise"))):
            number = asked.strip().zfill(len("03.1")) if re.fullmatch(r"\s*\d\.\d+\s*", asked) else asked
            with contextlib.suppress(RecursionError):  # so many brackets are no answer
                found.append((number, ast.unparse(given["answer"]), text_of(given.get("row")).upper()))
    return found
