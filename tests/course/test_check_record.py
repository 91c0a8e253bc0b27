"""What a reader has done is kept, carried, and shown; what to do next is said."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from course.check import check, find, forget, progress, record
from course.check.__main__ import main
from course.check.catalogue import EXERCISES
from course.check.edits import Edited
from tests.course.answers import notebook
from tests.on_time import on_time

ROOT = Path(__file__).parents[2]
ALL = sum(e.points for e in EXERCISES.values())


@pytest.fixture(autouse=True)
def place(own_progress, monkeypatch):
    monkeypatch.delitem(EXERCISES, "03.9")  # the exercises of the book, and no other
    return record.place()


def test_the_best_points_are_kept(place):
    exercise = find("01.1")
    for points, best in ((1, 1), (2, 2), (0, 2)):
        record.keep(exercise, points)
        assert json.loads(place.read_text())["01.1"]["points"] == best
    assert record.kept() == {"01.1": 1}
    record.keep(replace(exercise, points=8), 4)  # half of a homework's points is not more than all of the book's
    assert json.loads(place.read_text())["01.1"]["points"] == 2


@pytest.mark.parametrize(
    "text",
    ["[]", "{", "1", '"text"', '{"01.1": 3}', '{"01.1": {"points": "many", "max": 2}}', '{"01.1": {"points": 1}}'],
)
def test_a_file_that_somebody_edited_counts_for_nothing(place, text):
    place.write_text(text)
    assert record.kept() == {}
    assert f"0/{ALL:g} points" in record.all_chapters()


def test_nobody_has_more_than_all_points(place):
    place.write_text(
        '{"01.1": {"points": 1e9, "max": 2}, "01.2": {"points": -1, "max": 2}, "99.1": {"points": 1, "max": 1}}'
    )
    assert record.kept() == {"01.1": 1, "01.2": 0, "99.1": 1}
    assert f"{find('01.1').points}/{ALL:g} points" in record.all_chapters()


def test_what_to_do_next():
    """A chapter that is begun comes first, then the first exercise of all."""
    assert record.next_to_do({}).id == "01.1"
    assert record.next_to_do({"04.1": 1.0}).id == "04.2"
    assert record.next_to_do({"04.1": 0.5}).id == "04.1"
    assert record.next_to_do(dict.fromkeys(EXERCISES, 1.0)) is None
    assert record.advice(dict.fromkeys(EXERCISES, 1.0)) == "All exercises are done."
    assert record.advice({"04.1": 1.0}).endswith("in exercises/04_zero.ipynb")


def test_progress_says_what_is_next_and_a_terminal_shows_all(capsys):
    check("08.5", find("08.5").right[0])
    capsys.readouterr()
    progress()
    assert capsys.readouterr().out.splitlines()[-1].startswith("Next to do: 08.1 cut")
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    chapters = {exercise.chapter for exercise in EXERCISES.values()}
    assert len(lines) == len(chapters) + 2, "a line a chapter, the sum, and what is next"
    assert lines[7].startswith("chapter 8 ") and "1/13 points" in lines[7]


def test_in_a_new_kernel_the_points_of_earlier_sessions_are_told_apart(capsys):
    check("08.5", find("08.5").right[0])
    forget()
    check("08.1", lambda costs, head, num_stages: None)
    capsys.readouterr()
    progress()
    here, _, before = capsys.readouterr().out.partition("\n\n")
    said = [" ".join(line.split()) for line in here.splitlines()]
    assert said[0] == "In this session:" and said[-1] == "all 0/13 points"
    assert "08.5 plan 0/1 not checked yet, 1 before" in said and "08.1 cut 0/2" in said
    assert before.startswith("Best so far, with earlier sessions:\n") and "1/13 points" in before


def test_progress_of_a_homework_counts_its_tasks_and_no_others(capsys, tmp_path):
    """Before a check and after one; and in a terminal, where a task that no cell checks has 0 points."""
    asked = {"08.4": 3, "08.5": 5}
    progress(asked)
    check("08.5", find("08.5").right[0], points=5)
    progress(asked)
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    lines = [line for line in said if line.startswith(("08.", "all", "Next", "chapter"))]
    assert lines == [
        "08.4 accumulate 0/3 not checked yet",
        "08.5 plan 0/5 not checked yet",
        "all 0/8 points",
        "Next to do: 08.4 accumulate",
        "08.4 accumulate 0/3 not checked yet",
        "08.5 plan 5/5",
        "all 5/8 points",
        "Next to do: 08.4 accumulate",
    ]
    progress({"08.5": 5})
    assert capsys.readouterr().out.endswith("5/5 points\nAll exercises of this notebook are done.\n")
    cells = [
        {"cell_type": "code", "source": 'def plan(T_F, T_B, m, part):\n    return 0\n\ncheck("08.5", plan, points=5)'}
    ]
    about = {"exercises": asked | {"99.9": 1}}
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells, "metadata": about}))
    assert main([str(tmp_path / "a.ipynb")]) == 1
    assert capsys.readouterr().out.endswith("0/8 points\nNext to do: 08.4 accumulate\n")


FIRST_CELL = """import os
os.environ.pop("NBGRADER_EXECUTION", None)
os.environ.pop("CHECK_STRICT", None)
from course import check
print(check.NBGRADER, check._strict())
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="the system does not tell")
@pytest.mark.parametrize(
    ("given", "said"),
    [({"NBGRADER_EXECUTION": "autograde"}, "True True"), ({"CHECK_STRICT": "1"}, "False True"), ({}, "False False")],
)
def test_a_cell_above_the_imports_changes_no_strictness(given, said):
    environment = {k: v for k, v in os.environ.items() if k not in ("CHECK_STRICT", "NBGRADER_EXECUTION")} | given
    command = [sys.executable, "-c", FIRST_CELL]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert ended.stdout.strip() == said, ended.stderr


@pytest.fixture
def drive(monkeypatch, tmp_path):
    """A book, and a Drive that is not mounted yet: its folder is not there."""
    monkeypatch.undo()
    assert record.place() == ROOT / ".progress.json"
    (tmp_path / "book").mkdir()
    monkeypatch.setattr(record, "_BOOK", tmp_path / "book")
    monkeypatch.setattr(record, "_DRIVE", tmp_path / "drive")
    return tmp_path / "drive"


def test_in_colab_the_record_is_on_the_drive(drive):
    drive.mkdir()
    record.keep(find("01.1"), 2)
    assert json.loads((drive / "parallel-by-hand.progress.json").read_text())["01.1"]["points"] == 2


def test_a_drive_that_is_mounted_later_takes_nothing_away(drive):
    """Nor one that already has a record, nor one that is gone again."""
    record.keep(find("01.1"), 2)
    record.keep(find("01.2"), 0)
    drive.mkdir()
    assert record.kept() == {"01.1": 1, "01.2": 0}, "before the next check, too"
    on_drive = drive / "parallel-by-hand.progress.json"
    on_drive.write_text(
        '{"01.1": {"points": 1, "max": 2}, "01.2": {"points": 9, "max": 9}, "04.1": {"points": 1, "max": 2}}'
    )
    merged = {"01.1": 1, "01.2": 1, "04.1": 0.5}
    assert record.kept() == merged
    record.keep(find("03.1"), 0)
    merged |= {"03.1": 0}
    assert record.kept() == merged and json.loads(on_drive.read_text()).keys() == merged.keys()
    on_drive.rename(drive.parent / "away")
    drive.rmdir()
    assert record.kept() == merged


@pytest.mark.parametrize("spoilt", ["[]", "{", "1", '{"01.1": {"points": "many", "max": 2}}'])
def test_a_spoilt_record_in_one_place_is_left_alone_and_the_other_counts(drive, spoilt):
    record.keep(find("01.1"), 2)
    drive.mkdir()
    on_drive = drive / "parallel-by-hand.progress.json"
    on_drive.write_text(spoilt)
    record.keep(find("01.3"), 0)
    assert record.kept() == {"01.1": 1, "01.3": 0} and on_drive.read_text() == spoilt


FAST = "01.3", "02.4", "03.1", "04.1", "06.3", "08.4", "11.2", "13.1"  # no wrong program of these lets ranks wait


@pytest.mark.timed("it measures time")
@pytest.mark.slow("eight checks that fail, where a neighbour takes the cores")
def test_a_check_that_fails_takes_no_long_time(capsys, say):
    """The first check of a notebook also starts the server, and is not counted."""
    check("03.1", find("03.1").right[0])
    took_s = []
    for exercise in map(find, FAST):
        wrong = exercise.mistakes[0].wrong
        wrong = wrong.load() if isinstance(wrong, Edited) else wrong
        began_s = time.monotonic()
        check(exercise, wrong)
        took_s.append(time.monotonic() - began_s)
    assert capsys.readouterr().out.count("\nFAIL  ") == len(FAST)
    say(f"a check that fails: {median(took_s):.1f} s is the median of {len(FAST)}, {max(took_s):.1f} s the longest")
    with on_time():
        assert median(took_s) < 3


@pytest.mark.thorough("a process that imports torch, and saves that are waited for")
@pytest.mark.slow("a process of its own imports torch")
def test_a_watched_notebook_is_checked_at_each_save(tmp_path):
    """And Ctrl-C ends it without a traceback."""
    path = tmp_path / "a.ipynb"

    def save(body):
        cells = f"def plan(T_F, T_B, m, part):\n    {body}", 'check("08.5", plan)'
        notebook(tmp_path, *cells, name=path.name)

    save("raise NotImplementedError")
    command = [sys.executable, "-m", "course.check", "--watch", str(path)]
    environment = os.environ | {"CHECK_STRICT": "1"}  # the reader's own record stays as it is
    child = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        said = read_until(child, "Waiting")
        assert "TODO  08.5" in said
        time.sleep(0.05)  # a file system's clock
        save("return 0")
        assert "FAIL  08.5" in read_until(child, "Waiting")
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=20)
        assert child.returncode == 0 and "Traceback" not in errors
    finally:
        child.kill()


def read_until(child, word):
    lines = []
    for line in child.stdout:
        lines.append(line)
        if word in line:
            break
    return "".join(lines)
