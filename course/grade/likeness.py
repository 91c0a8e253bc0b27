"""How alike answers are: each with those of the other students, and with the published solutions; for a teacher alone.

The problem: other names and comments hide a copy from a comparison of texts, and short right answers are alike in any
case. The idea: of the syntax tree, without the names that its author chose, each run of `RUN` nodes is a print. What
the handout gives has no prints. Two answers are as alike as the fraction of their prints that both have, and next to it
is how alike two answers to this exercise usually are.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import statistics
from collections.abc import Iterable, Iterator
from itertools import combinations
from pathlib import Path

import course
from course.check.cells import NotebookError
from course.check.exercise import Exercise
from course.check.magics import parse
from course.check.source import Notebook, read_notebook
from course.grade.assignment import Assignment
from course.grade.grading import answer_of
from course.grade.reports import MARK, write_table
from course.grade.submissions import Submission

RUN = 6  # nodes of a print: shorter, and all programs are alike; longer, and a changed line hides its neighbours
MOST_NODES = 20_000  # of an answer; the longest of the book has 600
MOST_NAMED = 5  # students who are equally alike
HEAD = (
    *("exercise", "student", "most like", "likeness", "usual likeness", "pairs so alike", "pairs"),
    *("published solution", "likeness to it", "usual likeness to one"),
)
BOOK = Path(course.__file__).resolve().parents[1]
Prints = frozenset[tuple[str, ...]]
Definitions = dict[str, ast.stmt]  # functions and classes by name; of two with a name, the later


def write_likeness(path: Path, assignment: Assignment, submissions: Iterable[Submission]) -> None:
    """A table with a row for each answer that is begun, the least usual first: whose answer is most like it."""
    notebooks = {}
    for one in submissions:
        with contextlib.suppress(OSError):  # its grade says so
            notebooks[one.student] = one.read()[0]
    rows = [row for exercise in assignment.exercises for row in _rows(exercise, notebooks)]
    rows.sort(key=lambda row: row[4] - row[3])
    write_table(path, [[*HEAD], *([f"{x:.2f}" if isinstance(x, float) else x for x in row] for row in rows)], MARK)


def _rows(exercise: Exercise, notebooks: dict[str, list[Notebook]]) -> Iterator[list]:
    given = _given(exercise)
    found: dict[str, Prints] = {}
    for student, books in notebooks.items():
        answer = answer_of(exercise, books, [])
        if not answer or not answer.notebook.names.get(answer.name):
            continue
        try:
            own = prints(definitions(text for _, text in answer.notebook.cells), answer.name)
        except (ValueError, RecursionError, MemoryError) as error:
            yield [exercise.id, student, f"not compared: {type(error).__name__}", *[0.0] * 2, *[""] * 3, *[0.0] * 2]
            continue
        if own - given:
            found[student] = own - given
    public = {name: own - given for name, own in _published(exercise).items()}
    alike: dict[str, dict[str, float]] = {student: {} for student in found}
    for one, other in combinations(found, 2):
        alike[one][other] = alike[other][one] = likeness(found[one], found[other])
    pairs = [alike[one][other] for one, other in combinations(found, 2)]
    usual = statistics.median(pairs) if pairs else 0.0
    nearest = {student: _nearest(own, public) for student, own in found.items()}
    usual_to_public = statistics.median(most for most, _ in nearest.values()) if nearest else 0.0
    for student, others in alike.items():
        most = max(others.values(), default=0.0)
        named = [other for other, x in others.items() if x == most > 0]
        more = f" and {len(named) - MOST_NAMED} more" * (len(named) > MOST_NAMED)
        of_class = ["; ".join(named[:MOST_NAMED]) + more, most, usual, sum(x >= most for x in pairs), len(pairs)]
        to_public, name = nearest[student]
        yield [exercise.id, student, *of_class, name, to_public, usual_to_public]


def _nearest(own: Prints, public: dict[str, Prints]) -> tuple[float, str]:
    most = ((likeness(own, there), name) for name, there in public.items())
    return max(most, key=lambda pair: pair[0], default=(0.0, ""))


def likeness(one: Prints, other: Prints) -> float:
    """The fraction of all prints that both have, from 0 to 1."""
    both = len(one & other)
    return both / max(1, len(one) + len(other) - both)


def prints(known: Definitions, name: str) -> Prints:
    """The prints of a definition, with those of the functions and classes that it uses."""
    nodes: list[str] = []
    used, left = {name}, [name]
    while left and len(nodes) < MOST_NODES:
        if (definition := known.get(left.pop())) is None:
            continue
        own = _own_names(definition) | known.keys()
        for node in _in_order(definition):
            nodes.append(_word(node, own))
            if isinstance(node, ast.Name) and node.id in known and node.id not in used:
                used.add(node.id)
                left.insert(0, node.id)
    nodes = nodes[:MOST_NODES]
    return frozenset(tuple(nodes[k : k + RUN]) for k in range(max(1, len(nodes) - RUN + 1)) if nodes)


def definitions(texts: Iterable[str]) -> Definitions:
    """The functions, classes and lambdas with a name at the top of some cells or files."""
    found: Definitions = {}
    for statement in (statement for text in texts for statement in parse(text).body):
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found[statement.name] = statement
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            found[statement.targets[0].id] = statement
    return found


def _own_names(definition: ast.stmt) -> set[str]:
    """The names that its author chose: of functions, arguments, variables, and attributes of `self`."""
    names: set[str] = set()
    for node in ast.walk(definition):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            of = node.value
            names |= {node.attr} if isinstance(of, ast.Name) and of.id == "self" else set()
    return names


def _in_order(definition: ast.stmt) -> Iterator[ast.AST]:
    """The nodes as they are written, without docstrings, annotations and what does nothing."""
    left: list[ast.AST] = [definition]
    while left:
        node = left.pop()
        yield node
        notes = (getattr(node, "annotation", None), getattr(node, "returns", None))
        left += [
            child
            for child in reversed([*ast.iter_child_nodes(node)])
            if child not in notes
            and not isinstance(child, (ast.expr_context, ast.Pass))
            and not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant))
        ]


def _word(node: ast.AST, own: set[str]) -> str:
    """A node, with what its author did not choose."""
    if isinstance(node, ast.Name):
        return "name" if node.id in own else node.id
    if isinstance(node, ast.Attribute):
        return ".name" if node.attr in own else f".{node.attr}"
    if isinstance(node, ast.Constant):
        return f"{node.value:x}"[:20] if isinstance(node.value, int) else repr(node.value)[:20]
    if isinstance(node, ast.keyword):
        return f"{node.arg}="
    return type(node).__name__


@functools.cache
def _chapter(folder: str, chapter: str) -> dict[str, Definitions]:
    """Name of a file -> what it defines, of the book's notebooks of a chapter; none where the book is not whole."""
    found = {}
    for path in sorted((BOOK / folder).glob(f"{chapter}*.ipynb")):
        try:
            found[f"{folder}/{path.name}"] = definitions(text for _, text in read_notebook(str(path)).cells)
        except NotebookError:
            continue
    return found


def _given(exercise: Exercise) -> Prints:
    """The prints of what the handout gives: a stub, and the functions beside it."""
    handed_out = _chapter("exercises", exercise.chapter).values()
    return frozenset().union(*(prints(known, name) for known in handed_out for name in known))


def _published(exercise: Exercise) -> dict[str, Prints]:
    """Where it is printed -> a right answer, of the exercise and of all its rows."""
    found = {}
    for name, known in _chapter("solutions", exercise.chapter).items():
        if exercise.title in known:
            found[name] = prints(known, exercise.title)
    for right in (right for one in exercise.rows.values() for right in one.right):
        program = inspect.unwrap(getattr(right, "func", right))
        is_text = inspect.isfunction(program) or inspect.isclass(program)
        path = inspect.getsourcefile(program) if is_text else None
        if path and Path(path).is_file():  # else it was made while Python ran
            found[f"{Path(path).name}, {program.__name__}"] = prints(_file(path), program.__name__)
    return {name: own for name, own in found.items() if own}  # a program in another one is none of its file


@functools.cache
def _file(path: str) -> Definitions:
    return definitions([Path(path).read_text(encoding="utf-8")])
