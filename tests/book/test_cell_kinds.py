"""Cells of a kind: folded in the notebook by their tag, and on the page; with the script, without it, and on paper."""

import json
import re
from functools import partial

import jupytext
import nbformat
import pytest
from bs4 import BeautifulSoup
from docutils import nodes

from lib.lab.claims import _Row, _Table
from tests.book.book_project import BOOK, build, load, soup
from tests.book.test_page_form import cell
from tests.book.test_repository import tool

notebooks, form, cells = tool("notebooks"), tool("page_form"), load("book_cells")
SOURCE = "\n".join(
    [
        '<p class="kick">Chapter 90 · Part</p>\n\n# Three words\n\n90 minutes to read, a minute to compute.\n',
        cell("import math\n", "setup"),
        cell("draw(math.pi)\n", "figure"),
        cell("two = 1 + 1\n"),
        cell('claim("one", 1, 1)\n', "evidence"),
        cell('claim("one", 1, 1)\nclaim("two", 2, two)\n', "evidence, open"),
        "## Going deeper\n\nMore.\n\n### Further\n",
        cell('# Measured: three is\n# three.\nclaim("three", 3, 1 + two)\n', "evidence"),
    ]
)


MARKS = "\n".join(
    [
        '<p class="kick">Chapter 92 · Part</p>\n\n# Four sections\n\n90 minutes to read, a minute to compute.\n',
        "## Two and a picture\n",
        cell('claim("one", 1, 1)\n', "evidence"),
        cell("draw(math.pi)\n", "figure"),
        cell('# Measured: two is two.\nclaim("two", 2, 2)\n', "evidence"),
        "Words.\n",
        "### Inside\n",
        cell('claim("one", 1, 1)\n', "evidence"),
        "## Pictures\n",
        *[cell("draw(math.pi)\n", "figure")] * 2,
        "## A table that is open\n",
        cell('claim("one", 1, 1)\nclaim("two", 2, 2)\n', "evidence, open"),
        cell('claim("one", 1, 1)\n', "evidence"),
        "## A picture\n",
        cell("draw(math.pi)\n", "figure"),
    ]
)


@pytest.fixture
def twins(tmp_path, monkeypatch):
    """Writes both files of a chapter from the text of its .md; returns them as text."""
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    (tmp_path / "chapters").mkdir()

    def write(text: str) -> tuple[str, str]:
        source = tmp_path / "chapters" / "90_x.md"
        source.write_text(text, encoding="utf-8")
        made = notebooks.twins(source)
        return made[source], made[source.with_suffix(".ipynb")]

    return write


# ---- the notebook ----------------------------------------------------------------------------------------------------


def test_cells_of_a_kind_start_folded_in_the_notebook_only(twins):
    source, notebook = twins(SOURCE)
    code = form.code_cells(nbformat.reads(notebook, as_version=4))
    folded = [cell for cell in code if cell.metadata.get("cellView") == "form"]
    assert [form.kind(cell) for cell in code if cell not in folded] == ["idea"]
    assert all(cell.metadata.jupyter == {"source_hidden": True} for cell in folded)
    titles = [cell.source.splitlines()[0] for cell in folded]
    measured = "#@title How this was measured"
    assert titles == ["#@title Run this cell first", "#@title Imports", "#@title How this was drawn", *[measured] * 3]
    assert not re.search("#@title|cellView|source_hidden", source)
    assert "\n1 minutes to read, a minute to compute." in source


def test_both_twins_stay_as_they_are_when_written_again_and_when_made_from_the_notebook(twins):
    made = twins(SOURCE)
    assert twins(made[0]) == made
    from_notebook = jupytext.writes(nbformat.reads(made[1], as_version=4), fmt="md:myst")
    assert "#@title" in from_notebook and twins(from_notebook) == made


def test_a_page_that_states_no_minutes_is_refused_by_name(twins):
    with pytest.raises(ValueError, match='^chapters/90_x.ipynb: .*"NN minutes to read"'):
        twins(SOURCE.replace("90 minutes to read", "Long"))


# ---- the page --------------------------------------------------------------------------------------------------------


def claims(*rows: tuple) -> str:
    return _Table(_Row(*row) for row in rows)._repr_html_()


EXACT = ("bytes of <a>", 1234567, 1234567, 0, 0, "B", "=", "ok")
BROKEN = ("bytes of <a>", 1234567, 1234568, 0, 0, "B", "=", "bad")
LATE = ("time", 1, 9, 0.05, 0, "s", "=", "busy")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([EXACT], "✓ measured: 1\u2009234\u2009567 B, as predicted · bytes of <a>"),
        ([("time", 1, 1.02, 0.05, 0, "s", "=", "ok")], "✓ measured: 1.02 s, predicted 1 s ± 5% · time"),
        ([("error", 1e-9, 1e-12, 0, 0, "", "<=", "ok")], "✓ measured: 1e-12, predicted ≤ 1e-09 · error"),
        ([EXACT, EXACT, EXACT], "✓ 3 of 3 hold"),
        ([EXACT, BROKEN], "✗ 1 of 2 hold"),
        ([BROKEN], "✗ 0 of 1 hold"),
        ([EXACT, LATE], "– 1 of 2 hold, 1 not measured here: the machine was busy"),
        ([LATE], "– 0 of 1 hold, 1 not measured here: the machine was busy"),
        ([BROKEN, LATE], "✗ 0 of 2 hold, 1 not measured here: the machine was busy"),
        ([], ""),
    ],
)
def test_the_line_says_what_was_measured(rows, said):
    line = cells.say_measured(claims(*rows) if rows else "<p>nothing</p>")
    assert BeautifulSoup(line, "html.parser").get_text() == said


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([EXACT], "✓ Measured: 4 < 5."),
        ([EXACT, EXACT], "✓ Measured: 4 < 5."),
        ([EXACT, LATE], "– Measured: 4 < 5. · 1 not measured here: the machine was busy"),
        ([EXACT, BROKEN], "✗ 1 of 2 hold"),
    ],
)
def test_a_sentence_says_what_all_claims_of_a_cell_mean(rows, said):
    line = cells.say_measured(claims(*rows), "Measured: 4 < 5.")
    assert BeautifulSoup(line, "html.parser").get_text() == said


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The page of SOURCE as it is built, and one without cells of a kind."""
    patch, folder = pytest.MonkeyPatch(), tmp_path_factory.mktemp("kinds")
    patch.setattr(notebooks, "ROOT", folder)
    (folder / "chapters").mkdir()
    pages = {"index": "# Home\n\n```{toctree}\nchapters/90_x\nchapters/91_old\nchapters/92_marks\n```\n"}
    old = SOURCE.replace("evidence", "hide-input").replace("[setup]", "[a]").replace("figure", "hide-input")
    for name, text in (("90_x", SOURCE), ("91_old", old.replace("deeper", "on")), ("92_marks", MARKS)):
        path = folder / "chapters" / f"{name}.md"
        path.write_text(text, encoding="utf-8")
        notebook = nbformat.reads(notebooks.twins(path)[path.with_suffix(".ipynb")], as_version=4)
        path.unlink()
        for one in form.code_cells(notebook):
            made = "".join(re.findall(r"^claim|^draw", one.source, re.MULTILINE))
            html = {"draw": '<figure class="pbh-figure">Round.</figure>', "claim": claims(EXACT)}.get(made)
            html = claims(EXACT, EXACT) if made == "claimclaim" else html
            if html:
                one.outputs = [nbformat.v4.new_output("display_data", {"text/html": html, "text/plain": "-"})]
        pages[f"chapters/{name}.ipynb"] = json.dumps(notebook)
    yield build(
        folder,
        pages,
        ["myst_nb", "book_cells"],
        nb_execution_mode="off",
        html_theme="sphinx_book_theme",
        html_context={"default_mode": "auto"},
        html_static_path=[str(BOOK / "static")],
        html_css_files=["book.css"],
    )
    patch.undo()


def article(site, name: str) -> BeautifulSoup:
    return soup(site / "chapters", name).article


def test_a_section_has_one_mark(site):
    """It opens to all that was measured and drawn there; an open table, and a section inside, have their own."""
    of = {
        section.find(["h1", "h2", "h3"]).get_text()[:-1]: section for section in article(site, "92_marks")("section")
    }

    def marks(name):
        folds = of[name].select("details.folded")
        return [
            fold
            for fold in folds
            if fold.find_parent("section") is of[name] and not fold.find_parent(class_="folded")
        ]

    (both,) = marks("Two and a picture")
    assert both.summary.get_text() == "✓ Measured: two is two. · and 1 more, 2 of 2 hold"
    inner = [fold.summary.get_text() for fold in both.find_all("details", recursive=False)]
    assert inner == [
        "✓ measured: 1\u2009234\u2009567 B, as predicted · bytes of <a>",
        "✓ Measured: two is two.",
        "How this was drawn",
    ]
    (left,) = of["Two and a picture"].select(":scope > div.cell.moved")
    assert set(left["class"]) & set(both.select_one("details.evidence")["class"]), "a tool finds the cell of a fold"
    assert len(of["Two and a picture"].select(":scope > div.cell figure")) == 1, "the picture stays where it was"
    assert [mark.summary.get_text()[:10] for mark in marks("Inside")] == ["✓ measured"]
    (pictures,) = marks("Pictures")
    assert len(of["Pictures"]("figure")) == 2 and len(pictures.select("details.code")) == 2
    table, closed = marks("A table that is open")
    assert table.has_attr("open") and not closed.has_attr("open")
    (alone,) = marks("A picture")
    assert alone.find_parent(class_="tag_figure").figure


def test_cells_that_were_not_run_have_no_mark():
    """Their code alone is folded, each at its place."""
    code = [cells.Folded("", line="How this was measured", classes=["folded", "code"]) for _ in range(2)]
    made = [nodes.container("", one, classes=["cell", "tag_evidence"]) for one in code]
    section = nodes.section("", nodes.title("", "Here"), *made, ids=["here"])
    cells.gather(section)
    assert section.children[1:] == made and [cell.children for cell in made] == [[one] for one in code]


def test_a_mark_of_several_says_what_does_not_hold():
    def fold(*rows, meaning=""):
        html = claims(*rows)
        return cells.Folded("", nodes.raw("", html, format="html"), line=cells.say_measured(html, meaning))

    def said(*folds):
        return BeautifulSoup(cells.say_all(folds), "html.parser").get_text()

    right = fold(EXACT, EXACT, meaning="Measured: two.")
    assert said(fold(EXACT, EXACT), right) == "✓ Measured: two. · and 1 more, 4 of 4 hold"
    assert said(fold(EXACT), fold(EXACT, EXACT)) == "✓ 3 of 3 hold"
    assert said(right, fold(BROKEN)) == "✗ 2 of 3 hold"


def test_a_mark_says_what_does_not_hold():
    assert BeautifulSoup(cells.say_how_many(1, 0, 2), "html.parser").get_text() == "✗ 1 of 2 hold"
    assert cells.counted(claims(EXACT, LATE, BROKEN, EXACT)) == (2, 1)


def test_each_kind_is_folded_in_its_way(site):
    page = article(site, "90_x")
    figure, idea, one, two, imports, deeper = page.select("div.cell:not(.tag_remove-cell)")
    drawn = one.details.select("details.code")[-1]
    assert [tag.summary.get_text() for tag in (imports, drawn)] == ["Imports", "How this was drawn"]
    assert imports.find(recursive=False).name == "details" and "import math" in imports.details.get_text()
    assert figure.figure and not figure.details and "draw" in drawn.get_text()
    assert idea.details is None and "two = 1 + 1" in idea.get_text()
    assert one.find_all(recursive=False) == [one.details] and not one.details.has_attr("open")
    assert one.summary.get_text().startswith("✓ measured: 1\u2009234\u2009567 B, as predicted")
    assert one.details.select_one("table.claims")
    code, _ = one.details.select("details.code")
    assert code.summary.get_text() == "How this was measured" and 'claim("one"' in code.get_text()
    assert two.details.has_attr("open") and not two.details.select_one("details.code").has_attr("open")
    assert "#@title" not in page.get_text()
    assert deeper.summary.get_text() == "✓ Measured: three is three."
    assert deeper.find_parent("details", class_="deeper").summary.get_text() == cells.DEEPER_LINE
    assert not deeper.find_parent("details", class_="deeper").has_attr("open")


def test_a_page_without_such_cells_is_left_as_it_is(site):
    page = article(site, "91_old")
    assert page.select("details.hide") and not page.select("details.folded, details.deeper")
    texts = {name: (site / "chapters" / f"{name}.html").read_text(encoding="utf-8") for name in ("90_x", "91_old")}
    assert {name: "all_code.js" in text for name, text in texts.items()} == {"90_x": True, "91_old": False}


@pytest.fixture
def open_page(opened, site):
    return partial(opened, site / "chapters" / "90_x.html")


OPEN = "[...document.querySelectorAll('details.folded')].map(fold => fold.open)"
CLOSED = [False, False, False, True, False, False, False, False]  # but for the table that is seen from the start
REFUSING = """for (const name of ['getItem', 'setItem']) {
    const theirs = Storage.prototype[name];
    Storage.prototype[name] = function (key, value) {
        if (key === 'all-code') throw new Error('refused');
        return theirs.call(this, key, value);
    };
}"""
SEEN = """[...document.querySelectorAll('article table.claims, article div.cell pre')]
    .filter(e => e.checkVisibility({contentVisibilityAuto: true})).length"""


@pytest.mark.parametrize("kept", [True, False])
def test_the_switch_opens_all_code_and_is_remembered(open_page, kept):
    page = open_page(script="" if kept else REFUSING)
    switch = page.get_by_role("button", name="All code")
    assert page.evaluate(OPEN) == CLOSED and switch.get_attribute("aria-pressed") == "false"
    switch.focus()
    page.keyboard.press("Enter")
    assert page.evaluate(OPEN) == [True] * 8 and switch.get_attribute("aria-pressed") == "true"
    assert not page.evaluate("document.querySelector('details.deeper').open")
    page.reload()
    assert page.evaluate(OPEN) == ([True] * 8 if kept else CLOSED)
    if kept:
        switch.press("Space")
        assert page.evaluate(OPEN) == CLOSED
        page.reload()
        assert page.evaluate(OPEN) == CLOSED


LINES_BY_WIDTH = """(() => {
    const line = document.querySelector('details.evidence > summary'), heights = [];
    for (let width = 150; width < 420; width++) {
        line.parentElement.style.width = width + 'px';
        heights.push(line.getBoundingClientRect().height);
    }
    return heights;
})()"""
NO_ARROW = "document.head.append(Object.assign(document.createElement('style'), {textContent: '%s'}))"


def test_no_arrow_wraps_alone(open_page):
    """At every width the line is as high as without its arrow; with room for it, it is seen."""
    page = open_page()
    heights = page.evaluate(LINES_BY_WIDTH)
    assert len(set(heights)) > 1, "it wraps"
    page.evaluate(NO_ARROW % "details.folded > summary::after {display: none !important}")
    assert page.evaluate(LINES_BY_WIDTH) == heights


def test_a_line_opens_without_a_script(open_page):
    page = open_page(java_script_enabled=False)
    line = page.locator("details.evidence > summary").first
    table = page.locator("details.evidence table.claims").first
    assert not table.is_visible()
    line.focus()
    page.keyboard.press("Enter")
    assert table.is_visible() and not page.locator("details.evidence pre").first.is_visible()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.locator("details.evidence pre").first.is_visible()
    assert page.locator(".all-code").count() == 0


def test_on_paper_folds_stay_closed_and_code_is_an_ideas(open_page):
    page = open_page()
    assert page.evaluate(SEEN) == 2, "the idea, and a table"
    page.get_by_role("button", name="All code").click()
    page.emulate_media(media="print")
    assert page.locator("details.code:visible, div.tag_setup:visible").count() == 0
    page.emulate_media(media="screen")
    page.get_by_role("button", name="All code").click()
    page.emulate_media(media="print")
    assert page.evaluate(SEEN) == 2, "of what is optional the text"
    assert (
        page.locator("details.deeper h3").is_visible() and not page.locator("details.deeper > summary").is_visible()
    )
