"""What a task asks of a student, in one quiet line above it: minutes, chapters, and the mistake that it is after.

The problem: the page, the handout and the teacher's table would each say it, and one of them would be old. The idea:
`tools/effort.py` writes the line into the task, and whoever else says it reads it there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import lib

EXPLAINED = (
    "Minutes are by a formula, for one who has read the chapter: three for each point of the book, one for 40 words of "
    "the task, for 3 lines of code in it and for 6 lines of the solution, five for a cell that shows something; to the "
    "nearest five."
)
_LINE = re.compile(r'<p class="effort">(\d+) minutes · needs (.*?) · mistake to avoid: (.*?)</p>')
_CHECK = re.compile(r'^check\("([^"]+)"', re.MULTILINE)
_TASKS = Path(lib.__file__).resolve().parents[1] / "exercises"


@dataclass(frozen=True)
class Effort:
    """What a task asks.

    Args:
        minutes: that it takes, by the formula.
        needs: chapters and exercises to be read or solved before, in words.
        after: the kind of mistake that the exercise is after.
    """

    minutes: int
    needs: str
    after: str

    @property
    def line(self) -> str:
        """The line above a task."""
        return f'<p class="effort">{self.minutes} minutes · needs {self.needs} · mistake to avoid: {self.after}</p>'

    @property
    def said(self) -> str:
        """The same as a sentence."""
        return f"{self.minutes} minutes; needs {self.needs}; mistake to avoid: {self.after}."


def in_notebook(sources: Iterable[str]) -> dict[str, Effort]:
    """Exercise → what its task asks, from the text of the cells of a notebook. A task without the line is left out."""
    found, last = {}, None
    for source in sources:
        if match := _LINE.search(source):
            last = Effort(int(match[1]), match[2], match[3])
        if last and (check := _CHECK.search(source)):
            found[check[1]], last = last, None
    return found


@cache
def efforts() -> dict[str, Effort]:
    """Of all exercises of the book."""
    found = {}
    for path in sorted(_TASKS.glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        found |= in_notebook("".join(cell["source"]) for cell in cells)
    return found
