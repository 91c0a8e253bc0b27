"""Made-up students, to try a homework before real ones do it.

`tools/made_up_students.py names 60 > roster.txt` prints their names. After a release,
`tools/made_up_students.py hand-in release/hw3 submissions` fills in the handout of each: with the book's solution, with
a usual mistake, with nothing, or with the answer of the student before, whose variables get different names.
"""

from __future__ import annotations

import random
import re
import sys
import zipfile
from itertools import product
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from course.check import find
from course.check.edits import Edited
from course.grade.sheets import of_cell, read_sheet
from course.release.__main__ import HANDOUT

FIRST = "Ada", "Bruno", "Chidi", "Dora", "Émile", "Fatima", "Goran", "Hana", "Ivan", "Jun"
LAST = "Lovelace", "Okafor", "Nguyen", "Sørensen", "Müller", "李"
KINDS = {"right": 5, "mistake": 3, "nothing": 1, "copy": 1}  # how often, of ten answers
_CHECK = re.compile(r'^check\("([^"]+)", (\w+)', re.MULTILINE)
_LOCAL = re.compile(r"^ +(\w+) = ", re.MULTILINE)


def names(count: int) -> list[str]:
    """So many students; 60 at most."""
    return [f"{first} {last}" for last, first in product(LAST, FIRST)][:count]


def hand_in(release: Path, submissions: Path) -> None:
    """A folder for each student of a release, with the notebooks of the own handout."""
    before: dict[str, str] = {}  # answer -> text, of the student before
    solutions = _cells(nbformat.read(path, 4) for path in release.glob(f"nbgrader/source/{release.name}/*.ipynb"))
    for row in read_sheet(release / "teacher" / "rows.csv", "student", HANDOUT):
        student, drawn = of_cell(row["student"]), random.Random(row["student"])
        folder, answers = submissions / student, {}
        folder.mkdir(parents=True)
        with zipfile.ZipFile(release / "handouts" / row[HANDOUT]) as handout:
            books = {
                Path(name).name: nbformat.reads(handout.read(name).decode(), 4)
                for name in handout.namelist()
                if re.fullmatch(r"[^/]+/exercises/[^/]+\.ipynb", name)
            }
        exercises = {title: i for book in books.values() for c in book.cells for i, title in _CHECK.findall(c.source)}
        for name, cell in _cells(books.values()).items():
            if cell.cell_type == "markdown":
                cell.source = f"By the formula of the chapter. {student}"
                continue
            title = next(title for title in exercises if re.search(rf"^(?:def|class) {title}\b", cell.source, re.M))
            (kind,) = drawn.choices([*KINDS], KINDS.values())
            cell.source = answers[name] = {
                "right": solutions[name].source,
                "mistake": drawn.choice(_wrong(exercises[title]) or [cell.source]),
                "nothing": cell.source,
                "copy": _renamed(before.get(name, cell.source)),
            }[kind]
        for name, book in books.items():
            nbformat.write(book, folder / name)
        before = answers


def _cells(books) -> dict[str, NotebookNode]:
    """The cells that a student fills in, by their `grade_id`."""
    cells = (cell for book in books for cell in book.cells)
    return {m["grade_id"]: cell for cell in cells if (m := cell.metadata.get("nbgrader", {})).get("solution")}


def _wrong(exercise_id: str) -> list[str]:
    """The texts of the usual mistakes that are a program of their own."""
    exercise = find(exercise_id)
    wrong = (mistake.wrong for mistake in exercise.mistakes if not mistake.hangs)
    return [one.text for one in wrong if isinstance(one, Edited) and one.expression == exercise.title]


def _renamed(text: str) -> str:
    """An answer whose variables have other names."""
    for name in {*_LOCAL.findall(text)}:
        text = re.sub(rf"(?<![.\w]){name}\b(?!=)", f"my_{name}", text)
    return text


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["names", count]:
            print(*names(int(count)), sep="\n")
        case ["hand-in", release, submissions]:
            hand_in(Path(release), Path(submissions))
        case _:
            sys.exit(__doc__)
