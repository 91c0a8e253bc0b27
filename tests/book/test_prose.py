"""Texts say it plainly, and write one notation."""

import pytest

from tests.book.test_repository import ROOT, tool

prose = tool("prose")

MOST_HITS = 12  # of a page; most of these are good English
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(path for folder in ("chapters", "solutions", "book") for path in sorted((ROOT / folder).glob("*.md"))),
    *sorted((ROOT / "book" / "library").iterdir()),
]
CODE = sorted((ROOT / "lib").rglob("*.py"))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_page_has_few_habits_and_one_notation(path):
    text = path.read_text(encoding="utf-8")
    assert prose.wrong_letters(text) == []
    few_habits(text)


@pytest.mark.parametrize("path", CODE, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_words_of_a_module_have_few_habits(path):
    few_habits(prose.words_of(path.read_text(encoding="utf-8")))


def few_habits(text):
    hits = prose.habits(text)
    assert len(hits) <= MOST_HITS, "\n".join(f"{hit.line}: {hit.words} → {hit.better}" for hit in hits)


def test_words_of_a_module_are_its_docstrings_comments_and_sentences():
    code = '"""What it wants."""\nso = "nobody knows"\n\nnobody = knows("of")  # of which\nnobody = knows\n'
    assert [line for line in prose.words_of(code).splitlines() if line] == [
        code.splitlines()[line] for line in (0, 1, 3)
    ]


def test_each_habit_and_each_wrong_letter_is_seen():
    text = (
        "First.\n\nWhat it wants is there. So nobody knows whose optimizer's state stands behind the last one, too.\n"
    )
    assert {hit.line for hit in prose.habits(text)} == {3}
    assert len(prose.habits(text)) >= 8
    assert prose.habits("What is a rank? Every rank holds the full gradient.\n") == []
    code = "```\nP = 4  # $P$, which is as long as it likes\n```\n"
    letters = "$n$ ranks\n\n$2\\frac{N-1}{N}S$, $t_F$ and $12h^2/tp$\n"
    assert [hit.line for hit in prose.wrong_letters(code + letters)] == [6, 6, 6]
    assert prose.wrong_letters(code + "$p$, $\\Psi$, $T_F$, $\\text{start at N}$, $Q K^T$?\n") == []
