"""What tests of the grader share: a course and its submissions, and whether this machine has a jail for them."""

import csv
import json
import os
from pathlib import Path

import pytest

from course.grade import sight
from course.grade.__main__ import USER, main
from course.grade.submissions import Submission

ROOT = Path(__file__).parents[2]
ASKED = {"id": "hw", "title": "Homework", "exercises": {"03.1": 3, "03.2": 2}}
SETUP = "import os, sys, time, torch\nimport torch.distributed as dist\nfrom lib import comm"
RIGHT = """def average_gradients(params, group):
    used = comm.all_reduce(torch.tensor([float(p.grad is not None) for p in params]), group)
    for p, ranks in zip(params, used):
        if ranks:
            g = torch.zeros_like(p) if p.grad is None else p.grad
            p.grad = comm.all_reduce(g, group, op="mean")"""
WRONG = RIGHT.replace(', op="mean"', "")
THIRD = RIGHT.replace('comm.all_reduce(g, group, op="mean")', "comm.all_reduce(g, group) / 3")
OTHER = """def global_gradient(g, count, group):
    return comm.all_reduce(g, group) / comm.all_reduce(torch.tensor(float(count)), group)"""
WHY = "**why** (5 points). Why?"  # the cell of a question in words


def an_answer(body, head="average_gradients(params, group)"):
    return f"def {head}:\n    " + body.replace("\n", "\n    ")


def markdown(*texts):
    return [{"cell_type": "markdown", "source": text} for text in texts]


def write_notebook(path, *cells):
    """A notebook; a cell is its source, or a dict of more."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = [cell if isinstance(cell, dict) else {"source": cell} for cell in cells]
    cells = [{"cell_type": "code", "metadata": {}} | cell for cell in cells]
    path.write_text(json.dumps({"cells": cells, "nbformat": 4, "nbformat_minor": 5, "metadata": {}}))


class Course:
    """A folder with a homework, `ASKED` with changes, and what students hand in."""

    def __init__(self, folder, **changes):
        self.folder, self.asked = folder, ASKED
        self.submissions, self.grades = folder / "submissions", folder / "grades"
        self.by_hand = self.grades / "by_hand.csv"
        self.submissions.mkdir()
        self.asks(**changes)

    def asks(self, **changes):
        """The homework changes."""
        self.asked = self.asked | changes
        (self.folder / "hw.json").write_text(json.dumps(self.asked))

    def has_cases(self, *exercises, before=""):
        """From now on the teacher has hidden cases."""
        begin = f"from dataclasses import replace\nfrom course.check import find\n{before}\n"
        (self.folder / "cases.py").write_text(f"{begin}EXERCISES = [{', '.join(exercises)}]\n")

    def hands_in(self, student, *cells, file="03.ipynb"):
        write_notebook(self.submissions / student / file, *cells)

    def command(self, *more, **tables):
        """The arguments of the grader; of each table, such as `roster`, the text."""
        args = [str(self.folder / "hw.json"), str(self.submissions), "--out", str(self.grades), *more]
        if (self.folder / "cases.py").exists():
            args += ["--cases", str(self.folder / "cases.py")]
        for name, text in tables.items():
            (self.folder / f"{name}.csv").write_text(text)
            args += [f"--{name}", str(self.folder / f"{name}.csv")]
        return args

    def grade(self, **tables):
        """Grade with the teacher's own rights; returns the exit code."""
        return main(self.command("--trust", **tables))

    def rows(self, code=0, **tables):
        """Grade, with this exit code, and return student -> row of grades.csv."""
        assert self.grade(**tables) == code
        with open(self.grades / "grades.csv", newline="", encoding="utf-8-sig") as file:
            return {row["student"]: row for row in csv.DictReader(file)}

    def given(self, student):
        """What the grader keeps of this student."""
        return json.loads((self.grades / "students" / f"{student}.json").read_text())

    def told(self, student):
        """What this student gets back."""
        return (self.grades / "feedback" / f"{Submission(student).file_name}.md").read_text()

    def enter(self, old, new):
        """A person changes the table of answers in words."""
        text = self.by_hand.read_text()
        assert old in text
        self.by_hand.write_text(text.replace(old, new))


# ---- the jail -------------------------------------------------------------------------------------------------------


def _why_not() -> str:
    if os.geteuid() != 0:
        return "only root can give students' code a user of its own"
    path = sight.unreadable(USER)
    return f"students' code cannot read {path}, and no view of its own is allowed here" if path else ""


def _new_view() -> None:
    if sight._libc.unshare(sight._NEW_VIEW):
        raise OSError("not allowed")


WHY_NOT = _why_not()
needs_jail = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
needs_view = pytest.mark.skipif(
    os.geteuid() != 0 or not sight.in_child(_new_view),
    reason="the system allows no view of the disk of one's own",
)
alone = pytest.mark.alone("a second run would kill the processes of the user that both have")
