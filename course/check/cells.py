"""The cells of a notebook's file, in the encodings and formats that editors write, or a sentence that says what it is.

The problem: PowerShell saves UTF-16, an old Jupyter keeps its cells in worksheets, and what is handed in may be a web
page called `.ipynb`. The idea: read what can be read without a guess. Where something is guessed or lost, a note says
so, and what is no notebook gets a sentence with the way out.
"""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path
from typing import Any

MOST_CODE = 2**20  # letters in all code cells of a notebook; to parse them takes about 600 MB
SAVE_AS = "open it in JupyterLab, choose Download in the menu File, and take that file"
_KINDS = {  # the end of a name -> what the file is, and the way out
    "zip": "it is a zip: unzip it, and take the notebook in it",
    "pdf": f"it is a PDF: from the notebook itself, {SAVE_AS}",
    "html": f"it is a web page, as Export or a browser saves it: from the notebook itself, {SAVE_AS}",
    "py": "it is a Python script: jupytext --to ipynb FILE makes a notebook of it",
}
_LOOKS_LIKE = {  # the beginning of a text -> the same
    r"\s*\Z": f"it is empty: {SAVE_AS}",
    r"PK": _KINDS["zip"],
    r"%PDF": _KINDS["pdf"],
    r"\s*<": _KINDS["html"],
    r"[^{\[]*^(?:import|from|def|# ?%%|# In\[)": _KINDS["py"],
    r"(?s:.*)^(?:<<<<<<<|>>>>>>>) ": "it has the marks of a merge that git could not finish (<<<<<<<): decide each of "
    "them, and save",
}
_DEFINED = re.compile(
    r"^[ \t]*+(?:async[ \t]++)?(?:def|class)[ \t]++(\w+)|^(\w++)[ \t]*+(?::[^=\n]*+)?=(?!=)", re.MULTILINE
)


class NotebookError(ValueError):
    """The file is no notebook that can be read."""


def printable(text: str, lines: bool = False) -> str:
    """With an escape for each letter that is not seen: codes of terminals, marks of direction, bytes that are no UTF-8.

    With `lines`, the text may have several, and tabs.
    """

    def seen(letter: str) -> str:
        is_seen = letter.isprintable() or unicodedata.category(letter) == "Zs" or (lines and letter in "\n\t")
        return letter if is_seen else ascii(letter)[1:-1]

    return re.sub("[^ -~]", lambda found: seen(found[0]), text.replace("\r\n", "\n") if lines else text)


def source(cell: dict) -> str:
    """The text of a cell; in format 3, code is called its input."""
    text = cell.get("source", cell.get("input", ""))
    return "".join(map(str, text)) if isinstance(text, list) else str(text)


def way_out(name: str) -> str:
    """What a file is that is no notebook, by the end of its name, and how to make a notebook of it; or ""."""
    return _KINDS.get(name.rpartition(".")[2].lower(), "")


def defined_in(text: str) -> set[str]:
    """The names that a text defines, in lines that may be no Python."""
    return {name for match in _DEFINED.findall(text) for name in match if name}


def read_cells(path: str) -> tuple[list[dict], dict, list[str]]:
    """A notebook's cells and metadata, and a sentence for each thing that was guessed.

    Raises:
        NotebookError: no such file, a folder, or not a notebook's JSON.
    """
    try:
        raw = Path(path).read_bytes()
    except FileNotFoundError:
        raise NotebookError(f"{path} does not exist") from None
    except IsADirectoryError:
        raise NotebookError(f"{path} is a folder; name a notebook in it") from None
    except OSError as error:
        raise NotebookError(f"{path} cannot be read: {error.strerror}") from None
    text, notes = _decoded(raw, name := printable(Path(path).name))
    try:
        book, twice = _json(text)
    except (ValueError, RecursionError):
        what = next((what for how, what in _LOOKS_LIKE.items() if re.match(how, text, re.MULTILINE)), "")
        raise NotebookError(f"{path} is not a notebook: its text is not JSON{what and f'; {what}'}") from None
    cells = book.get("cells") if isinstance(book, dict) else None
    if isinstance(book, dict) and isinstance(sheets := book.get("worksheets"), list):  # format 3, before 2015
        cells = [cell for sheet in sheets if isinstance(sheet, dict) for cell in _list(sheet.get("cells"))]
    if not isinstance(cells, list):
        raise NotebookError(f"{path} is not a notebook: it has no list of cells")
    if twice:
        notes.append(f"{name} has {', '.join(twice)} twice in one place, as after a merge: the last one counts")
    about = book.get("metadata")
    return [cell for cell in cells if isinstance(cell, dict)], about if isinstance(about, dict) else {}, notes


def _list(found: Any) -> list:
    return found if isinstance(found, list) else []


def _decoded(raw: bytes, name: str) -> tuple[str, list[str]]:
    """The text of a file in UTF-8, 16 or 32, with or without its mark; in Latin-1 it is guessed, and a note says so."""
    try:
        return raw.decode(json.detect_encoding(raw)), []
    except UnicodeDecodeError as error:
        letter = raw[error.start : error.start + 1].decode("cp1252", "replace")
        note = (
            f"{name} is not in UTF-8, but perhaps in Latin-1, as some editors of Windows write: letters such as "
            f"{printable(letter)} may be read wrongly. Save it as UTF-8"
        )
        return raw.decode("cp1252", "replace"), [note]


def _json(text: str) -> tuple[Any, list[str]]:
    """What JSON says, and the keys of a notebook that are there twice."""
    twice: dict[str, None] = {}

    def of_pairs(pairs: list[tuple[str, Any]]) -> dict:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice.update(
                dict.fromkeys(x for x in ("cells", "cell_type", "source", "worksheets") if names.count(x) > 1)
            )
        return found

    return json.loads(text, object_pairs_hook=of_pairs), [*twice]
