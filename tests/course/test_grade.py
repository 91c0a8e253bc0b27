"""Submissions are graded as they should be, whatever is in them, and nothing of them is left."""

import csv
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from course.check.compare import same
from course.check.judge import dealt
from course.check.running import NoAnswer
from course.check.source import read_notebook
from course.grade import __main__ as grade_main
from course.grade import grading, sight
from course.grade.__main__ import USER, main
from course.grade.assignment import Assignment, AssignmentError, Late, hidden_ranks, read_assignment
from course.grade.jail import Jail, JailError, User, processes_of
from course.grade.reports import fill_canvas, gradescope, write_table
from course.grade.returns import pack, unpack
from course.grade.sheets import as_cell, of_cell, read_sheet
from course.grade.submissions import Submission, find_submissions
from tests.course.homework import (
    OTHER,
    RIGHT,
    ROOT,
    SETUP,
    THIRD,
    WHY,
    WRONG,
    Course,
    alone,
    an_answer,
    markdown,
    needs_jail,
    needs_view,
    write_notebook,
)

CASES = 'replace(find("03.1"), ranks=(3,), timeout_s=1.5)', 'replace(find("03.2"), ranks=(3,))'
WITNESS = "/tmp/a-student-was-here"
STUB = "raise NotImplementedError"


def first(body):
    """A notebook with this answer to the first exercise, and a right one to the second."""
    return [SETUP, an_answer(body), OTHER]


def second(body, *above):
    """A notebook with this answer to the second exercise, and a right one to the first."""
    return [SETUP, *above, an_answer(body, "global_gradient(g, count, group)"), RIGHT]


# Name -> cells, points of the first exercise (of 3), points of the second (of 2).
HOSTILE = {
    name: (first(body), 0, 2)
    for name, body in {
        "untouched": STUB,
        "sleeps": "time.sleep(10**6)",
        "loops": "while True: pass",
        "waits for a message": "comm.recv(params[0].grad, group, (group.rank + 1) % 3).wait()",
        "calls on one rank": "if group.rank == 0: comm.all_reduce(params[0].grad, group)",
        "raises on one rank": "if group.rank == 0: raise ValueError('a\\nb\\n' * 9)",
        "segfault": "import ctypes; ctypes.string_at(0)",
        "leaves": "os._exit(0)",
        "sys.exit": "sys.exit(0)",
        "prints for ever": "while True: print('x' * 10**6)",
        "prints a verdict": "print('PASS  03.1 average_gradients   3/3 points')",
        "a status on paper": 'print(\'{"status": "PASS", "points": 3}\')',
        "eats memory": "x = [bytearray(10**9) for _ in range(100)]",
        "fills memory": "x = [bytes([1]) * (3 * 10**9) for _ in range(9)] if group.rank == 0 else 0",
        "fork bomb": "while True:\n    try: os.fork()\n    except OSError: pass",
        "patches torch": "torch.allclose = torch.equal = torch.Tensor.__eq__ = lambda *a, **k: True",
        "patches arithmetic": "torch.Tensor.__sub__ = torch.Tensor.sub = lambda a, b: a * 0",
        "calls the reference": "from course.exercises import e03_1_average_gradients as e\n"
        "e.average_gradients(params, group)",
        "patches the judge": "import course.check as c, course.check.judge as j\nj.same = c.verdict = lambda *a: True",
        "writes elsewhere": f"for f in ('{WITNESS}', '/etc/x', '{ROOT}/x'):\n    try: open(f, 'w').write('1')\n"
        "    except OSError: pass",
        "pipes for files": "import tempfile\nfor where, _, names in os.walk(tempfile.gettempdir()):\n"
        "    for name in names:\n        try: os.remove(f'{where}/{name}'); os.mkfifo(f'{where}/{name}')\n"
        "        except OSError: pass",
        "stops its parent": "import signal\nos.kill(os.getppid(), signal.SIGSTOP); time.sleep(99)",
        "half a letter": "raise ValueError('\\ud800')",
        "kills its parent": "os.kill(os.getppid(), 9); time.sleep(9)",
        "kills all": "os.kill(-1, 9); time.sleep(9)",
        "leaves a daemon": "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(999)\n"
        "    os._exit(0)",
        "many who ignore": "import signal\nfor _ in range(50):\n    if os.fork() == 0:\n"
        "        os.setsid(); signal.signal(15, signal.SIG_IGN); time.sleep(999)",
        "fills the disk": "import tempfile\nfor where in ('/tmp', '/var/tmp', '/dev/shm', tempfile.gettempdir()):\n"
        "    for i in range(99):\n"
        "        with open(f'{where}/{group.rank}-{i}', 'wb') as file: file.write(bytes(10**8))",
        "input": "input()",
        "numbers by heart": "for p in params:\n    if p.grad is not None: p.grad = torch.ones_like(p)",
    }.items()
}
HOSTILE |= {
    name: (second(f"return {result}", *above), 3, 0)
    for name, (result, *above) in {
        "a class that runs code": (
            "Odd()", f"class Odd:\n    def __reduce__(self): return os.system, ('touch {WITNESS}',)"
        ),
        "800 MB": ("torch.zeros(10**8).double()",),
        "a sparse tensor": ("g.to_sparse()",),
        "a meta tensor": ("g.to('meta')",),
        "a large number": ("10**5000",),
        "lists in lists": ("(x := [g], x.append(x))[0]",),
        "infinite": ("g * float('inf')",),
        "nan": ("g * float('nan')",),
        "a lying tensor": (
            "g.as_subclass(Liar)",
            "class Liar(torch.Tensor):\n    def __eq__(self, other): return True\n"
            "    def allclose(self, *a, **k): return True\n"
            "    @classmethod\n    def __torch_function__(cls, f, t, a=(), k=None): return True",
        ),
    }.items()
}  # fmt: skip
HOSTILE |= {
    "right": ([SETUP, RIGHT, OTHER], 3, 2),
    "def check": ([SETUP, "def check(*a, **k): pass", *first("pass")[1:]], 0, 2),
    "environment": (["import os\nos.environ['CHECK_STRICT'] = '0'", *first("os.environ['CHECK_STRICT'] = '0'")], 0, 2),
    "stops its parent, which is to be sent much": (
        ["# " + "x" * 10**6, *first("import signal\nos.kill(os.getppid(), signal.SIGSTOP)")], 0, 2,
    ),
    "much code": ([SETUP, *["x = 1\n" * 10**5] * 2, RIGHT, OTHER], 0, 0),
    "the network": (  # right, unless it gets through
        first("import socket\ntry: socket.create_connection(('127.0.0.1', PORT), 1)\n"
              "except OSError: right(params, group)")
        + [RIGHT.replace("average_gradients", "right")], 3, 2,
    ),
    "forged": (
        [
            {"source": SETUP, "outputs": [{"output_type": "stream", "name": "stdout", "text": "PASS  03.1"}]},
            *first("pass")[1:],
            {"source": "check = print\ncheck('03.1', average_gradients)", "metadata": {"nbgrader": {"points": 99}}},
        ], 0, 2,
    ),
    "a shell in a cell": ([SETUP, "!rm -rf /", "%%bash\nrm -rf /", "os.system('rm -rf /')", RIGHT, OTHER], 3, 2),
    "a loop at top level": (["while True: pass", SETUP, RIGHT, OTHER], 3, 2),
    "a cell that does not parse": ([SETUP, "def average_gradients(:", OTHER], 0, 2),
    "a helper in another cell": (
        [SETUP, RIGHT.replace("comm.all", "all"), "all_reduce = lambda *a, **k: comm.all_reduce(*a, **k)", OTHER], 3, 2,
    ),
    "code in a default": ([SETUP, "def helper(x=os._exit(0)): pass", RIGHT, OTHER], 0, 0),
    "parentheses": (
        [SETUP, *(f"x = {'(' * n + ')' * n}\ny = {'1+' * n}1" for n in (50, 500, 2000, 30_000)), RIGHT, OTHER], 3, 2,
    ),
    "other names": (
        [
            SETUP,
            "from functools import partial\nMEAN = 'mean'\nreduce = comm.all_reduce\nmean = partial(reduce, op=MEAN)",
            "?comm\ncomm.send?\nfiles = !ls",
            RIGHT.replace('comm.all_reduce(g, group, op="mean")', "mean(g, group)"),
            OTHER,
        ], 3, 2,
    ),
    "a class for a function": ([SETUP, "average_gradients = 3", OTHER], 0, 2),
}  # fmt: skip


def sparse(path):
    path.touch()
    os.truncate(path, 10 * 2**30)


# Files that are no notebook: name of the student, of the file, what it is, and what a note must say.
BROKEN = [
    ("garbage", "a.ipynb", os.urandom(999), "not JSON"),
    ("empty", "a.ipynb", b"", "not JSON"),
    ("a list", "a.ipynb", b"[1, 2]", "no list of cells"),
    ("brackets", "a.ipynb", b"[" * 100_000, "not JSON"),
    ("odd cells", "a.ipynb", b'{"cells": [null, 3, {"cell_type": "code", "source": [1, null]}, {}]}', ""),
    ("link", "a.ipynb", lambda path: path.symlink_to("/etc/passwd"), "not a plain file"),
    ("fifo", "a.ipynb", os.mkfifo, "not a plain file"),
    ("sparse", "a.ipynb", sparse, "too large"),
    ("no file", "", None, "nothing was handed in"),
    (os.fsdecode(b"\xff\xfe"), "", None, "nothing was handed in"),
    ("a script", "hw.py", RIGHT.encode(), "hw.py: no notebook"),
    ("zipped", "hw.zip", b"PK", "REVIEW: unzip hw.zip, and grade again"),
]


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """All of them in one run, two at a time; student -> JSON."""
    course = Course(tmp_path_factory.mktemp("grading"))
    course.has_cases(*CASES)
    for name, file, made, _ in BROKEN:
        (course.submissions / name).mkdir()
        if callable(made):
            made(course.submissions / name / file)
        elif file:
            (course.submissions / name / file).write_bytes(made)
    course.hands_in(os.fsdecode(b"\xfe\xff"), SETUP, RIGHT, OTHER, file="\udcff.ipynb")
    with socket.create_server(("127.0.0.1", 0)) as listens:
        port = str(listens.getsockname()[1])
        for name, (cells, *_) in HOSTILE.items():
            cells = [cell if isinstance(cell, dict) else cell.replace("PORT", port) for cell in cells]
            course.hands_in(name, *cells)
        assert main(course.command("--jobs", "2")) == 0
    found = [json.loads(path.read_text()) for path in (course.grades / "students").glob("*.json")]
    return {given["student"]: given for given in found}


def of_fifty(test):
    """Whichever is the first of these waits for all submissions."""
    for mark in (
        needs_jail,
        alone,
        pytest.mark.thorough("fifty submissions, of which many end by their time limit"),
        pytest.mark.slow("grades fifty submissions, some of which loop"),
        pytest.mark.timeout(300),
    ):
        test = mark(test)
    return test


def points(given):
    return tuple(sum(r["points"] for r in given["results"] if r["exercise"] == i) for i in ("03.1", "03.2"))


@of_fifty
@pytest.mark.parametrize("name", HOSTILE)
def test_points_are_as_they_should_be(graded, name):
    assert points(graded[name]) == HOSTILE[name][1:], graded[name]


@of_fifty
def test_what_is_no_notebook_costs_its_student_alone(graded):
    for name, file, _, note in BROKEN:
        given = graded[ascii(name)[1:-1]]
        assert points(given) == (0, 0) and note in " ".join(given["notes"]), given
        assert {r["status"] for r in given["results"]} == {"BLOCKED" if file == "a.ipynb" else "MISSING"}
    assert points(graded["\\udcfe\\udcff"]) == (3, 2)


@of_fifty
def test_nothing_is_left(graded):
    assert not processes_of(USER) and not processes_of(USER + 1)
    assert not [path for path in (WITNESS, "/etc/x", ROOT / "x") if os.path.exists(path)]
    assert not list(Path("/tmp").glob("jail-*"))


@of_fifty
def test_what_went_wrong_is_told_apart(graded):
    said = {name: graded[name]["results"][0] for name in HOSTILE}
    assert said["untouched"]["status"] == "TODO"
    assert said["a cell that does not parse"]["status"] == "BLOCKED"
    assert "does not parse" in graded["a cell that does not parse"]["notes"][0]
    assert "endless loop" in said["loops"]["hint"] and "did not call it" in said["calls on one rank"]["hint"]
    assert graded["right"]["notes"] == [] and {r["hidden"] for r in graded["right"]["results"]} == {False}
    assert "REVIEW: course in 03.ipynb" in graded["patches the judge"]["notes"]
    assert "REVIEW: ctypes in 03.ipynb" in graded["segfault"]["notes"]
    assert "REVIEW: course in 03.ipynb" in graded["calls the reference"]["notes"]
    assert any(word in said["fills memory"]["hint"] for word in ("MemoryError", "did not return within"))
    assert "letters of code" in graded["much code"]["notes"][0]
    assert "No space left" in said["fills the disk"]["hint"]
    for name in ("a sparse tensor", "a meta tensor", "a large number", "lists in lists"):
        assert {r["status"] for r in graded[name]["results"]} == {"PASS", "FAIL"}, graded[name]
    assert "\\ud800" in said["half a letter"]["hint"]
    for name in ("stops its parent", "stops its parent, which is to be sent much"):
        assert said[name]["hint"].startswith("Your function returned nothing within"), said[name]


@needs_view
@pytest.mark.parametrize("allowed", [True, False])
def test_a_home_that_is_closed_to_others(allowed, open_folder, monkeypatch):
    """Python in it can be read, nothing else; where the system allows no such view, the folder is named."""
    home, below = open_folder, open_folder / "python" / "lib"
    below.mkdir(parents=True)
    for path in (below / "os.py", home / "secret"):
        path.write_text("x")
    monkeypatch.setattr(sight, "needed", lambda: [below])
    if not allowed:
        monkeypatch.setattr(sight, "_libc", SimpleNamespace(unshare=lambda flags: -1))
    assert sight.can_read(below / "os.py", USER) is allowed
    assert not sight.can_read(home / "secret", USER)
    assert sight._closed_above(below / "os.py") == home and home.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(sight, "unreadable", lambda uid: None if allowed else home)
    monkeypatch.setattr("course.grade.jail.processes_of", lambda uid: [])
    with nullcontext() if allowed else pytest.raises(JailError, match=f"cannot read {home}"):
        User(USER).check(home)


@needs_jail
def test_a_folder_that_a_classmates_code_could_read(open_folder):
    (open_folder / "ann").mkdir()
    User(USER).check(open_folder)
    open_folder.chmod(0o755)
    with pytest.raises(JailError, match=f"could read {open_folder}, and copy a classmate's answer: chmod 700"):
        User(USER).check(open_folder)


@needs_jail
def test_hidden_cases_that_students_code_could_read_are_refused_before_python_caches_them(
    tmp_path, open_folder, capsys, monkeypatch
):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    course, cases = Course(tmp_path), open_folder / "cases.py"
    open_folder.chmod(0o755)
    cases.write_text("EXERCISES = []")
    cases.chmod(0o644)
    assert main(course.command("--cases", str(cases))) == 2
    assert f"{cases}: chmod 600 that file" in capsys.readouterr().err
    assert list(open_folder.iterdir()) == [cases]
    cases.chmod(0o600)
    User(USER).check(tmp_path, str(cases))
    read_assignment(str(tmp_path / "hw.json"), str(cases))
    (cached,) = (open_folder / "__pycache__").iterdir()
    User(USER).check(tmp_path, str(cases))
    cached.chmod(0o644)
    with pytest.raises(JailError, match=f"{cached}: chmod 600"):
        User(USER).check(tmp_path, str(cases))


# ---- one run after another ------------------------------------------------------------------------------------------


@pytest.fixture
def course(tmp_path):
    """A homework of 03.1, with a hidden case, a question, a due date, and two students."""
    late = {"due": "2027-03-01T12:00:00+00:00", "late": {"percent_per_day": 10, "max_days": 2}}
    course = Course(tmp_path, **late, by_hand={"why": {"points": 5, "question": "Why?"}}, exercises={"03.1": 4})
    course.has_cases(CASES[0].replace("(3,)", "(3, 5)"))
    course.hands_in("ann", SETUP, RIGHT)
    course.hands_in("=ben", SETUP, WRONG)
    return course


def times_of(folder):
    return {path: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_a_course(course, capsys):
    tables = {
        "roster": "ann\n=ben\ncarl\ndora\n",
        "times": "student,time\nann,2027-03-02T13:00:00+00:00\n=ben,2027-03-01T11:00:00+00:00\n",
    }
    rows = course.rows(**tables)
    assert [*rows] == ["'=ben", "ann", "carl", "dora"]
    assert (rows["ann"]["raw"], rows["ann"]["days_late"], float(rows["ann"]["score"])) == ("4.0", "2", 3.2)
    assert rows["'=ben"]["score"] == rows["carl"]["score"] == "0.0"
    assert "nothing was handed in" in rows["carl"]["look at it because"]
    out = capsys.readouterr().out
    assert "03.1 average_gradients: 1 all, 0 some, 3 none (2 not defined)\n" in out
    assert "you summed and did not divide" in out

    given = course.given("ann")
    assert [(r["case"], r["hidden"]) for r in given["results"]] == [("3 ranks", False), ("5 ranks", True)]
    seen = gradescope(given)["tests"]
    assert [t["visibility"] for t in seen] == ["visible", "after_published"]
    assert sum(t["score"] for t in seen) == pytest.approx(3.2) == gradescope(given)["score"]

    # Points for words are entered by a person, and stay; nobody is graded twice.
    course.enter("ann,why,,5,", "ann,why,5,5,")
    before = times_of(course.grades / "students")
    row = course.rows(**tables)["ann"]
    assert (float(row["score"]), row["why"]) == (3.2 + 5 * 0.8, "5.0")
    assert before == times_of(course.grades / "students")

    # What a person enters must be a number.
    course.enter("ann,why,5.0,", "ann,why,two,")
    assert course.grade(**tables) == 2 and "'two' is no number of points" in capsys.readouterr().err
    course.enter("ann,why,two,", "ann,why,5,")

    # Another day, another number of points, another case, another submission: it is graded again.
    assert course.rows()["ann"]["score"] == "9.0"
    course.asks(exercises={"03.1": 2})
    assert course.rows()["ann"]["raw"] == "2.0"
    course.asks(exercises={"03.1": 4})
    course.has_cases(CASES[0].replace("(3,)", "(3, 4)"))
    course.rows()
    assert "4 ranks" in str(course.given("ann"))
    course.hands_in("=ben", SETUP, RIGHT)
    assert course.rows(**tables)["'=ben"]["score"] == "4.0"


def test_an_exercise_in_parts_gives_points_for_each(tmp_path):
    course = Course(tmp_path, exercises={"10.3": 4})
    course.hands_in("ann", "def missing_calls():\n    return '1SEND_F3', '0RECV_F0'")
    assert course.grade() == 0
    found = [(r["case"], r["status"], r["points"]) for r in course.given("ann")["results"]]
    assert found == [("Report 1", "PASS", 2), ("Report 2", "FAIL", 0)]


GATHER = """def gather_shards(x):
    sizes = [torch.zeros(1).long() for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(x)]))
    shards = [x.new_empty(int(size)) for size in sizes]
    shards[dist.get_rank()] = x
    for src, shard in enumerate(shards):
        dist.broadcast(shard, src)
    return """
IN_ROW = {
    "A": "torch.cat(shards[::-1])",
    "B": "torch.cat([shard[i : i + 1] for i in range(max(sizes)) for shard in shards])",
    "C": "torch.cat([shard.flip(0) for shard in shards])",
}


def test_the_answer_to_another_row_gets_no_points(tmp_path):
    course = Course(tmp_path, exercises={"02.4": 2}, varied=["02.4"])
    homework = read_assignment(str(tmp_path / "hw.json"))
    rows = {name: homework.row_of(name, "02.4") for name in ("ann", "ben", "cid", "dora", "eva")}
    assert {*rows.values()} == {*IN_ROW}, "change the names above"
    for name in rows:  # all have copied from ann
        course.hands_in(name, SETUP, GATHER + IN_ROW[rows["ann"]], file="02.ipynb")
    assert course.grade() == 0
    for name, row in rows.items():
        given = course.given(name)
        assert given["score"] == 2 * (row == rows["ann"]) and {r["row"] for r in given["results"]} == {row}
        told = " ".join(course.told(name).split())
        assert f"## 02.4 gather_shards, row {row}: " in told
        assert (f"This is right for row {rows['ann']}. You have row {row}: " in told) == (row != rows["ann"])


def test_a_row_that_changed_after_the_release_is_noted_and_can_be_given(tmp_path, capsys):
    """The student's name was spelled differently then, or the teacher grades with the book's file."""
    course = Course(tmp_path, exercises={"02.4": 2})
    course.hands_in("ann", SETUP, GATHER + IN_ROW["A"], 'check("02.4", gather_shards, row="A")', file="02.ipynb")
    for more, row in (({}, "-"), ({"varied": ["02.4"], "id": "other"}, "[BC]")):
        course.asks(**more)
        assert course.grade() == 0
        note = course.given("ann")["notes"][0]
        assert re.match(f"REVIEW: 02.4 was handed out in row A and is graded in row {row}: did", note), note
        assert "REVIEW" not in course.told("ann")
    assert course.grade(rows="student,02.4\nann,A\n") == 0  # of the release, with the name as it is now
    assert course.given("ann")["notes"] == [] and course.given("ann")["score"] == 2
    for text, words in (
        ("student,02.4\nann,D\n", "ann has row 'D' of 02.4, which has A, B, C"),
        ("student\nann\n", "has no column '02.4'"),
    ):
        assert course.grade(rows=text) == 2 and words in capsys.readouterr().err


def test_a_misspelt_name_in_the_times_is_no_earlier_time(course, capsys):
    assert course.grade(times="student,time\nanne,2027-03-02T13:00:00+00:00\n") == 2
    assert "times.csv has a time for 'anne', who handed nothing in and is on no roster" in capsys.readouterr().err
    rows = course.rows(times="student,time\nann,2027-03-01T11:00:00+00:00\n")
    assert "has no time for it" in rows["'=ben"]["look at it because"]
    assert "time" not in rows["ann"]["look at it because"]


@pytest.mark.parametrize(
    ("text", "words"), [("ann\nben\nann\n", "'ann' twice"), ("Student,ID,Section,hw1\n", "one name per line")]
)
def test_what_is_no_roster(course, text, words, capsys):
    assert course.grade(roster=text) == 2 and words in capsys.readouterr().err


def test_who_is_not_on_the_roster(course):
    rows = course.rows(roster="\ufeffstudent\nann\n")
    assert [*rows] == ["'=ben", "ann"] and "not on the roster" in rows["'=ben"]["look at it because"]
    assert "roster" not in rows["ann"]["look at it because"]


def test_an_answer_in_words_may_be_in_a_cell_of_its_own(tmp_path):
    """A student leaves the cell for the answer as it is, and writes below it; another deletes it."""
    stub = {"nbgrader": {"grade_id": "why", "solution": True}}

    def read(*cells):
        cells = [{"cell_type": "markdown", "source": text, "metadata": about} for text, about in cells]
        (tmp_path / "hw.ipynb").write_text(json.dumps({"cells": cells}))
        return read_notebook(str(tmp_path / "hw.ipynb")).texts.get("why")

    asked, untouched, end = (WHY, {}), ("*Your answer.*", stub), ("## Your progress", {})
    assert read(asked, untouched, end) == ""
    assert read(asked, untouched, ("Because.", {}), ("And so.", {}), end) == "Because.\n\nAnd so."
    assert read(asked, ("Because.", {}), end) == read(asked, ("Because.", stub), end) == "Because."
    assert read(asked, end) is None, "the grader notes that there is no cell for it"


def test_hidden_cases_of_a_varied_exercise_are_those_of_its_variants(tmp_path):
    course, paths = (
        Course(tmp_path, exercises={"02.4": 2}, varied=["02.4"]),
        (tmp_path / "hw.json", tmp_path / "cases.py"),
    )
    course.has_cases("replace(find('02.4'), ranks=(3, 5))")
    with pytest.raises(AssignmentError, match="its hidden cases are not those of its variants"):
        read_assignment(*map(str, paths))
    both = "variants=tuple(replace(one, ranks=(3, 5)) for one in find('02.4').variants)"
    course.has_cases(f"replace(find('02.4'), ranks=(3, 5), {both})")
    (exercise,) = read_assignment(*map(str, paths)).of("ann").exercises
    assert exercise.row and exercise.ranks == (3, 5) and hidden_ranks(exercise) == {5}


def test_where_grading_itself_fails_nobody_is_lost(course, monkeypatch, capsys):
    """A person looks; the next run grades that student again."""
    true = Submission.read

    def fails(submission):
        if submission.student == "ann" and submission.paths:
            raise OSError("the disk is gone")
        return true(submission)

    monkeypatch.setattr(Submission, "read", fails)
    rows = course.rows(code=1)
    assert rows["ann"]["look at it because"] == "could not be graded: OSError: the disk is gone"
    assert "(1 not readable)" in capsys.readouterr().out
    monkeypatch.undo()
    assert course.rows()["ann"]["raw"] == "4.0"


@pytest.mark.slow("a process of its own imports torch, and waits for a time limit")
@pytest.mark.thorough("a process that imports torch")
def test_what_is_interrupted_goes_on_where_it_was(course):
    for name in ("carl", "dora"):
        course.hands_in(name, *first("time.sleep(10**6)"))
    students, command = course.grades / "students", [sys.executable, "-m", "course.grade", *course.command("--trust")]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)
    until = time.monotonic() + 60
    while not (students / "ann.json").exists() and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    done = times_of(students)
    assert process.returncode != 0 and students / "ann.json" in done and students / "dora.json" not in done
    assert [*course.rows()] == ["'=ben", "ann", "carl", "dora"]
    assert done.items() <= times_of(students).items()


def test_a_container_without_root_needs_no_trust(course, monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr("course.grade.__main__.CONTAINER", (str(course.folder / "no such file"),))
    assert main(course.command()) == 2 and "only root can become one" in capsys.readouterr().err
    monkeypatch.setattr("course.grade.__main__.CONTAINER", (str(course.folder / "hw.json"),))
    assert main(course.command()) == 0 and "no root in this container" in capsys.readouterr().err


def test_what_a_chapter_defines_is_no_answer(course):
    """Who hands in the whole handout, with nothing done: chapters have functions with the names of some answers."""
    course.hands_in("dora", *first(STUB), file="exercises/03.ipynb")
    course.hands_in("dora", SETUP, RIGHT, file="chapters/03.ipynb")
    assert course.rows()["dora"]["score"] == "0.0"


def test_an_untouched_copy_counts_for_nothing(course):
    course.hands_in("ann", SETUP, an_answer(STUB), file="04.ipynb")
    row = course.rows()["ann"]
    assert row["raw"] == "4.0" and "defined in 2 notebooks; 03.ipynb counts" in row["look at it because"]


@pytest.mark.parametrize(
    ("own", "below", "text"),
    [
        ("Why? Because.", "*Your answer.*", "Because."),
        ("Why?\n\nBecause.", "It is.", "Because.\n\nIt is."),
        ("How?", "It is.", "It is."),
    ],
)
def test_an_answer_in_the_cell_of_its_question_is_one(course, own, below, text):
    course.hands_in("ann", SETUP, RIGHT, *markdown(WHY.replace("Why?", own), below))
    assert course.grade() == 0
    given = course.given("ann")
    assert [asked["text"] for asked in given["by_hand"]] == [text] and given["notes"] == []


def test_points_from_a_spreadsheet(course, capsys):
    """Excel writes a mark of the encoding, and in many countries semicolons and decimal commas."""
    assert "no cell for question why" in course.rows()["ann"]["look at it because"]
    head = "student;question;points;max;text;row;model answer"
    for said, wanted in (("2,5", "6.5"), ("5", "9.0"), ("", "4.0")):
        course.by_hand.write_text(f"\ufeff{head}\r\nann;why;{said};5;;;\r\n", newline="")
        assert course.rows()["ann"]["score"] == wanted
    for raw, words in (
        *((f"{head}\nann;why;{said};5;;;\n", "write a number from 0 to 5") for said in ("5,5", "-1", "nan", "inf")),
        ("student;question\nann;why\n", "has no column 'points'"),
        ("student,question,points,text\nann,why,3,für\n".encode("latin-1"), "save it as 'CSV UTF-8'"),
    ):
        course.by_hand.write_bytes(raw if isinstance(raw, bytes) else raw.encode())
        assert course.grade() == 2 and words in capsys.readouterr().err


def test_points_for_an_answer_that_has_changed_are_looked_at_again(course):
    def answer(text):
        course.hands_in("ann", *markdown(WHY, text), file="words.ipynb")  # their metadata is lost
        return course.rows()["ann"]

    answer("Because.")
    course.enter("ann,why,,5,Because.", "ann,why,4,5,Because.")
    assert "changed" not in answer("Because.")["look at it because"]
    for _ in range(2):  # until somebody says so
        row = answer("Or not.")
        assert "why: the answer changed" in row["look at it because"] and row["score"] == "8.0"
    course.enter("the answer changed", "")
    assert "changed" not in answer("Or not.")["look at it because"]


def test_what_a_student_gets_back(course):
    course.rows()
    said = course.told("=ben")
    assert "# Homework: =ben" in said and "**0 of 9 points**" in said and "why, in words: not graded yet" in said
    assert "[ ] 3 ranks" in said and "[ ] a hidden case" in said and "you summed and did not divide" in said
    assert "5 ranks" not in said


def test_one_exercise_that_cannot_be_judged(course, monkeypatch):
    """The others have their points, and the next run grades it again."""
    true = grading.judge
    course.asks(exercises={"03.1": 4, "03.2": 2})

    def fails(exercise, *rest):
        if exercise.id == "03.2":
            raise JailError("the disk is full")
        return true(exercise, *rest)

    monkeypatch.setattr(grading, "judge", fails)
    course.hands_in("ann", SETUP, RIGHT, OTHER)
    row = course.rows(code=1)["ann"]
    assert row["raw"] == "4.0"
    assert "global_gradient could not be graded: JailError: the disk" in row["look at it because"]
    monkeypatch.undo()
    assert course.rows()["ann"]["raw"] == "6.0"


def test_a_repaired_exercise_is_graded_again(course, monkeypatch):
    asked = read_assignment(str(course.folder / "hw.json"))
    before = grade_main._fingerprint(asked, None)
    assert grade_main._fingerprint(asked, None) == before
    exercise = ROOT / "course" / "exercises" / "ch03" / "e03_1_average_gradients.py"
    true = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: true(path) + b" " * (path == exercise))
    assert grade_main._fingerprint(asked, None) != before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_who_has_called_sudo_can_open_the_grades(course, monkeypatch):
    monkeypatch.setenv("SUDO_UID", "61234")
    monkeypatch.setenv("SUDO_GID", "61235")
    course.rows()
    made = [course.grades, *course.grades.rglob("*")]
    assert len(made) > 7 and {(p.stat().st_uid, p.stat().st_gid) for p in made} == {(61234, 61235)}


def test_hidden_cases_that_do_not_run_are_one_sentence(course, capsys):
    course.has_cases(before="1 / 0")
    assert course.grade() == 2
    said = capsys.readouterr().err
    assert "cases.py cannot be run: ZeroDivisionError: division by zero" in said and said.count("\n") == 1


# ---- what comes out of a jail ---------------------------------------------------------------------------------------


def saved(thing, **options):
    file = io.BytesIO()
    torch.save(thing, file, **options)
    return file.getvalue()


def deflated(raw):
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as records, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for name in records.namelist():
            new.writestr(name, records.read(name))
    return file.getvalue()


class Large:
    def __reduce__(self):
        return bytearray, (10**9,)


TWICE = [1] * 9
for _ in range(40):
    TWICE = [TWICE, TWICE]
FORGED = {
    "other ranks": saved([[{}] * 2]),
    "other answers": saved([[{}] * 3] * 2),
    "no list": saved({"a": 1}),
    "deflated": deflated(saved([[{"x": torch.zeros(10**6)}] * 3])),
    "legacy": saved([[{}] * 3], _use_new_zipfile_serialization=False),
    "behind other bytes": b"x" + saved([[{}] * 3]),
    "before other bytes": saved([[{}] * 3]) + b"x",
    "a bytearray": saved([[{"x": Large()}] * 3]),
    "a large shape": saved([[{"x": torch.zeros(1).expand(10**9)}] * 3]),
    "a list many times": saved([[{"x": TWICE}] * 3]),
    "no verdict": saved([{"status": "PASS", "hint": "", "stuck": "", "fault": False}]),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_bytes_are_not_read(name):
    with pytest.raises(ValueError):
        unpack(FORGED[name], answers=1, ranks=3)


def test_what_is_packed_can_be_read():
    fault = NoAnswer("FAIL", "The disk is full.", fault=True)
    got = [{"x": torch.ones(2).double(), "y": [1, 2.5, "z", None, True, (3,)]}] * 3
    back, why = unpack(pack([got, fault]), answers=2, ranks=3)
    assert same(back[0], got[0]) and why == fault


@needs_view
def test_a_disk_of_its_own(open_folder):
    """Small, in memory, and gone with its process."""
    inside = open_folder / "inside"
    inside.mkdir()

    def write(n_bytes):
        sight.own_disk([str(open_folder)], str(inside), USER, 2**20)
        for place in (open_folder, inside):
            (place / "x").write_bytes(bytes(n_bytes))

    assert sight.in_child(lambda: write(2**19)) and not sight.in_child(lambda: write(2**21))
    assert list(open_folder.rglob("*")) == [inside]


def test_names_of_canvas(tmp_path):
    """Of several uploads of a student, the newest is the last, by Canvas' number."""
    for name in (
        "doeann_LATE_12345_678_hw-1.ipynb",
        "doeann_LATE_12345_679_other.ipynb",
        "roeben_22_34_hw.ipynb",
        "roeben_22_4_hw-1.ipynb",
        "roeben_22_100_hw-2.ipynb",
        "kimminjun_7_1_hw.ipynb",
        "kimminjun_8_2_hw.ipynb",
        "own.ipynb",
    ):
        write_notebook(tmp_path / name)
    (tmp_path / "__MACOSX").mkdir()
    (tmp_path / "poecid_9_3_hw.pdf").write_text("")
    found = {s.student: s for s in find_submissions(str(tmp_path))}
    assert [*found] == ["doeann", "kimminjun_7", "kimminjun_8", "own", "poecid", "roeben"]
    assert found["kimminjun_8"].canvas_id == "8" and found["poecid"].others == ("poecid_9_3_hw.pdf",)
    assert (found["doeann"].canvas_id, found["doeann"].marked_late, len(found["doeann"].paths)) == ("12345", True, 2)
    assert (found["roeben"].canvas_id, found["roeben"].marked_late) == ("22", False)
    assert [path.name.split("_")[2] for path in found["roeben"].paths] == ["4", "34", "100"]


def test_a_column_of_canvas(tmp_path):
    asked = Assignment("hw", "Homework", (), {})
    rows = [
        ["Student", "ID", "SIS Login ID", "Homework (77)", "Final"],
        ["    Points Possible", "", "", "5", "9"],
        ["Doe, Ann", "12345", "ann@x", "", "8"],
        ["Roe, Ben", "22", "roeben", "", ""],
        ["Poe, Cid", "23", "cid", "", ""],
    ]
    write_table(tmp_path / "export.csv", rows)
    people = {"doeann": "12345", "roeben": "", "zoe": ""}
    grades = [{"student": name, "canvas_id": canvas_id} for name, canvas_id in people.items()]
    totals = {"doeann": 4.5, "roeben": 3.0, "zoe": 1}  # with points for words
    assert fill_canvas(str(tmp_path / "export.csv"), tmp_path / "new.csv", asked, grades, totals) == ["zoe"]
    filled = list(csv.reader(open(tmp_path / "new.csv", newline="")))
    assert [row[3] for row in filled] == ["Homework (77)", "5", "4.5", "3", ""] and [r[4] for r in filled][2] == "8"
    write_table(tmp_path / "other.csv", [["Student", "ID"]])
    with pytest.raises(ValueError, match="0 columns called 'Homework'"):
        fill_canvas(str(tmp_path / "other.csv"), tmp_path / "new.csv", asked, grades, totals)


@pytest.mark.parametrize(
    ("late", "days", "factor"),
    [(Late(), 0, 1), (Late(10, 3), 3, 0.7), (Late(10, 3), 4, 0), (Late(60, 3), 2, 0), (Late(), 1, 0)],
)
def test_what_a_day_costs(late, days, factor):
    assert late.factor(days) == pytest.approx(factor)


def test_a_day_late_is_a_day_begun():
    due = datetime.fromisoformat("2027-03-01T12:00:00+00:00")
    asked = Assignment("hw", "Homework", (), {}, due=due)
    times = {"2027-03-01T12:00:00+00:00": 0, "2027-03-01T14:00:00+01:00": 1, "2027-03-02T12:00:01+00:00": 2}
    assert {when: asked.days_late(datetime.fromisoformat(when)) for when in times} == times


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"exercises": {"03.77": 1}}, "there is no exercise '03.77'"),
        ({"exercises": {"03.1": 0}}, "03.1 has 0 points"),
        ({"exercises": {"03.1": 1.66667}}, "03.1 has 1.66667 points; write two decimals at most, such as 1.67"),
        ({"points": 3}, "it has an unknown key 'points'"),
        ({"varied": ["02.4"]}, "varied names 02.4, which is not one of its exercises"),
        (
            {"varied": ["03.1"]},
            "varied names 03.1, which has no variants; in the book, 02.4, 04.1, 15.1, 15.2, 15.3 have",
        ),
        ({"varied": "03.1"}, "varied is '03.1'; write a list"),
        ({"exercises": ["03.1"]}, "exercises is no object"),
        ({"id": "hw 1/x"}, "its id is 'hw 1/x'"),
        ({"by_hand": {"why not": {"points": 1, "question": "?"}}}, "a question is called 'why not'"),
        ({"by_hand": {"why": {"point": 1, "question": "?"}}}, "why has an unknown key 'point'"),
        ({"late": {"percent_per_day": "10", "max_days": 1}}, "percent_per_day '10'; write a number"),
        ({"late": {"percent_per_day": 10, "max_days": -1}}, "max_days -1; write a number"),
        ({"due": "2027-03-01"}, "has no time zone"),
        ({"due": "soon"}, "Invalid isoformat"),
        ({"late": {"per_day": 1}}, "per_day"),
        ({"due": "2027-03-01T12:00:00+00:00"}, "no price of a late day"),
        ({"due": "2027-03-01T12:00:00+00:00", "late": {"percent_per_day": 10}}, "no price of a late day"),
    ],
)
def test_what_is_no_assignment(tmp_path, changes, words, capsys):
    course = Course(tmp_path, **changes)
    with pytest.raises(AssignmentError, match=words):
        read_assignment(str(tmp_path / "hw.json"))
    assert course.grade() == 2 and capsys.readouterr().err.count("\n") == 1


def test_names_of_files_are_plain_and_differ():
    names = {Submission(name).file_name for name in ("ann", "a/nn", "a_nn", "../x", "=cmd|calc", "é" * 300)}
    assert len(names) == 6 and all(name.isascii() and "/" not in name and len(name) < 100 for name in names)


@needs_jail
def test_a_jail_that_is_ended_is_closed_once(monkeypatch):
    """The thread that ends it at its limit may be slow: what it closes must not be closed again."""
    monkeypatch.setattr("course.grade.jail.SLACK_S", -59)  # of 60 s
    jail, closed = Jail(User(None)), []
    leash = jail._leash

    def close():
        leash.close()
        time.sleep(0.5)
        closed.append(leash)

    jail._leash = SimpleNamespace(close=close, closed=True)
    exercise = SimpleNamespace(body=lambda answer, group, given: time.sleep(60), timeout_s=60)
    (outcome,) = jail.returned(exercise, [len], [{}])
    closed_by_then, jail._leash = [*closed], leash
    jail.close()
    assert closed_by_then == [leash] and isinstance(outcome, NoAnswer) and outcome.status == "FAIL"


@needs_jail
def test_users_that_cannot_be():
    with pytest.raises(JailError, match="is root"):
        User(0).check(Path("/root"))
    sleeper = subprocess.Popen(["sleep", "60"], user=61234)
    try:
        with pytest.raises(JailError, match="61234 has processes"):
            User(61234).check(Path("/root"))
    finally:
        sleeper.kill()
        sleeper.wait()


@needs_jail
def test_without_rights_there_must_be_trust():
    """As somebody who is not root; what is imported before, this one need not be allowed to read."""
    args = ["course/assignments/hw1.json", "solutions"]
    code = "import course.check.catalogue, os, sys\nfrom course.grade import __main__ as grade\nos.setuid(61234)\n"
    importer = f"{code}grade.CONTAINER = ()\nsys.exit(grade.main({args!r}))"
    done = subprocess.run([sys.executable, "-c", importer], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "only root can become one" in done.stderr and "--trust" in done.stderr


def test_the_solutions_have_all_points(tmp_path):
    course = Course(tmp_path)
    (course.submissions / "model").mkdir()
    shutil.copy(ROOT / "solutions" / "03_data_parallelism.ipynb", course.submissions / "model")
    assert course.grade() == 0 and course.given("model")["score"] == 5


# ---- what people read ---------------------------------------------------------------------------------------------

ODD = "a\x1b[31mb\rc\x9bd\u202ee\u2066f\x1b]0;title\x07"
SEEN = r"a\x1b[31mb\rc\x9bd\u202ee\u2066f\x1b]0;title\x07"


def is_seen(text):
    return all(letter.isprintable() or letter in "\n\t\ufeff" for letter in text)


def test_no_letter_that_steers_a_terminal_reaches_a_teacher(course, capsys):
    """In names, answers, errors, and what is printed about them."""
    course.hands_in(ODD, *first(f"raise ValueError({ODD!r})"), "def (", *markdown(WHY, ODD), file=f"{ODD}.ipynb")
    course.hands_in("<b>eve", SETUP)
    rows = course.rows(roster=f"ann\n=ben\n{ODD[1:].replace(chr(13), '')}\n")
    files = [path for path in course.grades.rglob("*") if path.is_file()]
    assert len(files) > 9 and SEEN in rows and SEEN[1:].replace("\\r", "") in rows
    assert not [path.name for path in files if not is_seen(path.name) or not is_seen(path.read_text())]
    assert is_seen("".join(capsys.readouterr()))
    assert {row["student"]: row["text"] for row in read_sheet(course.by_hand)}[SEEN] == SEEN
    assert "# Homework: &lt;b>eve" in course.told("<b>eve") and "<b>" not in course.told("<b>eve")
    assert course.grade(times=f"student,time\n{ODD[:4]},2027-03-02T13:00:00+00:00\n") == 2
    assert is_seen(capsys.readouterr().err)


@pytest.mark.parametrize("text", ["=1", "+1", "-1", "@a", "\t=1", " =1", "\n=1", "'=1", "''=1", "\uff1d1", "\tx"])
def test_a_cell_that_a_spreadsheet_would_compute_is_text(text):
    assert as_cell(text) == f"'{text}" and of_cell(as_cell(text)) == text


@pytest.mark.parametrize("text", ["", "'t Hooft", "a=1", "1.5", "x-y"])
def test_a_cell_that_a_spreadsheet_would_not_compute_stays(text):
    assert as_cell(text) == text == of_cell(text)


def test_a_long_cell_can_be_read(tmp_path):
    """A picture was pasted into it."""
    write_table(tmp_path / "long.csv", [["text"], ["x" * 200_000]])
    assert read_sheet(tmp_path / "long.csv") == [{"text": "x" * 200_000}]


def test_ten_megabytes_of_words_are_cut(course):
    course.hands_in("ann", SETUP, RIGHT, *markdown(WHY, "word " * 2 * 10**6))
    assert course.grade() == 0
    assert course.by_hand.stat().st_size < 30_000 and "… (9,980,000 more letters)" in course.by_hand.read_text()
    course.enter("ann,why,,5,", "ann,why,5,5,")
    row = course.rows()["ann"]
    assert row["score"] == "9.0" and "changed" not in row["look at it because"]


def test_many_cells_that_cannot_be_read_are_few_notes(course):
    course.hands_in("ann", SETUP, RIGHT, *["def ("] * 5000)
    notes = course.rows()["ann"]["look at it because"]
    assert "and 4980 more notes of this kind" in notes and len(notes) < 3000


def test_of_two_notebooks_the_newest_counts(course):
    """Whatever they are called; and its answers in words."""
    course.hands_in("ann", SETUP, RIGHT, *markdown(WHY, "New."))
    for name in ("final-10", "final-9"):
        course.hands_in("ann", SETUP, WRONG, *markdown(WHY, "Old."), file=f"{name}.ipynb")
    files = [*(course.submissions / "ann").iterdir()]
    for newest, wanted in (("03.ipynb", (4, "New.")), ("final-10.ipynb", (0, "Old."))):
        for path in files:
            os.utime(path, (1e9 + 9 * (path.name == newest),) * 2)
        row = course.rows()["ann"]
        assert f"in 3 notebooks; {newest}" in row["look at it because"], row
        assert f"why is answered in several notebooks; {newest}" in row["look at it because"]
        given = course.given("ann")
        assert (given["score"], given["by_hand"][0]["text"]) == wanted
    for path in files:
        os.utime(path, (1e9, 1e9))  # as in a zip without times: the number in the name tells
    assert "; final-10.ipynb counts" in course.rows()["ann"]["look at it because"]


@pytest.mark.parametrize(("points", "count"), [(5, 3), (4, 3), (1, 7), (0.1, 3), (2.55, 4), (3, 1), (100, 9)])
def test_points_of_cases_have_two_decimals_and_add_up(points, count):
    each = dealt(points, count)
    assert len(each) == count and all(x == round(x, 2) for x in each)
    assert round(sum(each), 2) == points and max(each) - min(each) < 0.0101


def test_points_that_are_shown_have_two_decimals_and_add_up(course):
    """A third of 5 points, and a late day: in the tables, to the student, and on platforms."""
    course.asks(exercises={"03.1": 5}, late={"percent_per_day": 33.333, "max_days": 2})
    course.has_cases(CASES[0].replace("(3,)", "(3, 4, 5)"))
    course.hands_in("ann", SETUP, THIRD)
    times = "student,time\nann,2027-03-02T11:00:00+00:00\n=ben,2027-03-01T11:00:00+00:00\n"
    row = course.rows(times=times)["ann"]
    assert (row["03.1"], row["raw"], row["score"]) == ("1.67", "1.67", "1.11")
    assert re.findall(r"([\d.]+) of [\d.]+ points", course.told("ann")) == ["1.11", "1.67"]
    given = course.given("ann")
    assert [r["max"] for r in given["results"]] == [1.67, 1.66, 1.67]
    seen = gradescope(given)
    assert seen["score"] == round(sum(t["score"] for t in seen["tests"]), 2) == 1.11


def test_a_constant_of_a_library_is_one_and_what_a_line_computes_is_named(course):
    """As in nbgrader, which runs the notebook; what is not run has a sentence."""
    uses = RIGHT.replace(', op="mean")', ") * SCALE / group.size")
    imports = "import numpy as np\nimport math"
    for constant in ("np.float64(1)", "float('1') * math.cos(0)", "torch.ones(3)[0]", "np.arange(3)[1] / 1"):
        course.hands_in("ann", SETUP, imports, f"SCALE = {constant}", uses)
        assert course.rows()["ann"]["raw"] == "4.0", constant
    course.hands_in("ann", SETUP, "SCALE = 0\nfor k in range(3):\n    SCALE += 1 / 3\nprint('!' * 9)", uses)
    assert course.rows()["ann"]["raw"] == "4.0", "what an answer needs is run"
    course.hands_in("ann", SETUP, "for SCALE in (input(),): pass", uses)
    note = course.rows()["ann"]["look at it because"]
    told = " ".join(course.told("ann").split())
    said = "SCALE comes from 03.ipynb, code cell 2, line 1, which is not run: no command"
    assert f"name 'SCALE' is not defined {said}" in told and f"- 03.1: {said}" in told and f"03.1: {said}" in note


def test_what_is_lost_tells_nothing_of_a_hidden_case(course):
    """An answer that puts what it was given into an error would else read it in a note."""
    leak = RIGHT + "\n    if group.size == 5: raise NameError(\"name 'x5' is not defined\")"
    course.hands_in("ann", SETUP, "\n".join(f"x{k} = input()" for k in range(9)), leak)
    row = course.rows()["ann"]
    assert row["raw"] == "2.0" and "x5" not in row["look at it because"] + course.told("ann")


NAMED = RIGHT.replace("average_gradients", "mine")
TODO = an_answer(STUB)
CHECK, CHECK_MINE = (f'check("03.1", {name})' for name in ("average_gradients", "mine"))


@pytest.mark.parametrize(
    ("cells", "score", "note"),
    [
        ([NAMED, CHECK_MINE], 4, "03.1: mine counts, which the check in 03.ipynb names, because average_gradients is"),
        ([TODO, NAMED, CHECK_MINE], 4, "average_gradients is as it was handed out; nbgrader and otter judge only that"),
        ([RIGHT, NAMED.replace("mean", "sum"), CHECK_MINE], 4, "average_gradients counts, and the last check in 03.i"),
        ([RIGHT, NAMED, CHECK_MINE, CHECK], 4, ""),
        ([NAMED, WRONG.replace("average_gradients", "old"), 'check("03.1", old)', CHECK_MINE], 4, "03.1: mine counts"),
        ([NAMED, 'EX = "03.1"\ncheck(exercise=EX, answer=lambda p, g: mine(p, g))'], 4, "03.1: lambda p, g: mine(p, g"),
        ([NAMED, 'check("3.1", mine)'], 4, "03.1: mine counts"),
        ([WRONG, CHECK, RIGHT], 4, "03.1: 03.ipynb, code cell 4, line 1 defines average_gradients again"),
        ([TODO, CHECK, RIGHT, CHECK], 4, ""),
        ([CHECK_MINE], 0, ""),
        ([TODO, "def mine(params, group):\n    raise NotImplementedError", CHECK_MINE], 0, ""),
    ],
)  # fmt: skip
def test_an_answer_has_the_name_that_its_check_has(course, cells, score, note):
    """Which passes in the notebook and in a terminal."""
    course.hands_in("ann", SETUP, *cells)
    row = course.rows()["ann"]
    assert float(row["raw"]) == score and note in row["look at it because"] and note in course.told("ann")
    if not note:
        assert "03.1" not in row["look at it because"]


NOT_CODE = "average_gradients is in 03.ipynb, cell 2, which is a {} cell: change its type to Code."


@pytest.mark.parametrize(
    ("cells", "status", "said"),
    [
        (markdown(RIGHT), "MISSING", NOT_CODE.format("Markdown")),
        ([{"cell_type": "raw", "source": RIGHT}, TODO], "TODO", NOT_CODE.format("raw")),
        (["%%bash\n" + RIGHT], "MISSING", "code cell 2, which begins with %%bash: its names are lost."),
        ([TODO, RIGHT + "\n  x = ("], "TODO", "average_gradients is in 03.ipynb, code cell 3, which does not parse."),
        ([RIGHT + "\n  x = ("], "BLOCKED", "average_gradients is in 03.ipynb, code cell 2, which does not parse."),
        (["from answers import *"], "MISSING", "It may be in answers, of which 03.ipynb, code cell 2, line 1 imports"),
        (["from answers import average_gradients"], "MISSING", "average_gradients is imported in 03.ipynb, code cell"),
    ],
)  # fmt: skip
def test_an_answer_in_no_cell_of_code_is_said_to_both(course, cells, status, said):
    course.hands_in("ann", SETUP, *cells)
    row = course.rows()["ann"]
    assert {one["status"] for one in course.given("ann")["results"]} == {status}
    assert said in row["look at it because"] and course.told("ann").count(said) == 2, course.told("ann")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "cp1252"])
def test_a_notebook_in_another_encoding_is_graded(course, encoding):
    course.hands_in("ann", SETUP, f"{RIGHT}  # für", *markdown(WHY, "Größe."))
    path = course.submissions / "ann" / "03.ipynb"
    path.write_bytes(json.dumps(json.loads(path.read_text()), ensure_ascii=False).encode(encoding))
    row = course.rows()["ann"]
    assert row["raw"] == "4.0" and course.given("ann")["by_hand"][0]["text"] == "Größe."
    assert ("perhaps in Latin-1" in row["look at it because"]) == (encoding == "cp1252")


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("hw.py", "jupytext --to ipynb FILE"),
        ("hw.html", "a web page"),
        ("hw.pdf", "a PDF"),
        ("hw.docx", "no notebook"),
    ],
)
def test_what_is_no_notebook_has_a_way_out(course, name, way_out):
    shutil.rmtree(course.submissions / "ann")
    (course.submissions / "ann").mkdir()
    (course.submissions / "ann" / name).write_text(RIGHT)
    note = course.rows()["ann"]["look at it because"]
    assert f"{name}: no notebook" in note and way_out in note and f"- {name}: no notebook" in course.told("ann")
