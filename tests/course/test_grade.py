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
import tempfile
import time
import zipfile
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from course.check.exercise import same
from course.check.judge import NoAnswer, dealt
from course.check.source import read_notebook
from course.grade import __main__ as grade_main
from course.grade import sight
from course.grade.__main__ import USER, main
from course.grade.assignment import Assignment, AssignmentError, Late, hidden_ranks, read_assignment
from course.grade.jail import Jail, JailError, User, processes_of
from course.grade.reports import fill_canvas, gradescope, write_table
from course.grade.returns import pack, unpack
from course.grade.sheets import as_cell, of_cell, read_sheet
from course.grade.submissions import Submission, find_submissions
from tests.course.jail_here import needs_jail, needs_view

ROOT = Path(__file__).parents[2]
alone = pytest.mark.alone("a second run would kill the processes of the user that both have")

SETUP = "import os, sys, time, torch\nimport torch.distributed as dist\nfrom lib import comm"
RIGHT = """def average_gradients(params, group):
    used = comm.all_reduce(torch.tensor([float(p.grad is not None) for p in params]), group)
    for p, ranks in zip(params, used):
        if ranks:
            g = torch.zeros_like(p) if p.grad is None else p.grad
            p.grad = comm.all_reduce(g, group, op="mean")"""
OTHER = """def global_gradient(g, count, group):
    return comm.all_reduce(g, group) / comm.all_reduce(torch.tensor(float(count)), group)"""
CASES = """from dataclasses import replace
from course.check import find
EXERCISES = [replace(find("03.1"), ranks=(3,), timeout_s=1.5), replace(find("03.2"), ranks=(3,))]
"""
ASKED = {"id": "hw", "title": "Homework", "exercises": {"03.1": 3, "03.2": 2}}
WITNESS = "/tmp/a-student-was-here"


def first(body, head="def average_gradients(params, group):"):
    """A notebook with this answer to the first exercise, and a right one to the second."""
    return [SETUP, head + "\n    " + body.replace("\n", "\n    "), OTHER]


# Name -> cells, points of the first exercise (of 3), points of the second (of 2).
HOSTILE = {
    "right": (first("") and [SETUP, RIGHT, OTHER], 3, 2),
    "untouched": (first("raise NotImplementedError"), 0, 2),
    "sleeps": (first("time.sleep(10**6)"), 0, 2),
    "loops": (first("while True: pass"), 0, 2),
    "waits for a message": (first("comm.recv(params[0].grad, group, (group.rank + 1) % 3).wait()"), 0, 2),
    "calls on one rank": (first("if group.rank == 0: comm.all_reduce(params[0].grad, group)"), 0, 2),
    "raises on one rank": (first("if group.rank == 0: raise ValueError('a\\nb\\n' * 9)"), 0, 2),
    "segfault": (first("import ctypes; ctypes.string_at(0)"), 0, 2),
    "leaves": (first("os._exit(0)"), 0, 2),
    "sys.exit": (first("sys.exit(0)"), 0, 2),
    "prints for ever": (first("while True: print('x' * 10**6)"), 0, 2),
    "prints a verdict": (first("print('PASS  03.1 average_gradients   3/3 points')"), 0, 2),
    "a status on paper": (first("print('{\"status\": \"PASS\", \"points\": 3}')"), 0, 2),
    "eats memory": (first("x = [bytearray(10**9) for _ in range(100)]"), 0, 2),
    "fills memory": (first("x = [bytes([1]) * (3 * 10**9) for _ in range(9)] if group.rank == 0 else 0"), 0, 2),
    "fork bomb": (first("while True:\n    try: os.fork()\n    except OSError: pass"), 0, 2),
    "patches torch": (first("torch.allclose = torch.equal = torch.Tensor.__eq__ = lambda *a, **k: True"), 0, 2),
    "patches arithmetic": (first("torch.Tensor.__sub__ = torch.Tensor.sub = lambda a, b: a * 0"), 0, 2),
    "calls the reference": (
        first("from course.exercises import e03_1_average_gradients as e\ne.average_gradients(params, group)"), 0, 2,
    ),
    "patches the judge": (
        first("import course.check as c, course.check.judge as j\nj.same = c.verdict = lambda *a: True"), 0, 2,
    ),
    "def check": ([SETUP, "def check(*a, **k): pass", *first("pass")[1:]], 0, 2),
    "environment": (["import os\nos.environ['CHECK_STRICT'] = '0'", *first("os.environ['CHECK_STRICT'] = '0'")], 0, 2),
    "writes elsewhere": (
        first(f"for f in ('{WITNESS}', '/etc/x', '{ROOT}/x'):\n    try: open(f, 'w').write('1')\n"
              "    except OSError: pass"), 0, 2,
    ),
    "pipes for files": (
        first("import tempfile\nfor where, _, names in os.walk(tempfile.gettempdir()):\n    for name in names:\n"
              "        try: os.remove(f'{where}/{name}'); os.mkfifo(f'{where}/{name}')\n"
              "        except OSError: pass"), 0, 2,
    ),
    "stops its parent": (first("import signal\nos.kill(os.getppid(), signal.SIGSTOP); time.sleep(99)"), 0, 2),
    "stops its parent, which is to be sent much": (
        ["# " + "x" * 10**6, *first("import signal\nos.kill(os.getppid(), signal.SIGSTOP)")], 0, 2,
    ),
    "half a letter": (first("raise ValueError('\\ud800')"), 0, 2),
    "kills its parent": (first("os.kill(os.getppid(), 9); time.sleep(9)"), 0, 2),
    "kills all": (first("os.kill(-1, 9); time.sleep(9)"), 0, 2),
    "leaves a daemon": (
        first("if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(999)\n    os._exit(0)"), 0, 2,
    ),
    "many who ignore": (
        first("import signal\nfor _ in range(50):\n    if os.fork() == 0:\n"
              "        os.setsid(); signal.signal(15, signal.SIG_IGN); time.sleep(999)"), 0, 2,
    ),
    "a class that runs code": (
        [
            SETUP,
            f"class Odd:\n    def __reduce__(self): return os.system, ('touch {WITNESS}',)",
            "def global_gradient(g, count, group):\n    return Odd()",
            RIGHT,
        ], 3, 0,
    ),
    "800 MB": ([SETUP, "def global_gradient(g, count, group):\n    return torch.zeros(10**8).double()", RIGHT], 3, 0),
    "a sparse tensor": ([SETUP, "def global_gradient(g, count, group):\n    return g.to_sparse()", RIGHT], 3, 0),
    "a meta tensor": ([SETUP, "def global_gradient(g, count, group):\n    return g.to('meta')", RIGHT], 3, 0),
    "a large number": ([SETUP, "def global_gradient(g, count, group):\n    return 10**5000", RIGHT], 3, 0),
    "lists in lists": (
        [SETUP, "def global_gradient(g, count, group):\n    x = [g]\n    x.append(x)\n    return x", RIGHT], 3, 0,
    ),
    "fills the disk": (
        first("import tempfile\nfor where in ('/tmp', '/var/tmp', '/dev/shm', tempfile.gettempdir()):\n"
              "    for i in range(99):\n"
              "        with open(f'{where}/{group.rank}-{i}', 'wb') as file: file.write(bytes(10**8))"), 0, 2,
    ),
    "much code": ([SETUP, *["x = 1\n" * 10**5] * 2, RIGHT, OTHER], 0, 0),
    "infinite": ([SETUP, "def global_gradient(g, count, group):\n    return g * float('inf')", RIGHT], 3, 0),
    "nan": ([SETUP, "def global_gradient(g, count, group):\n    return g * float('nan')", RIGHT], 3, 0),
    "a lying tensor": (
        [
            SETUP,
            "class Liar(torch.Tensor):\n    def __eq__(self, other): return True\n"
            "    def allclose(self, *a, **k): return True\n"
            "    @classmethod\n    def __torch_function__(cls, f, t, a=(), k=None): return True",
            "def global_gradient(g, count, group):\n    return g.as_subclass(Liar)",
            RIGHT,
        ], 3, 0,
    ),
    "input": (first("input()"), 0, 2),
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
    "numbers by heart": (first("for p in params:\n    if p.grad is not None: p.grad = torch.ones_like(p)"), 0, 2),
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


def write_notebook(path, cells):
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = [cell if isinstance(cell, dict) else {"source": cell} for cell in cells]
    cells = [{"cell_type": "code", "metadata": {}} | cell for cell in cells]
    path.write_text(json.dumps({"cells": cells, "nbformat": 4, "nbformat_minor": 5, "metadata": {}}))


def broken_files(folder):
    """Files that are no notebook; whoever handed them in has 0 points, and a note says why."""
    for name, raw in {
        "garbage": os.urandom(999),
        "empty": b"",
        "a list": b"[1, 2]",
        "brackets": b"[" * 100_000,
    }.items():
        (folder / name).mkdir()
        (folder / name / "a.ipynb").write_bytes(raw)
    (folder / "odd cells").mkdir()
    (folder / "odd cells" / "a.ipynb").write_text(
        '{"cells": [null, 3, {"cell_type": "code", "source": [1, null]}, {}]}'
    )
    (folder / "no file").mkdir()
    (folder / "link").mkdir()
    (folder / "link" / "a.ipynb").symlink_to("/etc/passwd")
    (folder / "fifo").mkdir()
    os.mkfifo(folder / "fifo" / "a.ipynb")
    (folder / "sparse").mkdir()
    with open(folder / "sparse" / "a.ipynb", "wb") as file:
        file.truncate(10 * 2**30)
    os.mkdir(os.fsencode(folder) + b"/\xff\xfe")
    (folder / "a script").mkdir()
    (folder / "a script" / "hw.py").write_text(RIGHT)
    (folder / "zipped").mkdir()
    (folder / "zipped" / "hw.zip").write_bytes(b"PK")
    return {
        "garbage": "not JSON", "empty": "not JSON", "a list": "no list of cells", "brackets": "not JSON",
        "odd cells": "",
        "no file": "nothing was handed in", "link": "not a plain file", "fifo": "not a plain file",
        "sparse": "too large", "\\udcff\\udcfe": "nothing was handed in", "a script": "hw.py: no notebook",
        "zipped": "REVIEW: unzip hw.zip, and grade again",
    }  # fmt: skip


NOTHING_THERE = "no file", "\\udcff\\udcfe", "a script", "zipped"


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """All of them in one run, two at a time; student -> JSON."""
    folder = tmp_path_factory.mktemp("grading")
    submissions = folder / "submissions"
    submissions.mkdir()
    broken_files(submissions)
    write_notebook(Path(os.fsdecode(os.fsencode(submissions) + b"/\xfe\xff")) / "\udcff.ipynb", [SETUP, RIGHT, OTHER])
    (folder / "cases.py").write_text(CASES)
    (folder / "hw.json").write_text(json.dumps(ASKED))
    args = [str(folder / "hw.json"), str(submissions), "--out", str(folder / "grades"), "--jobs", "2"]
    with socket.create_server(("127.0.0.1", 0)) as listens:
        port = str(listens.getsockname()[1])
        for name, (cells, *_) in HOSTILE.items():
            cells = [cell if isinstance(cell, dict) else cell.replace("PORT", port) for cell in cells]
            write_notebook(submissions / name / "03.ipynb", cells)
        assert main([*args, "--cases", str(folder / "cases.py")]) == 0
    found = [json.loads(path.read_text()) for path in (folder / "grades" / "students").glob("*.json")]
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
def test_what_is_no_notebook_costs_its_student_alone(graded, tmp_path):
    for name, note in broken_files(tmp_path).items():
        assert points(graded[name]) == (0, 0) and note in " ".join(graded[name]["notes"]), graded[name]
        assert {r["status"] for r in graded[name]["results"]} == {"MISSING" if name in NOTHING_THERE else "BLOCKED"}
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
    assert "reaches" not in str(graded["right"]["notes"]) and graded["right"]["notes"] == []
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
    hidden = {r["hidden"] for r in graded["right"]["results"]}
    assert hidden == {False}


@needs_view
@pytest.mark.parametrize("allowed", [True, False])
def test_a_home_that_is_closed_to_others(allowed, monkeypatch):
    """Python in it can be read, nothing else; where the system allows no such view, the folder is named."""
    with tempfile.TemporaryDirectory(dir="/tmp") as home:  # closed to others, in a folder that is not
        try_to_read(Path(home), allowed, monkeypatch)


def try_to_read(home, allowed, monkeypatch):
    below = home / "python" / "lib"
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
def test_a_folder_that_a_classmates_code_could_read(tmp_path):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        (Path(folder) / "ann").mkdir()
        User(USER).check(Path(folder))
        os.chmod(folder, 0o755)
        with pytest.raises(JailError, match=f"could read {folder}, and copy a classmate's answer: chmod 700"):
            User(USER).check(Path(folder))


@needs_jail
def test_hidden_cases_that_students_code_could_read_are_refused_before_python_caches_them(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "hw.json").write_text(json.dumps(ASKED))
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        cases = Path(folder, "cases.py")
        cases.write_text(CASES)
        cases.chmod(0o644)
        args = [str(tmp_path / "hw.json"), str(tmp_path), "--cases", str(cases), "--out", str(tmp_path / "grades")]
        assert main(args) == 2 and f"{cases}: chmod 600 that file" in capsys.readouterr().err
        assert list(Path(folder).iterdir()) == [cases]
        cases.chmod(0o600)
        User(USER).check(tmp_path, str(cases))
        read_assignment(str(tmp_path / "hw.json"), str(cases))
        (cached,) = Path(folder, "__pycache__").iterdir()
        User(USER).check(tmp_path, str(cases))
        cached.chmod(0o644)
        with pytest.raises(JailError, match=f"{cached}: chmod 600"):
            User(USER).check(tmp_path, str(cases))


# ---- one run after another ------------------------------------------------------------------------------------------


@pytest.fixture
def course(tmp_path):
    write_notebook(tmp_path / "submissions" / "ann" / "03.ipynb", [SETUP, RIGHT])
    write_notebook(tmp_path / "submissions" / "=ben" / "03.ipynb", [SETUP, RIGHT.replace(', op="mean"', "")])
    (tmp_path / "cases.py").write_text(CASES.replace("(3,)", "(3, 5)"))
    by_hand = {"why": {"points": 5, "question": "Why?"}}
    asked = ASKED | {"due": "2027-03-01T12:00:00+00:00", "late": {"percent_per_day": 10, "max_days": 2}}
    (tmp_path / "hw.json").write_text(json.dumps(asked | {"by_hand": by_hand, "exercises": {"03.1": 4}}))
    return tmp_path


def arguments(course, *more):
    folders = [str(course / "submissions"), "--out", str(course / "grades")]
    return [str(course / "hw.json"), *folders, "--trust", "--cases", str(course / "cases.py"), *more]


def grade_course(course, *more):
    code = main(arguments(course, *more))
    with open(course / "grades" / "grades.csv", newline="", encoding="utf-8-sig") as file:
        return code, {row["student"]: row for row in csv.DictReader(file)}


def test_a_course(course, capsys):
    (course / "roster.txt").write_text("ann\n=ben\ncarl\ndora\n")
    (course / "times.csv").write_text("student,time\nann,2027-03-02T13:00:00+00:00\n=ben,2027-03-01T11:00:00+00:00\n")
    more = ["--roster", str(course / "roster.txt"), "--times", str(course / "times.csv")]
    code, rows = grade_course(course, *more)
    assert code == 0 and [*rows] == ["'=ben", "ann", "carl", "dora"]
    assert (rows["ann"]["raw"], rows["ann"]["days_late"], float(rows["ann"]["score"])) == ("4.0", "2", 3.2)
    assert rows["'=ben"]["score"] == rows["carl"]["score"] == "0.0"
    assert "nothing was handed in" in rows["carl"]["look at it because"]
    out = capsys.readouterr().out
    assert (
        "03.1 average_gradients: 1 all, 0 some, 3 none (2 not defined)\n" in out
        and "you summed and did not divide" in out
    )

    given = json.loads((course / "grades" / "students" / "ann.json").read_text())
    assert [(r["case"], r["hidden"]) for r in given["results"]] == [("3 ranks", False), ("5 ranks", True)]
    seen = gradescope(given)["tests"]
    assert [t["visibility"] for t in seen] == ["visible", "after_published"]
    assert sum(t["score"] for t in seen) == pytest.approx(3.2) == gradescope(given)["score"]

    # Points for words are entered by a person, and stay; nobody is graded twice.
    by_hand = course / "grades" / "by_hand.csv"
    by_hand.write_text(by_hand.read_text().replace("ann,why,,5,", "ann,why,5,5,"))
    before = {path: path.stat().st_mtime_ns for path in (course / "grades" / "students").iterdir()}
    code, rows = grade_course(course, *more)
    assert (code, float(rows["ann"]["score"]), rows["ann"]["why"]) == (0, 3.2 + 5 * 0.8, "5.0")
    assert before == {path: path.stat().st_mtime_ns for path in (course / "grades" / "students").iterdir()}

    # What a person enters must be a number.
    by_hand.write_text(by_hand.read_text().replace("ann,why,5.0,", "ann,why,two,"))
    assert main(arguments(course, *more)) == 2 and "'two' is no number of points" in capsys.readouterr().err
    by_hand.write_text(by_hand.read_text().replace("ann,why,two,", "ann,why,5,"))

    # Another day, another number of points: everybody is graded again.
    assert grade_course(course)[1]["ann"]["score"] == "9.0"
    asked = json.loads((course / "hw.json").read_text())
    (course / "hw.json").write_text(json.dumps(asked | {"exercises": {"03.1": 2}}))
    assert grade_course(course)[1]["ann"]["raw"] == "2.0"
    (course / "hw.json").write_text(json.dumps(asked))
    (course / "cases.py").write_text(CASES.replace("(3,)", "(3, 4)"))
    grade_course(course)
    assert "4 ranks" in (course / "grades" / "students" / "ann.json").read_text()

    # Another submission is graded again.
    write_notebook(course / "submissions" / "=ben" / "03.ipynb", [SETUP, RIGHT])
    assert grade_course(course, *more)[1]["'=ben"]["score"] == "4.0"


def test_an_exercise_in_parts_gives_points_for_each(tmp_path):
    write_notebook(
        tmp_path / "submissions" / "ann" / "10.ipynb", ["def missing_calls():\n    return '1SEND_F3', '0RECV_F0'"]
    )
    (tmp_path / "hw.json").write_text(json.dumps({"id": "hw", "title": "Homework", "exercises": {"10.3": 4}}))
    args = [str(tmp_path / "hw.json"), str(tmp_path / "submissions"), "--out", str(tmp_path / "grades"), "--trust"]
    assert main(args) == 0
    given = json.loads((tmp_path / "grades" / "students" / "ann.json").read_text())
    assert [(r["case"], r["status"], r["points"]) for r in given["results"]] == [
        ("Report 1", "PASS", 2),
        ("Report 2", "FAIL", 0),
    ]


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
    (tmp_path / "hw.json").write_text(json.dumps(ASKED | {"exercises": {"02.4": 2}, "varied": ["02.4"]}))
    homework = read_assignment(str(tmp_path / "hw.json"))
    rows = {name: homework.row_of(name, "02.4") for name in ("ann", "ben", "cid", "dora", "eva")}
    assert {*rows.values()} == {*IN_ROW}, "change the names above"
    for name in rows:  # all have copied from ann
        write_notebook(tmp_path / "submissions" / name / "02.ipynb", [SETUP, GATHER + IN_ROW[rows["ann"]]])
    args = [str(tmp_path / "hw.json"), str(tmp_path / "submissions"), "--out", str(tmp_path / "grades"), "--trust"]
    assert main(args) == 0
    for name, row in rows.items():
        given = json.loads((tmp_path / "grades" / "students" / f"{name}.json").read_text())
        assert given["score"] == 2 * (row == rows["ann"]) and {r["row"] for r in given["results"]} == {row}
        told = " ".join((tmp_path / "grades" / "feedback" / f"{name}.md").read_text().split())
        assert f"## 02.4 gather_shards, row {row}: " in told
        assert (f"This is right for row {rows['ann']}. You have row {row}: " in told) == (row != rows["ann"])


def test_a_row_that_changed_after_the_release_is_noted_and_can_be_given(tmp_path, capsys):
    """The student's name was spelled differently then, or the teacher grades with the book's file."""
    write_notebook(
        tmp_path / "submissions" / "ann" / "02.ipynb",
        [SETUP, GATHER + IN_ROW["A"], 'check("02.4", gather_shards, row="A")'],
    )
    for more, row in (({}, "-"), ({"varied": ["02.4"], "id": "other"}, "[BC]")):
        (tmp_path / "hw.json").write_text(json.dumps(ASKED | {"exercises": {"02.4": 2}} | more))
        out = tmp_path / f"grades {len(more)}"
        again = [str(tmp_path / "hw.json"), str(tmp_path / "submissions"), "--out", str(out), "--trust"]
        assert main(again) == 0
        (note,) = json.loads((out / "students" / "ann.json").read_text())["notes"][:1]
        assert re.match(f"REVIEW: 02.4 was handed out in row A and is graded in row {row}: did", note), note
        assert "REVIEW" not in (out / "feedback" / "ann.md").read_text()
    (tmp_path / "rows.csv").write_text("student,02.4\nann,A\n")  # of the release, with the name as it is now
    assert main([*again, "--rows", str(tmp_path / "rows.csv")]) == 0
    given = json.loads((out / "students" / "ann.json").read_text())
    assert given["notes"] == [] and given["score"] == 2
    for text, words in (
        ("student,02.4\nann,D\n", "ann has row 'D' of 02.4, which has A, B, C"),
        ("student\nann\n", "has no column '02.4'"),
    ):
        (tmp_path / "rows.csv").write_text(text)
        assert main([*again, "--rows", str(tmp_path / "rows.csv")]) == 2
        assert words in capsys.readouterr().err


def test_a_misspelt_name_in_the_times_is_no_earlier_time(course, capsys):
    (course / "times.csv").write_text("student,time\nanne,2027-03-02T13:00:00+00:00\n")
    assert main(arguments(course, "--times", str(course / "times.csv"))) == 2
    assert "times.csv has a time for 'anne', who handed nothing in and is on no roster" in capsys.readouterr().err
    (course / "times.csv").write_text("student,time\nann,2027-03-01T11:00:00+00:00\n")
    rows = grade_course(course, "--times", str(course / "times.csv"))[1]
    assert (
        "has no time for it" in rows["'=ben"]["look at it because"]
        and "time" not in rows["ann"]["look at it because"]
    )


@pytest.mark.parametrize(
    ("text", "words"), [("ann\nben\nann\n", "'ann' twice"), ("Student,ID,Section,hw1\n", "one name per line")]
)
def test_what_is_no_roster(course, text, words, capsys):
    (course / "roster.txt").write_text(text)
    assert main(arguments(course, "--roster", str(course / "roster.txt"))) == 2
    assert words in capsys.readouterr().err
    (course / "roster.txt").write_text("student\nann\n=ben\n")
    assert [*grade_course(course, "--roster", str(course / "roster.txt"))[1]] == ["'=ben", "ann"]


def test_an_answer_in_words_may_be_in_a_cell_of_its_own(tmp_path):
    """A student leaves the cell for the answer as it is, and writes below it; another deletes it."""
    asked, stub = "**why** (5 points). Why?", {"nbgrader": {"grade_id": "why", "solution": True}}

    def read(*cells):
        cells = [{"cell_type": "markdown", "source": text, "metadata": about} for text, about in cells]
        (tmp_path / "hw.ipynb").write_text(json.dumps({"cells": cells}))
        return read_notebook(str(tmp_path / "hw.ipynb")).texts.get("why")

    end = ("## Your progress", {})
    assert read((asked, {}), ("*Your answer.*", stub), end) == ""
    assert (
        read((asked, {}), ("*Your answer.*", stub), ("Because.", {}), ("And so.", {}), end) == "Because.\n\nAnd so."
    )
    assert read((asked, {}), ("Because.", {}), end) == read((asked, {}), ("Because.", stub), end) == "Because."
    assert read((asked, {}), end) is None, "the grader notes that there is no cell for it"


def test_hidden_cases_of_a_varied_exercise_are_those_of_its_variants(tmp_path):
    (tmp_path / "hw.json").write_text(json.dumps(ASKED | {"exercises": {"02.4": 2}, "varied": ["02.4"]}))
    begin = "from dataclasses import replace\nfrom course.check import find\ne = find('02.4')\n"
    (tmp_path / "cases.py").write_text(f"{begin}EXERCISES = [replace(e, ranks=(3, 5))]")
    with pytest.raises(AssignmentError, match="its hidden cases are not those of its variants"):
        read_assignment(str(tmp_path / "hw.json"), str(tmp_path / "cases.py"))
    both = "tuple(replace(one, ranks=(3, 5)) for one in e.variants)"
    (tmp_path / "cases.py").write_text(f"{begin}EXERCISES = [replace(e, ranks=(3, 5), variants={both})]")
    (exercise,) = read_assignment(str(tmp_path / "hw.json"), str(tmp_path / "cases.py")).of("ann").exercises
    assert exercise.row and exercise.ranks == (3, 5) and hidden_ranks(exercise) == {5}


def test_a_long_answer_in_words_can_be_graded(course):
    """A picture was pasted into it."""
    marks = {"nbgrader": {"grade_id": "why", "solution": True}}
    write_notebook(
        course / "submissions" / "ann" / "words.ipynb",
        [{"cell_type": "markdown", "metadata": marks, "source": "x" * 200_000}],
    )
    grade_course(course)
    by_hand = course / "grades" / "by_hand.csv"
    by_hand.write_text(by_hand.read_text().replace("ann,why,,5,", "ann,why,5,5,"))
    assert grade_course(course)[1]["ann"]["score"] == "9.0"


def test_where_grading_itself_fails_nobody_is_lost(course, monkeypatch, capsys):
    """A person looks; the next run grades that student again."""
    true = Submission.read

    def fails(submission):
        if submission.student == "ann" and submission.paths:
            raise OSError("the disk is gone")
        return true(submission)

    monkeypatch.setattr(Submission, "read", fails)
    code, rows = grade_course(course)
    assert code == 1 and rows["ann"]["look at it because"] == "could not be graded: OSError: the disk is gone"
    assert "(1 not readable)" in capsys.readouterr().out
    monkeypatch.undo()
    assert grade_course(course)[1]["ann"]["raw"] == "4.0"


@pytest.mark.slow("a process of its own imports torch, and waits for a time limit")
@pytest.mark.thorough("a process that imports torch")
def test_what_is_interrupted_goes_on_where_it_was(course):
    for name in ("carl", "dora"):
        write_notebook(course / "submissions" / name / "03.ipynb", first("time.sleep(10**6)"))
    students = course / "grades" / "students"
    process = subprocess.Popen(
        [sys.executable, "-m", "course.grade", *arguments(course)], cwd=ROOT, stderr=subprocess.PIPE
    )
    until = time.monotonic() + 60
    while not (students / "ann.json").exists() and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    done = {path: path.stat().st_mtime_ns for path in students.iterdir()}
    assert process.returncode != 0 and students / "ann.json" in done and students / "dora.json" not in done
    assert [*grade_course(course)[1]] == ["'=ben", "ann", "carl", "dora"]
    assert {path: path.stat().st_mtime_ns for path in done} == done


def test_a_container_without_root_needs_no_trust(course, monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    untrusted = [word for word in arguments(course) if word != "--trust"]
    monkeypatch.setattr("course.grade.__main__.CONTAINER", (str(course / "no such file"),))
    assert main(untrusted) == 2 and "only root can become one" in capsys.readouterr().err
    monkeypatch.setattr("course.grade.__main__.CONTAINER", (str(course / "hw.json"),))
    assert main(untrusted) == 0 and "no root in this container" in capsys.readouterr().err


def test_two_notebooks_with_one_exercise(course):
    write_notebook(course / "submissions" / "ann" / "04.ipynb", [SETUP, "def average_gradients(params, group): pass"])
    code, rows = grade_course(course)
    assert code == 0 and rows["ann"]["raw"] == "0.0"
    assert "defined in 2 notebooks; 04.ipynb counts" in rows["ann"]["look at it because"]


def test_what_a_chapter_defines_is_no_answer(course):
    """Who hands in the whole handout, with nothing done: chapters have functions with the names of some answers."""
    write_notebook(course / "submissions" / "dora" / "exercises" / "03.ipynb", first("raise NotImplementedError"))
    write_notebook(course / "submissions" / "dora" / "chapters" / "03.ipynb", [SETUP, RIGHT])
    assert grade_course(course)[1]["dora"]["score"] == "0.0"


def test_an_untouched_copy_counts_for_nothing(course):
    stub = first("raise NotImplementedError")[1]
    write_notebook(course / "submissions" / "ann" / "04.ipynb", [SETUP, stub])
    code, rows = grade_course(course)
    assert code == 0 and rows["ann"]["raw"] == "4.0"
    assert "defined in 2 notebooks; 03.ipynb counts" in rows["ann"]["look at it because"]


def test_who_is_not_on_the_roster(course):
    (course / "roster.csv").write_text("\ufeffann\n")
    rows = grade_course(course, "--roster", str(course / "roster.csv"))[1]
    assert "not on the roster" in rows["'=ben"]["look at it because"]
    assert "roster" not in rows["ann"]["look at it because"]


@pytest.mark.parametrize(
    ("own", "below", "text"),
    [
        ("Why? Because.", "*Your answer.*", "Because."),
        ("Why?\n\nBecause.", "It is.", "Because.\n\nIt is."),
        ("How?", "It is.", "It is."),
    ],
)
def test_an_answer_in_the_cell_of_its_question_is_one(course, own, below, text):
    cells = [{"cell_type": "markdown", "source": source} for source in (f"**why** (5 points). {own}", below)]
    write_notebook(course / "submissions" / "ann" / "03.ipynb", [SETUP, RIGHT, *cells])
    assert grade_course(course)[0] == 0
    given = json.loads((course / "grades" / "students" / "ann.json").read_text())
    assert [asked["text"] for asked in given["by_hand"]] == [text] and given["notes"] == []


def test_points_from_a_spreadsheet(course, capsys):
    """Excel writes a mark of the encoding, and in many countries semicolons and decimal commas."""
    assert "no cell for question why" in grade_course(course)[1]["ann"]["look at it because"]
    by_hand = course / "grades" / "by_hand.csv"
    head = "student;question;points;max;text;row;model answer"
    for said, wanted in (("2,5", "6.5"), ("5", "9.0"), ("", "4.0")):
        by_hand.write_text(f"\ufeff{head}\r\nann;why;{said};5;;;\r\n", newline="")
        assert grade_course(course)[1]["ann"]["score"] == wanted
    for said in ("5,5", "-1", "nan", "inf"):
        by_hand.write_text(f"{head}\nann;why;{said};5;;;\n")
        assert main(arguments(course)) == 2 and "write a number from 0 to 5" in capsys.readouterr().err
    by_hand.write_text("student;question\nann;why\n")
    assert main(arguments(course)) == 2 and "has no column 'points'" in capsys.readouterr().err
    by_hand.write_bytes("student,question,points,text\nann,why,3,für\n".encode("latin-1"))
    assert main(arguments(course)) == 2 and "save it as 'CSV UTF-8'" in capsys.readouterr().err


def test_points_for_an_answer_that_has_changed_are_looked_at_again(course):
    def answer(text):
        cells = ["**why** (5 points). Why?", text]  # their metadata is lost
        cells = [{"cell_type": "markdown", "source": cell} for cell in cells]
        write_notebook(course / "submissions" / "ann" / "words.ipynb", cells)
        return grade_course(course)[1]["ann"]

    by_hand = course / "grades" / "by_hand.csv"
    answer("Because.")
    by_hand.write_text(by_hand.read_text().replace("ann,why,,5,Because.", "ann,why,4,5,Because."))
    assert "changed" not in answer("Because.")["look at it because"]
    for _ in range(2):  # until somebody says so
        row = answer("Or not.")
        assert "why: the answer changed" in row["look at it because"] and row["score"] == "8.0"
    by_hand.write_text(by_hand.read_text().replace("the answer changed", ""))
    assert "changed" not in answer("Or not.")["look at it because"]


def test_what_a_student_gets_back(course):
    grade_course(course)
    said = (course / "grades" / "feedback" / f"{Submission('=ben').file_name}.md").read_text()
    assert "# Homework: =ben" in said and "**0 of 9 points**" in said and "why, in words: not graded yet" in said
    assert "[ ] 3 ranks" in said and "[ ] a hidden case" in said and "you summed and did not divide" in said
    assert "5 ranks" not in said


def test_one_exercise_that_cannot_be_judged(course, monkeypatch, capsys):
    """The others have their points, and the next run grades it again."""
    from course.grade import grading

    true = grading.judge
    hw = json.loads((course / "hw.json").read_text())
    (course / "hw.json").write_text(json.dumps(hw | {"exercises": {"03.1": 4, "03.2": 2}}))

    def fails(exercise, *rest):
        if exercise.id == "03.2":
            raise JailError("the disk is full")
        return true(exercise, *rest)

    monkeypatch.setattr(grading, "judge", fails)
    write_notebook(course / "submissions" / "ann" / "03.ipynb", [SETUP, RIGHT, OTHER])
    code, rows = grade_course(course)
    assert (code, rows["ann"]["raw"]) == (1, "4.0")
    assert "global_gradient could not be graded: JailError: the disk" in rows["ann"]["look at it because"]
    monkeypatch.undo()
    code, rows = grade_course(course)
    assert (code, rows["ann"]["raw"]) == (0, "6.0")


def test_a_repaired_exercise_is_graded_again(course, monkeypatch):
    asked = read_assignment(str(course / "hw.json"))
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
    grade_course(course)
    made = [course / "grades", *(course / "grades").rglob("*")]
    assert len(made) > 7 and {(p.stat().st_uid, p.stat().st_gid) for p in made} == {(61234, 61235)}


def test_hidden_cases_that_do_not_run_are_one_sentence(course, capsys):
    (course / "cases.py").write_text("1 / 0")
    assert main(arguments(course)) == 2
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
def test_a_disk_of_its_own(tmp_path):
    """Small, in memory, and gone with its process."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        inside = Path(folder) / "inside"
        inside.mkdir()

        def write(n_bytes):
            sight.own_disk([folder], str(inside), USER, 2**20)
            for place in (folder, inside):
                (Path(place) / "x").write_bytes(bytes(n_bytes))

        assert sight.in_child(lambda: write(2**19)) and not sight.in_child(lambda: write(2**21))
        assert list(Path(folder).rglob("*")) == [inside]


def test_names_of_canvas(tmp_path):
    for name in (
        "doeann_LATE_12345_678_hw-1.ipynb",
        "doeann_LATE_12345_679_other.ipynb",
        "roeben_22_33_hw.ipynb",
        "kimminjun_7_1_hw.ipynb",
        "kimminjun_8_2_hw.ipynb",
        "own.ipynb",
    ):
        write_notebook(tmp_path / name, [])
    (tmp_path / "__MACOSX").mkdir()
    (tmp_path / "poecid_9_3_hw.pdf").write_text("")
    found = {s.student: s for s in find_submissions(str(tmp_path))}
    assert [*found] == ["doeann", "kimminjun_7", "kimminjun_8", "own", "poecid", "roeben"]
    assert found["kimminjun_8"].canvas_id == "8" and found["poecid"].others == ("poecid_9_3_hw.pdf",)
    assert (found["doeann"].canvas_id, found["doeann"].marked_late, len(found["doeann"].paths)) == ("12345", True, 2)
    assert (found["roeben"].canvas_id, found["roeben"].marked_late) == ("22", False)


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
    grades = [
        {"student": "doeann", "canvas_id": "12345", "score": 4},
        {"student": "roeben", "canvas_id": "", "score": 3.0},
        {"student": "zoe", "canvas_id": "", "score": 1.0},
    ]
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
        ({"points": 3}, "it has an unknown key 'points'"),
        ({"varied": ["02.4"]}, "varied names 02.4, which is not one of its exercises"),
        ({"varied": ["03.1"]}, "varied names 03.1, which has no variants; in the book, 02.4, 04.1 have"),
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
    (tmp_path / "hw.json").write_text(json.dumps(ASKED | changes))
    with pytest.raises(AssignmentError, match=words):
        read_assignment(str(tmp_path / "hw.json"))
    assert main([str(tmp_path / "hw.json"), str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


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
    (tmp_path / "submissions" / "model").mkdir(parents=True)
    shutil.copy(ROOT / "solutions" / "03_data_parallelism.ipynb", tmp_path / "submissions" / "model")
    (tmp_path / "hw.json").write_text(json.dumps(ASKED))
    assert (
        main([str(tmp_path / "hw.json"), str(tmp_path / "submissions"), "--out", str(tmp_path / "g"), "--trust"]) == 0
    )
    assert json.loads((tmp_path / "g" / "students" / "model.json").read_text())["score"] == 5


# ---- what people read ---------------------------------------------------------------------------------------------

ODD = "a\x1b[31mb\rc\x9bd\u202ee\u2066f\x1b]0;title\x07"
SEEN = r"a\x1b[31mb\rc\x9bd\u202ee\u2066f\x1b]0;title\x07"


def is_seen(text):
    return all(letter.isprintable() or letter in "\n\t\ufeff" for letter in text)


def test_no_letter_that_steers_a_terminal_reaches_a_teacher(course, capsys):
    """In names, answers, errors, and what is printed about them."""
    cells = [{"cell_type": "markdown", "source": text} for text in ("**why** (5 points). Why?", ODD)]
    wrong = first(f"raise ValueError({ODD!r})")
    write_notebook(course / "submissions" / ODD / f"{ODD}.ipynb", [*wrong, "def (", *cells])
    (course / "roster.txt").write_text(f"ann\n=ben\n{ODD[1:].replace(chr(13), '')}\n")
    write_notebook(course / "submissions" / "<b>eve" / "03.ipynb", [SETUP])
    code, rows = grade_course(course, "--roster", str(course / "roster.txt"))
    files = [path for path in (course / "grades").rglob("*") if path.is_file()]
    assert code == 0 and len(files) > 9 and SEEN in rows and SEEN[1:].replace("\\r", "") in rows
    assert not [path.name for path in files if not is_seen(path.name) or not is_seen(path.read_text())]
    assert is_seen("".join(capsys.readouterr()))
    by_hand = {row["student"]: row["text"] for row in read_sheet(course / "grades" / "by_hand.csv")}
    assert by_hand[SEEN] == SEEN
    told = (course / "grades" / "feedback" / f"{Submission('<b>eve').file_name}.md").read_text()
    assert "# Homework: &lt;b>eve" in told and "<b>" not in told
    (course / "times.csv").write_text(f"student,time\n{ODD[:4]},2027-03-02T13:00:00+00:00\n")
    assert main(arguments(course, "--times", str(course / "times.csv"))) == 2
    assert is_seen(capsys.readouterr().err)


@pytest.mark.parametrize("text", ["=1", "+1", "-1", "@a", "\t=1", " =1", "\n=1", "'=1", "''=1", "\uff1d1", "\tx"])
def test_a_cell_that_a_spreadsheet_would_compute_is_text(text):
    assert as_cell(text) == f"'{text}" and of_cell(as_cell(text)) == text


@pytest.mark.parametrize("text", ["", "'t Hooft", "a=1", "1.5", "x-y"])
def test_a_cell_that_a_spreadsheet_would_not_compute_stays(text):
    assert as_cell(text) == text == of_cell(text)


def test_ten_megabytes_of_words_are_cut(course):
    cells = [{"cell_type": "markdown", "source": text} for text in ("**why** (5 points). Why?", "word " * 2 * 10**6)]
    write_notebook(course / "submissions" / "ann" / "03.ipynb", [SETUP, RIGHT, *cells])
    by_hand = course / "grades" / "by_hand.csv"
    assert grade_course(course)[0] == 0
    assert by_hand.stat().st_size < 30_000 and "… (9,980,000 more letters)" in by_hand.read_text()
    by_hand.write_text(by_hand.read_text().replace("ann,why,,5,", "ann,why,5,5,"))
    assert "changed" not in grade_course(course)[1]["ann"]["look at it because"]


def test_many_cells_that_cannot_be_read_are_few_notes(course):
    write_notebook(course / "submissions" / "ann" / "03.ipynb", [SETUP, RIGHT, *["def ("] * 5000])
    notes = grade_course(course)[1]["ann"]["look at it because"]
    assert "and 4980 more notes of this kind" in notes and len(notes) < 3000


def test_of_two_notebooks_the_newest_counts(course):
    """Whatever they are called; and its answers in words."""
    why = [{"cell_type": "markdown", "source": text} for text in ("**why** (5 points). Why?", "Old.")]
    wrong = RIGHT.replace(', op="mean"', "")
    folder = course / "submissions" / "ann"
    write_notebook(folder / "03.ipynb", [SETUP, RIGHT, why[0], why[1] | {"source": "New."}])
    write_notebook(folder / "final-10.ipynb", [SETUP, wrong, *why])
    write_notebook(folder / "final-9.ipynb", [SETUP, wrong, *why])
    for newest in ("03.ipynb", "final-10.ipynb"):
        for path in folder.iterdir():
            os.utime(path, (1e9 + 9 * (path.name == newest),) * 2)
        row = grade_course(course)[1]["ann"]
        assert f"in 3 notebooks; {newest}" in row["look at it because"], row
        assert f"why is answered in several notebooks; {newest}" in row["look at it because"]
        given = json.loads((course / "grades" / "students" / "ann.json").read_text())
        assert (given["score"], given["by_hand"][0]["text"]) == ((4, "New.") if newest[0] == "0" else (0, "Old."))
    for path in folder.iterdir():
        os.utime(path, (1e9, 1e9))  # as in a zip without times: the number in the name tells
    assert "; final-10.ipynb counts" in grade_course(course)[1]["ann"]["look at it because"]


def test_the_newest_upload_of_canvas_counts(tmp_path):
    for name in ("roeben_22_34_hw.ipynb", "roeben_22_4_hw-1.ipynb", "roeben_LATE_22_100_hw-2.ipynb"):
        write_notebook(tmp_path / name, [])
    (one,) = find_submissions(str(tmp_path))
    assert [path.name.split("_")[-2] for path in one.paths] == ["4", "34", "100"]


@pytest.mark.parametrize(("points", "count"), [(5, 3), (4, 3), (1, 7), (0.1, 3), (2.55, 4), (3, 1), (100, 9)])
def test_points_of_cases_have_two_decimals_and_add_up(points, count):
    each = dealt(points, count)
    assert len(each) == count and all(x == round(x, 2) for x in each)
    assert round(sum(each), 2) == points and max(each) - min(each) < 0.0101


def test_points_that_are_shown_have_two_decimals_and_add_up(course):
    """A third of 5 points, and a late day: in the tables, to the student, and on platforms."""
    late = {"percent_per_day": 33.333, "max_days": 2}
    asked = json.loads((course / "hw.json").read_text())
    (course / "hw.json").write_text(json.dumps(asked | {"exercises": {"03.1": 5}, "late": late}))
    (course / "cases.py").write_text(CASES.replace("(3,)", "(3, 4, 5)"))
    (course / "times.csv").write_text("student,time\nann,2027-03-02T11:00:00+00:00\n=ben,2027-03-01T11:00:00+00:00\n")
    third = RIGHT.replace('comm.all_reduce(g, group, op="mean")', "comm.all_reduce(g, group) / 3")
    write_notebook(course / "submissions" / "ann" / "03.ipynb", [SETUP, third])
    row = grade_course(course, "--times", str(course / "times.csv"))[1]["ann"]
    assert (row["03.1"], row["raw"], row["score"]) == ("1.67", "1.67", "1.11")
    told = (course / "grades" / "feedback" / "ann.md").read_text()
    assert re.findall(r"([\d.]+) of [\d.]+ points", told) == ["1.11", "1.67"]
    given = json.loads((course / "grades" / "students" / "ann.json").read_text())
    assert [r["max"] for r in given["results"]] == [1.67, 1.66, 1.67]
    seen = gradescope(given)
    assert seen["score"] == round(sum(t["score"] for t in seen["tests"]), 2) == 1.11


def test_points_with_more_decimals_are_refused(tmp_path):
    (tmp_path / "hw.json").write_text(json.dumps(ASKED | {"exercises": {"03.1": 1.66667}}))
    with pytest.raises(AssignmentError, match="03.1 has 1.66667 points; write two decimals at most, such as 1.67"):
        read_assignment(str(tmp_path / "hw.json"))


def test_a_constant_of_a_library_is_one_and_what_a_line_computes_is_named(course):
    """As in nbgrader, which runs the notebook; what is not run has a sentence."""
    uses = RIGHT.replace(', op="mean")', ") * SCALE / group.size")
    imports = "import numpy as np\nimport math"
    for constant in ("np.float64(1)", "float('1') * math.cos(0)", "torch.ones(3)[0]", "np.arange(3)[1] / 1"):
        write_notebook(course / "submissions" / "ann" / "03.ipynb", [SETUP, imports, f"SCALE = {constant}", uses])
        assert grade_course(course)[1]["ann"]["raw"] == "4.0", constant
    write_notebook(course / "submissions" / "ann" / "03.ipynb", [SETUP, "for SCALE in (1,): pass", uses])
    grade_course(course)
    told = " ".join((course / "grades" / "feedback" / "ann.md").read_text().split())
    assert "name 'SCALE' is not defined SCALE comes from 03.ipynb, code cell 2, line 1, which is not run: of" in told
