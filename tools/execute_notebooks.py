"""Runs the solution notebooks and stores their outputs, which nbval then compares with.

python tools/execute_notebooks.py                          # those that have no outputs yet
python tools/execute_notebooks.py solutions/03_name.ipynb  # these, whatever they hold
"""

import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from set_repository import ROOT


def has_run(notebook) -> bool:
    return all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code" and cell.source)


def run(notebook, folder: Path, timeout_s: int = 120) -> None:
    """Execute all cells in a kernel that starts in the folder; raises what a cell raises."""
    where = {"metadata": {"path": folder}}
    NotebookClient(notebook, timeout=timeout_s, kernel_name="python3", record_timing=False, resources=where).execute()


def execute(path: Path) -> None:
    start = time.monotonic()
    notebook = nbformat.read(path, as_version=4)
    metadata = dict(notebook.metadata)
    run(notebook, path.parent)
    notebook.metadata = metadata  # the kernel adds its own version to it
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    print(f"{path.relative_to(ROOT)} executed in {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    os.environ["CHECK_STRICT"] = "1"  # an exercise's check that fails stops the notebook
    given = [Path(name).resolve() for name in sys.argv[1:]]
    waiting = [p for p in sorted(ROOT.glob("solutions/*.ipynb")) if not has_run(nbformat.read(p, as_version=4))]
    for path in given or waiting:
        execute(path)
