"""Each sentence of a task, and what checks it: the tables in `tests/course/demands/`, one for each chapter.

    python -m tests.course.demands 08         # the table of chapter 8, with the sentences that have no row yet
    python -m tests.course.demands --advice   # all sentences that nothing checks, with the reasons

A table has the id of an exercise; below it, indented by two, each sentence of its task, word for word; and below a
sentence, indented by four, its rows:

    08.2
      Run all forwards before the first backward.
        the order | You run a microbatch backward before

A row names a fact, the name of a result or a part of it, and the beginning of a hint of the exercise: the program of
this mistake breaks the demand, and a check sees it by that fact. The fact of a program that does not return is `hangs`.
In an exercise that minds calls through `lib.comm`, the fact is `lib.comm`, without a hint. A sentence that asks for
nothing that could be checked has the row `advice: the reason`.
"""

import re
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[2]
TABLES = Path(__file__).with_name("demands")
ASKED = re.compile(r'^check\("(\d\d\.\d+)"', re.MULTILINE)
LINKED = re.compile(r"\[([^][]*)\]\([^)]*\)")
BLOCK = re.compile(r"^```.*?^```|^\|.*?(?=^[^|]|\Z)|^\$\$.*?\$\$", re.DOTALL | re.MULTILINE)
END = re.compile(r"(?<=[.?!])(?<!e\.g\.)(?<!i\.e\.)(?<!vs\.)\s+(?=[A-Z`$*(\[0-9])")
STRICT = re.compile(r"\b(must|only|before|at most|as soon as)\b", re.IGNORECASE)
ADVICE = "advice: "


@dataclass(frozen=True)
class Row:
    """A fact, and the beginning of the hint that names the program which breaks it."""

    fact: str
    hint: str


@dataclass
class Demand:
    """A sentence of a task: the rows that check it, or why it is advice."""

    sentence: str
    rows: list[Row] = field(default_factory=list)
    advice: str = ""

    @property
    def is_strict(self) -> bool:
        """Not where to read: a section may have such a word in its title."""
        return bool(STRICT.search(self.sentence)) and not self.sentence.startswith("From the section")


@cache
def tasks() -> dict[str, list[str]]:
    """Exercise → the sentences of its task, as the notebook has them, without links."""
    found: dict[str, list[str]] = {}
    for path in sorted(ROOT.glob("exercises/*.ipynb")):
        text = ""
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "markdown":
                text = text + "\n\n" + cell.source if text and not cell.source.startswith("#") else cell.source
            elif asked := ASKED.search(cell.source):
                found[asked[1]] = sentences(text)
                text = ""
    return found


def sentences(text: str) -> list[str]:
    """The sentences of a Markdown text, one line each; a block of code, a table or a formula is one."""
    text = LINKED.sub(r"\1", text)
    found, rest = [], 0
    for block in BLOCK.finditer(text):
        found += _of_prose(text[rest : block.start()])
        lines = [line.strip() for line in block[0].splitlines() if line.strip("` ")]
        found.append(f"[block] {lines[lines[0].startswith('```')][:80]}")
        rest = block.end()
    return found + _of_prose(text[rest:])


def _of_prose(text: str) -> list[str]:
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text.replace("**", ""))
    paragraphs = [re.sub(r"^(?:[-*]|\d+\.|[A-Z]\.) ", "", " ".join(one.split())) for one in paragraphs]
    return [one for p in paragraphs if p and not p.startswith(("#", '<p class="effort">')) for one in END.split(p)]


def read(chapter: str) -> dict[str, list[Demand]]:
    """The table of a chapter: exercise → its sentences, in their order.

    Raises:
        ValueError: a line that is neither an id, a sentence nor a row.
    """
    path = TABLES / f"{chapter}.txt"
    found: dict[str, list[Demand]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else [], 1):
        depth, said = len(line) - len(line.lstrip()), line.strip()
        if not said:
            continue
        if depth == 0:
            demands = found[said] = []
        elif depth == 2:
            demands.append(Demand(said))
        elif depth == 4 and said.startswith(ADVICE):
            demands[-1].advice = said.removeprefix(ADVICE)
        elif depth == 4 and (said == "lib.comm" or " | " in said):
            fact, _, hint = said.partition(" | ")
            demands[-1].rows.append(Row(fact, hint))
        else:
            raise ValueError(f"{path.name}, line {number}: no id, sentence or row: {line!r}")
    return found


def written(chapter: str) -> str:
    """The table with today's sentences: those that are new have no row, those that are gone are left out."""
    old = read(chapter)
    lines = []
    for exercise, said in tasks().items():
        if not exercise.startswith(chapter):
            continue
        known = {one.sentence: one for one in old.get(exercise, [])}
        lines += ["", exercise]
        for sentence in said:
            one = known.get(sentence, Demand(sentence))
            lines.append(f"  {sentence}")
            lines += [f"    {row.fact} | {row.hint}" if row.hint else f"    {row.fact}" for row in one.rows]
            lines += [f"    {ADVICE}{one.advice}"] if one.advice else []
    return "\n".join(lines[1:]) + "\n"


def main(asked: str) -> None:
    if asked != "--advice":
        print(written(asked), end="")
        return
    for chapter in sorted({one.partition(".")[0] for one in tasks()}):
        for exercise, demands in read(chapter).items():
            for one in (one for one in demands if one.advice):
                print(f"{exercise}  {one.sentence}\n       {one.advice}")


if __name__ == "__main__":
    main(sys.argv[1])
