"""What a reader has done is kept, carried, and shown; what to do next is said."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lib import check as checks
from lib.check import check, find, progress, record
from lib.check.__main__ import main
from lib.check.catalogue import EXERCISES

ROOT = Path(__file__).parents[1]
ALL = sum(e.points for e in EXERCISES.values())


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    monkeypatch.setattr(record, "place", lambda: tmp_path / "progress.json")
    monkeypatch.setattr(checks, "_session", {})
    for variable in ("CHECK_STRICT", "NBGRADER_EXECUTION"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path / "progress.json"


def test_the_best_points_are_kept(place):
    exercise = find("01.1")
    for points, best in ((1, 1), (2, 2), (0, 2)):
        record.keep(exercise, points)
        assert json.loads(place.read_text())["01.1"]["points"] == best
    assert record.kept() == {"01.1": 1}
    record.keep(replace(exercise, points=8), 4)  # half of a homework's points is not more than all of the book's
    assert json.loads(place.read_text())["01.1"]["points"] == 2


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"01.1": 3}', '{"01.1": {"points": "many", "max": 2}}', '{"01.1": {"points": 1}}']
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
    assert len(lines) == 14 + 2 and lines[7].startswith("chapter 8 ") and "1/13 points" in lines[7]


def test_in_colab_the_record_is_on_the_drive(monkeypatch, tmp_path):
    monkeypatch.undo()
    assert record.place() == ROOT / ".progress.json"
    monkeypatch.setattr(record, "_DRIVE", tmp_path)
    record.keep(find("01.1"), 2)
    assert json.loads((tmp_path / "parallel-by-hand.progress.json").read_text())["01.1"]["points"] == 2


@pytest.mark.thorough("a process that imports torch, and saves that are waited for")
@pytest.mark.slow("a process of its own imports torch")
def test_a_watched_notebook_is_checked_at_each_save(tmp_path):
    """And Ctrl-C ends it without a traceback."""
    path = tmp_path / "a.ipynb"

    def save(body):
        cells = [f"def plan(T_F, T_B, m, part):\n    {body}", 'check("08.5", plan)']
        path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": text} for text in cells]}))

    save("raise NotImplementedError")
    command = [sys.executable, "-m", "lib.check", "--watch", str(path)]
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
