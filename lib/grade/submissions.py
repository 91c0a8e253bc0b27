"""Who has handed in what: a folder per student, or the files of Canvas' bulk download."""

from __future__ import annotations

import csv
import datetime
import hashlib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from lib.check.source import Notebook, NotebookError, read_notebook

MOST_BYTES = 20 * 2**20  # of a notebook
_CANVAS = re.compile(r"(?P<student>[^_]+)(?P<late>_LATE)?_(?P<id>\d+)_\d+_.+\.ipynb$", re.IGNORECASE)


@dataclass(frozen=True)
class Submission:
    """What one student has handed in.

    Args:
        student: a name that can be printed.
        paths: of notebooks, in order of their names.
        canvas_id: of the student, from the name of the file; "" without.
        marked_late: Canvas says so.
        when: it was handed in; None if nobody knows. Times of files do not survive a zip.
    """

    student: str
    paths: tuple[Path, ...] = ()
    canvas_id: str = ""
    marked_late: bool = False
    when: datetime.datetime | None = None

    @property
    def file_name(self) -> str:
        """Without anything that a file system or a shell might take amiss; two students never share one."""
        plain = re.sub(r"[^A-Za-z0-9@+-]", "_", self.student)[:80]
        same = plain == self.student
        return plain if same else f"{plain}-{hashlib.sha256(self.student.encode()).hexdigest()[:8]}"

    def read(self) -> tuple[list[Notebook], list[str]]:
        """Its notebooks, and what was wrong with others, a sentence each."""
        notebooks, notes = [], []
        for path in self.paths:
            try:
                _must_be_plain(path)
                notebooks.append(read_notebook(str(path)))
                notes += notebooks[-1].notes
            except NotebookError as error:
                notes.append(printable(str(error).replace(f"{path}", path.name)))
        return notebooks, [printable(note) for note in notes]

    def digest(self) -> str:
        """Of all that was handed in: another one is another submission."""
        found = hashlib.sha256()
        for path in self.paths:
            found.update(os.fsencode(path.name))
            try:
                _must_be_plain(path)
                found.update(path.read_bytes())
            except (OSError, NotebookError) as error:
                found.update(str(type(error)).encode())
        return found.hexdigest()


def printable(text: str) -> str:
    """As UTF-8, whatever bytes a file's name is made of."""
    return text.encode("utf-8", "backslashreplace").decode()


def _must_be_plain(path: Path) -> None:
    about = os.lstat(path)
    if not stat.S_ISREG(about.st_mode):
        raise NotebookError(f"{path} is not a plain file")
    if about.st_size > MOST_BYTES:
        raise NotebookError(f"{path} is too large: {about.st_size / 2**20:.0f} MB, and {MOST_BYTES >> 20} are read")


def find_submissions(folder: str, roster: str | None = None, times: str | None = None) -> list[Submission]:
    """All students, in order of their names.

    Args:
        folder: with a folder per student, or Canvas' files, or other notebooks, each then a student's.
        roster: a file with a student a line; who has handed in nothing gets 0 points.
        times: a CSV of student and time (ISO 8601, with a time zone).

    Raises:
        ValueError: a file that cannot be read.
    """
    when = _times(times) if times else {}
    found: dict[str, Submission] = {}
    for entry in sorted(Path(folder).iterdir()):
        if entry.name.startswith((".", "__MACOSX")):
            continue
        if entry.is_dir() and not entry.is_symlink():
            one = Submission(printable(entry.name), tuple(_notebooks(entry)))
        elif entry.suffix == ".ipynb":
            said = _CANVAS.match(entry.name)
            name = printable(said["student"] if said else entry.stem)
            before = found.get(name, Submission(name))
            late = before.marked_late or bool(said and said["late"])
            one = Submission(name, (*before.paths, entry), said["id"] if said else "", late)
        else:
            continue
        found[one.student] = one
    for name in read_roster(roster) if roster else ():
        found.setdefault(name, Submission(name))
    return [
        Submission(s.student, s.paths, s.canvas_id, s.marked_late, when.get(s.student))
        for _, s in sorted(found.items())
    ]


def _notebooks(folder: Path) -> list[Path]:
    found = []
    for where, folders, names in os.walk(folder):  # does not follow links
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(where) / name for name in sorted(names) if name.endswith(".ipynb") and name[0] != "."]
    return found


def read_roster(path: str) -> list[str]:
    """A file with a student a line."""
    return [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]


def _times(path: str) -> dict[str, datetime.datetime]:
    found = {}
    with open(path, encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.reader(file), 1):
            if len(row) < 2 or (number == 1 and row[1].strip().lower() in ("time", "when", "submitted")):
                continue
            try:
                found[row[0].strip()] = datetime.datetime.fromisoformat(row[1].strip())
            except ValueError:
                raise ValueError(
                    f"{path}, line {number}: {row[1]!r} is no time; write 2027-03-01T23:59:00+01:00"
                ) from None
            if found[row[0].strip()].tzinfo is None:
                raise ValueError(f"{path}, line {number}: {row[1]!r} has no time zone")
    return found
