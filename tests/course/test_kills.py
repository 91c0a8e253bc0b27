"""The book's table of wrong answers shows the outcome of a run, and a run of today's exercises."""

import hashlib
import json
import subprocess
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


def has(kills, name):
    """One more exercise."""
    path = kills.EXERCISES / f"ch{name[1:3]}" / f"{name}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text("")


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
        has(kills, name)
    assert kills.main([]) == 1 and sorted(tried) == ["02.4", "03.1"]
    assert [*json.loads(kills.KEPT.read_text())] == ["02.4", "12.3"]
    assert "03.1, wrong program 1: it passes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("only", "named"), [(["12"], ["12.3", "12.30"]), (["12.3"], ["12.3"]), (["01", "12.30"], ["01.1", "12.30"])]
)
def test_single_chapters_and_exercises_can_be_tried_again(kills, monkeypatch, only, named):
    has(kills, "e12_30_c")
    kills.keep({i: {"source": source} for i, source in kills.sources().items()})
    tried = []
    row = {"right": 2, "wrong": 3, "slips": 4, "mutants": 5}
    monkeypatch.setattr(kills, "try_one", lambda exercise_id, turns: (tried.append(exercise_id) or row, []))
    assert kills.main(only) == 0 and sorted(tried) == named
    assert [*json.loads(kills.KEPT.read_text())] == ["01.1", "12.3", "12.30"]


def test_what_was_not_asked_for_stays_as_it_was(kills, monkeypatch, capsys):
    """Even where it has changed: the table says so itself, and `--check` names it."""
    for name in ("ch01/e01_1_a", "ch12/e12_3_b"):
        (kills.EXERCISES / f"{name}.py").write_text("another = 'line'\n")
    before = json.loads(kills.KEPT.read_text())
    row = {"right": 2, "wrong": 3, "slips": 4, "mutants": 5}
    monkeypatch.setattr(kills, "try_one", lambda exercise_id, turns: (row, []))
    assert kills.main(["12.3"]) == 0 and kills.kept()["01.1"] == before["01.1"]
    assert "book/kill_table.json has 1 of 2 exercises as they are now" in capsys.readouterr().out
    assert kills.main(["--check"]) == 1 and "exercises 01.1: make kills" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["03.9", "1", "12.", "03"])
def test_what_is_no_exercise_is_not_tried(kills, name, capsys):
    before = kills.KEPT.read_text()
    assert kills.main(["12.3", name]) == 2 and kills.KEPT.read_text() == before
    said = capsys.readouterr()
    assert said.err == f"{name} is no exercise and no chapter of course/exercises, such as 03.1 and 03\n"
    assert said.out == ""


def test_make_passes_the_exercise_on():
    command = ["make", "-n", "--no-print-directory", "kills", "ID=03.9"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout.rstrip().endswith("tools/kills.py 03.9")


def test_too_few_programs_are_counted_and_not_tried(monkeypatch):
    exercise = find("02.4")
    row = replace(exercise.variants[0], right=exercise.right[:1])
    monkeypatch.setattr(
        "course.check.find", lambda i: replace(exercise, mistakes=exercise.mistakes[:2], variants=(row,))
    )
    module = tool("kills")
    counts, lines = module.try_one("02.4", module.Turns())
    assert lines == ["02.4 needs 3 wrong programs, and has 2", "02.4, row A needs 2 right programs, and has 1"]
    assert {*counts.values()} == {0}


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
