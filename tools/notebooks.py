"""Writes each NN_name.ipynb of chapters/ and solutions/ from its NN_name.md, or checks that they agree.

    python tools/notebooks.py            # what `make notebooks` runs
    python tools/notebooks.py --check    # changes nothing; fails naming what is out of step

The .md is the source. Both twins are put into one normal form (header, setup cell, link to Colab, minutes, cell ids),
so that the same source always gives the same bytes and a diff shows only what was edited. Only the .ipynb says that
code starts folded, by the kind of its cell.
"""

import argparse
import hashlib
import re
import sys
from pathlib import Path

import jupytext
import nbformat
from alone import alone, in_book
from effort import state_effort
from page_form import KINDS, kind, state_minutes
from set_repository import ROOT, address, colab

SETUP_CELL = ROOT / "tools" / "setup_cell.py"
TITLE = "#@title "  # what Colab shows of a cell whose code is folded
TITLES = KINDS | {"generated": "Run this cell first"}
COLAB_LINK = re.compile(r'<a class="colab" href="[^"]*">.*?</a>')
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},
}
HEADER = """---
jupytext:
  text_representation:
    extension: .md
    format_name: myst
    format_version: 0.13
kernelspec:
  display_name: Python 3
  name: python3
---
"""


def setup_source(path: str) -> str:
    """The setup cell of the notebook at `path`: the same text everywhere, but for that path."""
    text = SETUP_CELL.read_text(encoding="utf-8").rstrip()
    return text.replace("tools/setup_cell.py", path)


def is_setup(cell) -> bool:
    return {"setup", "remove-cell"} <= set(cell.metadata.get("tags", []))  # `setup` alone: imports of the page


def dress(notebook, path: str) -> None:
    """Give the notebook that will lie at `path` its setup cell, its link to Colab, and stable ids, in place.

    Works on any notebook whose first cell is its title; the exercises' generator uses it too.
    """
    title = notebook.cells[0]
    link = f'<a class="colab" href="{colab(address())}/{path}">Open in Colab</a>'
    bare = COLAB_LINK.sub("", title.source)
    title.source = re.sub(r'(<p class="kick">.*?)\s*</p>', rf"\1 {link}</p>", bare, count=1)
    if link not in title.source:
        raise ValueError(
            f'{path}: its first cell begins with <p class="kick">...</p>, which carries the link to Colab'
        )

    setup = next((cell for cell in notebook.cells if is_setup(cell)), None)
    if setup is None:
        setup = nbformat.v4.new_code_cell(metadata={"tags": ["setup", "remove-cell"]})
        notebook.cells.insert(1, setup)
    setup.source = setup_source(path)

    seen: dict[str, int] = {}
    for cell in notebook.cells:
        # An id from what the cell says, not from where it stands: inserting a cell leaves the others' ids alone.
        name = "setup" if cell is setup else cell.metadata.get("nbgrader", {}).get("grade_id")
        name = name or hashlib.sha256(cell.source.encode()).hexdigest()[:8]
        seen[name] = seen.get(name, 0) + 1
        cell["id"] = name if seen[name] == 1 else f"{name}-{seen[name]}"

    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5


def fold(notebook, path: str) -> None:
    """Give the notebook at `path` what a reader of it alone needs.

    The code of cells that have a kind starts folded, in Colab under a title, in JupyterLab without one; no link is
    relative.
    """
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = alone(cell.source, path)
        if cell.cell_type == "code" and kind(cell) in TITLES:
            cell.source = f"{TITLE}{TITLES[kind(cell)]}\n{cell.source}"
            cell.metadata.update(cellView="form", jupyter={"source_hidden": True})


def unfold(notebook, path: str) -> None:
    """Take back what `fold` did, in a source that was made from an .ipynb."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = in_book(cell.source, path)
        if cell.cell_type == "code" and kind(cell) in TITLES:
            cell.source = re.sub(rf"\A{TITLE}.*\n?", "", cell.source)
            cell.metadata.pop("cellView", None)
            cell.metadata.pop("jupyter", None)


def keep_outputs(notebook, stored: Path) -> None:
    """Carry over a solution's stored outputs, unless its code has changed since they were made."""
    if not stored.exists():
        return
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    old = [cell for cell in nbformat.read(stored, as_version=4).cells if cell.cell_type == "code"]
    if len(code) == len(old) and all(a.source == b.source or is_setup(a) for a, b in zip(code, old, strict=True)):
        for cell, before in zip(code, old, strict=True):
            cell.outputs, cell.execution_count = before.outputs, before.execution_count


def twins(source: Path, text: str | None = None) -> dict[Path, str]:
    """What the two files of one notebook should hold, if the .md has this text; by default that on the disk."""
    stored = source.with_suffix(".ipynb")
    notebook = jupytext.reads(text or source.read_text(encoding="utf-8"), fmt="md:myst")
    path = stored.relative_to(ROOT).as_posix()
    unfold(notebook, path)
    try:
        state_minutes(notebook)
        if source.parent.name == "solutions":
            state_effort(notebook)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    dress(notebook, path)
    body = jupytext.writes(notebook, fmt="md:myst").split("\n---\n", 1)[1]
    fold(notebook, path)
    if source.parent.name == "solutions":
        keep_outputs(notebook, stored)
    nbformat.validate(notebook)
    return {source: HEADER + body, stored: nbformat.writes(notebook) + "\n"}


def settle(wanted: dict[Path, str], orphans: list[str], description: str, remedy: str) -> None:
    """The command line of a generator: write the files that differ; with `--check`, name them and fail.

    Args:
        wanted: what each file should hold.
        orphans: a sentence for each file that has no source; with any, the command fails.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail if something is out of step")
    check = parser.parse_args().check
    for sentence in orphans:
        print(sentence)
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        name = f"{path.parent.name}/{path.name}"
        print(f"{name} is out of step: {remedy}" if check else f"{name} written")
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted[path], encoding="utf-8")
    sys.exit(bool(orphans or (check and stale)))


if __name__ == "__main__":
    both = [path for folder in ("chapters", "solutions") for path in sorted(ROOT.glob(f"{folder}/*"))]
    wanted = {path: text for one in both if one.suffix == ".md" for path, text in twins(one).items()}
    lost = [path.relative_to(ROOT) for path in both if path.suffix == ".ipynb" and path not in wanted]
    orphans = [f"{path} has no .md twin: jupytext --to md:myst {path} makes it" for path in lost]
    settle(wanted, orphans, __doc__, "the .md is the source; run make notebooks")
