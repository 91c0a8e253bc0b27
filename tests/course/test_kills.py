"""The book's table of wrong answers shows the outcome of a run, and a run of today's exercises."""

import hashlib
import json
from dataclasses import replace

import pytest

from course.check import find
from tests.book.test_repository import ROOT, tool

EXERCISE = "from course.check.bill import bill\nfrom lib.comm import send\n"


@pytest.fixture
def kills(tmp_path, monkeypatch):
    """The tool, on a repository with two exercises that were tried."""
    module = tool("kills")
    files = {
        "exercises/ch01/e01_1_a": "",
        "exercises/ch12/e12_3_b": EXERCISE,
        "check/tried": "from course.check.judge import judge\n",
    }
    for name, text in {**files, "check/judge": "", "check/bill": "", "check/record": ""}.items():
        path = tmp_path / "course" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in ("EXERCISES", "JUDGE", "KEPT", "ROOT"):
        monkeypatch.setattr(module, name, tmp_path / getattr(module, name).relative_to(ROOT))
    (tmp_path / "book").mkdir()
    module.keep({i: {"source": source} for i, source in module.sources().items()})
    return module


@pytest.mark.parametrize(
    ("file", "stale"),
    [
        ("exercises/ch12/e12_3_b", "12.3"),
        ("check/bill", "12.3"),
        ("check/judge", "01.1, 12.3"),
        ("check/tried", "01.1, 12.3"),
        ("exercises/ch02/e02_4_new", "02.4"),
        ("check/record", None),
    ],
)
def test_what_has_changed_since_it_was_tried_is_named(kills, file, stale, capsys):
    assert kills.main(["--check"]) == 0
    path = kills.ROOT / "course" / f"{file}.py"
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        path.write_text('"""Other words."""\n' + path.read_text() + "\n# another line\n")
        assert kills.main(["--check"]) == 0, "it is the same program"
    with path.open("a") as source:
        source.write("another = 'line'\n")
    assert kills.main(["--check"]) == bool(stale)
    said = f"book/kill_table.json is not of today's exercises {stale}: make kills\n" if stale else ""
    assert capsys.readouterr().err == said


def test_a_program_is_the_same_in_each_version_of_python():
    """Versions differ in the empty fields of a tree; a table that one has written must hold in all."""
    text = "class A:\n    x: int = None\n\ndef f(a, *, b=()):\n    return f'{a!r:>{b}}', lambda: [], {**a}"
    assert hashlib.sha256(tool("kills").program(text).encode()).hexdigest()[:16] == "62db2236bef69cb5"


def test_an_exercise_that_is_gone_is_named(kills, capsys):
    (kills.EXERCISES / "ch01" / "e01_1_a.py").unlink()
    assert kills.main(["--check"]) == 1 and "exercises 01.1: make kills" in capsys.readouterr().err


def test_only_what_has_changed_is_tried_and_only_what_came_out_right_is_kept(kills, monkeypatch, capsys):
    tried = []

    def try_one(exercise_id, turns):
        tried.append(exercise_id)
        return {"right": 2, "wrong": 3, "slips": 4, "mutants": 5}, ["03.1, wrong program 1: it passes"] * (
            exercise_id == "03.1"
        )

    monkeypatch.setattr(kills, "try_one", try_one)
    (kills.EXERCISES / "ch01" / "e01_1_a.py").unlink()
    for name in ("e03_1_c", "e02_4_d"):
        (kills.EXERCISES / f"ch{name[1:3]}").mkdir(exist_ok=True)
        (kills.EXERCISES / f"ch{name[1:3]}" / f"{name}.py").write_text("")
    assert kills.main([]) == 1 and sorted(tried) == ["02.4", "03.1"]
    assert [*json.loads(kills.KEPT.read_text())] == ["02.4", "12.3"]
    assert "03.1, wrong program 1: it passes" in capsys.readouterr().out


def test_single_chapters_can_be_tried_again(kills, monkeypatch):
    tried = []
    row = {"right": 2, "wrong": 3, "slips": 4, "mutants": 5}
    monkeypatch.setattr(kills, "try_one", lambda exercise_id, turns: (tried.append(exercise_id) or row, []))
    assert kills.main(["12"]) == 0 and tried == ["12.3"]
    assert [*json.loads(kills.KEPT.read_text())] == ["01.1", "12.3"]


def test_an_exercise_is_counted(monkeypatch):
    """A wrong program that passes, or has the hint of another, is no kill; a right one that fails is a fault."""
    module, exercise = tool("kills"), find("13.2")
    first, second, *others = exercise.mistakes
    right, *_ = exercise.right
    row, lines = module.try_one("13.2", module.Turns())
    assert (row["right"], row["wrong"], lines) == (len(exercise.right), len(exercise.mistakes), [])
    assert row["mutants"] > 5 and row["equivalent"] == 0
    assert 0 < row["fail_s"] < 30 and "cores" in row["machine"]
    broken = replace(
        exercise,
        right=(right, first.wrong),
        mistakes=(first, replace(second, wrong=right), replace(others[0], wrong=first.wrong), *others[1:]),
    )
    monkeypatch.setattr("course.check.find", lambda exercise_id: broken)
    row, lines = module.try_one("13.2", module.Turns())
    assert (row["right"], row["wrong"]) == (1, len(exercise.mistakes) - 2)
    assert [line.partition(", seed")[0] for line in lines] == [
        "13.2, right program 1",
        "13.2, wrong program 1",
        "13.2, wrong program 2",
    ]
