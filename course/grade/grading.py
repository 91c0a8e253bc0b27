"""Grade one submission: each exercise in its own jail, which ends with all of its processes and files."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from course.check.cells import printable, way_out
from course.check.exercise import COPIED, Exercise
from course.check.judge import PASS, cases_of, dealt, judge
from course.check.running import FAIL, TODO
from course.check.source import Answer, Notebook
from course.grade.assignment import Assignment, Question, hidden_ranks
from course.grade.feedback import REVIEW
from course.grade.jail import Jail, User
from course.grade.reports import BLOCKED, MISSING
from course.grade.submissions import Submission

MOST_LETTERS, MOST_OF_NOTE = 20_000, 1000  # of an answer in words or a hint; a cell of a spreadsheet has 32,767
UNDECIDED = "could not be graded"  # a note on a case without a verdict; the student is not at fault


def grade(assignment: Assignment, submission: Submission, user: User, secret: bytes) -> dict[str, Any]:
    """The grade of a submission, ready for JSON; with the same secret, the answers get the same inputs."""
    began_s = time.monotonic()
    in_table = assignment.by_hand  # as in a handout for all students, with the table of rows
    assignment = assignment.of(submission.student)
    notebooks, notes = submission.read()
    unread = len(notes) > 0
    if submission.others:
        ways_out = dict.fromkeys(filter(None, map(way_out, submission.others)))
        notes.append("; ".join([f"{', '.join(submission.others)}: no notebook", *ways_out]))
        notes += [f"{REVIEW}unzip {name}, and grade again" for name in submission.others if name.endswith(".zip")]
    elif not submission.paths:
        notes.append("nothing was handed in")
    if not submission.listed:
        notes.append(f"{REVIEW}{submission.student} is not on the roster: is the name spelled differently there?")
    notes += _other_rows(assignment, notebooks)
    notes += [f"{REVIEW}{what} in {book.name}" for book in notebooks for what in _suspicious(book)]
    by_hand = assignment.by_hand.items()
    texts = {name: _text(notebooks, name, (asked, in_table[name]), notes) for name, asked in by_hand}
    notes += [f"no cell for question {name}" for name, text in texts.items() if text is None and notebooks]
    results = []
    for exercise in assignment.exercises:
        seed = _seed(secret, assignment.id, submission.student, exercise.id)
        results += _results(exercise, assignment.points[exercise.id], notebooks, unread, notes, user, seed)
    copied = {f"{r['title']}: {r['hint'].partition('.')[0]}" for r in results if r["hint"].startswith(COPIED)}
    notes += [f"{REVIEW}{what}" for what in sorted(copied)]
    raw = round(sum(r["points"] for r in results), 2)
    days = assignment.days_late(submission.when) if submission.when else 0
    factor = assignment.late.factor(days) if days else 1.0
    if submission.marked_late and not submission.when:
        notes.append(
            f"{REVIEW}Canvas marks it late, without a time: give the times (--times), or take points in Canvas"
        )
    if submission.is_without_time:
        notes.append(f"{REVIEW}the file of times has no time for it: it counts as on time")
    return {
        "student": submission.student,
        "canvas_id": submission.canvas_id,
        "assignment": assignment.id,
        "score": round(raw * factor, 2),
        "raw_score": raw,
        "max_score": assignment.max_score,
        "days_late": days,
        "late_factor": factor,
        "files": [printable(path.name) for path in submission.paths],
        "notes": [shown(note, MOST_OF_NOTE) for note in notes],
        "results": results,
        "by_hand": [{"question": name, "max": asked.points, "text": texts[name] or ""} for name, asked in by_hand],
        # Without a digest, the next run grades it again.
        "digest": None if any(row.get("undecided") for row in results) else submission.digest(),
        "seconds": round(time.monotonic() - began_s, 1),
    }


def _other_rows(assignment: Assignment, notebooks: list[Notebook]) -> list[str]:
    """A note for each exercise whose check asks for a different row than the one that is graded."""
    asked = {exercise_id: row for notebook in notebooks for exercise_id, _, row in notebook.checks}
    other = [(e, asked[e.id]) for e in assignment.exercises if asked.get(e.id, e.row) != e.row]
    return [
        f"{REVIEW}{e.id} was handed out in row {row or '-'} and is graded in row {e.row or '-'}: did the student's "
        "name, or the homework's file, change after the release? Correct the name in teacher/rows.csv, and give "
        "that file with --rows"
        for e, row in other
    ]


# Code that no answer needs. It costs no points: a person looks at it. The imports in the book's cells are exceptions,
# word for word. Each pattern must be fast: a line may have millions of letters.
_SUSPICIOUS = {
    "course": r"(?m)^(?!from course\.check import check(?:, hint)?(?:, progress)?$"
    r"|from course\.check\.bill import bill$|from course\.check\.refusals import broken_layouts$"
    r"|from course\.practise import sick_run$)"
    r"[^\n]*\bcourse\s*\.\s*(?:check|exercises|practise|grade|release)\b"
    r"|from\s+course\s+import|\bimport\s[^\n]{0,80}\bcourse\s*(?:[,;#]|as\b|$)"
    r"|\bcourse\s*/\s*\w|[\"']check[\"']|[\"']course[\"'](?!, \"book\"\):$)|getattr\(\s*course\b",
    "lib.runtime": r"\blib\s*[./]\s*runtime\b|from\s+lib\s+import(?:\\\n|[^\n]){0,80}\bruntime\b"
    r"|from\s+lib\s+import\s*\([^)]{0,80}\bruntime\b",
    "modules": r"(?m)sys\.modules(?!\.get\(name\), \"__file__\", None\)$| and not \(origin and has_book\()"
    r"|from\s+sys\s+import|\bsys\s+as\b|\bpkgutil\b|\brunpy\b"
    r"|\bimportlib\b(?!\.util, os, subprocess, sys, zipfile$|\.util\.find_spec\(\"lib\"\) if spec|"
    r"\.util\.find_spec\(\"lib\"\)$)",
    "what functions are made of": r"__(?:globals|builtins|subclasses|code|closure|getattribute|mro|bases)__"
    r"|\bbuiltins\b",
    "/proc": r"/proc\b",
    "frames": r"(?m)_getframe|currentframe|gc\.get_|\b[ft]b?_(?:back|frame|globals|locals)\b|walk_stack"
    r"|\binspect[ \t]*(?:[.,;]|as\b|import\b|$)",
    "ctypes": r"\bctypes\b",
    "sockets": r"\bimport\s+socket|from\s+socket",
    "code from a string": r"(?<![.\w])(?:exec|eval|compile)\s*\(|__import__",
    # The first cell of each notebook fetches the book with such a run.
    "processes": r"\bos\.(fork|kill|setsid|exec\w*|spawn\w*|system)\b|from subprocess\b|\bsubprocess as\b"
    r"|\bsubprocess\.(?!PIPE\b|STDOUT\b|run\(command, stdout=subprocess\.PIPE, stderr=subprocess\.STDOUT, text=True\))",
}


def _suspicious(notebook: Notebook) -> list[str]:
    text = "\n".join(text for _, text in notebook.cells)
    return [what for what, pattern in _SUSPICIOUS.items() if re.search(pattern, text)]


def _seed(secret: bytes, *of: str) -> int:
    return int.from_bytes(hmac.digest(secret, "/".join(of).encode("utf-8", "backslashreplace"), hashlib.sha256)[:3])


def _results(
    exercise: Exercise,
    points: float,
    notebooks: list[Notebook],
    unread: bool,
    notes: list[str],
    user: User,
    seed: int,
) -> list[dict[str, Any]]:
    """A row for each case, with its fraction of the points. `unread`: a file or a cell could not be read."""
    hidden = hidden_ranks(exercise)
    asked = cases_of(exercise)
    each = dict(zip(asked, dealt(points, len(asked)), strict=True))

    def row(case: tuple[int, str], status: str, hint: str) -> dict[str, Any]:
        ranks, name = case
        of = {"exercise": exercise.id, "title": exercise.title, "row": exercise.row, "case": name}
        got = {"status": status, "points": each[case] if status == PASS else 0.0, "max": each[case]}
        return of | got | {"hidden": ranks in hidden, "hint": "" if status == PASS else shown(hint)}

    answer = _answer(exercise, notebooks, notes)
    elsewhere = next(filter(None, (book.where_else(exercise.title) for book in reversed(notebooks))), "")
    if not answer:
        status = BLOCKED if unread else MISSING
        why = f"{exercise.title} is not defined" + ", or in a cell or a file that cannot be read" * unread
        notes += [elsewhere] * bool(elsewhere)
        return [row(case, status, f"{why}. {elsewhere}".strip()) for case in asked]
    try:
        outcomes = _outcomes(exercise, answer, seed, user, hidden)
        # A student's code may write what it was given into an error: no word of a hidden case's hint decides here.
        seen = [hint for (ranks, _), (status, hint) in outcomes.items() if status == FAIL and ranks not in hidden]
        failed = any(status == FAIL for status, _ in outcomes.values())
        why = answer.notebook.reason(answer.name, "\n".join(seen)) if failed else ""
    except Exception as error:  # this exercise fails; the rest keep their points
        # A student's code may have written the error, with the inputs of a hidden case in it.
        notes.append(f"{REVIEW}{exercise.title} {UNDECIDED}: {type(error).__name__}: {error}")
        return [row(case, BLOCKED, f"It {UNDECIDED}.") | {"undecided": True} for case in asked]
    if TODO in (status for status, _ in outcomes.values()):
        why = elsewhere
    notes += [f"{exercise.id}: {why}"] * bool(why)
    return [row(case, status, f"{hint}\n{why}" if why else hint) for case, (status, hint) in outcomes.items()]


def _answer(exercise: Exercise, notebooks: list[Notebook], notes: list[str]) -> Answer | None:
    """The answer of the newest notebook in which it is begun; under its own name, or else as its check names it."""
    holders = [notebook for notebook in notebooks if notebook.defines(exercise.title)]
    holders.sort(key=lambda notebook: notebook.names[exercise.title])  # a stub counts only where all are stubs
    if len(holders) > 1:
        notes.append(
            f"{exercise.title} is defined in {len(holders)} notebooks; {holders[-1].name} counts, the newest in which"
            " it is begun"
        )
    checked = [
        (book, found) for book in notebooks if (found := book.checked(exercise.id)) not in ("", exercise.title)
    ]
    if not holders or not holders[-1].names[exercise.title]:
        if checked:
            book, found = checked[-1]
            notes.append(
                f"{exercise.id}: {found} counts, which the check in {book.name} names, because {exercise.title} is "
                f"{'as it was handed out' if holders else 'not defined'}; nbgrader and otter judge only that name"
            )
            return Answer(book, found)
    elif checked and checked[-1][0] is holders[-1]:
        notes.append(
            f"{exercise.id}: {exercise.title} counts, and the last check in {holders[-1].name} names {checked[-1][1]}"
        )
    if holders and (where := holders[-1].again.get(exercise.title)):
        notes.append(
            f"{exercise.id}: {where} defines {exercise.title} again, below its check: nbgrader judges it above"
        )
    return Answer(holders[-1], exercise.title) if holders else None


def _outcomes(
    exercise: Exercise, answer: Answer, seed: int, user: User, hidden: set[int]
) -> dict[tuple[int, str], tuple[str, str]]:
    """Status and hint of each case. Each hidden case has its own jail, so that no other case can tell of its inputs."""
    outcomes = dict.fromkeys(cases_of(exercise), (TODO, ""))
    known = tuple(n for n in exercise.ranks if n not in hidden)
    for ranks in (*[known] * bool(known), *((n,) for n in exercise.ranks if n in hidden)):
        of_jail, jail = replace(exercise, ranks=ranks), Jail(user)
        try:
            (cases,) = judge(of_jail, [answer], seed, jail.returned)
        finally:
            jail.close()
        found = [(case.status, case.advice) for case in cases]
        # A stub is judged once, in its first case; the rest get the same verdict.
        outcomes |= zip_longest(cases_of(of_jail), found, fillvalue=found[-1])
    return outcomes


def _text(notebooks: list[Notebook], name: str, handed_out: Sequence[Question], notes: list[str]) -> str | None:
    """An answer in words: what is below the question, and what its own cell has after the question."""
    found: list[tuple[str, str]] = []
    for notebook in (one for one in notebooks if name in one.texts):
        cell = notebook.questions.get(name, "")
        after = (cell.partition(question.in_handout)[2].strip() for question in handed_out)
        text = "\n\n".join(filter(None, [next(filter(None, after), ""), notebook.texts[name]]))
        found.insert(len(found) if text.strip() else 0, (text, notebook.name))
    if sum(bool(text.strip()) for text, _ in found) > 1:
        notes.append(f"{name} is answered in several notebooks; {found[-1][1]} counts, the newest")
    return shown(found[-1][0]) if found else None


def shown(text: str, most: int = MOST_LETTERS) -> str:
    """A student's text for people: no letter of it is unseen, and what is too long is cut."""
    text = printable(text, lines=True)
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most:,} more letters)"


def blocked(assignment: Assignment, submission: Submission, why: str) -> dict[str, Any]:
    """The grade if grading failed: the student is listed without points, and a person looks at it."""
    nothing = Submission(submission.student, (), submission.canvas_id)
    given = grade(assignment, nothing, User(None), b"")
    why = f"{UNDECIDED}: {why}"
    results = [row | {"status": BLOCKED, "hint": why} for row in given["results"]]
    files = [printable(path.name) for path in submission.paths]
    # Without a digest, the next run grades it again.
    return given | {"notes": [shown(why, MOST_OF_NOTE)], "files": files, "results": results, "digest": None}
