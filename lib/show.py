"""Show the library's own source in a notebook: what you read is what runs."""

from __future__ import annotations

import inspect
import os
import textwrap

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Source:
    """The source of a function or class with its place, as highlighted Markdown in a notebook and as text elsewhere."""

    def __init__(self, thing: object) -> None:
        lines, first = inspect.getsourcelines(thing)
        self.text = textwrap.dedent("".join(lines)).rstrip()
        self.place = f"{os.path.relpath(inspect.getsourcefile(thing), _ROOT)}, line {first}"

    def __repr__(self) -> str:
        return f"# {self.place}\n{self.text}"

    def _repr_markdown_(self) -> str:
        return f"```python\n{self!r}\n```"


def show(thing: object) -> Source:
    """The source of a function, method or class of `lib`: `show(NaiveDDP.finish)`."""
    return Source(thing)
