"""`python -m course.release course/assignments/hw1.json --out release`: the files of a homework for a course.

Without a homework it releases all of `--assignments FOLDER`, by default those of the book. Writes a folder named by the
homework's id:

- `hw1-handout.zip`: for students, with the library and without links to the solutions;
- with `--roster`, if a question or an exercise has a row per student: in its place `handouts/`, with a zip for each
  student, and `teacher/rows.csv`, which says who has which row, and which file;
- `teacher/`: a rubric with the mistakes that the judge recognises, and model answers;
- `nbgrader/`: a `source/` folder and a configuration; `otter/`: notebooks for `otter assign`;
- `gradescope.zip`; `github/`: a workflow for the repository that students get; `classroom50/`: an autograder.

Only `course.grade` knows who has which variant of an exercise. A homework with such exercises has the handouts of its
students and the folder `teacher/`, and nothing else.

Exit code: 0, or 2 with a sentence if something cannot be written.
"""

from __future__ import annotations

import argparse
import json
import posixpath
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import nbformat

import lib
from course.grade.assignment import Assignment, AssignmentError, read_assignment
from course.grade.reports import write_table
from course.grade.submissions import Submission, read_roster
from course.release import LIBRARY
from course.release.notebooks import homework
from course.release.platforms import CASES, NBGRADER, for_actions, for_classroom50, for_gradescope, for_otter
from course.release.words import readme, rubric

_LINK = re.compile(  # in text, not in code or a formula
    r"(?P<code>^```.*?^```|`[^`]+`|\$[^$]+\$)"
    r"|\[(?P<words>(?:[^][]|\[[^][]*\])+)\]\((?![a-z]+:)(?P<to>[^()\s#]+)(?:#[^()\s]*)?\)",
    re.DOTALL | re.MULTILINE,
)
BOOK = Path(lib.__file__).resolve().parents[1]
NEEDED = ("torch", "numpy", "matplotlib", "cloudpickle", "tqdm")  # imports of the library
TO_WORK = ("jupyterlab", "ipykernel", "ipywidgets")  # imports of a student's notebooks
NOT_FOR_STUDENTS = ("course/grade/", "course/release/")
CHECKERS = "course/exercises"
HANDOUT = "handout file"  # a column of rows.csv; no question has a name with a space
RUBRIC = "teacher/rubric.md"  # by which a release is known
_IMPORTED = re.compile(r"from course\.exercises\.ch\d+\.(\w+) import")
Files = Mapping[str, bytes | str]  # by their path in a folder or a zip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m course.release", description=__doc__.splitlines()[0])
    parser.add_argument(
        "homeworks", nargs="*", metavar="ASSIGNMENT", help="a JSON file; without one, all of a folder"
    )
    parser.add_argument("--assignments", metavar="FOLDER", help="of the homeworks; by default course/assignments")
    parser.add_argument("--out", default="release", help="the folder to write into")
    parser.add_argument("--cases", help="a Python file with hidden EXERCISES")
    parser.add_argument("--roster", help="a file with one student per line, by the name of the submission")
    parser.add_argument("--rows", help="a CSV of students and their rows, as teacher/rows.csv; the rest are drawn")
    args = parser.parse_args(argv)
    if args.homeworks and args.assignments:
        parser.error("name homeworks, or their folder with --assignments, and not both")
    folder = Path(args.assignments or BOOK / "course" / "assignments")
    if not (homeworks := args.homeworks or [*map(str, sorted(folder.glob("*.json")))]):
        parser.error(f"{folder} has no homework: a JSON file for each, such as those in course/assignments")
    failed, paths = False, {}
    for path in homeworks:
        try:
            assignment = read_assignment(path, args.cases, args.rows)
            if (first := paths.setdefault(assignment.id, path)) != path:
                raise AssignmentError(f"{path} has the id of {first}, {assignment.id}: give each its own")
            new = Path(args.out) / assignment.id
            release(assignment, Path(path), new, read_roster(args.roster) if args.roster else (), args.cases)
        except (AssignmentError, ValueError, OSError) as error:
            print(f"course.release: {error}", file=sys.stderr)
            failed = True
            continue
        points = assignment.max_score + assignment.points_by_hand
        print(f"{new}: {len(assignment.exercises)} exercises, {points:g} points")
        if assignment.rows and not args.roster:
            print(f"  {[*assignment.rows][0]} has a row per student: --roster writes a handout for each")
    return 2 if failed else 0


def release(
    assignment: Assignment, path: Path, folder: Path, students: Sequence[str] = (), cases: str | None = None
) -> None:
    """Write the files of a homework, after deleting an earlier release in the folder.

    Args:
        assignment, path: the homework and its file, of which the graders of platforms get a copy.
        folder: to write into.
        students: names, for handouts in their rows.
        cases: the file of hidden cases; a copy goes only to graders.

    Raises:
        AssignmentError: the folder holds something else, or an exercise has a row per student, and there are no
            students, or the homework or its cases lie where each handout takes its library from.
    """
    for secret in (path, *([Path(cases)] if cases else [])):
        if place := next((place for place in LIBRARY if secret.resolve().is_relative_to(BOOK / place)), None):
            raise AssignmentError(f"{secret} would be in every handout: move it out of {BOOK / place}")
    if _holds_something_else(folder):
        raise AssignmentError(
            f"{folder} would be replaced, and is no earlier release, because it has no {RUBRIC}: move it away, or give "
            "a different folder to --out"
        )
    if assignment.varied and not students:
        raise AssignmentError(
            f"{assignment.id} was not written: {assignment.varied[0]} has a row per student. Name the students in a "
            "file: --roster roster.txt, or make assignments ROSTER=roster.txt"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".release-") as name:
        new = Path(name) / "new"
        _write(new, {RUBRIC: rubric(assignment, for_teacher=True)})
        names, table = [*assignment.rows], []
        for student in students if assignment.rows else ():
            zipped = new / "handouts" / f"{assignment.id}-{Submission(student).file_name}.zip"
            _write_zip(zipped, assignment.id, handout(assignment.of(student)))
            table.append([student, *(assignment.row_of(student, name) for name in names), zipped.name])
        if table:
            write_table(new / "teacher" / "rows.csv", [["student", *names, HANDOUT], *table])
        if not (students and assignment.rows):  # a zip for all would tell nobody the own row
            _write_zip(new / f"{assignment.id}-handout.zip", assignment.id, handout(assignment))
        if not assignment.varied:
            _for_platforms(assignment, path, new, cases)
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)


def _holds_something_else(folder: Path) -> bool:
    """Whether this is a file, or a folder of somebody's own files."""
    is_free = not folder.exists() or folder.is_dir() and not any(folder.iterdir())
    return not is_free and not (folder / RUBRIC).exists()


def _for_platforms(assignment: Assignment, path: Path, new: Path, cases: str | None) -> None:
    needed, for_graders = packages(NEEDED), library()
    hidden = {CASES: Path(cases).read_bytes()} if cases else {}
    own = {f"{assignment.id}.json": path.read_bytes()} | hidden | for_gradescope(assignment, needed, bool(cases))
    _write_zip(new / "gradescope.zip", "", for_graders | own)
    _write(new / "classroom50", for_graders | for_classroom50(assignment, json.loads(path.read_bytes()), needed))
    files = {"nbgrader/nbgrader_config.py": NBGRADER.format(title=assignment.title)}
    files["github/.github/workflows/check.yml"] = for_actions(homework(BOOK, "exercises", assignment), needed)
    for name, book in homework(BOOK, "solutions", assignment).items():
        files[f"nbgrader/source/{assignment.id}/{name}"] = nbformat.writes(book)
        files[f"otter/{name}"] = nbformat.writes(for_otter(book, needed))
    _write(new, files)


def handout(assignment: Assignment) -> Files:
    """The files of the handout."""
    notebooks, checkers = homework(BOOK, "exercises", assignment), _checkers(assignment)
    files = {k: v for k, v in library().items() if not k.startswith(NOT_FOR_STUDENTS)}
    files = {k: v for k, v in files.items() if not k.startswith(f"{CHECKERS}/") or Path(k).stem in checkers}
    files |= {f"exercises/{name}": nbformat.writes(book) for name, book in notebooks.items()}
    chapters = sorted(BOOK.glob("chapters/*.ipynb"))
    there = {*files, *(f"chapters/{path.name}" for path in chapters)}
    files |= {f"chapters/{path.name}": _without_lost_links(path, there) for path in chapters}
    files |= {"README.md": readme(assignment, notebooks), "rubric.md": rubric(assignment)}
    return files | {"requirements.txt": "\n".join([*packages(NEEDED), *packages(TO_WORK)])}


def _without_lost_links(path: Path, there: set[str]) -> str:
    """A chapter's notebook, in which a link to a page that the handout does not have is words."""
    notebook = nbformat.read(path, as_version=4)

    def kept(match: re.Match) -> str:
        if match["code"]:
            return match[0]
        target = posixpath.normpath(posixpath.join("chapters", match["to"]))
        return match[0] if target in there else match["words"]

    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = _LINK.sub(kept, cell.source)
    return nbformat.writes(notebook)


def _checkers(assignment: Assignment) -> set[str]:
    """The checkers of a homework's exercises, and what these import: they have right programs, as the others have."""
    own = tuple(f"e{e.id.replace('.', '_')}_" for e in assignment.exercises)
    files = [path for path in (BOOK / CHECKERS).rglob("*.py") if path.stem.startswith(own)]
    imported = [name for path in files for name in _IMPORTED.findall(path.read_text(encoding="utf-8"))]
    return {"__init__", *(path.stem for path in files), *imported}


def library() -> dict[str, bytes]:
    """The files that notebooks import, without caches."""
    found = (path for place in LIBRARY for path in (BOOK / place, *(BOOK / place).rglob("*")))
    files = [path for path in sorted(found) if path.is_file() and path.suffix != ".pyc"]
    return {path.relative_to(BOOK).as_posix(): path.read_bytes() for path in files}


def packages(names: Iterable[str]) -> list[str]:
    """Names with the versions that the book is tried with, as in `torch==2.13.0`: those of `constraints.txt`."""
    lines = (BOOK / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("==")[0]: line for line in lines}
    return [pinned[name] for name in names]


def _raw(content: bytes | str) -> bytes:
    """A text with an end of its last line."""
    return content if isinstance(content, bytes) else (content.removesuffix("\n") + "\n").encode()


def _write(folder: Path, files: Files) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(_raw(content))


def _write_zip(path: Path, folder: str, files: Files) -> None:
    """Write a zip without dates: the same files give the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, raw in sorted((name, _raw(content)) for name, content in files.items()):
            info = zipfile.ZipInfo(f"{folder}/{name}".lstrip("/"))
            info.external_attr = (0o755 if raw.startswith(b"#!") else 0o644) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, raw)


if __name__ == "__main__":
    sys.exit(main())
