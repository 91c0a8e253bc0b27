"""What `make exercise` writes is an exercise at once: right programs pass, wrong ones are named."""

import importlib
import re
import runpy
import shutil
import subprocess

import pytest
import torch

from course.check.judge import judge
from tests.book.test_repository import ROOT, tool


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """The tool, on a repository with one chapter."""
    (tmp_path / "course/exercises").mkdir(parents=True)
    (tmp_path / "solutions").mkdir()
    shutil.copy(ROOT / "solutions/03_data_parallelism.md", tmp_path / "solutions")
    module = tool("new_exercise")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return lambda *args: module.main([*args])


@pytest.mark.parametrize(("number", "shape"), [(8, (3,)), (9, ())])
def test_it_runs_as_it_is_and_with_scalars(begin, tmp_path, capsys, monkeypatch, number, shape):
    begin(f"03.{number}", "scaled_sum")
    (path,) = tmp_path.glob("course/exercises/ch03/*.py")
    path.write_text(path.read_text().replace("random(generator, 3)", f"random(generator{', 3' * bool(shape)})"))
    monkeypatch.syspath_prepend(path.parent)
    exercise = importlib.import_module(path.stem).EXERCISE
    assert (exercise.id, exercise.title) == (f"03.{number}", "scaled_sum")
    assert exercise.inputs(torch.Generator(), 1)[0]["x"].shape == shape
    answers = [*exercise.right, *(mistake.wrong for mistake in exercise.mistakes)]
    hints = [{case.hint.replace("\n", " ") for case in cases} for cases in judge(exercise, answers, seed=1)]
    assert hints == [{""}, {""}, *({mistake.hint} for mistake in exercise.mistakes)]
    task = capsys.readouterr().out
    assert (
        f'check("03.{number}", scaled_sum)' in task and "03_data_parallelism.ipynb#" in task and "{" + "{" not in task
    )


def test_it_needs_no_name(begin, tmp_path, capsys):
    begin("03.8")
    written = runpy.run_path(str(tmp_path / "course/exercises/ch03/e03_8_answer.py"))
    assert written["EXERCISE"].title == "answer" and 'check("03.8", answer)' in capsys.readouterr().out
    said = subprocess.run(
        ["make", "-n", "--no-print-directory", "exercise", "ID=03.8"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.rstrip().endswith('tools/new_exercise.py "03.8"')


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("3.8", "f"), "ID=3.8 is no exercise"),
        (("", "f"), "ID= is no exercise"),
        (("03.8", ""), "NAME= cannot be"),
        (("03.8", "../f"), "NAME=../f cannot be"),
        (("77.1", "f"), "no solutions/77_"),
    ],
)
def test_what_it_refuses(begin, tmp_path, args, words):
    with pytest.raises(SystemExit, match=words.replace("(", r"\(")):
        begin(*args)
    assert not [*(tmp_path / "course/exercises").iterdir()]


def test_it_overwrites_nothing(begin, tmp_path):
    begin("03.8", "scaled_sum")
    begin("03.1", "first")
    with pytest.raises(SystemExit, match=r"03\.8 exists: course/exercises/ch03/e03_8_scaled_sum\.py; 03\.2 is free"):
        begin("03.8", "other")
    assert len([*(tmp_path / "course/exercises").iterdir()]) == 1


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "book/teaching.md", "Makefile", "tools/new_exercise.py"])
def test_the_exercise_that_a_page_begins_is_free(page):
    told = re.findall(r"make exercise ID=(\d\d)\.(\d+)", (ROOT / page).read_text())
    assert told
    for chapter, number in told:
        assert not [*ROOT.glob(f"course/exercises/ch{chapter}/e{chapter}_{number}_*.py")], (
            f"{page}: the next free one"
        )
