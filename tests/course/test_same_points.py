"""The same notebook gets the same points from course.grade, nbgrader and otter, or a sentence says why not."""

import json
import os
import subprocess
import sys

import nbformat
import pytest

from course.check.judge import PASS
from course.grade.assignment import read_assignment
from course.grade.grading import grade
from course.grade.jail import User
from course.grade.submissions import find_submissions
from course.release.notebooks import homework
from course.release.platforms import for_otter
from tests.course.homework import RIGHT, ROOT, THIRD, WRONG

pytest.importorskip("IPython.core.interactiveshell")
pytestmark = [
    pytest.mark.slow("a process that imports torch, and each notebook is judged three times"),
    pytest.mark.timeout(300),
]

POINTS, STUB = 4, "raise NotImplementedError"
UNTOUCHED = f"def average_gradients(params, group):\n    {STUB}"
MINE = RIGHT.replace("average_gradients", "mine")
WITH = RIGHT.replace(', op="mean")', ") / TABLE[group.size]")
NOTHING_MORE = ""
# The cells in place of the answer's, the check; the points in course.grade, nbgrader and otter; and the sentence.
NOTEBOOKS = {
    "right": ([RIGHT], "average_gradients", (4, 4, 4), NOTHING_MORE),
    "partly right": ([THIRD], "average_gradients", (2, 2, 0), "otter gives a task all of its points or none"),
    "wrong": ([WRONG], "average_gradients", (0, 0, 0), NOTHING_MORE),
    "untouched": ([UNTOUCHED], "average_gradients", (0, 0, 0), NOTHING_MORE),
    "renamed": ([MINE], "mine", (4, 0, 0), "mine counts, which the check in hw.ipynb names"),
    "with magics": (
        ["%%time\n!echo it's \\\n  so\nif True:\n    %pwd\nwhere = !pwd\n" + RIGHT], "average_gradients", (4, 4, 4), "",
    ),
    "a table that a loop fills": (
        ["TABLE = {}\nfor n in range(9):\n    TABLE[n] = n", WITH], "average_gradients", (4, 4, 4), NOTHING_MORE,
    ),
    "a command's table": (
        ["where = !echo 3\nTABLE = {3: 3, 4: int(where[0]) + 1}", WITH], "average_gradients", (0, 4, 4),
        "where comes from hw.ipynb, code cell 3, line 1, which is not run",
    ),
    "in if": (["if True:\n    " + RIGHT.replace("\n", "\n    ")], "average_gradients", (4, 4, 4), NOTHING_MORE),
    "a Markdown cell": ([{"markdown": RIGHT}], "average_gradients", (0, 0, 0), "change its type to Code"),
    "defined again below": ([RIGHT, "check('03.1', average_gradients)", WRONG], "average_gradients", (0, 0, 0), ""),
}  # fmt: skip

RUNS = r"""
import contextlib, io, json, sys
from IPython.core.interactiveshell import InteractiveShell

def points_of(cells):
    # As nbgrader counts: 0 after an error, the number that the last line returns, or else all.
    shell, points = InteractiveShell(history_manager=None), {}
    shell.showtraceback = shell.showsyntaxerror = lambda *args, **more: None
    for kind, source, most in cells:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            ended = shell.run_cell(source)
        if kind == "check":
            points["nbgrader"] = 0 if not ended.success else most if ended.result is None else ended.result
        if kind == "otter":
            points["otter"], points["said"] = most * (said.getvalue() == "PASS\n"), said.getvalue()
    return points

print(json.dumps([points_of(cells) for cells in json.load(sys.stdin)]))
"""


def of_student(given, answer, check):
    """The handed out notebook with these cells in the place of its answer; what the student sees as checks, edited."""
    book = nbformat.from_dict(given)
    cells = []
    for cell in book.cells:
        marks = cell.metadata.get("nbgrader", {})
        if cell.cell_type == "code" and marks.get("solution"):
            for one in answer:
                make = nbformat.v4.new_markdown_cell if isinstance(one, dict) else nbformat.v4.new_code_cell
                cells.append(make(one["markdown"] if isinstance(one, dict) else one))
        else:
            cells.append(cell)
            if marks.get("grade"):
                cell.source = cell.source.replace("average_gradients", check)
    book.cells = cells
    return book


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """Name of a notebook -> what course.grade gives, and what nbgrader and otter give in one process."""
    folder = tmp_path_factory.mktemp("same")
    (folder / "hw.json").write_text(json.dumps({"id": "hw", "title": "Homework", "exercises": {"03.1": POINTS}}))
    assignment = read_assignment(str(folder / "hw.json"))
    ((_, given),) = homework(ROOT, "solutions", assignment).items()
    (check,) = [cell.source for cell in given.cells if cell.metadata.get("nbgrader", {}).get("grade")]
    (test,) = [cell.source for cell in for_otter(given, ()).cells if "verdict(" in cell.source]
    runs = []
    for name, (answer, checked, *_) in NOTEBOOKS.items():
        book = of_student(given, answer, checked)
        path = folder / "submissions" / name / "hw.ipynb"
        path.parent.mkdir(parents=True)
        nbformat.write(book, path)
        cells = [(cell.cell_type, cell.source, POINTS) for cell in book.cells if cell.cell_type == "code"]
        # Both platforms bring their own check: nbgrader writes it into its cell again.
        edited = check.replace("average_gradients", checked)
        run = [("check", check, most) if source == edited else (kind, source, most) for kind, source, most in cells]
        runs.append([*run, ("otter", test, POINTS)])
    environment = os.environ | {"NBGRADER_EXECUTION": "autograde", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RUNS]
    ended = subprocess.run(
        command, input=json.dumps(runs), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == 0, ended.stderr
    platforms = dict(zip(NOTEBOOKS, json.loads(ended.stdout.splitlines()[-1]), strict=True))
    students = find_submissions(str(folder / "submissions"))
    ours = {one.student: grade(assignment, one, User(None), b"x") for one in students}
    return {name: (ours[name], platforms[name]) for name in NOTEBOOKS}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_points_are_the_same_or_a_sentence_says_why_not(graded, name):
    _, _, wanted, sentence = NOTEBOOKS[name]
    ours, platforms = graded[name]
    assert (ours["score"], platforms["nbgrader"], platforms["otter"]) == wanted, graded[name]
    said = " ".join([*ours["notes"], *(row["hint"] for row in ours["results"]), platforms["said"]])
    assert sentence in said and (sentence or len({*wanted}) == 1), said
    assert bool(ours["notes"]) == (sentence != "" and name != "partly right"), ours["notes"]
    assert all(row["hint"] for row in ours["results"] if row["status"] != PASS)
