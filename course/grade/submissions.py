"""Submissions: a folder per student, or the bulk download of Canvas or Moodle."""

from __future__ import annotations

import datetime
import hashlib
import os
import re
import stat
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from course.check.cells import NotebookError, printable
from course.check.source import Notebook, read_notebook
from course.grade.sheets import sheet_rows, sheet_text

MOST_BYTES = 20 * 2**20  # of a notebook
READING = "chapters"  # a folder of the handout: its functions have the names of some answers
MOST_NOTES = 20  # of files and cells that cannot be read
# As `ContentZipper` of Canvas and `mod_assign\downloader` of Moodle write them, Moodle's with and without folders.
_CANVAS = re.compile(
    r"(?P<student>[^_]+)(?P<late>_LATE)?_(?P<number>[1-9]\d*)_(?P<upload>[1-9]\d*)_.+$", re.IGNORECASE
)
_MOODLE = re.compile(r"(?P<student>[^_]+)_(?P<number>\d+)_assignsubmission_(?P<kind>[a-z]+)(_.*)?$")
# A day or a time in a student's own name of a file, where Canvas has two numbers: `hw1_11_20_draft`.
_SMALL, _YEAR = r"(?:[1-9]|[12]\d|3[01])", r"(?:19|20)\d\d"
_DATE = re.compile(
    rf"{_SMALL}_(?:{_SMALL}|{_YEAR})|{_YEAR}_{_SMALL}|{_YEAR}[01]\d[0-3]\d_[0-2]?\d[0-5]\d(?:[0-5]\d)?"
)


@dataclass(frozen=True)
class Submission:
    """The files of one student."""

    student: str  # a printable name; with the number after it if the platform writes the names of two people alike
    paths: tuple[Path, ...] = ()  # of notebooks, the newest last
    number: str = ""  # of the student on Canvas or Moodle, from the name of the file or folder
    marked_late: bool = False  # Canvas says so
    when: datetime.datetime | None = None  # of the submission, if known: times of files do not survive a zip
    others: tuple[str, ...] = ()  # names of files of a student without a notebook
    listed: bool = True  # on the roster, or there is no roster
    is_without_time: bool = False  # there is a file of times, and it does not have this submission

    @property
    def file_name(self) -> str:
        """Letters and digits of any script, and nothing that a shell could misread; two students never share it."""
        letters = (
            letter if letter in "@+-" or unicodedata.category(letter)[0] in "LMN" else "_"
            for letter in unicodedata.normalize("NFC", self.student)
        )
        plain = "".join(letters).encode()[:80].decode(errors="ignore")  # a name of a file has 255 bytes at most
        return plain + f"-{hashlib.sha256(self.student.encode()).hexdigest()[:8]}" * (plain != self.student)

    def read(self) -> tuple[list[Notebook], list[str]]:
        """Its notebooks, and a sentence for each file or cell that could not be read."""
        notebooks, notes = [], []
        for path in self.paths:
            try:
                _must_be_plain(path)
                notebooks.append(read_notebook(str(path)))
                notes += notebooks[-1].notes
            except NotebookError as error:
                notes.append(printable(str(error).replace(f"{path}", path.name)))
        more = [f"and {len(notes) - MOST_NOTES} more notes of this kind"] * (len(notes) > MOST_NOTES)
        return notebooks, [*map(printable, notes[:MOST_NOTES]), *more]

    def digest(self) -> str:
        """A hash of all files and the time: a new submission has a new digest."""
        about = self.others, self.marked_late, self.when, self.listed, self.is_without_time
        found = hashlib.sha256(repr(about).encode())
        for path in self.paths:
            found.update(os.fsencode(path.name))
            try:
                _must_be_plain(path)
                found.update(path.read_bytes())
            except (OSError, NotebookError) as error:
                found.update(str(type(error)).encode())
        return found.hexdigest()


def _must_be_plain(path: Path) -> None:
    about = os.lstat(path)
    if not stat.S_ISREG(about.st_mode):
        raise NotebookError(f"{path} is not a plain file")
    if about.st_size > MOST_BYTES:
        raise NotebookError(f"{path} is too large: {about.st_size / 2**20:.0f} MB, and {MOST_BYTES >> 20} are read")


def find_submissions(folder: str, roster: str | None = None, times: str | None = None) -> list[Submission]:
    """The submissions of all students, in order of their names.

    Args:
        folder: with a folder per student, or the download of Canvas or of Moodle, or notebooks, one per student.
        roster: a file with one student per line; a student without a submission gets 0 points.
        times: a CSV of student and time (ISO 8601, with a time zone).

    Raises:
        ValueError: a file cannot be read.
    """
    when = _times(times) if times else {}
    found: dict[str, Submission] = {}
    entries = [entry for entry in sorted(Path(folder).iterdir()) if not entry.name.startswith((".", "__MACOSX"))]
    of_platform = _of_platforms(entries)
    people = Counter(name for name, _ in {(parts["student"], parts["number"]) for parts in of_platform.values()})
    for entry in entries:
        parts, is_folder = of_platform.get(entry), entry.is_dir() and not entry.is_symlink()
        if not (parts or is_folder or entry.suffix == ".ipynb"):
            continue
        name, number, is_late = entry.name if is_folder else entry.stem, "", False
        if parts:
            alone, number = people[parts["student"]] == 1, parts["number"]
            name = parts["student"] if alone else f"{parts['student']}_{number}"
            is_late = bool(parts.groupdict().get("late"))
        name = printable(name)
        one = _with(found.get(name, Submission(name)), *(_files(entry) if is_folder else (entry,)))
        found[name] = replace(one, number=one.number or number, marked_late=one.marked_late or is_late)
    roll = read_roster(roster) if roster else [*found]
    for name in roll:
        found.setdefault(name, Submission(name))
    if strangers := when.keys() - found:
        raise ValueError(f"{times} has a time for {min(strangers)!r}, who handed nothing in and is on no roster")
    untimed = {name for name, one in found.items() if times and one.paths and name not in when}
    return [
        replace(one, when=when.get(name), listed=name in roll, is_without_time=name in untimed)
        for name, one in sorted(found.items())
    ]


def _of_platforms(entries: Iterable[Path]) -> dict[Path, re.Match[str]]:
    """The parts of each name that Canvas or Moodle wrote. Canvas gives a number of an upload to one file alone."""
    of_canvas = {entry: parts for entry in entries if not entry.is_dir() and (parts := _of_canvas(entry.name))}
    uploads = Counter(parts["upload"] for parts in of_canvas.values())
    of_canvas = {entry: parts for entry, parts in of_canvas.items() if uploads[parts["upload"]] == 1}
    return of_canvas | {entry: parts for entry in entries if (parts := _MOODLE.match(entry.name))}


def _of_canvas(name: str) -> re.Match[str] | None:
    """The parts of a name that Canvas may have written."""
    parts = _CANVAS.match(name)
    return None if parts and _DATE.fullmatch(f"{parts['number']}_{parts['upload']}") else parts


def _with(one: Submission, *files: Path) -> Submission:
    """The submission with more files; files that are no notebooks count only if there is no notebook."""
    paths = [*one.paths, *(path for path in files if path.suffix == ".ipynb")]
    uploads = {path: int(parts["upload"]) for path in paths if (parts := _of_canvas(path.name))}
    numbered = len(uploads) == len(paths)  # a number against a time says nothing
    paths.sort(key=lambda path: (uploads[path] if numbered else 0, *_age(path)))
    others = (*one.others, *(printable(path.name) for path in files if path.suffix != ".ipynb"))
    return replace(one, paths=tuple(paths), others=() if paths else others)


def _age(path: Path) -> tuple:
    """Larger for a newer notebook, where Canvas has no numbers: the time of the file, then the name's numbers."""
    numbers = [int(number) for number in re.findall(r"\d+", path.stem)]
    return os.lstat(path).st_mtime_ns, numbers, path.name


def _files(folder: Path) -> Iterator[Path]:
    for where, folders, names in os.walk(folder):  # without links
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != READING)
        yield from (Path(where) / name for name in sorted(names) if not name.startswith("."))


def read_roster(path: str) -> list[str]:
    """The names in a file with one student per line; a first line `student` is no name.

    Raises:
        ValueError: a name is there twice, or the file is a table.
    """
    names = (printable(line.strip().strip('"')) for line in sheet_text(path).splitlines())
    names = [name for name in names if name and name.lower() != "student"]
    if tables := [name for name in names if name.count(",") > 1]:
        raise ValueError(f"{path} has a line {tables[0][:60]!r}: a roster has one name per line, and nothing else")
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"{path} has {twice[0]!r} twice")
    return names


def _times(path: str) -> dict[str, datetime.datetime]:
    found = {}
    for number, row in enumerate(sheet_rows(path), 1):
        if len(row) < 2 or (number == 1 and row[1].strip().lower() in ("time", "when", "submitted")):
            continue
        told = f"{path}, line {number}: {row[1]!r}"
        try:
            when = datetime.datetime.fromisoformat(row[1].strip())
        except ValueError:
            raise ValueError(f"{told} is no time; write 2027-03-01T23:59:00+01:00") from None
        if when.tzinfo is None:
            raise ValueError(f"{told} has no time zone")
        found[printable(row[0].strip())] = when
    return found
