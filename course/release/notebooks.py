"""The notebooks of a homework: the sections of its exercises, copied from the notebooks of the book."""

from __future__ import annotations

import copy
import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from course.check.exercise import Exercise
from course.check.source import PROGRESS, YOUR_ANSWER
from course.grade.assignment import Assignment, Question

ASKED = "exercises"  # key in a notebook's metadata: its exercises, with their points
_CHECK = re.compile(r'^check\("([^"]+)"', re.MULTILINE)
_BEGIN = "    ### BEGIN SOLUTION"
_BACKGROUND = re.compile(r"\[chapter \d+\]\([^)]*\)")  # the book's link to it
_CALL = re.compile(r"^(check\(.*)\)$", re.MULTILINE)


def homework(book: Path, kind: str, assignment: Assignment) -> dict[str, NotebookNode]:
    """The notebooks of a homework by name, in order of chapters; the last notebook also has the questions.

    Args:
        book: the book's folder.
        kind: "exercises", or "solutions" with answers, which the teacher's platform removes.

    Raises:
        ValueError: no notebook of the book has an exercise; write a task for it.
    """
    ids = [exercise.id for exercise in assignment.exercises]
    found: dict[str, NotebookNode] = {}
    for path in sorted((book / kind).glob("*.ipynb")):
        whole = nbformat.read(path, as_version=4)
        if here := [i for i in _CHECK.findall("\n".join(c.source for c in whole.cells)) if i in ids]:
            found[path.name] = _cut(whole, path.name, here, assignment, restores_check=kind == "solutions")
    if lost := {*ids} - {i for notebook in found.values() for i in notebook.metadata[ASKED]}:
        raise ValueError(
            f"no notebook in {book / kind} has exercise {min(lost)}: write its task into one of solutions/, "
            "as CONTRIBUTING.md describes, then run make exercises"
        )
    last = [*found.values()][-1]
    for name, notebook in found.items():
        title, questions = notebook.cells[0], assignment.by_hand if notebook is last else {}
        title.source = _title(name, title.source, assignment, notebook.metadata[ASKED], questions)
    if assignment.by_hand:
        progress = next(k for k, cell in enumerate(last.cells) if cell.source.startswith(PROGRESS))
        last.cells[progress:progress] = _questions(assignment.by_hand, with_answers=kind == "solutions")
    for notebook in found.values():
        nbformat.validate(notebook)
    return found


def _cut(
    whole: NotebookNode, name: str, ids: list[str], assignment: Assignment, restores_check: bool
) -> NotebookNode:
    sections: list[list[NotebookNode]] = [[]]
    helpers = ""  # functions above an answer that it calls: they move into it, where a platform takes both out
    for cell in whole.cells:
        if "solution-only" in cell.metadata.get("tags", ()):
            helpers += f"\n{cell.source}" * (cell.cell_type == "code")
            continue
        if cell.cell_type == "markdown" and cell.source.startswith("## "):
            sections.append([])
            helpers = ""
        sections[-1].append(copy.deepcopy(cell))
        if cell.metadata.get("nbgrader", {}).get("solution"):
            sections[-1][-1].source = cell.source.replace(_BEGIN, _BEGIN + textwrap.indent(helpers, "    "), 1)
    head, *rest, progress = sections
    for cell in head:
        cell.source = cell.source.replace(f"solutions/{name}", f"exercises/{name}")
    of = {exercise.id: exercise for exercise in assignment.exercises}
    kept = [s for s in rest if {*_CHECK.findall("\n".join(c.source for c in s))} & {*ids}]
    for cell in (cell for section in kept for cell in section):
        marks = cell.metadata.get("nbgrader", {})
        if marks.get("grade"):  # its points in this homework, not in the book
            exercise = of[_CHECK.findall(cell.source)[0]]
            marks["points"] = assignment.points[exercise.id]
            row = f', row="{exercise.row}"' if exercise.row else ""
            cell.source = _CALL.sub(rf"\1{row}, points={marks['points']:g})", cell.source)
            if restores_check:  # a student's cell above may have replaced `check`
                cell.source = f"from course.check import check\n\n{cell.source}"
    metadata = {key: whole.metadata[key] for key in ("kernelspec", "language_info") if key in whole.metadata}
    points = {i: assignment.points[i] for i in ids}
    for cell in progress:
        cell.source = cell.source.replace("progress()", f"progress({_as_python(points)})")
    for section in kept:
        _say_row(section, of)
    cells = [*head, *(cell for section in kept for cell in section), *progress]
    for cell in cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return nbformat.v4.new_notebook(cells=cells, metadata={**metadata, ASKED: points})


def _say_row(section: list[NotebookNode], of: Mapping[str, Exercise]) -> None:
    """Above the stub, how the task of this student differs from the one in the book."""
    exercise = of[_CHECK.findall("\n".join(cell.source for cell in section))[0]]
    if exercise.row:
        stub = next(k for k, cell in enumerate(section) if cell.metadata.get("nbgrader", {}).get("solution"))
        text = f"**You have row {exercise.row}.** Your task differs from the one above: {exercise.task}"
        section.insert(stub, nbformat.v4.new_markdown_cell(text, id=f"row-{section[stub].id}"))


def _as_python(points: dict[str, float]) -> str:
    """The source code of a dict."""
    return "{" + ", ".join(f'"{i}": {most:g}' for i, most in points.items()) + "}"


def _title(
    name: str, old: str, assignment: Assignment, points: Mapping[str, float], questions: Mapping[str, Question]
) -> str:
    chapter = re.search(r"^# (.*?)(?:: (?:exercises|solutions))?$", old, re.MULTILINE)
    subject = chapter[1] if chapter else name
    background = _BACKGROUND.search(old)
    asked = _count("exercise", points.values())
    asked += f", and {_count('question', (one.points for one in questions.values()))}" if questions else ""
    due = f", due {assignment.due:%A, %d %B %Y, %H:%M %Z}" if assignment.due else ""
    return (
        f"# {assignment.title}\n\n{subject}: {asked}{due}.\n\n"
        f"The background is in {background[0] if background else f'chapter {int(name[:2])}'}. Hand in this file, with "
        "its name."
    )


def _count(what: str, points: Iterable[float]) -> str:
    points = list(points)
    return f"{len(points)} {what}{'s' * (len(points) > 1)}, {sum(points):g} points"


def _questions(asked: dict[str, Question], with_answers: bool) -> Iterable[NotebookNode]:
    def cell(name: str, text: str) -> NotebookNode:
        return nbformat.v4.new_markdown_cell(text, id=name)  # a fixed id: two handouts can be compared

    yield cell("questions", "## Questions\n\nAnswer in words and numbers, in the cell below each.")
    for name, one in asked.items():
        yield cell(f"{name}-question", f"**{name}** ({one.points:g} points). {one.in_handout}")
        model = "\n\n".join(f"{row and f'**Row {row}.** '}{text}" for row, text in one.answers.items())
        answer = cell(name, model if with_answers else YOUR_ANSWER)
        marks = {"grade_id": name, "grade": True, "solution": True, "locked": False, "task": False}
        answer.metadata["nbgrader"] = marks | {"schema_version": 3, "points": one.points}
        yield answer
