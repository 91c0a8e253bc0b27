"""Points that the real nbgrader gives: `make nbgrader` installs it into a folder of its own and runs this."""

import json
import os
import shutil
import subprocess
import sys

import nbformat
import pytest

from course.release.__main__ import main
from tests.course.homework import RIGHT, THIRD, WRONG

NBGRADER = os.environ.get("NBGRADER")  # the folder with its programs
pytestmark = [
    pytest.mark.skipif(not NBGRADER, reason="make nbgrader"),
    pytest.mark.slow("nbgrader starts a kernel for each submission"),
    pytest.mark.timeout(600),
]

ENDLESS = "def average_gradients(params, group):\n    while True: pass"
NOISY = "import sys\nprint('noise', file=sys.stderr)\n" + RIGHT.replace(
    "    for p", "    print('more', file=sys.stderr)\n    for p"
)
FIRST_CELL = "import os\nos.environ.pop('NBGRADER_EXECUTION', None)\nos.environ['CHECK_STRICT'] = '0'"
# Student -> answer to 03.1 (4 points; None: as it was handed out), and the points that nbgrader must give.
STUDENTS = {
    "right": (RIGHT, 4),
    "half": (THIRD, 2),  # right on three ranks, one of the two cases
    "wrong": (WRONG, 0),
    "untouched": (None, 0),
    "endless": (ENDLESS, 0),
    "noisy": (NOISY, 4),
    "shadows": ("def check(*args, **more): pass\n" + WRONG, 0),
    "above the imports": (WRONG, 0),
    "above the imports, untouched": (None, 0),
    "environment": ("import os\nos.environ['NBGRADER_EXECUTION'] = os.environ['CHECK_STRICT'] = ''\n" + WRONG, 0),
}
SCORES = """import json, sys
from nbgrader.api import Gradebook
with Gradebook("sqlite:///gradebook.db") as book:
    grades = [(s.student.id, g.auto_score, g.name) for s in book.assignment_submissions("hw")
              for n in s.notebooks for g in n.grades if g.name.startswith("check-")]
    print(json.dumps(grades))
"""


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A course with one homework, released."""
    folder = tmp_path_factory.mktemp("course")
    asked = {"id": "hw", "title": "Homework", "exercises": {"03.1": 4}}
    (folder / "hw.json").write_text(json.dumps(asked))
    assert main([str(folder / "hw.json"), "--out", str(folder / "out")]) == 0
    shutil.copytree(folder / "out" / "hw" / "nbgrader", folder, dirs_exist_ok=True)
    kernel = folder / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "Python 3", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    nbgrader(folder, "generate_assignment", "hw", "--create", "--force")
    return folder


def nbgrader(course, *args, **environment):
    """Run it as a teacher does; its programs and the book's kernel are found, and no variable of ours is set."""
    known = {k: v for k, v in os.environ.items() if k not in ("CHECK_STRICT", "NBGRADER_EXECUTION")}
    known |= {"PATH": f"{NBGRADER}:{os.environ['PATH']}", "JUPYTER_PATH": str(course / "jupyter")}
    command = [f"{NBGRADER}/nbgrader", *args]
    ended = subprocess.run(command, cwd=course, env=known | environment, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def submit(course, student, answer):
    path = course / "submitted" / student / "hw" / "03_data_parallelism.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    book = nbformat.read(course / "release" / "hw" / path.name, as_version=4)
    for cell in book.cells:
        if answer and cell.metadata.get("nbgrader", {}).get("grade_id") == "average-gradients":
            cell.source = answer
    if student.startswith("above the imports"):
        book.cells.insert(0, nbformat.v4.new_code_cell(FIRST_CELL))
    nbformat.write(book, path)


def points(course):
    said = subprocess.run(
        [f"{NBGRADER}/python", "-c", SCORES], cwd=course, capture_output=True, text=True, check=True
    )
    return {student: score for student, score, _ in json.loads(said.stdout)}


def test_what_students_get_has_no_answer(course):
    given = (course / "release" / "hw" / "03_data_parallelism.ipynb").read_text()
    assert "raise NotImplementedError" in given and "BEGIN SOLUTION" not in given and "solution-only" not in given
    assert json.loads(given)["metadata"]["exercises"] == {"03.1": 4}


def test_points_of_each(course):
    for student, (answer, _) in STUDENTS.items():
        submit(course, student, answer)
    nbgrader(course, "autograde", "hw", "--force")
    assert points(course) == {student: wanted for student, (_, wanted) in STUDENTS.items()}


def test_points_with_our_own_variable(course):
    """`CHECK_STRICT=1` is for other graders, and changes nothing here."""
    asked = ("half", "wrong", "untouched")
    for student in STUDENTS:
        shutil.rmtree(course / "submitted" / student, ignore_errors=True)
    for student in asked:
        submit(course, student, STUDENTS[student][0])
    nbgrader(course, "autograde", "hw", "--force", CHECK_STRICT="1")
    found = points(course)
    assert {student: found[student] for student in asked} == {student: STUDENTS[student][1] for student in asked}


def test_a_teacher_validates(course):
    assert "Success" in nbgrader(course, "validate", "source/hw/03_data_parallelism.ipynb")
    said = nbgrader(course, "validate", "release/hw/03_data_parallelism.ipynb")
    assert "failed" in said and "average_gradients" in said
