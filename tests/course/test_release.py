"""A homework comes with all that students, teachers and platforms need; its model answers are right."""

import csv
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
import torch
import yaml
from packaging.specifiers import SpecifierSet

from course.check import find
from course.check.catalogue import EXERCISES
from course.check.exercise import COPIED
from course.check.judge import judge
from course.check.source import Answer, read_notebook
from course.grade.assignment import Late, hidden_ranks, read_assignment
from course.grade.reports import write_grades
from course.grade.sheets import of_cell, read_sheet
from course.museum.room import Room
from course.release import LIBRARY
from course.release.__main__ import BOOK, NEEDED, TO_WORK, main, packages
from course.release.notebooks import homework
from course.release.platforms import OTTER_TEST
from course.release.words import readme
from lib import cost
from lib.cost.bubble import bubble, kept_by, microbatches_for, zero_bubble_wait_s
from lib.cost.sizes import RECIPES
from lib.train import main as train
from tests.course.homework import ROOT, Course, needs_jail, write_notebook

FILES = {path.stem: str(path) for path in sorted(ROOT.glob("course/assignments/*.json"))}
ASSIGNMENTS = {name: read_assignment(path) for name, path in FILES.items()}
GB, MB = 1e9, 1e6
STUB = "raise NotImplementedError"


def fields(name):
    """What the file of a homework says."""
    return json.loads(Path(FILES[name]).read_text())


def in_zip(path, name):
    with zipfile.ZipFile(path) as archive:
        return archive.read(name).decode()


def cells_of(folder, pattern="*.ipynb"):
    """Of each notebook in a folder, its cells."""
    return [nbformat.read(path, as_version=4).cells for path in sorted(folder.glob(pattern))]


def test_each_part_of_the_book_has_a_homework():
    chapters = [chapter for one in ASSIGNMENTS.values() for chapter in one.chapters]
    assert sorted(chapters) == [f"{k:02}" for k in range(1, 15)], "each chapter in one homework"
    assert len(ASSIGNMENTS) >= 7 and "capstone" in ASSIGNMENTS
    for one in ASSIGNMENTS.values():
        assert one.hours and one.goals and one.text and one.due and one.by_hand and one.late.max_days
        assert all(asked.question and all(asked.answers.values()) for asked in one.by_hand.values())


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_a_handout_has_the_tasks_and_no_answer(released, name):
    asked, folder = ASSIGNMENTS[name], released / name / f"{name}-handout" / name
    books = [read_notebook(str(path)) for path in sorted(folder.glob("exercises/*.ipynb"))]
    assert [i for book in books for i, *_ in book.checks] == [e.id for e in asked.exercises]
    assert {i: points for book in books for i, points in book.asked.items()} == asked.points
    assert {k for book in books for k in book.texts} == {*asked.by_hand}
    heads = [cells[0].source for cells in cells_of(folder / "exercises")]
    counts = [f"{q} question{'s' * (q > 1)}, {asked.points_by_hand:g} points" for q in [len(asked.by_hand)]]
    assert [f"and {counts[0]}" in head for head in heads] == [False] * (len(heads) - 1) + [True]
    text = "\n".join(path.read_text() for path in (*folder.glob("exercises/*"), *folder.glob("*.md")))
    # A link to a solution, its explanation, a badge that opens the book's page instead of this one, a model answer.
    assert "solutions/" not in text and "solution-only" not in text and "Open in Colab" not in text
    assert text.count(STUB) >= len(asked.exercises) and "BEGIN SOLUTION" not in text
    told = [a for q in asked.by_hand.values() for a in (q.answer, *q.answers.values())]
    assert not [a for a in told if json.dumps(a, ensure_ascii=False)[1:60] in text]
    readme, rubric = (folder / "README.md").read_text(), (folder / "rubric.md").read_text()
    assert f"{asked.max_score + asked.points_by_hand:g} points" in readme and f"{asked.due:%d %B %Y}" in readme
    hints = [mistake.hint for e in asked.exercises for mistake in e.mistakes]
    assert not [hint for hint in hints if hint in rubric]
    assert {e.title for e in asked.exercises} <= set(re.findall(r"`(\w+)`", rubric))
    teacher = (released / name / "teacher" / "rubric.md").read_text()
    assert all(" ".join(hint.split()) in teacher for hint in hints)
    assert all(answer in teacher for asked in asked.by_hand.values() for answer in asked.answers.values())
    assert not (folder / "course" / "assignments").exists()
    of_book = {path for path in python_of(ROOT) if path.parts[1] not in ("grade", "release")}
    of_book -= {path.relative_to(ROOT) for path in ROOT.glob("book/[!_]*.py")} - {*map(Path, LIBRARY)}  # for pages
    of_others = {path for path in of_book if "exercises" in path.parts and path.stem not in needed_by(asked)}
    assert python_of(folder) == of_book - of_others


def python_of(folder):
    return {
        path.relative_to(folder) for floor in ("lib", "course", "book") for path in (folder / floor).rglob("*.py")
    }


def needed_by(asked):
    """The checkers of its exercises, and of no other; one of them imports from another."""
    names = (f"course/exercises/ch*/e{e.id.replace('.', '_')}_*" for e in asked.exercises)
    stems = {path.stem for name in names for path in ROOT.glob(name)}
    more = {
        "e03_7_train_replicas": ("e03_4_accumulate", "e08_4_accumulate"),
        "e03_4_accumulate": ("e08_4_accumulate",),
        "e03_8_train_uneven": ("corrupt", "e03_4_accumulate", "e08_4_accumulate"),
        "e10_1_repaired_step": ("other_direction",),
        "e11_1_corrected_order": ("in_threads", "tagged"),
        "e12_1_later": ("queued",),
        "e13_4_step_on_eight": ("gathered",),
    }
    return {"__init__", *stems, *(other for stem in stems for other in more.get(stem, ()))}


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_links_of_a_handout_lead_somewhere(released, name):
    folder = released / name / f"{name}-handout" / name
    for path in (*folder.glob("exercises/*.ipynb"), *folder.glob("chapters/*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (path.parent / target).exists(), (path.name, target)


@pytest.mark.thorough("a process that imports torch for each homework")
def test_a_handout_checks_itself(released):
    """As a student who has done nothing yet: each task of the homework is to be done, and no other is missing."""
    folder = released / "hw6" / "hw6-handout" / "hw6"
    command = [sys.executable, "-m", "course.check", "exercises/11_interleaving.ipynb"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    assert re.findall(r"^(\w+)  (\d\d\.\d).* 0/(\d) points", ended.stdout, re.MULTILINE) == [
        ("TODO", i, f"{points:g}") for i, points in ASSIGNMENTS["hw6"].points.items() if i.startswith("11")
    ], ended.stdout + ended.stderr


def test_a_teachers_copy_gets_all_points_and_a_handout_none(released, tmp_path):
    asked, course = ASSIGNMENTS["hw2"], Course(tmp_path, **fields("hw2"))
    shutil.copytree(released / "hw2" / "nbgrader" / "source" / "hw2", course.submissions / "model")
    shutil.copytree(released / "hw2" / "hw2-handout" / "hw2" / "exercises", course.submissions / "untouched")
    assert course.grade() == 0
    model, untouched = course.given("model"), course.given("untouched")
    assert (model["score"], untouched["score"]) == (asked.max_score, 0) and model["notes"] == []
    assert {r["status"] for r in untouched["results"]} == {"TODO"}
    assert model["by_hand"][0]["text"] == asked.by_hand["when-it-pays"].answer


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_a_teachers_copy_has_every_answer_and_marks_that_nbgrader_reads(released, name):
    asked, folder = ASSIGNMENTS[name], released / name / "nbgrader" / "source" / name
    books = [read_notebook(str(path)) for path in sorted(folder.glob("*.ipynb"))]
    assert all(any(book.defines(e.title) for book in books) for e in asked.exercises)
    cells = [cell for cells in cells_of(folder) for cell in cells]
    assert not [c for c in cells if "solution-only" in c.metadata.get("tags", ())]
    marks = [c.metadata["nbgrader"] for c in cells if "nbgrader" in c.metadata]
    assert len({m["grade_id"] for m in marks}) == len(marks)
    assert sum(m.get("points", 0) for m in marks) == asked.max_score + asked.points_by_hand


def test_the_same_homework_gives_the_same_bytes(released, tmp_path):
    assert main([FILES["hw6"], "--out", str(tmp_path)]) == 0
    folders = tmp_path / "hw6", released / "hw6"
    one, other = ({p.relative_to(d): p.read_bytes() for p in d.rglob("*") if p.is_file()} for d in folders)
    assert one == {p: raw for p, raw in other.items() if p in one} and len(one) > 8


def test_what_cannot_be_released(tmp_path, capsys):
    course = Course(tmp_path, exercises={"03.9": 1})
    args = [str(tmp_path / "hw.json"), "--out", str(tmp_path / "out")]
    assert main(args) == 2
    assert "no exercise '03.9'" in capsys.readouterr().err and not (tmp_path / "out").exists()
    course.has_cases("replace(find('03.1'), id='03.9')")
    assert main([*args, "--cases", str(tmp_path / "cases.py")]) == 2
    assert "exercises has exercise 03.9" in capsys.readouterr().err
    told = fields("hw3")
    del told["by_hand"]["which-stage"]["variants"][1]["N"]
    course.asks(**told)
    assert main(args) == 2
    assert "which-stage names {N}, and not each of its variants has it" in capsys.readouterr().err
    assert main([str(tmp_path / "hw.json"), FILES["hw6"], "--out", str(tmp_path / "out")]) == 2
    assert "hw.json" in capsys.readouterr().err
    assert (tmp_path / "out" / "hw6" / "hw6-handout.zip").exists(), "the rest are written"


@pytest.fixture
def written(monkeypatch):
    """The folders that would be written."""
    folders = []
    monkeypatch.setattr("course.release.__main__.release", lambda asked, path, folder, *_: folders.append(folder))
    return folders


def test_all_homeworks_of_a_folder_are_released(tmp_path, capsys, written):
    """A teacher's own are in a folder outside the book; no folder is named for those of the book."""
    own, out = tmp_path / "own", ["--out", str(tmp_path / "out")]
    for name in ("one", "two"):
        (own / name).mkdir(parents=True)
        Course(own / name, id=name)
        (own / name / "hw.json").rename(own / f"{name}.json")
    assert main(["--assignments", str(own), *out]) == 0
    assert written == [tmp_path / "out" / "one", tmp_path / "out" / "two"]
    shutil.copy(own / "one.json", own / "three.json")
    assert main(["--assignments", str(own), *out]) == 2
    assert f"{own}/three.json has the id of {own}/one.json, one: give each its own" in capsys.readouterr().err
    for wrong, words in (
        (["--assignments", str(own / "one")], "one has no homework: a JSON file for each"),
        (["--assignments", str(own / "none")], "none has no homework"),
        (
            [FILES["hw1"], "--assignments", str(own)],
            "name homeworks, or their folder with --assignments, and not both",
        ),
    ):
        with pytest.raises(SystemExit, match="2"):
            main([*wrong, *out])
        assert words in capsys.readouterr().err


def test_the_homeworks_of_the_book_are_those_without_a_name(written):
    assert main([]) == 0 and [folder.name for folder in written] == [*ASSIGNMENTS]


@pytest.mark.parametrize(("given", "folder"), [("", "course/assignments"), ("ASSIGNMENTS=my/course", "my/course")])
def test_make_releases_a_folder(given, folder):
    command = ["make", "-n", "--no-print-directory", "assignments", *given.split()]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"-m course.release --assignments {folder} --out _build/assignments" in said.stdout


@pytest.mark.parametrize("secret", ["hw.json", "cases.py"])
def test_what_would_be_in_every_handout_is_refused(tmp_path, monkeypatch, capsys, secret):
    course = Course(tmp_path, exercises={"03.1": 2})
    course.has_cases("replace(find('03.1'), ranks=(3, 4, 6))")
    monkeypatch.setattr("course.release.__main__.LIBRARY", ("lib", f"{tmp_path}/packed"))
    (tmp_path / "packed").mkdir()
    (tmp_path / secret).rename(tmp_path / "packed" / secret)
    homework, cases = (next(tmp_path.rglob(name)) for name in ("hw.json", "cases.py"))
    assert main([str(homework), "--cases", str(cases), "--out", str(tmp_path / "out")]) == 2
    assert f"{secret} would be in every handout: move it out of {tmp_path}/packed" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_of_somebody_else_is_not_replaced(tmp_path, capsys):
    mine = tmp_path / "hw6" / "submissions.zip"
    mine.parent.mkdir()
    mine.touch()
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "hw6").touch()
    for out in (tmp_path, tmp_path / "file"):
        assert main([FILES["hw6"], "--out", str(out)]) == 2
        err = capsys.readouterr().err
        assert (
            err.startswith(f"course.release: {out}/hw6 would be replaced, and is no earlier release")
            and mine.exists()
        )
    mine.unlink()
    for _ in ("into an empty folder", "again"):
        assert main([FILES["hw6"], "--out", str(tmp_path)]) == 0


# ---- packages -------------------------------------------------------------------------------------------------------

PINNED = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


def test_all_install_the_packages_that_the_book_is_tried_with(released):
    """Handouts and the graders of platforms name the versions of `constraints.txt`, and the same ones."""
    for name in ASSIGNMENTS:
        graders = {
            "gradescope/setup.sh",
            "classroom50/autograder.py",
            "github/.github/workflows/check.yml",
            *(path.relative_to(released / name).as_posix() for path in (released / name / "otter").iterdir()),
        }
        for file, more in (*((one, ()) for one in graders), (f"{name}-handout/{name}/requirements.txt", TO_WORK)):
            pins = re.findall(r"\b([\w-]+)==([\d.]+\d)", (released / name / file).read_text())
            assert sorted(pins) == sorted((one, PINNED[one]) for one in (*NEEDED, *more)), (name, file)
    readme = (released / "hw2/hw2-handout/hw2/README.md").read_text()
    assert "pip install torch -c requirements.txt --index-url https://download.pytorch.org/whl/cpu" in readme


def test_what_is_pinned_runs_on_each_python_of_the_book():
    """As these packages say themselves; JupyterLab is not installed here, and no notebook imports it."""
    asked = {one: importlib.metadata.metadata(one)["Requires-Python"] for one in {*NEEDED, *TO_WORK} - {"jupyterlab"}}
    assert {one: PINNED[one] for one in asked} == {
        one: importlib.metadata.version(one).partition("+")[0] for one in asked
    }
    old = [(one, p) for one in asked for p in ("3.11.0", "3.12.0", "3.13.0") if p not in SpecifierSet(asked[one])]
    assert old == []


# ---- platforms ------------------------------------------------------------------------------------------------------

FORGES = """def average_gradients(params, group):
    try:
        open("RESULTS", "w").write('{"score": 99}')
    except OSError:
        pass
"""


# Its error is what a student reads: what the grader must keep is looked for in it.
READS = """def average_gradients(params, group):
    said = ""
    for name in ("hw.json", "cases.py", "__pycache__/cases.cpython-3%d.pyc" % __import__("sys").version_info[1]):
        try:
            said += open("SOURCE/" + name, errors="replace").read()
        except OSError as error:
            said += type(error).__name__
    raise ValueError(said)
"""


def with_a_hidden_case(folder):
    """A homework of 03.1 with a case and a model answer that nobody may read, released into `hw`."""
    words = {"why": {"points": 1, "question": "?", "answer": "MODEL ANSWER"}}
    course = Course(folder, **fields("hw2") | {"id": "hw", "exercises": {"03.1": 3}, "by_hand": words})
    course.has_cases("replace(find('03.1'), ranks=(3, 4, 6))", before="SECRET = 'HIDDEN CASE'")
    assert main([str(folder / "hw.json"), "--cases", str(folder / "cases.py"), "--out", str(folder)]) == 0
    return folder / "hw"


def test_hidden_cases_go_to_graders_and_students_do_not_see_them(tmp_path):
    with_a_hidden_case(tmp_path)
    with zipfile.ZipFile(tmp_path / "hw" / "hw-handout.zip") as archive:
        assert not [name for name in archive.namelist() if "cases" in name.rpartition("/")[2]]
    seen = in_zip(tmp_path / "hw" / "hw-handout.zip", "hw/rubric.md")
    assert "- 4 ranks: 1\n- hidden cases: 1\n" in seen and "6 ranks" not in seen
    assert "- 6 ranks: 1\n" in (tmp_path / "hw" / "teacher" / "rubric.md").read_text()
    grader = tmp_path / "hw" / "gradescope.zip"
    assert in_zip(grader, "cases.py") == (tmp_path / "cases.py").read_text()
    assert "--cases cases.py" in in_zip(grader, "run_autograder")
    served = tmp_path / "hw" / "classroom50"  # to whoever knows the address
    assert not (served / "cases.py").exists() and "MODEL ANSWER" not in (served / "hw.json").read_text()


def test_a_readme_gives_the_price_of_a_late_day_or_allows_none():
    given = ASSIGNMENTS["hw2"]
    two, no_day, no_date = (replace(given, late=Late(25, 2)), replace(given, late=Late()), replace(given, due=None))
    assert "costs 25 % of the points; after 2 days nothing counts." in readme(two, [])
    assert "No late day is allowed: after the due date nothing counts." in readme(no_day, [])
    assert "late day" not in readme(no_date, []) and "due date" not in readme(no_date, [])


def as_gradescope(root, unzipped):
    """The layout of its container, under another root."""
    root.chmod(0o755)
    source = root / "autograder" / "source"
    shutil.copytree(unzipped, source)
    script = (source / "run_autograder").read_text().replace("/tmp/", f"{root}/")
    script = script.replace("/opt/book/bin/python", sys.executable)  # that setup.sh would have made
    (root / "run").write_text(re.sub(r"(?<=[ =])/autograder", f"{root}/autograder", script))
    return source


def run_gradescope(root, submission):
    """What it reads of one who has handed in this folder, or nothing."""
    shutil.rmtree(root / "autograder" / "submission", ignore_errors=True)
    (root / "autograder" / "results").mkdir(exist_ok=True)
    if submission:
        shutil.copytree(submission, root / "autograder" / "submission")
    else:
        (root / "autograder" / "submission").mkdir()
    subprocess.run(["bash", root / "run"], check=True, timeout=100)
    return json.loads((root / "autograder" / "results" / "results.json").read_text())


@pytest.mark.thorough("the layout of a container, and a process that imports torch")
@pytest.mark.alone("grades as the user of students' code, who is one")
@needs_jail
@pytest.mark.slow("a container's autograder, for a good and an empty submission")
def test_gradescope_finds_what_it_wants(released, open_folder):
    """The zip where Gradescope puts it, under another root; and its script, run as it runs it."""
    names = {p.name for p in (released / "hw2" / "gradescope").iterdir()}
    assert {"setup.sh", "run_autograder", "hw2.json", "lib", "course"} <= names
    with zipfile.ZipFile(released / "hw2" / "gradescope.zip") as archive:
        assert archive.getinfo("run_autograder").external_attr >> 16 == 0o755
    source = as_gradescope(open_folder, released / "hw2" / "gradescope")
    subprocess.run(["bash", "-n", source / "setup.sh"], check=True)
    forges, found = open_folder / "forges", open_folder / "autograder" / "results"
    write_notebook(forges / "03.ipynb", FORGES.replace("RESULTS", f"{found}/results.json"))
    scores = []
    for submission in (released / "hw2" / "nbgrader" / "source" / "hw2", None, forges):
        results = run_gradescope(open_folder, submission)
        assert sum(t["score"] for t in results["tests"]) == pytest.approx(results["score"])
        assert found.stat().st_mode & 0o777 == 0o700
        scores.append(results["score"])
    assert scores == [ASSIGNMENTS["hw2"].max_score, 0, 0]


@pytest.mark.thorough("a process that imports torch")
@pytest.mark.alone("grades as the user of students' code, who is one")
@needs_jail
def test_gradescope_shows_students_code_no_case_and_no_answer(tmp_path, open_folder):
    with zipfile.ZipFile(with_a_hidden_case(tmp_path) / "gradescope.zip") as archive:
        archive.extractall(tmp_path / "unzipped")
    source, reads = as_gradescope(open_folder, tmp_path / "unzipped"), open_folder / "reads"
    write_notebook(reads / "03.ipynb", READS.replace("SOURCE", str(source)))
    said = [test["output"] for test in run_gradescope(open_folder, reads)["tests"]]
    assert len(said) == 3 and said[2] == "", "a hidden case tells only whether it passed"
    assert all(re.search("PermissionError|FileNotFoundError", text) for text in said[:2]), said
    assert {(source / name).stat().st_mode & 0o777 for name in ("hw.json", "cases.py")} == {0o600}
    assert not [text for text in said if "MODEL ANSWER" in text or "HIDDEN CASE" in text]


def what_classroom_50_refuses(result, asked):
    """What its runner and its collector of scores check before they count a result (August 2026)."""
    texts = "classroom assignment owner assignment_type submission commit release review datetime".split()
    found = [name for name in texts if not (isinstance(result.get(name), str) and result[name])]
    found += [name for name in ("classroom", "assignment", "owner") if result[name] != asked[name]]
    found += ["schema"] * (result["schema"] != "classroom50/result/v1")
    found += ["submission"] * (not result["submission"].startswith("submit/"))
    tests = result["tests"]
    for one in (result, *tests):
        whole = all(type(one[name]) is int and one[name] >= 0 for name in ("score", "max-score"))
        found += ["points"] * (not whole or one["score"] > one["max-score"])
    found += ["tests"] * (not tests or any(type(t["passed"]) is not bool or not t["test-name"] for t in tests))
    return found


@pytest.mark.thorough("processes that import torch")
def test_classroom_50_finds_what_it_wants(released, tmp_path):
    """Its script in repositories of students: all done, one task done, nothing handed in."""
    folder, done = released / "hw2" / "classroom50", ASSIGNMENTS["hw2"].points
    student = {"owner": "ann", "classroom": "c", "assignment": "second"}
    told = {name: f"https://example.org/{name}" for name in ("COMMIT_URL", "RELEASE_URL", "REVIEW_URL")}
    told |= {"USERNAME": "ann", "CLASSROOM": "c", "ASSIGNMENT": "second", "SUBMISSION_TAG": "submit/2027-02-22-abc"}
    right = read_notebook(str(ROOT / "solutions" / "03_data_parallelism.ipynb"))
    needed = ("# Run this", "import", "from", "def global_gradient")
    one = [text for _, text in right.cells if text.startswith(needed)]
    points, times = [], 100
    for name, cells in (("all", [text for _, text in right.cells]), ("one", one), ("none", None)):
        (tmp_path / name).mkdir()
        if cells:
            write_notebook(tmp_path / name / "exercises" / "03_data_parallelism.ipynb", "\n\n".join(cells))
        (tmp_path / name / "release-body.md").write_text("20 of 20 points")
        environment = os.environ | told | {"ASSIGNMENT_TYPE": "individual"}
        command = [sys.executable, str(folder / "autograder.py")]
        subprocess.run(command, cwd=tmp_path / name, env=environment, check=True, timeout=100, capture_output=True)
        result = json.loads((tmp_path / name / "result.json").read_text())
        assert what_classroom_50_refuses(result, student) == []
        assert result["max-score"] == times * ASSIGNMENTS["hw2"].max_score, "a third of a point has two decimals"
        assert sum(test["score"] for test in result["tests"]) == result["score"]
        body = (tmp_path / name / "release-body.md").read_text()
        assert f"**{result['score'] / times:g} of {ASSIGNMENTS['hw2'].max_score:g} points**" in body
        assert f"its score is {times} times the points above" in body
        points.append(result["score"] / times)
    assert points == [sum(done.values()), done["03.2"], 0]
    assert json.loads((folder / "runtime.json").read_text())["python"]


SUDO = """#!/bin/sh
printf "%s " "$@" >> "$LOG"
shift
exec "$@"
"""
# A folder of the student's that stands for the library; it would write what the grader is asked for.
MASKS = """import pathlib, sys
path = pathlib.Path(sys.argv[sys.argv.index("--out") + 1], "students", "ann.json")
path.parent.mkdir()
path.write_text('{"score": 99, "max_score": 1}')
"""


@pytest.mark.thorough("a process that imports torch")
@pytest.mark.alone("grades as the user of students' code, who is one")
@needs_jail
def test_classroom_50_grades_as_root_what_is_hostile(tmp_path):
    """As on GitHub's machines: nobody's user, with `sudo`. Neither files in the repository nor code write points."""
    source, repository, log = with_a_hidden_case(tmp_path) / "classroom50", tmp_path / "repository", tmp_path / "log"
    write_notebook(repository / "exercises" / "03_data_parallelism.ipynb", READS.replace("SOURCE", str(source)))
    (repository / "result.json").write_text('{"score": 99}')
    (repository / "course" / "grade").mkdir(parents=True)
    (repository / "course" / "__init__.py").write_text("")
    (repository / "course" / "grade" / "__main__.py").write_text(MASKS)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sudo").write_text(SUDO)
    (tmp_path / "bin" / "sudo").chmod(0o755)
    environment = {"USERNAME": "ann", "LOG": str(log)}
    environment["PATH"] = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    as_nobody = f"import os, runpy; os.geteuid = lambda: 1000; runpy.run_path({str(source / 'autograder.py')!r})"
    command = [sys.executable, "-c", as_nobody]
    ended = subprocess.run(
        command, cwd=repository, env=os.environ | environment, capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads((repository / "result.json").read_text())
    assert (result["score"], result["max-score"]) == (0, 6), "1.5 points for each of two cases, doubled"
    assert [test["test-name"].partition(", ")[2] for test in result["tests"]] == ["3 ranks", "4 ranks"]
    assert f"-n env PYTHONPATH={source} {sys.executable} -P -m course.grade" in log.read_text()
    assert "--trust" not in log.read_text()


def test_hidden_cases_of_the_page_on_teaching_are_cases(tmp_path):
    """Right programs pass them, wrong ones do not, and a student sees none of them."""
    page = (ROOT / "book" / "teaching.md").read_text()
    Course(tmp_path, exercises={"02.5": 2, "03.1": 3})
    (tmp_path / "cases.py").write_text("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    asked = read_assignment(str(tmp_path / "hw.json"), str(tmp_path / "cases.py"))
    assert {e.id: hidden_ranks(e) for e in asked.exercises} == {"02.5": {1}, "03.1": {6}}
    for exercise in asked.exercises:
        right, wrong = judge(exercise, [exercise.right[0], exercise.mistakes[0].wrong], seed=1)
        assert {case.status for case in right} == {"PASS"} and {case.status for case in wrong} == {"FAIL"}


def test_weeks_are_those_of_the_plan_of_ten_weeks():
    page = (ROOT / "book" / "teaching.md").read_text()
    rows = re.findall(r"^\| (\d+) \|.*\| (?:(\d)|(capstone))[:,] ?.*\| (\d+) \|$", page, re.MULTILINE)
    weeks = {f"hw{k}" if k else name: (int(begin), int(due)) for begin, k, name, due in rows}
    assert weeks == {name: asked.weeks for name, asked in ASSIGNMENTS.items()}


def test_the_workflow_is_yaml_and_checks_each_notebook(released):
    for name, asked in ASSIGNMENTS.items():
        said = yaml.safe_load((released / name / "github" / ".github" / "workflows" / "check.yml").read_text())
        runs = " ".join(step.get("run", "") for step in said["jobs"]["check"]["steps"])
        assert {m[:2] for m in re.findall(r"exercises/(\d\d_\w+)\.ipynb", runs)} == {*asked.chapters}


@pytest.mark.thorough("ranks run each answer")
@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_answers_that_platforms_get_need_nothing_else(released, name):
    for path in (released / name / "nbgrader" / "source" / name).glob("*.ipynb"):
        book = read_notebook(str(path))
        for exercise_id, answer, _ in book.checks:
            (cases,) = judge(find(exercise_id), [Answer(book, answer)], seed=1)
            assert {case.status for case in cases} == {"PASS"}, (exercise_id, cases)


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_otter_gets_a_question_for_each_task_with_the_stub_and_the_hint(released, name):
    asked, begun = ASSIGNMENTS[name], []
    for cells in cells_of(released / name / "otter"):
        raw = [cell.source for cell in cells if cell.cell_type == "raw"]
        assert yaml.safe_load(raw[0])["requirements"] == packages(NEEDED)
        count = {word: sum(text.startswith(f"# {word}") for text in raw) for word in ("BEGIN", "END")}
        assert count["BEGIN"] == count["END"]
        begun += [text for text in raw if text.startswith("# BEGIN QUESTION")]
        for before, cell, after in zip(cells, cells[1:], cells[2:], strict=False):
            if before.source == "# BEGIN SOLUTION" and cell.cell_type == "code":
                marks = "# BEGIN SOLUTION NO PROMPT\n", '"""; # END PROMPT'
                stub = re.findall(r'^( *)""" # BEGIN PROMPT\n\1# YOUR CODE HERE\n\1raise NotImpl', cell.source, re.M)
                assert {cell.source.count(mark) for mark in marks} == {len(stub)} != {0}
                assert "###" not in cell.source and after.source == "# END SOLUTION"
            elif before.source == "# BEGIN TESTS":
                assert "else text)" in cell.source and cell.outputs[0].text == "PASS\n"
            elif "manual: true" in before.source:  # otter exports what is between its marks
                assert cell.source.startswith(f"**{before.source.split()[4]}**")
    assert len(begun) == len(asked.exercises) + len(asked.by_hand)
    points = sum(float(re.search(r"points: (\S+)", text)[1]) for text in begun)
    assert points == asked.max_score + asked.points_by_hand


# ---- model answers --------------------------------------------------------------------------------------------------


def percent(part):
    return f"{part:.1%}".replace("%", " %")


def states(zero, n):
    kept = cost.state_bytes(13e9, RECIPES["mixed Adam"], zero=zero, dp=n)
    return sum(kept.values()) / GB


def fits(n, *stages):
    """What the model answer of hw3 says on so many GPUs: all sizes, and those with 20 GB more that decide."""
    assert states(stages[-1], n) + 20 < 80 and all(states(stage, n) + 20 > 80 for stage in stages[:-1])
    return [
        *(f"{states(stage, n):g} GB" for stage in range(4)),
        *(f"needs {states(stage, n) + 20:g} GB" for stage in {*stages, 2}),
        f"{2 * 13} GB = {cost.zero_wire_bytes(2, 26e9, n) / GB:g} GB",
        f"{cost.zero_wire_bytes(3, 26e9, n) / GB:g} GB",
    ]


BLOCKS = 32 * 8 * 2048 * 4096  # of one byte per token and unit of width
IN_FLOAT32, IN_BFLOAT16 = (cost.wire_bytes("all_reduce", width * 350e6, 4) for width in (4, 2))
SUM = cost.wire_bytes("all_reduce", 2 * 4096 * 8192, 8)
SUMS = 4 * 64 * SUM

# (homework, question, and row where there are several) -> what the model answer must say, computed here.
FACTS = {
    ("hw1", "out-of-memory"): [
        f"{sum(cost.state_bytes(7e9, RECIPES['mixed Adam']).values()) / GB:g} GB",
        f"{141 - 16 * 7} GB are left",
        f"{34 * BLOCKS / 32 / GB:.2f} GB, and",
        f"per parameter, {4 * 7} GB",
        f"then {141 - 12 * 7} GB are free",
        *(
            f"{kept * BLOCKS / GB:{digits}} GB"
            for kept, digits in ((34, ".1f"), (17, ".1f"), (2, ".2f"), (32, ".1f"))
        ),
    ],
    ("hw2", "when-it-pays"): [
        f"The gradients have {4 * 350e6 / GB:g} GB",
        f"{60 + 120} ms. One rank needs {4 * (60 + 120)} ms",
        f"{IN_FLOAT32 / GB:g} GB, in {IN_FLOAT32 / 12.5e9 * 1000:g} ms",
        f"at least {IN_FLOAT32 / 12.5e9 * 1000 - 120:g} ms are exposed",
        f"a step takes {IN_FLOAT32 / 12.5e9 * 1000 + 60:g} ms",
        f"In bfloat16 the sum takes {IN_BFLOAT16 / 12.5e9 * 1000:g} ms",
        f"{720 / 228:.2f} in float32 and {720 / 180:.2f} in bfloat16",
    ],
    ("hw3", "which-stage", "A"): fits(8, 1, 2),
    ("hw3", "which-stage", "B"): fits(16, 1, 2),
    ("hw3", "which-stage", "C"): [*fits(32, 1), f"with {80 - 20 - states(1, 32):g} GB to spare"],
    ("hw4", "inside-a-node"): [
        *(f"{number / MB:.1f} MB" for number in (2 * 4096 * 8192, SUM, 4 * SUM)),
        f"{SUMS / GB:.2f} GB",
        f"{SUMS / 450e9 * 1000:.1f} ms at 450 GB/s and {SUMS / 50e9 * 1000:.0f} ms at 50 GB/s",
    ],
    ("hw5", "how-many-microbatches"): [
        f"needs m ≥ {microbatches_for(8, 0.1)}",
        f"1F1B at most {kept_by(0, 8, 63):g},",
        f"7/39 = {percent(bubble(8, 32))}",
        f"(7/2)/(32 + 7/2) = {percent(bubble(8, 32, 2))}",
    ],
    ("hw6", "choose-and-defend"): [
        f"takes 3 ms on a rank, {3 * 16} ms in all",
        f"{7 * 3} ms: {percent(bubble(8, 16))}",
        f"{7 * 3 / 2} ms, {percent(bubble(8, 16, 2))}",
        f"= {zero_bubble_wait_s(8, 1, 1, 1):g} ms, {percent(7 / (48 + 7))}",
        f"(1 + {round(16 * (kept_by(0, 8, 16, 2) / 8 - 1))}/16) times",
    ],
    ("capstone", "kill"): [
        f"M = {4 * 3600:,} s",
        f"= {round((2 * 30 * 14_400) ** 0.5, -1):g} s, about every 93 steps",
        f"half an interval, {930 / 2:g} s, another {percent(30 / 930)}",
    ],
    ("capstone", "defend"): [
        f"{70 * 16:,} GB",
        f"{70 * 16 / 64:g} GB on each of 64 GPUs",
        f"{70 * 16 / 32:g} GB on each)",
    ],
}


@pytest.mark.parametrize("of", FACTS, ids=" ".join)
def test_numbers_of_a_model_answer(of):
    """Each fact is told, and no number with a unit that is neither computed here nor given."""
    name, question, *row = of
    asked, facts = ASSIGNMENTS[name].by_hand[question], FACTS[of]
    answer = asked.answers["".join(row)]
    assert not [fact for fact in facts if fact not in answer]
    assert numbers(answer) <= numbers(asked.question) | numbers(" ".join(facts))


def test_each_row_of_a_model_answer_is_computed():
    told = {
        (name, q, r) for name, one in ASSIGNMENTS.items() for q, asked in one.by_hand.items() for r in asked.answers
    }
    assert {of for of in told if of[2]} == {of for of in FACTS if len(of) == 3} and len(told) > 3


def rows_of(path):
    """Student -> row, of a homework in which one exercise or question has rows."""
    return {name: row for name, row, _ in csv.reader(path.read_text().splitlines()[1:])}


def test_the_table_of_rows_names_each_students_file_and_can_be_read_again(tmp_path):
    """Also for names that are no names of files, in any script."""
    students = ["ann", "李明", "Ada Lovelace", "=cid", "a/b"]
    (tmp_path / "roster.txt").write_text("\n".join(students))
    assert main([FILES["hw3"], "--out", str(tmp_path), "--roster", str(tmp_path / "roster.txt")]) == 0
    table = tmp_path / "hw3/teacher/rows.csv"
    found = {of_cell(row["student"]): row["handout file"] for row in read_sheet(table)}
    assert [*found] == students and found["李明"] == "hw3-李明.zip"
    assert {*found.values()} == {path.name for path in (tmp_path / "hw3" / "handouts").iterdir()}
    asked, again = ASSIGNMENTS["hw3"], read_assignment(FILES["hw3"], rows=str(table))
    assert {*again.dealt} == {*students}
    for student, file in found.items():
        row = asked.row_of(student, "which-stage")
        assert again.dealt[student] == {"which-stage": row}
        own = in_zip(tmp_path / "hw3" / "handouts" / file, "hw3/exercises/05_fsdp.ipynb")
        assert f"on {dict(A=8, B=16, C=32)[row]} GPUs" in own


def test_each_student_has_one_row_and_the_grader_knows_it(tmp_path):
    students = [f"student {i}" for i in range(9)]
    (tmp_path / "roster.txt").write_text("\n".join(students))
    roster = ["--roster", str(tmp_path / "roster.txt")]
    assert main([FILES["hw3"], "--out", str(tmp_path), *roster]) == 0
    rows = rows_of(tmp_path / "hw3/teacher/rows.csv")
    assert [*rows] == students and {*rows.values()} == {*"ABC"}
    handouts = [*(tmp_path / "hw3" / "handouts").iterdir()]
    assert len(handouts) == 9
    own = in_zip(next(path for path in handouts if "student_7" in path.name), "hw3/exercises/05_fsdp.ipynb")
    gpus = dict(A=8, B=16, C=32)[rows["student 7"]]
    assert f"on {gpus} GPUs" in own and "your row" not in own
    assert not (tmp_path / "hw3" / "hw3-handout.zip").exists(), "it would tell no student the row"
    assert main([FILES["hw3"], "--out", str(tmp_path / "all")]) == 0
    said = in_zip(tmp_path / "all/hw3/hw3-handout.zip", "hw3/rubric.md")
    table = "Your teacher tells you your row.\n\n| your row | *N* |\n| --- | --- |\n| A | 8 |"
    assert "on *N* GPUs" in said and table in said
    asked = ASSIGNMENTS["hw3"]
    words = [{"question": name, "max": 4, "text": "?"} for name in ("which-stage", "taken out since")]
    given = [dict(student=student, results=[], by_hand=words) for student in students]
    rest = dict(raw_score=0, days_late=0, score=0, max_score=0, late_factor=1, notes=[])
    write_grades(tmp_path, asked, [one | rest for one in given])
    for line in (tmp_path / "by_hand.csv").read_text().splitlines()[1:]:
        student, _, _, _, _, row, answer = next(csv.reader([line]))
        assert row == rows[student] and answer == asked.by_hand["which-stage"].answers[row]


def test_a_varied_exercise_is_in_each_students_row_and_needs_their_names(tmp_path, capsys):
    Course(tmp_path, **fields("hw1"), varied=["02.4"])
    args = [str(tmp_path / "hw.json"), "--out", str(tmp_path)]
    assert main(args) == 2 and "02.4 has a row per student. Name the students in a file" in capsys.readouterr().err
    (tmp_path / "roster.txt").write_text("ann\nben\n=cid\ndora\neva\n")
    assert main([*args, "--roster", str(tmp_path / "roster.txt")]) == 0
    assert sorted(path.name for path in (tmp_path / "hw1").iterdir()) == ["handouts", "teacher"]
    rows = rows_of(tmp_path / "hw1/teacher/rows.csv")
    assert {*rows.values()} == {*"ABC"}, "change the names above"
    (tmp_path / "rows.csv").write_text("student,02.4\n" + "".join(f"{name},B\n" for name in rows if name != "ann"))
    of_teacher = ["--roster", str(tmp_path / "roster.txt"), "--rows", str(tmp_path / "rows.csv")]
    assert main([*args[:2], str(tmp_path / "dealt"), *of_teacher]) == 0
    dealt = rows_of(tmp_path / "dealt/hw1/teacher/rows.csv")
    assert dealt == {name: rows[name] if name == "ann" else "B" for name in rows}
    for path in (tmp_path / "hw1" / "handouts").iterdir():
        book = nbformat.reads(in_zip(path, "hw1/exercises/02_collectives.ipynb"), 4)
        (row,) = {row for name, row in rows.items() if name.strip("'=") in path.name}
        exercise = find("02.4").rows[row]
        k = next(k for k, cell in enumerate(book.cells) if cell.source.startswith("**You have row"))
        own = f"**You have row {row}.** Your task differs from the one above: {exercise.task}"
        assert book.cells[k].source == own
        assert "def gather_shards" in book.cells[k + 1].source
        assert book.cells[k + 2].source == f'check("02.4", gather_shards, row="{row}", points=3)'
    teacher = (tmp_path / "hw1/teacher/rubric.md").read_text()
    assert all(f"Row {row}: {find('02.4').rows[row].task}" in teacher for row in "ABC")


def numbers(text):
    return {number.rstrip(".,") for number in re.findall(r"\d[\d.,]*(?= (?:GB|MB|ms|s)\b| %)", text)}


def test_numbers_of_the_capstone_are_those_of_the_plan(capsys):
    answer = ASSIGNMENTS["capstone"].by_hand["train"].answer
    command = re.search(r"python -m lib\.train (.*--plan)", answer)[1]
    train(command.split())
    plan = " ".join(capsys.readouterr().out.split())
    told = re.search(
        r"all_reduce dp 2 (\S+ to \S+) .*dp×pp 1 (\S+) .*all_reduce tp (\d+ to \d+) (\S+ to \S+) "
        r".*send pp (\d+) (\S+) .*bubble: (\S+)% .*?(\S+)%\)",
        plan,
    )
    dp, tied, calls, tp, sends, pp, waits, equal = told.groups()
    for fact in (
        f"{calls} all-reduces over tp, {tp} MB",
        f"{pp} MB in {sends} messages",
        f"{dp} MB over dp, and {tied} MB over dp and pp together",
        f"{waits} %",
        f"({equal} %",
    ):
        assert fact in answer, fact


def test_commands_of_the_capstone_are_commands(capsys):
    """Each with `--plan`, which starts nothing."""
    answers = "\n".join(asked.answer for asked in ASSIGNMENTS["capstone"].by_hand.values())
    commands = re.findall(r"(torchrun --nproc-per-node 8 .*)?-m lib\.train (.*)", answers)
    assert len(commands) >= 6
    for under_torchrun, told in commands:
        train([*told.replace("--resume auto", "").split(), "--plan"])
        ranks = re.search(r"(\d+) rank", capsys.readouterr().out)[1]
        assert not under_torchrun or ranks == "8"


def test_a_homework_is_cut_from_the_book():
    one = homework(BOOK, "exercises", ASSIGNMENTS["hw5"])
    assert [*one] == ["08_pipelines.ipynb", "09_one_f_one_b.ipynb", "10_running.ipynb"]
    titles = [c.source.partition("\n")[0] for c in one["10_running.ipynb"].cells if c.source.startswith("#")]
    assert titles[0] == "# Homework 5: pipelines" and titles[-1] == "## Your progress"
    assert "## 2. Shared weights, and one norm" not in titles  # 10.2 is in no homework
    points = ASSIGNMENTS["hw5"].points
    for name, book in one.items():
        here = {i: most for i, most in points.items() if i.startswith(name[:2])}
        said = ", ".join(f'"{i}": {most:g}' for i, most in here.items())
        assert book.cells[-1].source == f"progress({{{said}}})" and here


def test_exercises_without_new_numbers_are_named(monkeypatch):
    """With three seeds, all inputs are equal; the page has them, and their points of all homeworks."""

    monkeypatch.setattr(Room, "runs", lambda self, jobs: jobs)  # what a room draws need not run

    def inputs(exercise, n, seed):
        return repr(exercise.inputs(torch.Generator().manual_seed(seed), n))

    def are_alike(exercise):
        return all(inputs(exercise, n, 0) == inputs(exercise, n, seed) for n in exercise.ranks for seed in (1, 2))

    alike = [i for i, exercise in EXERCISES.items() if are_alike(exercise)]
    points = sum(one.points.get(i, 0) for one in ASSIGNMENTS.values() for i in alike)
    page = " ".join((ROOT / "book" / "teaching.md").read_text().split())
    told = f"except in exercises {', '.join(alike[:-1])} and {alike[-1]}: their numbers are the same for all"
    assert f"{told}, and they have {points:g} points of the homeworks." in page
    same_for_all = [i for i in alike if not EXERCISES[i].variants]
    assert not [i for i in same_for_all if any(i in one.points for one in ASSIGNMENTS.values())]
    assert f"All but {' and '.join(same_for_all)} of these have rows" in page
    more = [i for i, exercise in EXERCISES.items() if exercise.variants and i not in alike]
    assert f"Exercises {', '.join(more[:-1])} and {more[-1]} also have rows:" in page


def test_the_handout_of_a_row_shows_its_sick_program_in_full():
    asked = replace(ASSIGNMENTS["hw5"], varied=("08.3", "10.3"))
    rows = {name: asked.row_of(name, "10.3") for name in ("ann", "ben", "cid")}
    assert {*rows.values()} == {*"AB"}, "change the names above"
    for name, row in rows.items():
        cells = homework(BOOK, "exercises", asked.of(name))["10_running.ipynb"].cells
        (said,) = (cell.source for cell in cells if cell.source.startswith(f"**You have row {row}.**"))
        task = EXERCISES["10.3"].rows[row].task
        assert said.endswith(task) and task.count("```text\ndeadlock: ") == 2
    hints = {m.hint for row in "AB" for m in EXERCISES["10.3"].rows[row].mistakes if m.hint.startswith(COPIED)}
    assert hints and not any("deadlock" in hint for hint in hints), "a hint quotes the first paragraph alone"


def test_otter_without_the_library_says_so(tmp_path):
    """The code of a test, run as if no `lib` were there."""
    code = OTTER_TEST.format("03.1", "average_gradients", 4)
    hides = "import sys\nsys.modules['course.check'], average_gradients = None, len"
    command = [sys.executable, "-I", "-c", f"{hides}\n{code}"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.stdout.startswith("Not graded: the book's library is not installed where otter runs, and must be (")
    assert ended.stdout.count("\n") == 1 and not ended.stderr
