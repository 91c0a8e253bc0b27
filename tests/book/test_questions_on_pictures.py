"""A question on a picture is read at a glance: it has at most twenty words."""

import ast
import re
from pathlib import Path

import jupytext
import pytest

from tests.book.test_repository import tool

ROOT = Path(__file__).resolve().parents[2]
MOST = 20
PAGES = sorted(path.stem for path in ROOT.glob("chapters/*.md"))
form = tool("page_form")


def asked(node: ast.expr) -> str:
    """The text of a string that a cell gives, in which a computed value is one word.

    Raises:
        ValueError: it is no string, such as a name.
    """
    if isinstance(node, ast.JoinedStr):
        return "".join(asked(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return asked(node.left) + asked(node.right)
    if isinstance(node, ast.FormattedValue):
        return "7"
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError(f"{ast.unparse(node)}: write the question where the guess is, so that its words can be counted")


def questions(text: str) -> list[str]:
    """Of a page: those of its `Guess(...)`, and those of its text that have a row of options right below a picture."""
    notebook = jupytext.reads(text, fmt="md:myst")
    found, after_picture = [], False
    for cell in notebook.cells:
        if cell.cell_type == "code":
            found += [asked(call.args[1]) for call in form.calls(cell, "Guess")]
            after_picture = form.kind(cell) == "figure"
        elif cell.cell_type == "markdown":
            if after_picture and (guess := form.GUESS.match(cell.source)):
                first = re.sub(r"^> ?", "", guess[0].partition("\n> <details")[0], flags=re.MULTILINE)
                found.append(first.replace("**Guess before you read on.**", ""))
            after_picture = False
    return found


def words(text: str) -> list[str]:
    """Without signs such as a dash or an equals sign between two words."""
    return [word for word in form.plain(text).split() if any(map(str.isalnum, word))]


@pytest.mark.parametrize("name", PAGES)
def test_a_question_on_a_picture_has_at_most_twenty_words(name):
    asks = questions((ROOT / "chapters" / f"{name}.md").read_text(encoding="utf-8"))
    assert [f"{len(words(one))} words: {one}" for one in asks if len(words(one)) > MOST] == []


GUESS = "```{code-cell}\n:tags: [figure]\n\nGuess(draw(), %s, {}, answer=1)\n```\n"
LONG = "word " * 20
BELOW = """```{code-cell}
:tags: [figure]

draw()
```

> **Guess before you read on.** %s?
> <details class="option">x</details>
"""


def test_the_questions_of_a_page_are_found():
    assert questions(GUESS % '"How " f"many {n} are {m:.0f}?"') == ["How many 7 are 7?"]
    assert questions(BELOW % LONG) == [f" {LONG}?"]
    assert questions("Text.\n\n" + BELOW.partition("```\n\n")[2] % LONG) == [], "on no picture"
    assert len(words("**Two** to 7 = [a link](https://x.org) of $a + b$?")) == 7
    with pytest.raises(ValueError, match="QUESTION: write the question where the guess is"):
        questions(GUESS % "QUESTION")


def test_there_are_questions():
    assert sum(len(questions((ROOT / "chapters" / f"{name}.md").read_text(encoding="utf-8"))) for name in PAGES) > 25
