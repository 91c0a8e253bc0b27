"""The page's commands for a whole homework, from handouts to grades, with four students for sixty."""

import csv
import re
import subprocess
import sys

import pytest

from course.grade.sheets import read_sheet
from tests.course.homework import ROOT
from tools.made_up_students import names

PAGE = (ROOT / "book" / "teaching.md").read_text(encoding="utf-8")
STUDENTS = 4


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    """What the commands leave, and print."""
    section = PAGE.split("## A whole homework, command by command")[1].split("\n## ")[0]
    script = "\n".join(re.findall(r"```bash\n(.*?)```", section, re.DOTALL))
    folder = tmp_path_factory.mktemp("whole") / "trial"
    for old, new in (
        ("names 60", f"names {STUDENTS}"),
        ("sudo ", ""),
        ("-m course.grade", "-m course.grade --trust"),  # the jail of another test would end these processes
        (".venv/bin/python", sys.executable),
        ("trial", str(folder)),
        ("column -s, -t", "cat"),  # a tool that not every container has
    ):
        assert old in script, old
        script = script.replace(old, new)
    ended = subprocess.run(["bash", "-ec", script], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return folder, ended.stdout


pytestmark = [
    pytest.mark.slow("grades a homework"),
    pytest.mark.timeout(600),
    pytest.mark.thorough("grades a homework"),
]


def test_each_student_has_a_handout_a_grade_and_feedback(trial):
    folder, said = trial
    students = names(STUDENTS)
    rows = {row["student"]: row for row in read_sheet(folder / "release/hw3/teacher/rows.csv")}
    assert {*rows} == {*students}
    grades = {row["student"]: row for row in read_sheet(folder / "grades" / "grades.csv")}
    assert {*grades} == {*students} and {row["look at it because"] for row in grades.values()} == {""}
    assert {row["which-stage"] for row in grades.values()} == {"3.0"}
    assert all(float(row["score"]) == float(row["raw"]) + 3 for row in grades.values())
    assert len({row["raw"] for row in grades.values()}) > 1 and any(float(row["raw"]) for row in grades.values())
    assert len([*(folder / "grades" / "feedback").iterdir()]) == STUDENTS
    assert "# Homework 3: ZeRO and FSDP: Ada Lovelace" in said and said.count("handout file") == 1
    asked = {(row["student"], row["row"]) for row in read_sheet(folder / "grades" / "by_hand.csv")}
    assert asked == {(student, row["which-stage"]) for student, row in rows.items()}


def test_a_failure_has_its_call_and_a_copy_is_seen(trial):
    folder, _ = trial
    told = "".join(path.read_text() for path in (folder / "grades" / "feedback").iterdir())
    assert re.search(r'The same numbers again: check\("0[45]\.\d", \w+, seed=\d+\)', told)
    with open(folder / "grades" / "likeness.csv", newline="", encoding="utf-8-sig") as file:
        rows = [*csv.DictReader(file)]
    assert rows and {row["exercise"] for row in rows} <= {"04.1", "04.2", "04.3", "05.1", "05.2", "05.5"}
    assert rows[0]["likeness"] == "1.00" and rows[0]["most like"] in {*names(STUDENTS)} | {"; ".join(names(2))}


def test_sixty_names_are_sixty():
    assert len({*names(60)}) == 60 and names(60)[-1] == "Jun 李"
