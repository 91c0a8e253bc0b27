"""A check loads the file of its exercise and no other; one that is broken is named."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from course.check import __main__ as terminal
from course.check import catalogue, check, progress
from course.check.catalogue import EXERCISES, BrokenExercise, Catalogue

FOLDER = Path(catalogue.__file__).parents[1] / "exercises"


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """A catalogue in which 01.2 is no Python, and 01.3 fails when it is imported."""
    import course.exercises

    folder = tmp_path / "ch01"
    folder.mkdir()
    for path in FOLDER.glob("ch01/*.py"):
        (folder / path.name).write_text(path.read_text(encoding="utf-8"))
    (no_python,) = folder.glob("e01_2_*.py")
    no_python.write_text("x = 1\ndef f(:\n")
    (fails,) = folder.glob("e01_3_*.py")
    fails.write_text("import nowhere_at_all\n")
    monkeypatch.setattr(course.exercises, "__path__", [str(tmp_path)])
    before = {name: module for name, module in sys.modules.items() if name.startswith("course.exercises.")}
    for name in before:
        del sys.modules[name]
    yield Catalogue(), no_python.name
    for name in [name for name in sys.modules if name.startswith("course.exercises.")]:
        del sys.modules[name]
    sys.modules.update(before)
    vars(course.exercises).pop("ch01", None)
    if "course.exercises.ch01" in before:
        course.exercises.ch01 = before["course.exercises.ch01"]


def test_a_broken_file_is_named_and_stops_no_other(broken):
    exercises, name = broken
    assert [*exercises] == [i for i in EXERCISES if i.startswith("01.")] and len(exercises) > 4
    assert exercises["01.1"].title == EXERCISES["01.1"].title
    with pytest.raises(
        BrokenExercise, match=f"exercise 01.2 cannot be loaded: course/exercises/ch01/{name}, line 2: Syn"
    ):
        exercises["01.2"]
    with pytest.raises(BrokenExercise, match="ModuleNotFoundError: No module named 'nowhere_at_all'. Mend this file"):
        exercises["01.3"]
    able, why = exercises.able({"01"})
    assert [e.id for e in able] == [i for i in exercises if i not in ("01.2", "01.3")] and len(why) == 2
    assert exercises.able(set()) == ([], [])


def test_progress_names_what_it_could_not_load(broken, own_progress, monkeypatch, capsys):
    exercises, _ = broken
    monkeypatch.setattr(catalogue, "EXERCISES", exercises)
    check("01.1", exercises["01.1"].right[0])
    progress()
    said = capsys.readouterr().out
    assert "PASS  01.1" in said and "Next to do: exercise 01.2 cannot be loaded" in said
    assert said.count("exercise 01.3 cannot be loaded") == 1


def test_in_a_terminal_a_broken_exercise_fails_alone(broken, own_progress, monkeypatch, tmp_path, capsys):
    """01.2 is asked for, and has no cell; 01.1 is judged all the same."""
    exercises, _ = broken
    monkeypatch.setattr(catalogue, "EXERCISES", exercises)
    monkeypatch.setattr(terminal, "EXERCISES", exercises)
    cells = [f"def f():\n    pass\ncheck({i!r}, f)" for i in ("01.1", "01.3")]
    path = tmp_path / "mine.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells]), path)
    assert terminal.main([str(path)]) == 1
    said = capsys.readouterr().out
    assert "01.1 state_bytes" in said and said.count("exercise 01.3 cannot be loaded") >= 1
    assert "FAIL  01.2\n  exercise 01.2 cannot be loaded" in said and "FAIL  01.4" in said


def test_a_check_loads_one_exercise():
    code = (
        "from course.check import find\nimport sys\nfind('01.1')\n"
        "print([name.rpartition('.')[2] for name in sys.modules if name.startswith('course.exercises.ch')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=FOLDER.parents[1])
    assert "'e01_1_" in done.stdout and "e01_2" not in done.stdout and "ch02" not in done.stdout, done
