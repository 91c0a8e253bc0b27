"""Writes each exercises/NN_name.ipynb from solutions/NN_name.ipynb, or checks that they agree.

    python tools/make_exercises.py            # what `make exercises` runs
    python tools/make_exercises.py --check    # changes nothing; fails naming what is out of step

The marks are nbgrader's, so a solution notebook works there too. What lies between `### BEGIN SOLUTION` and
`### END SOLUTION` becomes a stub that says "not done yet" when it is called, and only then: an untouched exercise
notebook runs from top to bottom.
"""

import ast
import re
import sys
from pathlib import Path

import nbformat
from notebooks import dress, fold, settle, unfold
from set_repository import ROOT

BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
STUB = ("# YOUR CODE HERE", "raise NotImplementedError")
NBGRADER = {"grade_id", "grade", "solution", "locked", "task", "schema_version"}


def without_answer(source: str) -> str:
    """The cell with a stub in place of each marked region.

    Raises:
        ValueError: marks that do not pair up, or a stub that would run by itself or not parse.
    """
    lines, begun = [], 0
    for number, line in enumerate(source.splitlines(), 1):
        if line.strip() == BEGIN:
            if begun:
                raise ValueError(f"line {number}: {BEGIN} inside the region that line {begun} began")
            begun, indent = number, line[: len(line) - len(line.lstrip())]
            lines += [indent + text for text in STUB]
        elif line.strip() == END:
            if not begun:
                raise ValueError(f"line {number}: {END} without a {BEGIN}")
            begun = 0
        elif BEGIN in line or END in line:
            raise ValueError(f"line {number}: a mark stands alone in its line")
        elif not begun:
            lines.append(line)
    if begun:
        raise ValueError(f"line {begun}: {BEGIN} without an {END}")
    stubbed = "\n".join(lines)
    try:
        tree = ast.parse(stubbed)
    except SyntaxError as error:
        raise ValueError(f"without its answer the cell does not parse: {error}") from None
    if any(isinstance(node, ast.Raise) for node in _outside_functions(tree)):
        raise ValueError("the stub is outside a function and would stop the notebook; mark the body of each function")
    return stubbed


def _outside_functions(node: ast.AST):
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield child
            yield from _outside_functions(child)


def exercise(solution, name: str):
    """The exercise notebook `exercises/name` for the notebook `solutions/name`."""
    cells, ids = [], set()
    unfold(solution, f"solutions/{name}")
    for number, old in enumerate(solution.cells):
        tags, grading = old.metadata.get("tags", []), old.metadata.get("nbgrader", {})
        if "solution-only" in tags:
            continue
        cell = nbformat.v4.new_code_cell() if old.cell_type == "code" else nbformat.v4.new_markdown_cell()
        cell.source = old.source
        cell.metadata = nbformat.from_dict({k: old.metadata[k] for k in ("nbgrader", "tags") if k in old.metadata})
        try:
            _check_grading(old, tags, grading, ids)
            if grading.get("solution"):
                cell.source = without_answer(old.source)
        except ValueError as error:
            raise ValueError(
                f"solutions/{name}, cell {number} ({grading.get('grade_id', 'no grade_id')}): {error}"
            ) from None
        cells.append(cell)

    # One title for both pages: each says what it is, and links to the other.
    other = {"solutions": "exercises", "exercises": "solutions", "Solutions": "Exercises", "Exercises": "Solutions"}
    cells[0].source = re.sub("|".join(other), lambda match: other[match.group()], cells[0].source)
    notebook = nbformat.v4.new_notebook(cells=cells)
    dress(notebook, f"exercises/{name}")
    fold(notebook, f"exercises/{name}")
    notebook.metadata["generated"] = f"from solutions/{name}; edit its .md there, then run make notebooks"
    nbformat.validate(notebook)
    return notebook


def _check_grading(cell, tags: list[str], grading: dict, ids: set[str]) -> None:
    marked = BEGIN in cell.source or END in cell.source
    if marked and not grading.get("solution"):
        raise ValueError(f"has {BEGIN} or {END}, but its metadata does not say nbgrader solution: true")
    if grading.get("solution") and not marked:
        raise ValueError(f"its metadata says solution: true, but it has no {BEGIN}")
    if ("check" in tags) != bool(grading.get("grade")):
        raise ValueError("the tag check and nbgrader's grade: true go together")
    if grading.get("grade") and not (grading.get("locked") and grading.get("points", 0) > 0):
        raise ValueError("a check cell needs locked: true and points above 0")
    if grading and not grading.keys() >= NBGRADER:
        raise ValueError(f"nbgrader also needs {', '.join(sorted(NBGRADER - grading.keys()))}")
    if grading and grading["grade_id"] in ids:
        raise ValueError("another cell has the same grade_id")
    ids.update({grading["grade_id"]} if grading else ())


def main() -> None:
    wanted: dict[Path, str] = {}
    try:
        for path in sorted(ROOT.glob("solutions/*.ipynb")):
            notebook = exercise(nbformat.read(path, as_version=4), path.name)
            wanted[ROOT / "exercises" / path.name] = nbformat.writes(notebook) + "\n"
    except ValueError as error:
        sys.exit(str(error))
    lost = [path.name for path in sorted(ROOT.glob("exercises/*.ipynb")) if path not in wanted]
    orphans = [f"exercises/{name} has no solutions/{name}: write its .md there, or remove it" for name in lost]
    settle(wanted, orphans, __doc__, "run make exercises")


if __name__ == "__main__":
    main()
