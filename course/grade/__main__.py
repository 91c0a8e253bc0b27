"""`python -m course.grade course/assignments/hw1.json submissions/ --out grades`: points for a folder of notebooks.

Exit code: 0 if all are graded, with any points; 1 if a submission could not be graded; 2 if grading did not begin.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import hashlib
import json
import os
import secrets
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue

from tqdm import tqdm

import course.check
from course.check.cells import printable
from course.grade.assignment import Assignment, AssignmentError, read_assignment
from course.grade.gradebooks import fill_canvas, fill_moodle
from course.grade.grading import blocked, grade
from course.grade.jail import JailError, User, is_isolated
from course.grade.likeness import write_likeness
from course.grade.reports import Grade, gradescope, overview, write, write_grades, write_json
from course.grade.submissions import Submission, find_submissions
from course.grade.trial import must_pass

USER = 54321
CONTAINER = "/.dockerenv", "/run/.containerenv"  # files that Docker and Podman make


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        trusted = args.trust or _only_user_here()
        users = [User(None if trusted else args.user + i) for i in range(args.jobs)]
        for user in users:  # before Python caches the hidden cases, with the permissions that their file has
            user.check(Path(args.submissions), args.cases)
        assignment = read_assignment(args.assignment, args.cases, args.rows)
        submissions = find_submissions(args.submissions, args.roster, args.times)
        if not trusted and not is_isolated():
            print(
                "The system gives no process a separate network and disk (it needs CAP_SYS_ADMIN): students' code can"
                " reach the network, fill the disk, and read the right programs in course/exercises and solutions/.",
                file=sys.stderr,
            )
        if not submissions:
            raise ValueError(f"{args.submissions} contains neither folders nor notebooks")
        _must_be_among(args.again, submissions)
        out = Path(args.out)
        out.mkdir(parents=True, exist_ok=True, mode=0o700)
        asked = _fingerprint(assignment, args.cases)
        grades, failed = _all(assignment, submissions, users, out, _secret(out), asked, args.again)
        if len(submissions) > 1:
            write_likeness(out / "likeness.csv", assignment, submissions)
        totals = write_grades(out, assignment, grades)
        if args.gradescope:
            write_json(Path(args.gradescope), gradescope(grades[0]))
        for table, fill in ((args.canvas, fill_canvas), (args.moodle, fill_moodle)):
            if table:
                filled = out / f"{fill.__name__.removeprefix('fill_')}.csv"
                lost = fill(table, filled, assignment, grades, totals)
                found = f"{len(grades) - len(lost)} of {len(grades)} students are in {table}"
                print(printable(f"{filled}: {found}{', without ' * bool(lost)}{'; '.join(lost)}"))
    except (AssignmentError, JailError, ValueError, OSError) as error:
        print(f"course.grade: {printable(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("course.grade: stopped; the same command continues", file=sys.stderr)
        return 1
    finally:
        _hand_over(Path(args.out))
    print(printable(overview(assignment, grades), lines=True))
    print(
        f"{out / 'grades.csv'}; of each student a JSON file in {out / 'students'}, and {out / 'feedback'} to hand back"
    )
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m course.grade", description="Grade notebooks without running them."
    )
    parser.add_argument("assignment", help="its JSON file")
    parser.add_argument(
        "submissions", help="a folder per student, or the bulk download of Canvas or Moodle, unzipped"
    )
    parser.add_argument("--out", default="grades", help="where grades go; students in it are not graded again")
    parser.add_argument("--jobs", type=int, default=1, help="submissions graded at the same time")
    parser.add_argument("--roster", help="a file with one student per line: without a submission, 0 points")
    parser.add_argument("--times", help="a CSV of student and time, for days late")
    parser.add_argument("--cases", help="a Python file with hidden EXERCISES")
    parser.add_argument("--rows", help="the release's teacher/rows.csv; without it, rows follow from students' names")
    parser.add_argument(
        "--again",
        metavar="STUDENT",
        action="append",
        default=[],
        help="grade this student again, though all is as it was",
    )
    parser.add_argument("--canvas", metavar="CSV", help="an exported gradebook: a copy of it gets the scores")
    parser.add_argument("--moodle", metavar="CSV", help="a grading worksheet: a copy of it gets the scores")
    parser.add_argument("--gradescope", metavar="JSON", help="write the first submission's results.json here")
    parser.add_argument("--user", type=int, default=USER, help="number of the user that runs students' code")
    parser.add_argument("--trust", action="store_true", help="run students' code as yourself")
    return parser


def _only_user_here() -> bool:
    """Whether this is a container without root; students' code can then reach only the container."""
    here = os.geteuid() != 0 and any(map(os.path.exists, CONTAINER))
    if here:
        print("There is no root in this container: students' code runs as you, as with --trust.", file=sys.stderr)
    return here


def _secret(out: Path) -> bytes:
    """The source of each student's inputs: made once, so that the same submission gets the same inputs again."""
    path = out / ".secret"
    if not path.exists():
        write(path, secrets.token_hex())
    return path.read_text().encode()


def _hand_over(out: Path) -> None:
    """Give the grades to the user who called sudo."""
    if os.geteuid() == 0 and "SUDO_UID" in os.environ:
        for path in (out, *out.rglob("*")):
            with contextlib.suppress(OSError):
                os.lchown(path, int(os.environ["SUDO_UID"]), int(os.environ["SUDO_GID"]))


def _fingerprint(assignment: Assignment, cases: str | None) -> str:
    """A hash of all that points depend on, except the submission: if it changes, all students are graded again."""
    of = ("id", "points", "varied", "by_hand", "due", "late", "dealt")
    settings = repr([getattr(assignment, x) for x in of]).encode()
    of_code = "check/**/*.py", "exercises/**/*.py", "practise/**/*.py", "grade/grading.py"
    judges = sorted(path for files in of_code for path in Path(course.__file__).parent.glob(files))
    files = b"".join(Path(path).read_bytes() for path in (*judges, cases) if path)
    return hashlib.sha256(settings + files).hexdigest()


def _must_be_among(students: list[str], submissions: list[Submission]) -> None:
    there = [submission.student for submission in submissions]
    for name in students:
        if name not in there:
            near = difflib.get_close_matches(name, there)
            hint = f"did you mean {near[0]!r}?" if near else "write the name as grades.csv has it"
            raise ValueError(f"no submission is of {name!r}; {hint}")


def _all(
    assignment: Assignment,
    submissions: list[Submission],
    users: list[User],
    out: Path,
    secret: bytes,
    asked: str,
    again: list[str],
) -> tuple[list[Grade], int]:
    """The grades, in order of students, and how many submissions could not be graded."""
    free: SimpleQueue[User] = SimpleQueue()
    for user in users:
        free.put(user)

    def one(submission: Submission) -> Grade:
        user = free.get()
        try:
            given = grade(assignment, submission, user, secret) | {"asked": asked}
            write_json(_path(out, submission), given)
        except Exception as error:  # perhaps the disk is full: the next run grades this submission again
            given = blocked(assignment, submission, f"{type(error).__name__}: {error}")
            with contextlib.suppress(OSError):
                write_json(_path(out, submission), given)
        finally:
            free.put(user)
        return given

    known = {s.student: _known(out, s, asked) for s in submissions if s.student not in again}
    grades = {student: given for student, given in known.items() if given is not None}
    left = [submission for submission in submissions if submission.student not in grades]
    for user in users if left else ():
        must_pass(user)
    pool = ThreadPoolExecutor(len(users))
    try:
        under_way = {pool.submit(one, submission): submission.student for submission in left}
        for done in tqdm(as_completed(under_way), total=len(under_way), unit="submission", disable=None):
            grades[under_way[done]] = done.result()
    finally:  # Ctrl-C waits for the submission that is being graded
        pool.shutdown(cancel_futures=True)
    failed = sum(given["digest"] is None for given in grades.values())
    return [grades[submission.student] for submission in submissions], failed


def _path(out: Path, submission: Submission) -> Path:
    return out / "students" / f"{submission.file_name}.json"


def _known(out: Path, submission: Submission, asked: str) -> Grade | None:
    """The grade of an earlier run, if the submission and the assignment are unchanged."""
    try:
        given = json.loads(_path(out, submission).read_text(encoding="utf-8"))
        return given if (given["digest"], given["asked"]) == (submission.digest(), asked) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


if __name__ == "__main__":
    sys.exit(main())
