"""On the pages the axes of a layout have their names: `Layout` counts dp, pp, tp and `Layout4D` tp, cp, pp, dp."""

import ast
import json
from pathlib import Path

import pytest

CHAPTERS = sorted((Path(__file__).parents[2] / "chapters").glob("*.ipynb"))


def unnamed(code: str) -> list[str]:
    """Layouts whose axes are told by their places."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call) and node.args]
    return [ast.unparse(call) for call in calls if getattr(call.func, "id", "") in ("Layout", "Layout4D")]


def cells(path: Path) -> list[str]:
    """Its code; a cell of IPython's own commands is none."""
    found = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    return [text for text in found if not any(line.startswith(("%", "!")) for line in text.splitlines())]


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_layout_on_a_page_names_its_axes(path):
    assert [call for code in cells(path) for call in unnamed(code)] == []


def test_an_axis_without_a_name_is_seen():
    assert unnamed("x = Layout(2, pp=2)\ny = Layout4D(tp=2, cp=1, pp=1, dp=1)") == ["Layout(2, pp=2)"]
