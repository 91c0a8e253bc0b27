"""Runs a chapter, the solutions of an exercise sheet and a hang, with the packages of the Python that runs this file.

The book pins its packages, and Colab has those of the day: `make newest` installs them, torch apart, and calls this.
"""

import os
import re
import sys
from importlib import metadata

import nbformat
from execute_notebooks import run
from set_repository import ROOT

HANG = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
import torch
from lib import comm, run
def waits(world):
    comm.recv(torch.ones(1), world, 1 - world.rank).wait()
try:
    run(waits, 2)
except Exception as error:
    print(error)
"""


def execute(name: str, notebook: nbformat.NotebookNode, folder: str) -> str:
    """What its cells print; an error of a cell ends this program."""
    run(notebook, ROOT / folder, timeout_s=300)
    print(f"{name} runs", flush=True)
    return "".join(out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", ()))


if __name__ == "__main__":
    os.environ["CHECK_STRICT"] = "1"  # a check that fails stops the notebook
    needs = re.findall(r"^[\w-]+", (ROOT / "requirements.txt").read_text(encoding="utf-8"), re.MULTILINE)
    versions = [f"{name} {metadata.version(name)}" for name in needs]
    print(f"Python {sys.version.split()[0]}", *versions, sep=", ", flush=True)
    said = execute("a hang", nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(HANG)]), "chapters")
    if not re.search(r"rank 0  waits in recv from 1.* Cell In\[1\], line \d+, in waits: comm\.recv", said):
        sys.exit(f"the report of a hang does not name the cell and the line:\n{said}")
    for name in ("solutions/01_memory.ipynb", "chapters/02_collectives.ipynb"):
        execute(name, nbformat.read(ROOT / name, as_version=4), name.partition("/")[0])
