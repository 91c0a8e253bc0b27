"""A notebook has no link that leads nowhere, and no directive; the built page has both."""

import json
import re
import sys
import types

import nbformat
import pytest

from tests.book.book_project import build, load
from tests.book.test_repository import NOTEBOOKS, ROOT, name, tool

pages, alone = load("book_pages"), tool("alone")
ADDRESS = "https://github.com/Some-Org/some.repo"
SITE = "https://some-org.github.io/some.repo"
CODE = re.compile(r"^```\w*$.*?^```$|`[^`]*`|\$\$.*?\$\$|\$[^$\n]+\$", re.DOTALL | re.MULTILINE)


@pytest.fixture(params=["none", ADDRESS])
def address(request, monkeypatch):
    """The book's address, as `alone` and the extension of the book read it."""
    found = alone.PLACEHOLDER if request.param == "none" else request.param
    for module in (alone, sys.modules["alone"]):
        monkeypatch.setattr(module, "address", lambda: found)
        monkeypatch.setattr(module, "branch", lambda: "main")
    return found


def texts(path) -> list[str]:
    return [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]


def leading_nowhere(text: str, path: str) -> list[str]:
    """The links to no address, or without an address to no file, and the directives, of a notebook at `path`."""
    text = CODE.sub("", text)
    links = re.findall(r"\]\((?!https?:)([^)]*)\)|(?:href|src)=\"(?!https?:)([^\"]*)\"", text)
    beside = [(one or other).partition("#")[0] for one, other in links]
    is_there = alone.address() == alone.PLACEHOLDER and all(
        (ROOT / path).parent.joinpath(to).exists() for to in beside
    )
    return [*([] if is_there else beside), *re.findall(r"\{[a-z:]+\}", text)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_no_notebook_has_a_link_that_leads_nowhere_or_a_directive(path):
    for text in texts(path):
        assert leading_nowhere(text, name(path)) == []
        assert not re.search(r"^(`{3,}|:{3,})\{", text, re.MULTILINE)
        assert ".venv/bin/python" not in text, "which Colab does not have; %run -m is right in each notebook"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_the_book_gets_each_text_back(path, address):
    """Made for this address from the text in the book, it is made back into it."""
    as_stored = tool("alone")  # with the real address
    for text in (as_stored.in_book(text, name(path)) for text in texts(path)):
        made = alone.alone(text, name(path))
        assert leading_nowhere(made, name(path)) == [] and alone.in_book(made, name(path)) == text


LINKS = {  # as written in chapters/03_x.md, and where it leads on the site
    "[chapter 2](02_y.ipynb)": "/chapters/02_y.html",
    "[`f[0]` *of* [it]](02_y.ipynb#a-part)": "/chapters/02_y.html#a-part",
    "[a part](#a-part)": "/chapters/03_x.html#a-part",
    "[exercises](../exercises/03_x.ipynb)": "/exercises/03_x.html",
    "[Will it fit?](../book/will_it_fit.md)": "/book/will_it_fit.html",
    "[ours](../lib/launch.py)": ADDRESS + "/blob/main/lib/launch.py",
    "[the map](../README.md)": ADDRESS + "/blob/main/README.md",
    "[two\nlines](02_y.ipynb)": "/chapters/02_y.html",
    '<a href="#a-part">words</a>': "/chapters/03_x.html#a-part",
    '<a href="02_y.ipynb">words</a>': "/chapters/02_y.html",
}


@pytest.mark.parametrize("link", LINKS)
def test_a_link_leads_to_the_site_or_stays(link, address):
    made = alone.alone(f"**{link}**, and so on", "chapters/03_x.ipynb")
    to = LINKS[link] if "://" in LINKS[link] else SITE + LINKS[link]
    if address == ADDRESS:
        assert f"({to})**" in made or f'href="{to}"' in made
    else:
        assert made == f"**{link}**, and so on"
    assert alone.in_book(made, "chapters/03_x.ipynb") == f"**{link}**, and so on"


@pytest.mark.parametrize(
    "text",
    [
        "`f[0](n)` and `[a](b.ipynb)`",
        "```python\nrun[0](n)\n[a](b.ipynb)\n```",
        "$f[0](n)$, and $$f[0](n)\n[a](b.md)$$",
        "[paper](https://arxiv.org/abs/2006.15704), [mail](mailto:a@example.org)",
        "rows[i](x, world)",
    ],
)
def test_code_formulas_and_addresses_stay(text, address):
    assert alone.alone(text, "chapters/03_x.ipynb") == text


def test_the_cards_of_the_chapters_are_a_list(address):
    text = "## The chapters\n\n```{cards}\n```\n\n## Next"
    made = alone.alone(text, "chapters/00_start.ipynb")
    assert (
        leading_nowhere(made, "chapters/00_start.ipynb") == []
        and "3. " in made
        and "14. " in made
        and "\n    - [Latency" in made
        and "Data parallelism" in made
    )
    assert alone.in_book(made, "chapters/00_start.ipynb") == text


def test_a_notebook_says_where_the_blocks_of_a_schedule_are(address):
    text = "# Try a schedule\n\nDrag a block.\n\n```{workshop}\n```\n\n```{cards}\n```"
    made = alone.alone(text, "chapters/workshop.ipynb")
    assert leading_nowhere(made, "chapters/workshop.ipynb") == [] and "\n    - [Latency" in made
    assert "The blocks are on " in made and (f"({SITE}/chapters/workshop.html)" in made) == (address == ADDRESS)
    assert "(workshop.ipynb)" not in made, "a link to the notebook that one reads"
    assert alone.in_book(made, "chapters/workshop.ipynb") == text


def test_the_page_that_is_built_from_a_notebook_has_its_links(tmp_path, monkeypatch, address):
    extension = types.ModuleType("only_links")
    extension.setup = lambda app: app.connect("source-read", pages.restore_links) and {}
    monkeypatch.setitem(sys.modules, "only_links", extension)
    cell = nbformat.v4.new_markdown_cell(
        alone.alone('# One\n\n[two](02_y.ipynb#two) <a href="#one">one</a>', "chapters/01_x.ipynb")
    )
    files = {
        "index": "# Home\n\n```{toctree}\nchapters/01_x\nchapters/02_y\n```\n",
    }
    for page, one in (("01_x", cell), ("02_y", nbformat.v4.new_markdown_cell("# Two"))):
        files[f"chapters/{page}.ipynb"] = json.dumps(nbformat.v4.new_notebook(cells=[one]))
    monkeypatch.setattr("tests.book.book_project.load", lambda name: None)
    out = build(tmp_path, files, ["myst_nb", "only_links"], nb_execution_mode="off", myst_heading_anchors=3)
    page = (out / "chapters" / "01_x.html").read_text(encoding="utf-8")
    assert 'href="02_y.html#two"' in page and 'href="#one"' in page
