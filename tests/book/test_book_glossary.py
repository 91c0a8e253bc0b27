"""The glossary's extension, on a Sphinx project of a few lines."""

import pytest

from tests.book.book_project import build, load, soup

glossary = load("book_glossary")

RING = "# Rings\n\n## Key terms\n\n**Rank**: one process. **Ring**: each rank sends to *the next*.\n"
TREE = "# Trees\n\n## Key terms\n\n**Tree**: half of them at a time, $\\log_2 n$ steps.\n\n**Rank**: one process.\n"


def site(tmp_path, **pages):
    index = "# Home\n\n```{toctree}\n" + "\n".join([*pages, "words"]) + "\n```\n"
    words = "# Glossary\n\n```{terms}\n```\n"
    return build(tmp_path, {"index": index, "words": words, **pages}, ["book_glossary"])


def test_terms_of_all_chapters_are_listed_once_with_links_both_ways(tmp_path):
    out = site(tmp_path, ring=RING, tree=TREE)
    page = soup(out, "words")
    terms = [dt.get_text().rstrip("¶") for dt in page.select("dl.glossary dt")]
    assert terms == ["Rank", "Ring", "Tree"]
    rank, ring, tree = page.select("dl.glossary dd")
    assert [a["href"] for a in rank.select("a")] == ["ring.html#key-terms", "tree.html#key-terms"]
    assert ring.find("em").get_text() == "the next" and ring.get_text().startswith("each rank sends")
    assert tree.select(".math") and "mathjax" in (out / "words.html").read_text().lower()

    chapter = soup(out, "tree")
    links = {a.get_text(): a["href"] for a in chapter.select("a.term")}
    assert links == {"Tree": "words.html#term-tree", "Rank": "words.html#term-rank"}
    ids = {dt["id"] for dt in page.select("dt")}
    assert {href.split("#")[1] for href in links.values()} <= ids
    assert chapter.find(id="key-terms")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("**Rank**: a process.", "defined in two ways"),
        ("**rank**: one process.", "agree on one"),
        ("**Rank** is one process.", "write \\*\\*Rank\\*\\*: definition"),
        ("**Rank**:", "write \\*\\*Rank\\*\\*: definition"),
        ("A **Rank**: one process.", "write \\*\\*Term\\*\\*: definition"),
        ("**Rank**: one process. **Rank**: one process.", "twice"),
        ("**Rank**: one [process](https://example.org).", "holds a link"),
    ],
)
def test_terms_that_disagree_or_are_written_otherwise_stop_the_build(tmp_path, text, complaint):
    with pytest.raises(glossary.TermsError, match=complaint):
        site(tmp_path, ring=RING, other=f"# Other\n\n## Key terms\n\n{text}\n")


def test_anchor_keeps_letters_of_any_alphabet():
    names = ["All-gather", "α–β model", "Model", "2(n−1)/n"]
    assert len({glossary.anchor(name) for name in names}) == len(names)
    assert glossary.anchor("All-gather") == "term-all-gather"
