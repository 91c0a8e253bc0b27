"""Functions of a notebook file, without running the notebook.

The problem: a check in a terminal could run the saved notebook, with every effect of its cells. The idea: read the
file, and keep only definitions: imports, functions, classes and constants. Prints, loops at top level and magics are
skipped, so they cannot fail.
"""

from __future__ import annotations

import ast
import json
import linecache
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MOST_CODE = 2**20  # letters in all code cells of a notebook; to parse them takes about 600 MB
_FOR_IPYTHON = re.compile(r"^\s*(\w+\s*=\s*)?[%!?]|^\s*[\w.]+\?{1,2}\s*$")
_QUESTION = re.compile(r"\*\*([\w-]+)\*\* \(")
_LOST = re.compile(r"NameError: name '(\w+)' is not defined")
# With constants in them, calls of these are constants: `torch.tensor([1, 2])`, `float("inf")`.
_KNOWN = {*"np numpy torch math float int complex bool str list tuple dict set range".split()}
YOUR_ANSWER = "*Your answer.*"  # what is in the place of an answer in words
PROGRESS = "## Your progress"  # the section after the last question


class NotebookError(ValueError):
    """The file is no notebook that can be read."""


@dataclass(frozen=True)
class Notebook:
    """The content of a notebook that is never run.

    Args:
        name: of the file.
        cells: (title, text) of each code cell that parses.
        checks: (exercise id, name of the answer, row or "") for each `check(...)` in it.
        notes: a sentence for each cell that could not be read.
        texts: question -> the answer in words that a person grades; "" if there is none.
        questions: question -> its own cell, in which somebody may have written the answer.
        names: the functions, classes and constants that its cells define, and whether each is more than a stub.
        computed: name -> the cell and line that assign it, if these are never run.
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
    computed: dict[str, str] = field(default_factory=dict)

    def with_reason(self, hint: str) -> str:
        """The hint; and if a name of this notebook is not there, why."""
        lost = (name for name in _LOST.findall(hint) if name in self.computed and name not in self.names)
        return hint + "".join(
            f"\n{name} comes from {self.computed[name]}, which is not run: of a notebook only imports, functions, "
            "classes and constants are read. Compute it in your function, or in a function that yours calls."
            for name in dict.fromkeys(lost)
        )

    def defines(self, name: str) -> bool:
        """Whether one of its cells defines a function, a class or a constant of that name."""
        return name in self.names

    def define(self) -> tuple[dict[str, Any], list[str]]:
        """Name -> object, and a sentence for each definition that raised an error."""
        names: dict[str, Any] = {"__name__": f"notebook {self.name}"}
        notes = []
        for title, text in self.cells:
            linecache.cache[title] = (len(text), None, text.splitlines(keepends=True), title)
            for statement in filter(_defines, parse(text).body):
                try:
                    exec(compile(ast.Module([statement], []), title, "exec"), names)
                except Exception as error:
                    notes.append(f"{title}, line {statement.lineno}: {type(error).__name__}: {error}")
        return names, notes


@dataclass(frozen=True)
class Answer:
    """A notebook's function or class, which only ranks define."""

    notebook: Notebook
    name: str

    def load(self) -> Callable:
        """Run the definitions of the notebook, and return this function or class.

        Raises:
            NameError: it cannot be defined.
        """
        names, notes = self.notebook.define()
        if not callable(names.get(self.name)):
            raise NameError("; ".join([f"{self.name} is not defined", *notes]))
        return names[self.name]


def printable(text: str, lines: bool = False) -> str:
    """With an escape for each letter that is not seen: codes of terminals, marks of direction, bytes that are no UTF-8.

    With `lines`, the text may have several, and tabs.
    """

    def seen(letter: str) -> str:
        is_seen = letter.isprintable() or unicodedata.category(letter) == "Zs" or (lines and letter in "\n\t")
        return letter if is_seen else ascii(letter)[1:-1]

    return re.sub("[^ -~]", lambda found: seen(found[0]), text.replace("\r\n", "\n") if lines else text)


def read_notebook(path: str) -> Notebook:
    """The definitions of a notebook's file.

    Raises:
        NotebookError: no such file, a folder, not a notebook's JSON, or more than `MOST_CODE` letters.
    """
    cells: list[tuple[str, str]] = []
    checks: list[tuple[str, str, str]] = []
    notes: list[str] = []
    names: dict[str, bool] = {}
    computed: dict[str, str] = {}
    every, about = _read(path)
    name = printable(Path(path).name)
    code = [_source(cell) for cell in every if cell.get("cell_type") == "code"]
    if (letters := sum(map(len, code))) > MOST_CODE:
        raise NotebookError(f"{path} has {letters:,} letters of code, and {MOST_CODE:,} are read")
    for number, text in enumerate(code, 1):
        title = f"{name}, code cell {number}"
        try:
            tree = parse(text)
            checks += _checks(tree)
            computed |= _computed(tree, title)
            names |= {one: not _is_stub(s) for s in filter(_defines, tree.body) for one in _names(s)}
            cells.append((title, text))
        except SyntaxError as error:
            notes.append(f"{title}, line {error.lineno} does not parse: {error.msg}")
        except (ValueError, RecursionError, MemoryError) as error:
            notes.append(f"{title} does not parse: {error}")
    asked = about.get("exercises")
    asked = {i: x for i, x in asked.items() if isinstance(x, (int, float))} if isinstance(asked, dict) else {}
    texts, questions = _texts(every)
    return Notebook(name, tuple(cells), tuple(checks), tuple(notes), texts, asked, questions, names, computed)


def _read(path: str) -> tuple[list[dict], dict]:
    """A notebook's cells and metadata."""
    try:
        book = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotebookError(f"{path} does not exist") from None
    except IsADirectoryError:
        raise NotebookError(f"{path} is a folder; name a notebook in it") from None
    except OSError as error:
        raise NotebookError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise NotebookError(f"{path} is not a notebook: its text is not JSON") from None
    cells = book.get("cells") if isinstance(book, dict) else None
    if not isinstance(cells, list):
        raise NotebookError(f"{path} is not a notebook: it has no list of cells")
    about = book.get("metadata")
    return [cell for cell in cells if isinstance(cell, dict)], about if isinstance(about, dict) else {}


def _source(cell: dict) -> str:
    text = cell.get("source", "")
    return "".join(map(str, text)) if isinstance(text, list) else str(text)


def _texts(cells: list[dict]) -> tuple[dict[str, str], dict[str, str]]:
    """Question -> the Markdown below it, and its own; a student may add cells, an editor may lose the `grade_id`."""
    found: dict[str, list[str]] = {}
    questions: dict[str, str] = {}
    name = ""
    for cell in (cell for cell in cells if cell.get("cell_type") == "markdown"):
        text, about = _source(cell), cell.get("metadata")
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


def parse(source: str) -> ast.Module:
    """The Python of a cell, without lines that only IPython reads, such as `%matplotlib inline`, `!ls` and `?f`."""
    try:
        return ast.parse(source)
    except SyntaxError:
        lines = source.splitlines(keepends=True)
        if lines[0].startswith("%%") and not lines[0].startswith(("%%time", "%%capture")):
            return ast.parse("")  # a cell in a different language
        return ast.parse("".join("\n" if _FOR_IPYTHON.search(line) else line for line in lines))


def _defines(statement: ast.stmt) -> bool:
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        value = statement.value
        return isinstance(value, ast.Lambda) or _is_constant(value) or _is_other_name(value)
    return isinstance(statement, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef))


def _names(statement: ast.stmt) -> set[str]:
    """The names that a statement defines."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return {statement.name}
    nodes = statement.targets if isinstance(statement, ast.Assign) else [statement]
    nodes = (node for one in nodes for node in ast.walk(one) if isinstance(node, ast.Name))
    return {node.id for node in nodes if isinstance(node.ctx, ast.Store)}


def _computed(tree: ast.Module, title: str) -> dict[str, str]:
    """Name -> the cell and line of a statement that is not read, and assigns it."""
    left = (s for s in tree.body if not _defines(s))
    return {name: f"{title}, line {s.lineno}" for s in left for name in _names(s)}


def _is_stub(statement: ast.stmt) -> bool:
    """Whether a definition still has the line that a learner replaces."""
    if not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return False
    raised = (ast.unparse(node.exc) for node in ast.walk(statement) if isinstance(node, ast.Raise) and node.exc)
    return any(what.startswith("NotImplementedError") for what in raised)


def _is_constant(value: ast.expr | None) -> bool:
    """Of constants in capitals, literals, arithmetic and calls of libraries: `[1, 2]`, `MB * 25`, `np.float64(1)`."""
    return value is not None and all(
        node.id in _KNOWN or node.id.isupper() if isinstance(node, ast.Name) else not _is_large(node)
        for node in ast.walk(value)  # which is no recursion: a sum may be long
    )


def _is_large(node: ast.AST) -> bool:
    """Whether it may take much memory: a power of large numbers, or a text or list that is repeated."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Pow | ast.Mult):
        return False
    values = [getattr(side, "value", None) for side in (node.left, node.right)]
    if isinstance(node.op, ast.Pow):
        return not all(value in range(10_000) for value in values)
    return any(isinstance(x, (str, bytes)) for x in values) or not {ast.List, ast.Tuple}.isdisjoint(
        map(type, (node.left, node.right))
    )


def _is_other_name(value: ast.expr | None) -> bool:
    """`torch.float64`, the name of a function, or `partial` of it."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "partial"
    while isinstance(value, ast.Attribute):
        value = value.value
    return isinstance(value, ast.Name)


def _checks(tree: ast.Module) -> list[tuple[str, str, str]]:
    """`check("03.1", average_gradients)` anywhere in a cell."""
    return [
        (node.args[0].value, node.args[1].id, _row(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "check"
        and len(node.args) >= 2
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[1], ast.Name)
    ]


def _row(call: ast.Call) -> str:
    """The variant that a `check(..., row="B")` asks for."""
    given = (word.value for word in call.keywords if word.arg == "row" and isinstance(word.value, ast.Constant))
    return next((str(value.value).upper() for value in given), "")
