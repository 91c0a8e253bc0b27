"""Points in a platform's own table, which a teacher uploads there."""

from __future__ import annotations

import csv
from pathlib import Path

from course.grade.assignment import Assignment
from course.grade.reports import Grade, write_csv


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
