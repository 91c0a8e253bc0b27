"""The Python of a cell: lines that only IPython reads, such as `%matplotlib inline`, become `pass`.

The problem: `!pip install` may go on behind a backslash, stand inside `if`, or give a name its value, and a line inside
parentheses may begin with `%` and be Python. IPython's own translation moves lines, and takes 24 s for 300 of them.
The idea: IPython's commands begin a statement. So the text is read once, statement by statement, and each command gives
way to a line of Python in the same place.
"""

from __future__ import annotations

import ast
import re

KEEPS_NAMES = {"time", "capture", "prun"}  # `%%` of a cell whose names are there afterwards; others keep none
# Pieces of a statement: a comment, a string, a bracket, an end of a line, anything else. None can be read in two ways.
_PIECE = re.compile(
    r"#[^\n]*|(?P<long>\"\"\"|''')(?:[^\\\"']++|\\.|(?!(?P=long)).)*+(?:(?P=long))?"
    r"|(?P<quote>[\"'])(?:[^\\\"'\n]++|\\.|(?!(?P=quote))[^\n])*+(?P=quote)?"
    r"|[\[({]|[\])}]|\\\n|\n|[^#\"'\[\](){}\\\n]++|\\",
    re.DOTALL,
)
_INDENT = re.compile(r"[ \t]*+")
_COMMAND = re.compile(r"[ \t]*+(?:(?P<to>[^\n=!?%#'\"]*+=[ \t]*+(?=[%!]))|(?=[%!?,;/]))")
_TIMED = re.compile(r"[ \t]*+(?P<magic>%time[ \t]++)(?=[^\s-])")
_TO_ITS_END = re.compile(r"(?:[^\n]*\\\n)*+[^\n]*\n?")
_CELL_MAGIC = re.compile(r"\s*+%%(\w+)[^\n]*")
_PROMPT = r"[ \t]*+(?:>>>|\.\.\.+:?|In \[\d+\]:)(?: |$)"  # of an example that was pasted
_PASTED = re.compile(r"\s*+(?:>>>|In \[\d+\]:)(?:\s|$)")
_EACH_PROMPT = re.compile(_PROMPT, re.MULTILINE)
_NOTHING_HERE = "get_ipython()"  # the value of a command


def parse(text: str) -> ast.Module:
    """The statements of a cell; each has the line that it has in the cell.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: it is no Python.
    """
    try:
        return ast.parse(text)
    except SyntaxError:
        return ast.parse(as_python(text))


def not_python(text: str) -> str:
    """The `%%` command whose text this cell is, such as `%%bash`, if the names in it are not the notebook's; or ""."""
    found = _CELL_MAGIC.match(text)
    return f"%%{found[1]}" if found and found[1] not in KEEPS_NAMES else ""


def as_python(text: str) -> str:
    """The cell with as many lines, and Python in the place of each command of IPython."""
    if not_python(text):
        return ""
    text = text.replace("\r\n", "\n")
    if magic := _CELL_MAGIC.match(text):
        text = "\n" * text.count("\n", 0, magic.end()) + text[magic.end() :]
    if _PASTED.match(text):
        text = _EACH_PROMPT.sub("", text)
    if indent := re.match(r"(?:[ \t]*+\n)*+([ \t]++)(?=\S)", text):
        text = "\n".join(line.removeprefix(indent[1]) for line in text.split("\n"))
    done, at = [], 0
    while at < len(text):
        if timed := _TIMED.match(text, at):
            done.append(text[at : timed.start("magic")])
            at = timed.end()
        command = None if timed else _COMMAND.match(text, at)
        end, asks = (_TO_ITS_END.match(text, at).end(), False) if command else _statement(text, at)
        if command or asks:
            to = command["to"] or "" if command else ""
            here = _INDENT.match(text, at)[0] + to + (_NOTHING_HERE if to else "pass")
            done.append(here + "\n" * text.count("\n", at, end))
        else:
            done.append(text[at:end])
        at = end
    return "".join(done)


def is_command(name: str) -> bool:
    """Whether this name, in the Python of a cell, stands for a command of IPython."""
    return name == _NOTHING_HERE.removesuffix("()")


def _statement(text: str, at: int) -> tuple[int, bool]:
    """Where the statement that begins here ends, and whether it asks for help, as `f?` does."""
    depth, last = 0, ""
    while at < len(text):
        piece = _PIECE.match(text, at)[0]
        at += len(piece)
        depth = max(0, depth + (piece in ("(", "[", "{")) - (piece in (")", "]", "}")))
        if piece == "\n" and not depth:
            break
        last = last if piece.isspace() or piece.startswith("#") else piece
    return at, last.rstrip().endswith("?") and last[0] not in "\"'"
