"""Files for platforms: the same homework for nbgrader, Gradescope, otter, GitHub Actions and Classroom 50."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable
from typing import Any

import nbformat
from nbformat import NotebookNode

from course.grade.assignment import Assignment

NBGRADER = """# nbgrader_config.py: {title}
# Install the book's library where notebooks are graded, and without a copy (-e): a copy has right programs, too.
# pip install -e /path/to/the/book -c /path/to/the/book/constraints.txt
c = get_config()
c.CourseDirectory.course_id = "parallel-by-hand"
c.ClearSolutions.code_stub = {{"python": "# YOUR CODE HERE\\nraise NotImplementedError"}}
c.ClearSolutions.text_stub = "*Your answer.*"
# The longest check takes seconds, and it detects a deadlock.
c.ExecutePreprocessor.timeout = 120
"""

# Gradescope unzips a submission into submission/, runs this as root and reads results.json. The first file stays if the
# grader dies. Only root may read right programs, model answers and hidden cases: students' code runs as another user.
RUN_AUTOGRADER = """#!/usr/bin/env bash
cd /autograder/source
chmod 700 /autograder/results
chmod 600 {secret}
chmod 700 course/exercises
results=/autograder/results/results.json
echo '{{"score": 0, "output": "The grader ended early: please tell your teacher."}}' > $results
rm -rf /tmp/given /tmp/grades && mkdir -m 700 /tmp/given && cp -rp /autograder/submission /tmp/given/student
timeout {seconds} {python} -m course.grade {id}.json /tmp/given --out /tmp/grades --gradescope $results{more}
"""
SETUP_SH = """#!/usr/bin/env bash
set -e
python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {{ echo "Choose an image with Python 3.11"; exit 1; }}
# The Python of the system accepts no packages in current images.
python3 -m venv /opt/book || {{ apt-get update && apt-get install -y python3-venv && python3 -m venv /opt/book; }}
/opt/book/bin/pip install --index-url https://download.pytorch.org/whl/cpu {torch}
/opt/book/bin/pip install {others}
"""
PYTHON = "/opt/book/bin/python"  # setup.sh installs it
CASES = "cases.py"  # in the folder of the assignment, if there are hidden cases

ACTIONS = """# .github/workflows/check.yml: runs the checks at each push. Students can edit it: it gives no grade.
name: check
on: [push]
jobs:
  check:
    runs-on: ubuntu-latest
    timeout-minutes: 20
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with: {{python-version: "3.12"}}
      - run: pip install --index-url https://download.pytorch.org/whl/cpu {torch}
      - run: pip install {others}
      - run: |
          set -o pipefail
          python -m course.check {notebooks} | tee verdict.txt
      - if: always()
        run: |
          {{ echo '```'; cat verdict.txt; echo '```'; }} >> "$GITHUB_STEP_SUMMARY"
"""

# Classroom 50 runs this once per submission, in the student's repository; the library and the assignment lie beside it.
# All of it is served to whoever knows the address, so it has neither model answers nor hidden cases.
# The script writes result.json, whose points must be whole numbers, and release-body.md, which the student sees. The
# exit code is 0 for any number of points; with a different exit code there is no score.
# GitHub's machines allow sudo: as root, the grader runs students' code as a user without rights. `-P`: Python must not
# import a folder lib/ or course/ that a student pushed.
CLASSROOM50 = """#!/usr/bin/env python3
import datetime, fractions, importlib.util, json, math, os, pathlib, shutil, subprocess, sys, tempfile

here, given, grades = pathlib.Path(__file__).resolve().parent, pathlib.Path(tempfile.mkdtemp()), tempfile.mkdtemp()
variable = os.environ.get
for name in ("result.json", "release-body.md"):
    pathlib.Path(name).unlink(missing_ok=True)  # a student may have pushed one
shutil.copytree(".", given / variable("USERNAME"), symlinks=True, ignore=shutil.ignore_patterns(".git"))
if importlib.util.find_spec("torch") is None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--index-url", "https://download.pytorch.org/whl/cpu", {torch}], check=True)
    subprocess.run([*pip, {others}], check=True)
root, trust = ["env", f"PYTHONPATH={{here}}"], []
if os.geteuid():
    sudo = ["sudo", "-n"]
    if shutil.which("sudo") and not subprocess.run([*sudo, "true"]).returncode:
        root = [*sudo, *root]
    else:
        trust = ["--trust"]
        print("There is no root here: students' code runs as the grader, and could write its own points.")
grade = [sys.executable, "-P", "-m", "course.grade", str(here / "{id}.json"), str(given), "--out", grades]
command = [*root, *grade, *trust]
ended = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
print(ended.stdout)
if ended.returncode:
    sys.exit("The grader ended early.")

def read(*path):
    return subprocess.run([*root, "cat", str(pathlib.Path(grades, *path))], check=True, stdout=subprocess.PIPE).stdout

rows = json.loads(read("students", variable("USERNAME") + ".json"))["results"]
points = [row[key] for row in rows for key in ("max", "points")]
times = math.lcm(*(fractions.Fraction(x).limit_denominator(1000).denominator for x in points))
tests = [{{
    "test-name": " ".join([row["exercise"], row["title"] + ",", row["case"]]),
    "passed": row["status"] == "PASS", "score": round(times * row["points"]), "max-score": round(times * row["max"]),
}} for row in rows]
body = read("feedback", variable("USERNAME") + ".md").decode()
if times > 1:
    body += f"\\nClassroom 50 counts whole points: its score is {{times}} times the points above.\\n"
pathlib.Path("release-body.md").write_text(body)
pathlib.Path("result.json").write_text(json.dumps({{
    "schema": "classroom50/result/v1",
    "classroom": variable("CLASSROOM"), "assignment": variable("ASSIGNMENT"), "owner": variable("USERNAME"),
    "assignment_type": variable("ASSIGNMENT_TYPE"), "submission": variable("SUBMISSION_TAG"),
    "commit": variable("COMMIT_URL"), "release": variable("RELEASE_URL"), "review": variable("REVIEW_URL"),
    "datetime": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    "score": sum(test["score"] for test in tests), "max-score": sum(test["max-score"] for test in tests),
    "tests": tests,
}}))
"""
RUNTIME = '{"runs-on": "ubuntu-latest", "python": "3.12"}'  # of Classroom 50's assignment

# otter compares what a test prints: after a PASS one word, otherwise the text with the hint.
OTTER_TEST = """try:
    from course.check import verdict
    text, status = verdict("{}", {}, points={:g}, told=True)
    text += "\\n  Here otter gives a task all of its points or none." * ("[x]" in text)
except ImportError as error:
    text = status = f"Not graded: the book's library is not installed where otter runs, and must be ({{error}})."
print(status if status == "PASS" else text)"""
# Students get the lines between the quotes in place of the answer.
OTTER_STUB = r'''\1# END SOLUTION
\1""" # BEGIN PROMPT
\1# YOUR CODE HERE
\1raise NotImplementedError
\1"""; # END PROMPT'''


def for_gradescope(assignment: Assignment, packages: Iterable[str], with_cases: bool) -> dict[str, str]:
    """Files at the root of the zip, which also has `lib/`, the assignment and perhaps `CASES`."""
    torch, others = _split(packages)
    name, seconds = assignment.id, 120 + 60 * len(assignment.exercises)
    secret, more = f"{name}.json" + f" {CASES}" * with_cases, f" --cases {CASES}" * with_cases
    script = RUN_AUTOGRADER.format(id=name, seconds=seconds, python=PYTHON, secret=secret, more=more)
    return {"setup.sh": SETUP_SH.format(torch=torch, others=others), "run_autograder": script}


def for_actions(notebooks: Iterable[str], packages: Iterable[str]) -> str:
    """A workflow for the repository that students get."""
    torch, others = _split(packages)
    return ACTIONS.format(torch=torch, others=others, notebooks=" ".join(f"exercises/{name}" for name in notebooks))


def for_classroom50(assignment: Assignment, fields: dict[str, Any], packages: Iterable[str]) -> dict[str, str]:
    """Files of the assignment's folder, which also has `lib/`; `fields` are those of the assignment's file."""
    torch, *others = map(repr, packages)
    script = CLASSROOM50.format(id=assignment.id, torch=torch, others=", ".join(others))
    open_to_all = json.dumps({**fields, "by_hand": {}}, indent=1)
    return {"autograder.py": script, "runtime.json": RUNTIME, f"{assignment.id}.json": open_to_all}


def _split(packages: Iterable[str]) -> tuple[str, str]:
    quoted = [f"'{package}'" for package in packages]
    return quoted[0], " ".join(quoted[1:])


def for_otter(notebook: NotebookNode, packages: Iterable[str]) -> NotebookNode:
    """A notebook of solutions in the form that `otter assign` reads: questions between raw cells.

    Otter installs the packages where it grades.
    A check is the test of its question. It runs in the student's kernel, so a student can forge its result.
    """
    new, cells = nbformat.v4, []
    graded = [m for cell in notebook.cells if (m := cell.metadata.get("nbgrader", {})).get("grade")]
    points = {marks["grade_id"]: marks["points"] for marks in graded}

    def raw(*texts: str) -> None:
        cells.extend(map(new.new_raw_cell, texts))

    raw(f"# ASSIGNMENT CONFIG\nrequirements: [{', '.join(packages)}]\ncheck_all_cell: false\nexport_cell: false")
    for cell in notebook.cells:
        marks = cell.metadata.get("nbgrader", {})
        if cell.cell_type == "markdown" and marks.get("solution"):
            question = cells.pop()
            raw(f"# BEGIN QUESTION\nname: {marks['grade_id']}\npoints: {marks['points']:g}\nmanual: true")
            cells.append(question)
            raw("# BEGIN SOLUTION")
            cells.append(new.new_markdown_cell(cell.source))
            raw("# END SOLUTION", "# END QUESTION")
        elif marks.get("grade"):
            exercise, answer = re.findall(r'check\("([^"]+)", (\w+)', cell.source)[0]
            raw("# BEGIN TESTS")
            cells.append(new.new_code_cell(OTTER_TEST.format(exercise, answer, marks["points"])))
            cells[-1].outputs = [new.new_output("stream", name="stdout", text="PASS\n")]
            raw("# END TESTS", "# END QUESTION")
        elif marks.get("solution"):
            name = marks["grade_id"]
            raw(f"# BEGIN QUESTION\nname: {name}\npoints: {points[f'check-{name}']:g}", "# BEGIN SOLUTION")
            source = cell.source.replace("### BEGIN SOLUTION", "# BEGIN SOLUTION NO PROMPT")
            cells.append(new.new_code_cell(re.sub("^( *)### END SOLUTION$", OTTER_STUB, source, flags=re.MULTILINE)))
            raw("# END SOLUTION")
        else:
            cells.append(copy.deepcopy(cell))
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
    return new.new_notebook(cells=cells, metadata=notebook.metadata)
