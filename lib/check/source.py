"""Functions out of a notebook file, without running the notebook.

The problem: to check a saved notebook in a terminal one could run it, with all that its cells do. The idea: read the
file, and keep only what defines something: imports, functions, classes and constants. Prints, loops at top level and
magics are not looked at, so there is nothing that could go wrong in them.
"""

from __future__ import annotations

import ast
import json
import linecache
from pathlib import Path
from typing import Any


class NotebookError(ValueError):
    """The file is no notebook that can be read."""


def read_notebook(path: str) -> tuple[dict[str, Any], list[tuple[str, str]], list[str]]:
    """What a notebook defines, which answers it checks, and what could not be read.

    Returns:
        names to objects; (exercise id, name of the answer) for each `check(...)` in it; notes, a sentence each.

    Raises:
        NotebookError: no such file, a folder, or not a notebook's JSON.
    """
    cells = _code_cells(path)
    names: dict[str, Any] = {"__name__": f"notebook {Path(path).name}"}
    checks: list[tuple[str, str]] = []
    notes: list[str] = []
    for number, source in enumerate(cells, 1):
        title = f"{Path(path).name}, code cell {number}"
        try:
            tree = _parse(source)
        except SyntaxError as error:
            notes.append(f"{title}, line {error.lineno} does not parse: {error.msg}")
            continue
        except (ValueError, RecursionError, MemoryError) as error:
            notes.append(f"{title} does not parse: {error}")
            continue
        checks += _checks(tree)
        linecache.cache[title] = (len(source), None, source.splitlines(keepends=True), title)
        for statement in tree.body:
            try:
                if not _defines(statement):
                    continue
                exec(compile(ast.Module([statement], []), title, "exec"), names)
            except Exception as error:
                notes.append(f"{title}, line {statement.lineno}: {type(error).__name__}: {error}")
    return names, checks, notes


def _code_cells(path: str) -> list[str]:
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
    sources = [c.get("source", "") for c in cells if isinstance(c, dict) and c.get("cell_type") == "code"]
    return ["".join(map(str, s)) if isinstance(s, list) else str(s) for s in sources]


def _parse(source: str) -> ast.Module:
    """A cell's Python, without the lines that only IPython understands, as `%matplotlib inline` and `!ls`."""
    try:
        return ast.parse(source)
    except SyntaxError:
        lines = source.splitlines(keepends=True)
        if lines[0].startswith("%%") and not lines[0].startswith(("%%time", "%%capture")):
            return ast.parse("")  # a cell in another language
        return ast.parse("".join("\n" if line.lstrip().startswith(("%", "!")) else line for line in lines))


def _defines(statement: ast.stmt) -> bool:
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        value = statement.value
        return isinstance(value, ast.Lambda) or _is_literal(value) or _is_number(value)
    return isinstance(statement, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef))


def _is_literal(value: ast.expr | None) -> bool:
    try:
        ast.literal_eval(value or "")
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _is_number(value: ast.expr | None) -> bool:
    """A number, or arithmetic as in `25 * 1024**2`; a power only of what is small."""
    if not isinstance(value, ast.BinOp):
        return isinstance(value, ast.Constant) and isinstance(value.value, (int, float))
    if isinstance(value.op, ast.Pow):
        return all(isinstance(s, ast.Constant) and s.value in range(10_000) for s in (value.left, value.right))
    arithmetic = isinstance(value.op, (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv))
    return arithmetic and _is_number(value.left) and _is_number(value.right)


def _checks(tree: ast.Module) -> list[tuple[str, str]]:
    """`check("03.1", average_gradients)` anywhere in a cell."""
    return [
        (node.args[0].value, node.args[1].id)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "check"
        and len(node.args) >= 2
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[1], ast.Name)
    ]
