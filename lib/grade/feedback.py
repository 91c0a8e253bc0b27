"""The text for a student: points, and for each exercise the lines of its check."""

from __future__ import annotations

from typing import Any

from lib.check.judge import PASS
from lib.grade.assignment import Assignment

REVIEW = "REVIEW: "  # the beginning of a note that only the teacher sees


def feedback(assignment: Assignment, given: dict[str, Any], total: float, words: dict[str, float]) -> str:
    """The feedback for one student, in Markdown. For a hidden case it says only whether the answer passed.

    Args:
        assignment: the homework.
        given: the student's grade.
        total: all points, with the points for words.
        words: question -> points that a person entered.
    """
    most = assignment.max_score + assignment.points_by_hand
    lines = [f"# {assignment.title}: {given['student']}", "", f"**{total:g} of {most:g} points**"]
    if given["days_late"]:
        lines[-1] += f". Days late: {given['days_late']}; each point counts {given['late_factor']:g}."
    lines += ["", *(f"- {note}" for note in given["notes"] if not note.startswith(REVIEW))]
    for exercise in assignment.exercises:
        rows = [row for row in given["results"] if row["exercise"] == exercise.id]
        got = sum(row["points"] for row in rows)
        row = next((one["row"] for one in rows), "")
        name = f"{exercise.id} {exercise.title}" + f", row {row}" * bool(row)
        lines += ["", f"## {name}: {got:g} of {assignment.points[exercise.id]:g} points", ""]
        lines += [f"    {line}".rstrip() for line in _verdict(rows)]
    for name, asked in assignment.by_hand.items():
        got = f"{words[name]:g} of {asked.points:g} points" if name in words else "not graded yet"
        lines += ["", f"## {name}, in words: {got}"]
    return "\n".join(lines) + "\n"


def _verdict(rows: list[dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    printed = None
    for row in rows:
        name = "a hidden case" if row["hidden"] else row["case"]
        lines.append(f"[{'x' if row['status'] == PASS else ' '}] {name}")
        if row["hint"] and not row["hidden"] and row["hint"] != printed:
            printed = row["hint"]
            lines += [f"    {line}" for line in printed.splitlines()]
    return lines
