"""The glossary's extension, on a Sphinx project of a few lines; and the words of the book's pages, in their order."""

import re
from pathlib import Path

import jupytext
import pytest

from tests.book.book_project import build, load, soup
from tests.book.test_repository import tool

ROOT = Path(__file__).resolve().parents[2]
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


# A word that an earlier page uses before the page that lists it among its key terms, and why that is no riddle.
BEFORE_ITS_PAGE = {
    ("Collective", "00"): "named as what the book explains",
    ("Collective", "01"): "named as what the next page explains",
    ("Group", "00"): "named as what the book explains",
    ("Head", "00"): "explained there",
    ("Head", "01"): "explained there",
    ("Head", "03"): "explained in chapter 1",
    ("Head", "05"): "explained in chapter 1",
    ("Logits", "01"): "explained there",
    ("Dropout mask", "01"): "a word of PyTorch's users",
    ("Frozen parameter", "03"): "a word of PyTorch's users",
    ("ZeRO-3", "04"): "the row of a table, with a link to the next page",
    ("Flight recorder", "02"): "the name of a tool, explained there",
    ("Logits", "05"): "explained in chapter 1",
    ("Ring attention", "07"): "in a sentence about what chapter 17 brings",
    ("Ulysses", "07"): "in a sentence about what chapter 17 brings",
    ("Stage", "04"): "of ZeRO, explained there",
    ("Stage", "05"): "of ZeRO",
    ("Stage", "07"): "with a link to the chapter that cuts by depth",
    ("Axis", "07"): "in a sentence about what the next part of the book brings",
    ("Layout", "06"): "DTensor's word, explained there",
    ("Layout", "07"): "DTensor's word",
    ("Planner", "01"): "explained there",
    ("Planner", "03"): "explained in chapter 1",
    ("Planner", "04"): "explained in chapter 1",
    ("Planner", "05"): "explained in chapter 1",
    ("Planner", "06"): "explained in chapter 1",
    ("Planner", "07"): "explained in chapter 1",
    ("Stack", "00"): "a stack of blocks",
    ("Stack", "06"): "to stack two pairs of layers",
    ("Stream", "07"): "the residual stream",
    ("Stream", "10"): "with a link to NCCL's manual",
    ("Straggler", "13"): "explained there",
}


def test_no_page_uses_a_term_that_a_later_page_explains():
    """The book reads from its first page to its last: as one PDF it has nobody to look a word up."""
    form = tool("page_form")
    texts, first = {}, {}
    for path in sorted(path for path in ROOT.glob("chapters/*.md") if re.match(r"\d\dc?_", path.name)):
        notebook, number = jupytext.read(path), path.stem.partition("_")[0]
        texts[number] = form.prose(notebook)
        for cell in notebook.cells:
            listed = (
                cell.source.partition("## Key terms")[2].partition("\n## ")[0] if cell.cell_type == "markdown" else ""
            )
            for term in re.findall(r"\*\*([^*]+)\*\*:", listed):
                first.setdefault(term, number)
    early = {
        (term, page)
        for term, explained in first.items()
        for page, text in texts.items()
        if page < explained and re.search(rf"\b{re.escape(term)}(?:s|es)?\b", text, re.IGNORECASE)
    }
    assert len(first) > 60
    assert early == {*BEFORE_ITS_PAGE}
