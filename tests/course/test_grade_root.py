"""The root of a jail: Python is in it however it is reached, and nothing else of the machine is."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from course.grade import sight, trial
from course.grade.__main__ import USER, main
from course.grade.grading import grade
from course.grade.jail import User, processes_of
from course.grade.submissions import find_submissions
from tests.course.homework import OTHER, RIGHT, ROOT, SETUP, Course, alone, an_answer, needs_jail, needs_view
from tests.course.test_grade_jail import graded

RUNS = """
import os, sys, tempfile
from course.grade import sight, trial
sight.own_disk(["/tmp"], {folder!r}, {uid}, 2**26)
os.environ["TMPDIR"] = tempfile.tempdir = {folder!r}
sight.become({uid})
os.chdir({folder!r})
from lib.launch import run
from operator import attrgetter
print([*run(attrgetter("rank"), 2)])
"""


def seen(*paths):
    """Which of these paths the user of students' code sees in a root of its own."""
    reads, writes = os.pipe()

    def look():
        sight.own_disk(["/tmp"], "/tmp/jail-x", USER, 2**20)
        sight.become(USER)
        os.write(writes, b"".join(b"1" if os.path.exists(path) else b"0" for path in paths))

    assert sight.in_child(look)
    os.close(writes)
    with open(reads) as file:
        return [letter == "1" for letter in file.read()]


@needs_view
@pytest.mark.parametrize("by", ["a link", "a link to a link", "a relative link", "a link to its parent"])
def test_python_is_there_however_it_is_reached(by, open_folder, monkeypatch):
    """In a home that is closed to others, as an environment that is a link."""
    real = open_folder / "elsewhere" / "site"
    real.mkdir(parents=True)
    (real / "odd.py").write_text("x = 1")
    link = open_folder / "home" / "site"
    link.parent.mkdir()
    if by == "a link to its parent":
        link.parent.rmdir()
        link.parent.symlink_to(real.parent)
    else:
        link.symlink_to("../elsewhere/site" if by == "a relative link" else real)
    if by == "a link to a link":
        (open_folder / "again").symlink_to(link)
        link = open_folder / "again"
    assert not sight.can_read(link / "odd.py", USER), "nothing needs it yet"
    monkeypatch.syspath_prepend(str(link))
    assert sight.can_read(link / "odd.py", USER)
    assert seen(link / "odd.py", real / "odd.py", open_folder / "elsewhere", "/tmp") == [True] * 4


@needs_view
def test_nothing_else_of_the_machine_is_there(open_folder, monkeypatch):
    open_folder.chmod(0o755)
    (open_folder / "secret").write_text("x")
    assert sight.may_read(open_folder / "secret", USER) and seen(open_folder / "secret") == [False]
    elsewhere = ROOT / "README.md", ROOT / ".git", ROOT / "solutions", ROOT / "book", Path.home() / ".ssh"
    assert seen(*elsewhere) == [False] * 5
    assert (
        seen("/etc/passwd", "/dev/null", "/dev/fd/0", "/usr/lib", "/proc/self/status", sys.executable) == [True] * 6
    )


@needs_view
@pytest.mark.parametrize("place", ["site-packages", "the working folder", "a path of its own"])
def test_a_second_copy_of_the_book_has_no_right_program(place, open_folder, monkeypatch):
    """As `pip install` of the book makes one."""
    open_folder.chmod(0o755)
    answers = [open_folder / "course" / "exercises" / "e03_1.py", open_folder / "solutions" / "03.ipynb"]
    answers += [open_folder / "course" / room / "x" for room in ("practise", "assignments", "release")]
    check = open_folder / "course" / "check" / "judge.py"
    for path in (*answers, check):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    if place == "the working folder":
        monkeypatch.chdir(open_folder)
    if place != "a path of its own":
        monkeypatch.syspath_prepend(str(open_folder))
    assert seen(*answers) == [False] * 5
    assert seen(check) == [place == "site-packages"]


SENDS = """import logging.handlers
for path in {paths!r}:
    try:
        handler = logging.handlers.SysLogHandler(address=path)
        handler.emit(logging.makeLogRecord({{"msg": "hello"}}))
    except OSError: pass
"""


@alone
@needs_jail
@needs_view
def test_no_service_of_the_machine_hears_a_submission(tmp_path, open_folder):
    open_folder.chmod(0o755)
    places = [open_folder / "log", Path("/run/a-service"), Path("/var/tmp/a-service")]
    heard = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in places]
    try:
        for service, place in zip(heard, places, strict=True):
            service.bind(str(place))
            service.setblocking(False)
            place.chmod(0o777)
        paths = [*map(str, places), "/dev/log", "/run/systemd/journal/socket"]
        body = SENDS.format(paths=paths) + RIGHT.partition("\n")[2].replace("\n    ", "\n").strip()
        _, given = graded(tmp_path, an_answer(body), user=USER)
        assert given["score"] == 3, given
        for service in heard:
            with pytest.raises(BlockingIOError):
                service.recv(1)
    finally:
        for service, place in zip(heard, places, strict=True):
            service.close()
            place.unlink(missing_ok=True)


@alone
@needs_jail
@needs_view
def test_ranks_of_the_library_start_in_such_a_root(open_folder):
    """They are forked by a server that listens on a socket in a folder of its own."""
    code = RUNS.format(folder=str(open_folder / "mine"), uid=USER)
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, cwd="/"
    )
    assert done.stdout == "[0, 1]\n", done.stderr
    until = time.monotonic() + 20
    while processes_of(USER) and time.monotonic() < until:
        time.sleep(0.1)
    assert not processes_of(USER), "the server ends when its program has ended"


@alone
@needs_jail
@pytest.mark.parametrize(
    ("lost", "why"),
    [
        ("open('/nowhere/os.py')", "No such file or directory"),
        ("os._exit(1)", "exited without returning"),
        ("return x", "is not right"),
    ],
)
def test_nothing_is_graded_where_a_right_answer_fails(lost, why, tmp_path, monkeypatch, capsys):
    """As in a jail that cannot read Python, whose ranks end, or whose messages do not arrive."""
    course = Course(tmp_path)
    course.hands_in("ann", SETUP, RIGHT, OTHER)
    monkeypatch.setattr(trial, "CELL", trial.CELL.replace("x, group):", f"x, group):\n    {lost}"))
    assert main(course.command()) == 2
    said = capsys.readouterr().err
    assert "nothing was graded, because a right answer fails here" in said and why in said and "/opt" in said
    assert not (course.grades / "grades.csv").exists()


@alone
@needs_jail
def test_a_book_that_is_reached_by_a_link(tmp_path, open_folder):
    """Its environment is a link as well."""
    (open_folder / "book").symlink_to(ROOT)
    (open_folder / "env").symlink_to(sys.prefix)
    course = Course(tmp_path)
    course.hands_in("ann", SETUP, RIGHT, OTHER)
    here = {"PYTHONPATH": str(open_folder / "book"), "PATH": os.environ["PATH"]}
    python = open_folder / "env" / "bin" / "python"
    done = subprocess.run(
        [python, "-m", "course.grade", *course.command()], env=here, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and course.given("ann")["score"] == 5, done.stderr


def with_a_limit(folder, *cells, seconds):
    course = Course(folder, exercises={"03.1": 3})
    course.hands_in("ann", SETUP, *cells)
    course.has_cases(f"replace(find('03.1'), timeout_s={seconds})")
    from course.grade.assignment import read_assignment

    asked = read_assignment(str(folder / "hw.json"), str(folder / "cases.py"))
    (one,) = find_submissions(str(course.submissions))
    return grade(asked, one, User(None), b"x")


def test_what_is_late_is_tried_again_alone_and_a_person_is_told(tmp_path):
    slow = RIGHT.replace(":\n", ":\n    time.sleep(2)\n", 1)
    given = with_a_limit(tmp_path, slow, seconds=1)
    assert given["score"] == 3
    (note,) = given["notes"]
    assert note.startswith("REVIEW: average_gradients had no result within 1 s; it was tried again alone, with 3 s")


def test_what_is_late_twice_is_lost(tmp_path):
    given = with_a_limit(tmp_path, an_answer("while True: pass"), seconds=0.5)
    assert given["score"] == 0 and given["notes"][0].endswith("with 1.5 s, and had none again")
    assert "did not return within 1.5 s. Is there an endless loop?" in given["results"][0]["hint"]
    assert given["seconds"] < 10, "one second try, not one for each case"


def test_the_imports_of_a_notebook_are_not_the_answers_time(tmp_path):
    given = with_a_limit(tmp_path, "class Slow:\n    time.sleep(2)", RIGHT, seconds=1.5)
    assert given["score"] == 3 and given["notes"] == []


def test_filling_memory_is_no_endless_loop(tmp_path):
    given = with_a_limit(tmp_path, an_answer("x = [torch.ones(2**24) for _ in range(10)]\ntime.sleep(99)"), seconds=4)
    assert "of memory together: to fill that much takes this time" in given["results"][0]["hint"], given
