"""The text for a student: points, and for each exercise the lines of its check."""

from __future__ import annotations

from typing import Any

from course.check.judge import PASS
from course.grade.assignment import Assignment

REVIEW = "REVIEW: "  # the beginning of a note that only the teacher sees


def feedback(assignment: Assignment, given: dict[str, Any], total: float, words: dict[str, float]) -> str:
    """The feedback for one student, in Markdown. For a hidden case it has only a pass and points.

    Args:
        given: the student's grade.
        total: all points, with the points for words.
        words: question -> points that a person entered.
    """
    most = assignment.max_score + assignment.points_by_hand
    name = given["student"].replace("<", "&lt;")  # a tag of HTML is text
    lines = [f"# {assignment.title}: {name}", "", f"**{total:g} of {most:g} points**"]
    if given["days_late"]:
        lines[-1] += f". Days late: {given['days_late']}; each point counts {given['late_factor']:.4g}."
    lines += ["", *(f"- {note}".replace("<", "&lt;") for note in for_student(given["notes"]))]
    for exercise in assignment.exercises:
        rows = [row for row in given["results"] if row["exercise"] == exercise.id]
        got = round(sum(row["points"] for row in rows), 2)
        row = next((one["row"] for one in rows), "")
        name = f"{exercise.id} {exercise.title}" + f", row {row}" * bool(row)
        lines += ["", f"## {name}: {got:g} of {assignment.points[exercise.id]:g} points", ""]
        lines += [f"    {line}".rstrip() for line in _verdict(rows)]
    for name, asked in assignment.by_hand.items():
        got = f"{words[name]:g} of {asked.points:g} points" if name in words else "not graded yet"
        lines += ["", f"## {name}, in words: {got}"]
    return "\n".join(lines) + "\n"


def for_student(notes: list[str]) -> list[str]:
    """The notes that the student may see."""
    return [note for note in notes if not note.startswith(REVIEW)]


def seen(row: dict[str, Any]) -> tuple[str, str]:
    """The name of a case and its hint, as the student may see them: a hint may have the inputs of a hidden case."""
    return ("a hidden case", "") if row["hidden"] else (row["case"], row["hint"])


def repeated(row: dict[str, Any]) -> str:
    """A sentence with the call that fails in the same way at home; "" where there is none."""
    return f"The same numbers again: {row['again']}" if row["again"] else ""


def _verdict(rows: list[dict[str, Any]]) -> list[str]:
    lines, printed = [], ""
    for row in rows:
        name, hint = seen(row)
        part = f", {row['points']:g} points" if 0 < row["points"] < row["max"] else ""
        lines.append(f"[{'x' if row['status'] == PASS else ' '}] {name}{part}")
        if hint not in ("", printed):
            printed = hint
            lines += [f"    {line}" for line in hint.splitlines()]
    return [*lines, *dict.fromkeys(filter(None, map(repeated, rows)))]
