"""The files of a grading: JSON per student, tables, and the files that platforms read."""

from __future__ import annotations

import csv
import io
import json
import os
import tempfile
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from course.check.judge import PASS
from course.check.running import FAIL, TODO
from course.grade.assignment import Assignment
from course.grade.feedback import feedback, for_student, repeated, seen
from course.grade.sheets import as_cell, of_cell, read_sheet
from course.grade.submissions import Submission

Grade = dict[str, Any]
MARK = "\ufeff"
WHY = "look at it because"  # the column of notes in grades.csv
MISSING = "MISSING"  # no cell defines it
BLOCKED = "BLOCKED"  # a file or a cell that may define it cannot be read, or grading failed
WITHOUT = {TODO: "not begun", MISSING: "not defined", BLOCKED: "not readable"}  # why an answer has no points


def write(path: Path, text: str) -> None:
    """Write the full text or nothing: a run may be interrupted at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=".")
    with open(fd, "w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        file.write(text)
    os.chmod(name, 0o600)
    os.replace(name, path)


def write_json(path: Path, thing: object) -> None:
    """Write JSON, indented, with letters unescaped."""
    write(path, json.dumps(thing, indent=1, ensure_ascii=False) + "\n")


def write_table(path: Path, rows: list[list[Any]], mark: str = "") -> None:
    """Write a CSV; a cell that a spreadsheet would compute is text. With the `MARK`, Excel reads UTF-8."""
    write_csv(path, [[as_cell(x) for x in row] for row in rows], mark)


def write_csv(path: Path, rows: list[list[Any]], mark: str = "") -> None:
    """Write a CSV with its cells as they are."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    write(path, mark + out.getvalue())


def points_of(given: Grade, exercise: str) -> float:
    """The points of one exercise."""
    return round(sum(r["points"] for r in given["results"] if r["exercise"] == exercise), 2)


def write_grades(out: Path, assignment: Assignment, grades: list[Grade]) -> dict[str, float]:
    """`grades.csv`, feedback for each student, and `by_hand.csv` for questions in words.

    Points that a person entered in `by_hand.csv` stay and count. If the answer changed afterwards, `look again` says so
    until that person empties the cell.

    Returns:
        Student -> all points, with the points for words.

    Raises:
        ValueError: entered points are no number, or out of range.
    """
    ids = [e.id for e in assignment.exercises]
    by_hand, totals = _read_by_hand(out / "by_hand.csv", assignment), {}
    rows: list[list[Any]] = [["student", *ids, *assignment.by_hand, "raw", "days_late", "score", "max", WHY]]
    table: list[list[Any]] = [["student", "question", "points", "max", "text", "row", "model answer", "look again"]]
    for given in grades:
        student, notes, words = given["student"], [*given["notes"]], {}
        for asked in given["by_hand"]:
            if (name := asked["question"]) not in assignment.by_hand:  # graded before the question was taken out
                continue
            known, question = by_hand.get((student, name), _ByHand()), assignment.by_hand[name]
            if known.points is not None:
                words[name] = known.points
            if again := known.must_look_again(asked["text"]):
                notes.append(f"{name}: the answer changed after its points were entered")
            row = assignment.row_of(student, name)
            shown = words.get(name, ""), question.points, asked["text"], row, question.answers[row]
            table.append([student, name, *shown, "the answer changed" * again])
        totals[student] = round((given["raw_score"] + sum(words.values())) * given["late_factor"], 2)
        text = feedback(assignment, given, totals[student], words)
        write(out / "feedback" / f"{Submission(student).file_name}.md", text)
        points = [points_of(given, i) for i in ids] + [words.get(name, "") for name in assignment.by_hand]
        most = given["max_score"] + assignment.points_by_hand
        sums = given["raw_score"], given["days_late"], totals[student], most
        rows.append([student, *points, *sums, "; ".join(notes)])
    write_table(out / "grades.csv", rows, MARK)
    if assignment.by_hand:
        if not any(row[-1] for row in table[1:]):  # no answer needs a second look
            table = [row[:-1] for row in table]
        write_table(out / "by_hand.csv", table, MARK)
    return totals


@dataclass(frozen=True)
class _ByHand:
    """A row of `by_hand.csv`, as a person saved it."""

    points: float | None = None
    text: str = ""
    look_again: str = ""

    def must_look_again(self, text: str) -> bool:
        """Whether the points are for a different text; spreadsheets change ends of lines."""
        same = self.text.split() == str(as_cell(text)).split()
        return self.points is not None and (bool(self.look_again) or not same)


def _read_by_hand(path: Path, assignment: Assignment) -> dict[tuple[str, str], _ByHand]:
    found = {}
    for row in read_sheet(path, "student", "question", "points", "text") if path.exists() else ():
        student, name = of_cell(row["student"]), row["question"]
        points = None
        if name in assignment.by_hand and (entered := row["points"].strip()):
            points = _points(entered, assignment.by_hand[name].points, f"{path}, {student}, {name}")
        found[student, name] = _ByHand(points, row["text"], row.get("look again", "").strip())
    return found


def _points(entered: str, most: float, where: str) -> float:
    try:
        points = round(float(entered.replace(",", ".")), 2)
    except ValueError:
        raise ValueError(f"{where}: {entered!r} is no number of points; write 2.5") from None
    if not 0 <= points <= most:
        raise ValueError(f"{where}: {entered} points are out of range; write a number from 0 to {most:g}")
    return points


def overview(assignment: Assignment, grades: list[Grade]) -> str:
    """Per exercise: how many students have all points, some, none, and why; and the most frequent hint."""
    lines = [f"{assignment.title}: {len(grades)} students, {assignment.max_score:g} points"]
    for exercise in assignment.exercises:
        most = assignment.points[exercise.id]
        got = [points_of(g, exercise.id) for g in grades]
        wrong = [[r for r in g["results"] if r["exercise"] == exercise.id and r["status"] == FAIL] for g in grades]
        # A dict keeps the order: of two hints that are equally frequent, each run prints the same.
        hints = Counter(hint for rows in wrong for hint in dict.fromkeys(_first_paragraph(r["hint"]) for r in rows))
        often = "".join(hint for hint, _ in hints.most_common(1))
        whole, part = sum(x >= most - 1e-9 for x in got), sum(0 < x < most - 1e-9 for x in got)
        # An answer that is not defined, or not begun, has the same status in all cases.
        first = [next(r["status"] for r in g["results"] if r["exercise"] == exercise.id) for g in grades]
        why = ", ".join(f"{first.count(status)} {says}" for status, says in WITHOUT.items() if status in first)
        lines.append(
            f"  {exercise.id} {exercise.title}: {whole} all, {part} some, {len(got) - whole - part} none"
            + f" ({why})" * bool(why)
            + f"\n      most frequent: {often}" * bool(often)
        )
    return "\n".join(lines)


def _first_paragraph(hint: str) -> str:
    return " ".join(hint.partition("\n\n")[0].split())


def gradescope(given: Grade) -> dict[str, Any]:
    """`results.json` of one submission, as Gradescope reads it."""
    sums = [0.0, *accumulate(r["points"] for r in given["results"])]
    scores = [round(x * given["late_factor"], 2) for x in sums]  # of which the differences add up
    return {
        "score": given["score"],
        "output": "\n".join(for_student(given["notes"])),
        "output_format": "text",
        "stdout_visibility": "hidden",
        "tests": [
            {
                "name": f"{r['exercise']} {r['title']}, {seen(r)[0]}",
                "number": r["exercise"],
                "score": round(after - before, 2),
                "max_score": r["max"],
                "status": "passed" if r["status"] == PASS else "failed",
                "output": "\n".join(filter(None, (seen(r)[1], repeated(r)))),
                "output_format": "text",
                "visibility": "after_published" if r["hidden"] else "visible",
            }
            for r, (before, after) in zip(given["results"], pairwise(scores), strict=True)
        ],
    }
