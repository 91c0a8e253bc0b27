"""The line above each task of solutions/: how many minutes, which chapters, and the mistake that it is after.

`tools/notebooks.py` writes it, from the task and its solution; the exercises are generated with it.
"""

import ast
import math
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field

from page_form import FENCE, code_lines, words
from set_repository import ROOT

from course.release.effort import EXPLAINED, Effort

AFTER = ROOT / "course" / "exercises" / "after.toml"
CHECK = re.compile(r'^check\("(\d\d\.\d+)"', re.MULTILINE)
ANSWER = re.compile(r"### BEGIN SOLUTION\n(.*?)### END SOLUTION", re.DOTALL)
MARKED = re.compile(r"### BEGIN SOLUTION\n.*?### END SOLUTION", re.DOTALL)
STATED = re.compile(r'\n\n<p class="effort">.*?</p>')
CHAPTER = re.compile(r"\]\([^)\s]*chapters/(\d\d)([bc]?)_")
BUILDS_ON = re.compile(r"\bexercise (\d+)\b")
FACTS = re.compile(r'<p class="facts">\d+ minutes, (.*? of computing)\..*?</p>')
DEEP, DEEPER = "the deeper page of ", {15: "the museum of "}  # NNb_name.md
POINT_MIN, SHOWN_MIN, ROUND_MIN = 3, 5, 5
WORDS_A_MINUTE, GIVEN_LINES_A_MINUTE, ANSWER_LINES_A_MINUTE = 40, 3, 6


@dataclass
class Task:
    """The cells of a task, and what is counted in them."""

    id: str = ""
    cells: list = field(default_factory=list)  # its Markdown
    answer: str = ""
    given: list[str] = field(default_factory=list)  # lines of code that stand in the cell of the answer
    shown: int = 0  # cells that run before the answer
    points: float = 0

    @property
    def text(self) -> str:
        return STATED.sub("", "\n\n".join(cell.source for cell in self.cells))

    @property
    def minutes(self) -> int:
        given = len(self.given) + sum(code_lines(block) for block in FENCE.findall(self.text))
        written = sum(line.strip() not in ("", *self.given) for line in self.answer.splitlines())
        minutes = POINT_MIN * self.points + SHOWN_MIN * self.shown + words(self.text) / WORDS_A_MINUTE
        minutes += given / GIVEN_LINES_A_MINUTE + written / ANSWER_LINES_A_MINUTE
        return max(ROUND_MIN, ROUND_MIN * math.floor(minutes / ROUND_MIN + 0.5))

    @property
    def needs(self) -> str:
        """The chapters that the task links to, and the exercises that it names."""
        read = sorted({(int(number), page) for number, page in CHAPTER.findall(self.text)})
        chapters = [
            f"{DEEPER.get(number, DEEP)}chapter {number}" if page == "b" else f"chapter {number}{page}"
            for number, page in read
        ]
        own, _, number = self.id.partition(".")
        before = sorted({int(k) for k in BUILDS_ON.findall(self.text)} - {int(number)})
        return " and ".join([*chapters, *(f"exercise {own}.{k}" for k in before)])

    def effort(self, after: dict[str, list[str]]) -> Effort:
        """Raises ValueError where the mistake or a chapter is not said."""
        if self.id not in after:
            raise ValueError(
                f'exercise {self.id} needs a line in {AFTER.relative_to(ROOT)}: "{self.id}" = [words, hint]'
            )
        if not self.needs:
            raise ValueError(f"exercise {self.id}: its task links to no chapter, so nobody knows what to read before")
        return Effort(self.minutes, self.needs, after[self.id][0])


def given_lines(source: str) -> list[str]:
    """The lines of code around the answer, in its cell; the heads of functions and classes say only their names."""
    stub = MARKED.sub("pass", source)
    lines = stub.splitlines()
    found = set()
    for node in ast.walk(ast.parse(stub)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and not is_text:
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Pass)):
                end = node.body[0].lineno - 1 if hasattr(node, "body") else node.end_lineno
                found |= {*range(node.lineno, end + 1)}
    return [lines[k - 1].strip() for k in sorted(found)]


def tasks(notebook) -> Iterator[Task]:
    """The tasks of a notebook of solutions, each from its heading to its check."""
    task = None
    for cell in notebook.cells:
        marks = cell.metadata.get("nbgrader", {})
        if "solution-only" in cell.metadata.get("tags", []):
            if task and cell.cell_type == "code":
                task.answer += f"\n{cell.source}"
        elif cell.cell_type == "markdown":
            if cell.source.startswith("## "):
                task = Task()
            if task:
                task.cells.append(cell)
        elif task and marks.get("solution"):
            task.answer += "\n".join(ANSWER.findall(cell.source))
            task.given += given_lines(cell.source)
        elif task and (check := CHECK.search(cell.source)):
            task.id, task.points = check[1], marks["points"]
            yield task
            task = None
        elif task:
            task.shown += 1


def state_effort(notebook) -> None:
    """Write the line below the heading of each task, and the sum of the minutes above all, in place.

    Raises:
        ValueError: a task without a mistake or a chapter, or a first cell that does not state the minutes.
    """
    after, total = tomllib.loads(AFTER.read_text(encoding="utf-8")), 0
    for task in tasks(notebook):
        effort, first = task.effort(after), task.cells[0]
        heading, _, rest = STATED.sub("", first.source, count=1).partition("\n")
        first.source = f"{heading}\n\n{effort.line}\n{rest}"
        total += effort.minutes
    if total:
        title = notebook.cells[0]
        title.source, stated = FACTS.subn(rf'<p class="facts">{total} minutes, \1. {EXPLAINED}</p>', title.source)
        if stated != 1:
            raise ValueError('its first cell has one line <p class="facts">NN minutes, ... of computing.</p>')
