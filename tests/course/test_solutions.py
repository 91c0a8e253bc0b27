"""What nbval cannot see: that the stored outputs it compares with are there, are passes, and are compared at all."""

import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tests.book.test_repository import ROOT, name

SOLUTIONS = sorted(ROOT.glob("solutions/*.ipynb"))
EXERCISES = sorted(ROOT.glob("exercises/*.ipynb"))
IGNORED = re.compile(r"nbval-(?:ignore|skip|raises|test)|NBVAL_(?:IGNORE|SKIP|RAISES|TEST)", re.IGNORECASE)
MACHINE = re.compile(r"(?<!\w)/(?:work|root|home|Users|tmp|opt|usr|var)/|ipykernel_\d|site-packages")


def code_cells(path: Path) -> list:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def checks(path: Path) -> list:
    return [cell for cell in code_cells(path) if "check" in cell.metadata.get("tags", [])]


def said(cell) -> str:
    """What the cell printed; anything but plain print fails."""
    assert [output.output_type for output in cell.outputs] in ([], ["stream"]), cell.id
    return "".join(output.text for output in cell.outputs)


# ---- what is stored -------------------------------------------------------------------------------------------------


def test_there_are_solutions():
    assert SOLUTIONS and EXERCISES, "without any, the tests below and nbval would pass"


@pytest.mark.parametrize("path", SOLUTIONS, ids=name)
def test_every_cell_of_a_solution_was_run_in_order_and_quietly(path):
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "run make notebooks"
    outputs = [output for cell in cells for output in cell.outputs]
    assert [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"] == []
    text = "\n".join(output.get("text", "") + str(output.get("data", "")) for output in outputs)
    assert MACHINE.findall(text) == [], "what is stored is of this machine"


@pytest.mark.parametrize("path", SOLUTIONS, ids=name)
def test_every_check_of_a_solution_is_compared_and_passed_in_full(path):
    cells = checks(path)
    assert cells
    for cell in cells:
        called = re.fullmatch(r'check\("([\d.]+)", \w+\)', cell.source)
        assert called, f"{cell.id} holds more than its check"
        assert said(cell).startswith(f"PASS  {called.group(1)} ")
        points = cell.metadata.nbgrader.points
        assert f" {points}/{points} points" in said(cell).splitlines()[0], "the cell's points are not the check's"


@pytest.mark.parametrize("path", [*SOLUTIONS, *EXERCISES], ids=name)
def test_nothing_is_hidden_from_nbval(path):
    assert [cell.id for cell in code_cells(path) if IGNORED.search(cell.source + json.dumps(cell.metadata))] == []


@pytest.mark.parametrize("path", SOLUTIONS, ids=name)
def test_a_solution_ends_with_its_full_total(path):
    last = code_cells(path)[-1]
    assert last.source == "progress()"
    total = sum(cell.metadata.nbgrader.points for cell in checks(path))
    assert re.findall(r"(\d+)\s*/\s*(\d+)", said(last).splitlines()[-1]) == [(str(total), str(total))]


def first_check(notebook):
    return next(cell for cell in notebook.cells if "check" in cell.metadata.get("tags", []))


def clear(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None


def change(cell, old: str, new: str) -> None:
    """Another text in what the cell printed."""
    assert old in cell.outputs[0].text
    cell.outputs[0].text = cell.outputs[0].text.replace(old, new)


def print_to_stderr(notebook):
    first_check(notebook).outputs.append(nbformat.v4.new_output("stream", name="stderr", text="a warning"))


TAMPERED = {
    "outputs cleared": clear,
    "a check's output cleared": lambda notebook: first_check(notebook).update(outputs=[]),
    "a stored FAIL": lambda notebook: change(first_check(notebook), "PASS", "FAIL"),
    "other points": lambda notebook: first_check(notebook).metadata.nbgrader.update(points=99),
    "a mark": lambda notebook: first_check(notebook).update(source="# NBVAL_IGNORE_OUTPUT\n1"),
    "a tag": lambda notebook: first_check(notebook).metadata.tags.append("nbval-skip"),
    "stderr": print_to_stderr,
    "a path": lambda notebook: change(first_check(notebook), "\n", "\n/tmp/x.py\n"),
    "a total that is not full": lambda notebook: change(notebook.cells[-1], " points", "0 points"),
}


@pytest.mark.parametrize("tamper", TAMPERED.values(), ids=TAMPERED)
def test_the_tests_above_see(tamper, tmp_path):
    notebook = nbformat.read(SOLUTIONS[0], as_version=4)
    tamper(notebook)
    nbformat.write(notebook, tmp_path / "tampered.ipynb")
    with pytest.raises(AssertionError):
        test_every_cell_of_a_solution_was_run_in_order_and_quietly(tmp_path / "tampered.ipynb")
        test_every_check_of_a_solution_is_compared_and_passed_in_full(tmp_path / "tampered.ipynb")
        test_nothing_is_hidden_from_nbval(tmp_path / "tampered.ipynb")
        test_a_solution_ends_with_its_full_total(tmp_path / "tampered.ipynb")


# ---- what a student gets --------------------------------------------------------------------------------------------


def test_the_exercises_are_those_of_the_solutions():
    command = [sys.executable, "tools/make_exercises.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("path", EXERCISES, ids=name)
def test_an_exercise_has_its_task_above_it_and_its_check_below(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code" or cell.source]
    stubs = [i for i, cell in enumerate(cells) if cell.metadata.get("nbgrader", {}).get("solution")]
    headings = [i for i, cell in enumerate(cells) if cell.cell_type == "markdown" and cell.source.startswith("## ")]
    above = [max(i for i in headings if i < stub) for stub in stubs]  # a program to repair may stand between
    assert [cells[i].source[:40] for i in above if not re.match(r"## \d+\. ", cells[i].source)] == []
    assert len({*above}) == len(stubs)
    assert [cells[i].id for i in stubs if "check" not in cells[i + 1].metadata.get("tags", [])] == []
    assert len(stubs) == len(checks(path)) >= 2


# One kernel for all, as each would import torch for seconds; in a process of its own, as its client leaves sockets.
RUN_ALL = """
import json, sys
import nbformat
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.util import run_sync

manager = AsyncKernelManager(kernel_name="python3")
try:
    for source, target in json.loads(sys.argv[1]):
        notebook = nbformat.read(source, as_version=4)
        notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))
        NotebookClient(notebook, km=manager, timeout=60).execute()
        nbformat.write(notebook, target)
finally:
    run_sync(manager.shutdown_kernel)(now=True)
"""


@pytest.mark.thorough("all notebooks of exercises, one behind the other")
@pytest.mark.slow("all notebooks of exercises, one behind the other")
def test_untouched_exercises_run_to_their_end_and_say_todo(tmp_path):
    ran = {path: str(tmp_path / path.name) for path in EXERCISES}
    command = [sys.executable, "-c", RUN_ALL, json.dumps([(str(path), target) for path, target in ran.items()])]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for target in ran.values():
        notebook = nbformat.read(target, as_version=4)
        asked = [cell for cell in notebook.cells if "check" in cell.metadata.get("tags", [])]
        assert asked and [cell.id for cell in asked if not said(cell).startswith("TODO  ")] == [], target
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        assert [output for output in outputs if output.get("name") == "stderr"] == [], target
