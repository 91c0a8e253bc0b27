"""Show the source of the library in a notebook: the reader reads the code that runs."""

from __future__ import annotations

import ast
import inspect
import os
import textwrap

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class Source:
    """The source of a function or class with its place, as highlighted Markdown in a notebook and as text elsewhere."""

    def __init__(self, thing: object) -> None:
        thing = inspect.unwrap(thing)  # a decorated function has the decorator's file
        lines, first = inspect.getsourcelines(thing)
        self.text = _first_sentences("".join(lines))
        self.place = f"{os.path.relpath(inspect.getsourcefile(thing), _ROOT)}, line {first}"

    def __repr__(self) -> str:
        return f"# {self.place}\n{self.text}"

    def _repr_markdown_(self) -> str:
        return f"```python\n{self!r}\n```"


def _first_sentences(source: str) -> str:
    """The source with each docstring cut to its first line: on a page the text around it says the rest."""
    lines = textwrap.dedent(source).rstrip().splitlines()
    for node in ast.walk(ast.parse("\n".join(lines))):
        text = ast.get_docstring(node) if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else None
        if text and "\n" in text:
            whole = node.body[0]
            indent = " " * whole.col_offset
            lines[whole.lineno - 1] = f'{indent}"""{text.splitlines()[0]}"""'
            lines[whole.lineno : whole.end_lineno] = [None] * (whole.end_lineno - whole.lineno)
    return "\n".join(line for line in lines if line is not None)


def show(thing: object) -> Source:
    """The source of a function, method or class of `lib`: `show(BucketedDDP.finish)`."""
    return Source(thing)
