"""The workshop's buttons, pressed in a real kernel, as a front end presses them."""

from pathlib import Path

import nbclient
import nbformat
import pytest
from nbclient.util import run_sync

from book.figures.workbench import workbench
from course.workshop.typed import Par
from lib.pipeline.simulate import Costs

ROOT = Path(__file__).resolve().parents[2]
RIGHT = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
CIRCLE = "0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"
CELL = f"""
from book.figures.workbench import workbench
from course.workshop.typed import Par
box = workbench({RIGHT!r}, Par(2, 2))
area, row, bar, shown = box.children
print(area.model_id, *(button.model_id for button in row.children), bar.model_id, shown.model_id)
box
"""


def parts(box):
    area, row, bar, shown = box.children
    return area, *row.children, bar, shown


def test_check_and_simulate():
    area, check, simulate, run, bar, shown = parts(workbench(RIGHT, Par(2, 2)))
    check.click()
    assert "It works, in 9 units" in shown.value and "<svg" not in shown.value
    simulate.click()
    assert "<svg" in shown.value and "1F1B" in shown.value
    area.value = CIRCLE
    for button in (check, simulate, run):
        button.click()
        assert "This cannot work." in shown.value and "<svg" not in shown.value and "rank 0" in shown.value
    area.value = "0F0 <script>"
    check.click()
    assert "&lt;script&gt;" in shown.value and "<script" not in shown.value


def test_costs_are_those_of_par():
    _, _, simulate, _, _, shown = parts(workbench(RIGHT, Par(2, 2, costs=Costs(1, 2, 1))))
    simulate.click()
    assert "in 12 units" in shown.value


def test_its_buttons_in_a_real_kernel():
    cell = nbformat.v4.new_code_cell(CELL)
    notebook = nbformat.v4.new_notebook(cells=[cell])
    client = nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(ROOT)}})
    with client.setup_kernel():
        first = client.execute_cell(cell, 0)
        area, check, simulate, run, bar, shown = first.outputs[0]["text"].split()
        seen = []

        def send(comm_id: str, data: dict) -> None:
            client.kc.shell_channel.send(client.kc.session.msg("comm_msg", {"comm_id": comm_id, "data": data}))

        def press(button: str, until: str) -> str:
            send(button, {"method": "custom", "content": {"event": "click"}})
            while True:
                content = run_sync(client.kc.get_iopub_msg)(timeout=60)["content"]
                state = content.get("data", {}).get("state", {}) if "comm_id" in content else {}
                seen.append((content.get("comm_id"), state))
                if content.get("comm_id") == shown and until in state.get("value", ""):
                    return state["value"]

        assert "It works, in 9 units" in press(check, "It works")
        assert "Simulated" in press(simulate, "<svg")
        said = press(run, "units measured")
        assert "9 predicted." in said and "Run on ranks" in said
        assert any(at == bar and 0 < state.get("value", 0) <= 0.95 for at, state in seen), "a bar moves meanwhile"
        send(area, {"method": "update", "state": {"value": CIRCLE}, "buffer_paths": []})
        assert "rank 0" in press(run, "This cannot work.")


def test_without_ipywidgets_it_cannot_be(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ipywidgets", None)
    with pytest.raises(ImportError):
        workbench(RIGHT, Par(2, 2))
