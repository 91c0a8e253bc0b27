"""Model answers, rubrics for teachers and hidden cases are in nothing that a student gets."""

import base64
import functools
import io
import json
import py_compile
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import nbformat
import pytest

from course.grade.assignment import read_assignment
from course.release.__main__ import library, main
from tests.book.test_repository import tool
from tests.course.homework import ROOT, Course
from tests.course.texts import letters, of_archive, texts

FILES = sorted(ROOT.glob("course/assignments/*.json"))
LONG = 40  # letters and digits: less is found by chance
ANSWER = "The model answer of a teacher's own question, which nobody may read before all have handed in."
HIDDEN = "thirty seven ranks are the hidden case of a teacher who told nobody about it"


def sentences(text):
    parts = re.split(r"(?<=[.?!:;])\s+|\n", text)
    return {said for part in parts if len(said := letters(part)) >= LONG}


@functools.cache
def secrets():
    """Each sentence of each model answer, and of each teacher's rubric how its lists of hints begin."""
    found = sentences(ANSWER) | sentences(HIDDEN)
    for asked in (read_assignment(str(path)) for path in FILES):
        for question in asked.by_hand.values():
            told = {one for answer in question.answers.values() for one in sentences(answer)}
            found |= told - sentences(question.question)
        hints = (" ".join(exercise.mistakes[0].words.split()) for exercise in asked.exercises)
        found |= {letters(f"one of these hints if it fits: {hint[:60]}") for hint in hints}
    return found


@functools.cache
def secrets_of(data):
    """Cached: most files are in many archives."""
    said = [letters(text) for text in texts(data)]
    return {secret for secret in secrets() for one in said if secret in one}


def told_by(*paths):
    """(file, secret) for each secret in a file, or in a file of a folder."""
    files = [file for path in paths for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()]
    assert files, paths
    return [(name, secret) for file in files for name, data in members(file) for secret in secrets_of(data)]


def members(file):
    data = file.read_bytes()
    return [(f"{file.name}/{name}", content) for name, content in of_archive(data).items()] or [(file.name, data)]


# ---- the instrument -------------------------------------------------------------------------------------------------


def of_zip(name, data):
    with zipfile.ZipFile(packed := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, data)
    return packed.getvalue()


def of_tar(name, data):
    with tarfile.open(fileobj=(packed := io.BytesIO()), mode="w:gz") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def of_python(folder):
    (folder / "cases.py").write_text(f"def secret():\n    return {HIDDEN!r}\n")
    return Path(py_compile.compile(folder / "cases.py", folder / "cases.pyc")).read_bytes()


def of_notebook(output):
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1")])
    book.cells[0].outputs = [nbformat.v4.new_output("display_data", data={"image/png": output})]
    return nbformat.writes(book).encode()


HIDES = {
    "a text": lambda folder: ANSWER.encode(),
    "lines": lambda folder: ANSWER.replace(" ", "\n").encode(),
    "a page": lambda folder: f"<p>{ANSWER.replace(chr(39), '&#39;').replace('own', '<b>own</b>')}</p>".encode(),
    "JSON": lambda folder: json.dumps({"answer": [ANSWER[:30], ANSWER[30:]]}).encode(),
    "escapes": lambda folder: "".join(f"\\u{ord(x):04x}" for x in ANSWER).encode(),
    "compiled Python": of_python,
    "a zip in a zip": lambda folder: of_zip("a.zip", of_zip("b.json", json.dumps([ANSWER]).encode())),
    "a tar in a zip": lambda folder: of_zip("a.tgz", of_tar("b.md", ANSWER.encode())),
    "an output": lambda folder: of_notebook(base64.encodebytes(ANSWER.encode()).decode()),
    "a zip in an output": lambda folder: of_notebook(base64.b64encode(of_zip("a", of_python(folder))).decode()),
}


@pytest.mark.parametrize("hides", HIDES.values(), ids=HIDES)
def test_a_secret_is_found_in(hides, tmp_path):
    (tmp_path / "given").write_bytes(hides(tmp_path))
    (found,) = told_by(tmp_path / "given")
    assert found[1] in sentences(ANSWER) | sentences(HIDDEN)


def test_the_secrets_are_where_they_must_be(released, own):
    """And so are found there: what the tests below look for is what teachers get."""
    assert len(secrets()) > 100
    told = {secret for _, secret in told_by(ROOT / "course" / "assignments", *released.glob("*/teacher"))}
    assert told == secrets() - sentences(ANSWER) - sentences(HIDDEN)
    assert sentences(ANSWER) | sentences(HIDDEN) <= {secret for _, secret in told_by(own / "own" / "gradescope.zip")}


# ---- what students get ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A teacher's homework with hidden cases, and one for students in rows."""
    folder = tmp_path_factory.mktemp("secrets")
    words = {"why": {"points": 1, "question": "Why?", "answer": ANSWER}}
    course = Course(folder, id="own", by_hand=words)
    course.has_cases("replace(find('03.1'), ranks=(3, 4, 6))", before=f"SECRET = {HIDDEN!r}")
    (folder / "roster.txt").write_text("ann\nben\n")
    out, roster = ["--out", str(folder / "out")], ["--roster", str(folder / "roster.txt")]
    assert main([str(folder / "hw.json"), *out, "--cases", str(folder / "cases.py")]) == 0
    assert main([str(ROOT / "course/assignments/hw3.json"), *out, *roster]) == 0
    return folder / "out"


def test_no_handout_has_one(released, own):
    zips = [*released.glob("*/*-handout.zip"), *own.glob("own/*-handout.zip"), *own.glob("hw3/handouts/*.zip")]
    assert len(zips) == len(FILES) + 1 + 2
    assert told_by(*zips) == []


def test_nothing_that_platforms_show_has_one(released, own):
    """Classroom 50 serves its folder, and a workflow is in the student's repository."""
    shown = [
        folder for out in (released, own) for kind in ("github", "classroom50") for folder in out.glob(f"*/{kind}")
    ]
    assert len(shown) == 2 * (len(FILES) + 2)
    assert told_by(*shown) == []


def as_nbgrader(cells):
    """What `nbgrader generate_assignment` leaves of the cells with answers: a stub between the marks, or of a text."""
    for cell in cells:
        if cell.metadata.get("nbgrader", {}).get("solution"):
            short, marks = re.subn(r"(?ms)^ *### BEGIN SOLUTION$.*?^ *### END SOLUTION$", "    ...", cell.source)
            cell.source = short if marks else "Your answer."


def as_otter(cells):
    """What `otter assign` leaves of them: nothing of a text between marks, of code the prompt."""
    inside = False
    for cell in cells:
        inside = (inside or cell.source == "# BEGIN SOLUTION") and cell.source != "# END SOLUTION"
        if inside and cell.cell_type == "markdown":
            cell.source = ""
        cell.source = re.sub(r"(?ms)^ *# BEGIN SOLUTION NO PROMPT$.*?^ *# END SOLUTION$", "", cell.source)


@pytest.mark.parametrize(("place", "strip"), [("nbgrader/source/*", as_nbgrader), ("otter", as_otter)])
def test_what_a_platform_makes_of_a_teachers_copy_has_none(released, own, tmp_path, place, strip):
    """The files that we write have them, between marks that the platform removes."""
    books = [path for out in (released, own) for path in out.glob(f"*/{place}/*.ipynb")]
    assert len(told_by(*books)) > 50
    for number, path in enumerate(books):
        book = nbformat.read(path, as_version=4)
        strip(book.cells)
        nbformat.write(book, tmp_path / f"{number}.ipynb")
    assert told_by(tmp_path) == []


def test_the_library_for_notebooks_has_none(tmp_path):
    """It lies on the site: `tools/make_colab_zip.py`."""
    assert told_by(tool("make_colab_zip").write(tmp_path / "book.zip")) == []


def test_a_site_for_students_has_no_solutions(tmp_path):
    tool("student_site").copy(tmp_path / "book")
    names = [path.relative_to(tmp_path / "book").as_posix() for path in (tmp_path / "book").rglob("*")]
    assert "exercises/03_data_parallelism.ipynb" in names and "_toc.yml" in names
    assert not [name for name in names if name.startswith(("solutions", "tests/"))]
    for path in [tmp_path / "book" / "_toc.yml", *(tmp_path / "book").glob("exercises/*.ipynb")]:
        assert "solutions/" not in path.read_text(), path.name
    assert told_by(tmp_path / "book") == []


@pytest.mark.thorough("it builds a page")
def test_a_built_page_for_students_has_no_answer(tmp_path):
    """One page of exercises, nothing of it executed: the page, its source, the search and the zips of the site."""
    book = tmp_path / "book"
    tool("student_site").copy(book)
    (book / "_toc.yml").write_text("format: jb-book\nroot: exercises/03_data_parallelism\n")
    config = (book / "_config.yml").read_text()
    assert "execute_notebooks: cache" in config
    (book / "_config.yml").write_text(config.replace("execute_notebooks: cache", 'execute_notebooks: "off"'))
    command = [f"{sys.exec_prefix}/bin/jupyter-book", "build", "."]
    ended = subprocess.run(command, cwd=book, capture_output=True, text=True, timeout=200)
    site = book / "_build" / "html"
    page = site / "exercises" / "03_data_parallelism.html"
    assert ended.returncode == 0 and page.exists(), ended.stdout + ended.stderr
    assert "average_gradients" in page.read_text() and "NotImplementedError" in page.read_text()
    told = nbformat.read(ROOT / "solutions" / "03_data_parallelism.ipynb", as_version=4).cells
    answers = [c.source.splitlines()[0][:60] for c in told if "solution-only" in c.metadata.get("tags", ())]
    assert len(answers) > 5
    for path in [p for p in site.rglob("*") if p.suffix in (".html", ".ipynb", ".txt") or p.name == "searchindex.js"]:
        text = path.read_text()
        assert not [word for word in ("solutions/", "BEGIN SOLUTION", *answers) if word in text], path
    for path in site.glob("*.zip"):
        with zipfile.ZipFile(path) as archive:
            assert not [name for name in archive.namelist() if "solution" in name], path.name
    assert told_by(book) == []


KEEPS = "course/hw.json", "course/own/hw.json", "homeworks/hw.json", "my_cases.py", "release/hw1/teacher/rubric.md"


def test_what_a_teacher_keeps_in_the_books_folder_is_in_none(tmp_path, monkeypatch):
    for name in (*KEEPS, "_toc.yml", "lib/__init__.py"):
        (tmp_path / "here" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "here" / name).write_text(ANSWER * (name in KEEPS))
    site = tool("student_site")
    for names in (vars(site), site.files.__globals__):
        monkeypatch.setitem(names, "ROOT", tmp_path / "here")
    monkeypatch.setattr("course.release.__main__.BOOK", tmp_path / "here")
    site.copy(tmp_path / "copy")
    assert [*library()] == ["lib/__init__.py"] == site.files(*tool("make_colab_zip").NEEDED)
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["_toc.yml", "lib"]


def test_an_installed_book_has_none():
    """In a wheel is each folder of course/ that is not excluded, be it a package or not."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        excluded = tomllib.load(file)["tool"]["setuptools"]["packages"]["find"]["exclude"]
    folders = [
        path for path in (ROOT / "course").iterdir() if path.is_dir() and f"course.{path.name}" not in excluded
    ]
    assert ROOT / "course" / "check" in folders
    assert told_by(*folders) == []
