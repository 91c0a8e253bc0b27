"""The habits that `make lint` counts in each page and module are seen where they are, and nowhere else."""

from tests.book.test_repository import tool

prose = tool("prose")


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


def test_a_page_with_too_many_habits_fails(tmp_path, monkeypatch, capsys):
    (tmp_path / "book" / "library").mkdir(parents=True)
    for name in ("README.md", "CONTRIBUTING.md", "book/page.md"):
        (tmp_path / name).write_text("A rank holds the full gradient.\n")
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    assert prose.main(["--check"]) == 0 and capsys.readouterr().out == ""
    (tmp_path / "book" / "page.md").write_text("What it wants is there. So nobody knows.\n" * prose.MOST_HITS)
    assert prose.main(["--check"]) == 1 and "page.md:12: " in capsys.readouterr().out
    (tmp_path / "book" / "page.md").write_text("$t_F$\n")
    assert prose.main(["--check"]) == 1 and "0 habits (at most 12), 1 wrong letters" in capsys.readouterr().out
