"""A homework: a JSON file with its exercises, their points and the day it is due."""

from __future__ import annotations

import datetime
import hashlib
import importlib.util
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Formatter
from typing import Any

from course.check import find
from course.check.catalogue import EXERCISES
from course.check.exercise import ROWS, Exercise
from course.grade.sheets import of_cell, read_sheet

_KEYS = {"id", "title", "exercises", "varied", "by_hand", "due", "weeks", "late", "hours", "goals", "text"}


class AssignmentError(ValueError):
    """The file is not an assignment; the message says where."""


@dataclass(frozen=True)
class Late:
    """The price of a late day, and the number of late days after which no point counts."""

    percent_per_day: float = 0
    max_days: int = 0

    def factor(self, days: int) -> float:
        """The fraction of the points that counts after so many late days."""
        if days <= 0:
            return 1.0
        return max(0.0, 1 - days * self.percent_per_day / 100) if days <= self.max_days else 0.0


@dataclass(frozen=True)
class Question:
    """A question that is answered in words, and graded by a person.

    Of the rows of values for `{names}` in question and answer, 26 at most, each student has one: A, B, ... With rows, a
    literal brace is written twice.
    """

    points: float  # the most that an answer gets
    question: str  # Markdown, for the handout
    answer: str = ""  # Markdown, for the person who grades
    variants: tuple[dict[str, Any], ...] = ()  # the rows

    @property
    def in_handout(self) -> str:
        """The question; with variants, its values are in a table below."""
        if not self.variants:
            return self.question
        names = [*dict.fromkeys(name for _, name, _, _ in Formatter().parse(self.question) if name)]
        rows = [["your row", *(f"*{name}*" for name in names)], ["---"] * (len(names) + 1)]
        rows += [[row, *(str(one[name]) for name in names)] for row, one in zip(ROWS, self.variants, strict=False)]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
        asked = self.question.format(**{name: f"*{name}*" for name in names})
        return f"{asked} Your teacher tells you your row.\n\n{table}"

    @property
    def answers(self) -> dict[str, str]:
        """Row -> model answer; without variants, the only row is ""."""
        if not self.variants:
            return {"": self.answer}
        return {row: self.answer.format(**one) for row, one in zip(ROWS, self.variants, strict=False)}

    def in_row(self, row: str) -> Question:
        """The question of a student who has this row."""
        if not self.variants:
            return self
        asked = self.question.format(**self.variants[ROWS.index(row)])
        return Question(self.points, asked, self.answers[row])


@dataclass(frozen=True)
class Assignment:
    """A homework."""

    id: str  # short, part of file names
    title: str  # for people
    exercises: tuple[Exercise, ...]  # graded by the machine
    points: dict[str, float]  # by the id of an exercise
    varied: tuple[str, ...] = ()  # ids of exercises of which each student has a variant, and nobody the book's task
    by_hand: dict[str, Question] = field(default_factory=dict)  # by the `grade_id` of their cell
    due: datetime.datetime | None = None  # with a time zone; None: never late
    late: Late = Late()
    weeks: tuple[int, ...] = ()  # of the course, from 1: it is set in the first, and due in the second
    hours: float = 0  # that the work should take
    goals: tuple[str, ...] = ()  # skills that the homework teaches, a sentence each
    text: str = ""  # Markdown for the handout
    dealt: dict[str, dict[str, str]] = field(default_factory=dict)  # student -> name -> row, where none is drawn

    @property
    def chapters(self) -> list[str]:
        """The chapters of its exercises, such as `"03"`."""
        return sorted({exercise.chapter for exercise in self.exercises})

    @property
    def max_score(self) -> float:
        """All points that the machine gives."""
        return sum(self.points.values())

    @property
    def points_by_hand(self) -> float:
        """All points that a person gives."""
        return sum(question.points for question in self.by_hand.values())

    @property
    def rows(self) -> dict[str, list[str]]:
        """Question or exercise with variants -> the letters of its rows."""
        questions = {name: [*asked.answers] for name, asked in self.by_hand.items() if asked.variants}
        return {e.id: [one.row for one in e.variants] for e in self.exercises if e.id in self.varied} | questions

    def row_of(self, student: str, name: str) -> str:
        """A student's row of a question or an exercise, the same at every call; "" without variants."""
        if student in self.dealt:
            return self.dealt[student].get(name, "")
        rows = self.rows.get(name, [""])
        drawn = hashlib.sha256(f"{self.id}/{name}/{student}".encode()).digest()
        return rows[int.from_bytes(drawn[:8], "big") % len(rows)]

    def of(self, student: str) -> Assignment:
        """The homework of one student: each exercise and each question in the row of this student."""
        exercises = tuple(e.rows[self.row_of(student, e.id)] for e in self.exercises)
        questions = {name: asked.in_row(self.row_of(student, name)) for name, asked in self.by_hand.items()}
        return replace(self, exercises=exercises, varied=(), by_hand=questions)

    def days_late(self, when: datetime.datetime) -> int:
        """Days after the due date; the first second of a day counts as a day."""
        return max(0, -((self.due - when) // datetime.timedelta(days=1))) if self.due else 0


def read_assignment(path: str, cases: str | None = None, rows: str | None = None) -> Assignment:
    """An assignment's file.

    Args:
        path: of the JSON.
        cases: a teacher's Python file with a list `EXERCISES`, each in place of the book's with its id, or new.
        rows: a CSV of students and their rows, as a release writes it.

    Raises:
        AssignmentError: the file has a fault; the message names it.
    """
    own = {e.id: e for e in _own_exercises(cases)} if cases else {}
    try:
        assignment = _assignment(json.loads(Path(path).read_text(encoding="utf-8")), own)
    except OSError as error:
        raise AssignmentError(f"{path} cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise AssignmentError(f"{path} is not JSON: {error}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        fault = f"it has no {error}" if isinstance(error, KeyError) else error
        raise AssignmentError(f"{path} is not an assignment: {fault}") from None
    return replace(assignment, dealt=_dealt(rows, assignment)) if rows else assignment


def _dealt(path: str, assignment: Assignment) -> dict[str, dict[str, str]]:
    try:
        table = read_sheet(path, "student", *assignment.rows)
    except OSError as error:
        raise AssignmentError(f"{path} cannot be read: {error.strerror}") from None
    for row in table:
        for name, letters in assignment.rows.items():
            if row[name] not in letters:
                raise AssignmentError(
                    f"{path}: {row['student']} has row {row[name]!r} of {name}, which has {', '.join(letters)}"
                )
    return {of_cell(row["student"]): {name: row[name] for name in assignment.rows} for row in table}


def hidden_ranks(exercise: Exercise) -> set[int]:
    """The cases that only the teacher's file has: new numbers of ranks, or all of them if the inputs are new."""
    try:
        known = find(exercise.id)
    except ValueError:  # a teacher's exercise
        return set()
    return {*exercise.ranks} - ({*known.ranks} if exercise.inputs is known.inputs else set())


def _assignment(fields: dict[str, Any], own: dict[str, Exercise]) -> Assignment:
    _must_know("it", fields, _KEYS)
    _must_know("late", fields.get("late", {}), Late.__annotations__)
    for name, asked in fields.get("by_hand", {}).items():
        _must_know(name, asked, Question.__annotations__)
    points = fields["exercises"]
    if not isinstance(points, dict) or not points:
        raise ValueError('exercises is no object, or empty; write "exercises": {"03.1": 3}, with the points of each')
    by_hand = {}
    for name, asked in fields.get("by_hand", {}).items():
        by_hand[name] = asked = Question(**asked | {"variants": tuple(asked.get("variants", ()))})
        if not re.fullmatch(r"[\w-]+", name):
            raise ValueError(f"a question is called {name!r}; use letters, digits and -")
        if len(asked.variants) > len(ROWS):
            raise ValueError(f"{name} has {len(asked.variants)} variants; there are {len(ROWS)} letters for them")
        try:
            _ = asked.in_handout, asked.answers
        except (KeyError, IndexError) as error:
            raise ValueError(f"{name} names {{{error.args[0]}}}, and not each of its variants has it") from None
    for name, most in [*points.items(), *((name, asked.points) for name, asked in by_hand.items())]:
        if isinstance(most, bool) or not isinstance(most, (int, float)) or not most > 0:
            raise ValueError(f"{name} has {most!r} points; write a number above 0")
        if most != round(most, 2):
            raise ValueError(f"{name} has {most!r} points; write two decimals at most, such as {round(most, 2):g}")
    due = datetime.datetime.fromisoformat(fields["due"]) if fields.get("due") else None
    if due and due.tzinfo is None:
        raise ValueError(f'due {fields["due"]!r} has no time zone; write it as "2027-03-01T23:59:00+01:00"')
    late = fields.get("late", {})
    if due and "max_days" not in late:
        raise ValueError(
            'it has a date, and no price of a late day: write "late": {"percent_per_day": 10, "max_days": 3}, or '
            '{"max_days": 0} if nothing counts after that date'
        )
    exercises = tuple(own.get(i) or find(i) for i in points)
    varied = fields.get("varied", [])
    if not isinstance(varied, list):
        raise ValueError(f"varied is {varied!r}; write a list of exercises")
    if strangers := [name for name in varied if name not in points]:
        raise ValueError(f"varied names {strangers[0]}, which is not one of its exercises")
    for e in (e for e in exercises if e.id in varied):
        if not e.variants:
            able = ", ".join(i for i, known in EXERCISES.items() if known.variants)
            raise ValueError(f"varied names {e.id}, which has no variants; in the book, {able} have")
        if e.id in own and e.variants is getattr(EXERCISES.get(e.id), "variants", None):
            raise ValueError(
                f"varied names {e.id}, and its hidden cases are not those of its variants: replace them as well, with "
                f'variants=tuple(replace(one, ranks=...) for one in find("{e.id}").variants)'
            )
    for number in ("percent_per_day", "max_days"):
        if type(late.get(number, 0)) not in (int, float) or late.get(number, 0) < 0:
            raise ValueError(f"late has {number} {late[number]!r}; write a number, 0 or more")
    if not re.fullmatch(r"[\w.-]+", str(fields["id"])):
        raise ValueError(f"its id is {fields['id']!r}; use letters, digits and -, as it names files")
    names, goals = (str(fields["id"]), str(fields["title"])), tuple(fields.get("goals", ()))
    about = {"hours": fields.get("hours", 0), "goals": goals, "text": fields.get("text", "")}
    about["weeks"] = tuple(fields.get("weeks", ()))
    return Assignment(*names, exercises, points, tuple(varied), by_hand, due, Late(**late), **about)


def _must_know(what: str, fields: dict[str, Any], keys: Iterable[str]) -> None:
    if unknown := fields.keys() - set(keys):
        raise ValueError(f"{what} has an unknown key {min(unknown)!r}; the keys are {', '.join(sorted(keys))}")


def _own_exercises(path: str) -> list[Exercise]:
    spec = importlib.util.spec_from_file_location("cases", path)
    if spec is None or not Path(path).is_file():
        raise AssignmentError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise AssignmentError(f"{path} cannot be run: {type(error).__name__}: {error}") from None
    found = getattr(module, "EXERCISES", None)
    if not isinstance(found, (list, tuple)) or not all(isinstance(e, Exercise) for e in found):
        raise AssignmentError(f"{path} has no list EXERCISES of course.check.exercise.Exercise")
    return list(found)
