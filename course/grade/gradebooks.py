"""Points in a platform's own table, which a teacher uploads there."""

from __future__ import annotations

import csv
import re
from collections import Counter
from pathlib import Path

from course.check.cells import printable
from course.grade.assignment import Assignment
from course.grade.reports import Grade, write_csv
from course.grade.sheets import sheet_rows

_OF_MOODLE = "Identifier", "Full name", "Grade", "Maximum grade", "Grade can be changed"  # columns


def fill_canvas(
    export: str, out: Path, assignment: Assignment, grades: list[Grade], totals: dict[str, float]
) -> list[str]:
    """A copy of Canvas' exported gradebook with one column filled; returns the students that it does not have.

    Args:
        export: the gradebook's file; the column has the title of the assignment.
        out: the file of the copy.
        totals: student -> points.

    Raises:
        ValueError: the file is no export of a gradebook.
    """
    with open(export, encoding="utf-8-sig", newline="") as file:
        rows = list(csv.reader(file))
    head = rows[0] if rows else []
    if "ID" not in head or "Student" not in head:
        raise ValueError(f"{export} is no gradebook of Canvas: its first line has no Student and no ID")
    names = [i for i, name in enumerate(head) if name.split(" (")[0].strip() == assignment.title]
    if len(names) != 1:
        raise ValueError(f"{export} has {len(names)} columns called {assignment.title!r}; there must be one")
    students = {key: given["student"] for given in grades for key in (given["number"], given["student"]) if key}
    login = head.index("SIS Login ID") if "SIS Login ID" in head else head.index("ID")
    lost = dict.fromkeys(given["student"] for given in grades)
    for row in rows[1:]:
        keys = [row[i] for i in (head.index("ID"), login) if i < len(row) and row[i]]
        known = next((key for key in keys if key in students), None)
        if known is not None:
            row[names[0]] = f"{totals[students[known]]:g}"
            lost.pop(students[known], None)
    write_csv(out, rows)
    return [*lost]


def fill_moodle(
    worksheet: str, out: Path, assignment: Assignment, grades: list[Grade], totals: dict[str, float]
) -> list[str]:
    """A copy of Moodle's grading worksheet with its grades; returns the students without one, and why.

    A student is known by the number of the participant, which Moodle writes into the name of each file. Somebody of
    whom there is no file is known by the full name, if only one participant has it.

    Args:
        worksheet: the file that an assignment's "Download grading worksheet" gives, in English.
        out: the file of the copy.
        totals: student -> points.

    Raises:
        ValueError: the file is no such worksheet, or Moodle has a different number of points.
    """
    head, *rows = sheet_rows(worksheet) or [[]]
    columns = {name.strip().lower(): k for k, name in enumerate(head)}
    if missing := [name for name in _OF_MOODLE if name.lower() not in columns]:
        raise ValueError(
            f"{worksheet} is no grading worksheet of Moodle: its first line has no {missing[0]}. Moodle must be in "
            "English when you download it, and when you upload it"
        )
    rows = [[*row, *[""] * (len(head) - len(row))] for row in rows]
    number, name, grade, most_of, may_change = (columns[name.lower()] for name in _OF_MOODLE)
    most = assignment.max_score + assignment.points_by_hand
    if other := next((row[most_of] for row in rows if _number(row[most_of]) != most), ""):
        raise ValueError(
            f"{worksheet} has a maximum grade of {other}, and {assignment.title} has {most:g} points: set these in "
            "Moodle, which takes no grade above its maximum, and download the worksheet again"
        )
    numbers = {given["number"]: given["student"] for given in grades if given["number"]}
    names = {given["student"] for given in grades if not given["number"]}
    namesakes = Counter(printable(row[name]) for row in rows)
    lost = {given["student"]: "" for given in grades}
    for row in rows:
        full = printable(row[name])
        student = numbers.get(
            re.sub(r"\D", "", row[number]), full if namesakes[full] == 1 and full in names else None
        )
        if student is None:
            continue
        if row[may_change].strip().lower() == "no":
            lost[student] = " (Moodle has locked the grade)"
        else:
            row[grade] = f"{totals[student]:g}"
            lost.pop(student, None)
    write_csv(out, [head, *rows])
    return [f"{student}{why}" for student, why in lost.items()]


def _number(cell: str) -> float | None:
    try:
        return float(cell.replace(",", "."))
    except ValueError:
        return None
