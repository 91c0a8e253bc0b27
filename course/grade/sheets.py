"""Sheets, tables that people write: a spreadsheet's CSV, with commas or semicolons, its encoding marked or not."""

from __future__ import annotations

import csv
import io
import re
import sys
from pathlib import Path
from typing import Any

_COMPUTED = re.compile(r"'*(?:[\t\r\n]|\s*[=+\-@\uff1d\uff0b\uff0d\uff20])")  # also as letters of double width


def read_sheet(path: str | Path, *columns: str) -> list[dict[str, str]]:
    """The rows of a table, by the names in its first line.

    Raises:
        ValueError: one of these columns is missing.
    """
    head, *rows = sheet_rows(path) or [[]]
    head = [name.strip() for name in head]
    if missing := [name for name in columns if name not in head]:
        raise ValueError(
            f"{path} has no column {missing[0]!r}: its first line must name {', '.join(columns)}. Write them there, or "
            "rename the file and run this again: then a new one is written"
        )
    return [dict(zip(head, [*row, *[""] * len(head)], strict=False)) for row in rows]


def as_cell(x: Any) -> Any:
    """A text that a spreadsheet would compute, with an apostrophe before it, which makes it text."""
    return f"'{x}" if isinstance(x, str) and _COMPUTED.match(x) else x


def of_cell(text: str) -> str:
    """The text of which `as_cell` is this cell."""
    return text[1:] if as_cell(text[1:]) == text else text


def sheet_rows(path: str | Path) -> list[list[str]]:
    """The lines of a table as cells, without empty lines; where decimals have commas, a spreadsheet writes semicolons.

    Raises:
        ValueError: it is not text in UTF-8.
    """
    csv.field_size_limit(sys.maxsize)  # an answer may have a picture pasted into it
    text = sheet_text(path)
    first = text.partition("\n")[0]
    delimiter = ";" if first.count(";") > first.count(",") else ","
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    return [row for row in rows if any(cell.strip() for cell in row)]


def sheet_text(path: str | Path) -> str:
    """A file's text, without the mark that spreadsheets set before it."""
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8: in a spreadsheet, save it as 'CSV UTF-8'") from None
