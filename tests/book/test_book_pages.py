"""What a page says about itself, and what is put right in finished pages."""

import re

import pytest
from docutils import nodes

from tests.book.book_project import load

pages = load("book_pages")


def document(*children) -> nodes.document:
    from docutils.utils import new_document

    made = new_document("page")
    made += list(children)
    return made


def test_a_page_is_described_by_its_lead_else_by_its_first_paragraph():
    menu, first = nodes.paragraph("", "First  words."), nodes.paragraph("", "More.")
    lead = nodes.raw("", '<p class="lead">What <em>is</em> a &lt; b?\nIt is.</p>', format="html")
    assert pages.description(document(menu, lead, first)) == "What is a < b? It is."
    assert pages.description(document(menu, first)) == "First words."
    assert pages.description(document()) == ""
    long = pages.description(document(nodes.paragraph("", "word, " * 60)))
    assert len(long) <= pages.LONGEST + 2 and long.endswith("word …")


def test_every_address_of_the_lost_page_begins_at_the_root(tmp_path):
    head = '<html data-content_root="./"><head><link rel="canonical" href="https://x.org/404.html"></head>'
    links = '<a href="#top"><a href="a/b.html"><img src="./_static/i.svg"><a href="https://y.org/"><a href="/c">'
    links += '<form action="search.html">'
    (tmp_path / "404.html").write_text(head + links)
    pages.root_lost_page(tmp_path, "https://org.github.io/repo/")
    text = (tmp_path / "404.html").read_text()
    assert 'data-content_root="/repo/"' in text and 'href="#top"' in text and "noindex" in text
    for link in ('href="/repo/a/b.html"', 'src="/repo/_static/i.svg"', 'href="https://y.org/"', 'href="/c"'):
        assert link in text
    assert 'action="/repo/search.html"' in text and "canonical" not in text
    assert '<head><script>\nif (!location.pathname.startsWith("/repo/")' in text
    lost = (tmp_path / "lost.html").read_text()
    assert links in lost and "noindex" in lost and "<script>" not in lost


@pytest.mark.parametrize(
    ("page", "href", "number"),
    [
        ("chapters/00_start.html", "03_ddp.html", 3),
        ("chapters/03_ddp.html", "#", 3),
        ("book/library/index.html", "../../chapters/12_plan.html", 12),
        ("chapters/10_run.html", "10c_late.html", "10c"),
        ("chapters/10c_late.html", "#", "10c"),
        ("chapters/03_ddp.html", "../exercises/03_ddp.html", None),
        ("exercises/03_ddp.html", "#", None),
        ("exercises/03_ddp.html", "04_zero.html", None),
        ("chapters/03_ddp.html", "00_start.html", None),
        ("book/claims.html", "#", None),
    ],
)
def test_chapters_are_numbered_in_the_sidebar_and_nothing_else(page, href, number):
    link = f'<li class="toctree-l1"><a class="reference internal" href="{href}">Title</a>'
    text = pages.number_chapters(link, page)
    assert text == (link if number is None else link.replace("Title", f'<span class="number">{number}</span> Title'))
    assert pages.number_chapters(text, page) == text, "a page that a build keeps"


def test_an_option_says_whether_it_is_the_right_one():
    option = '<details class="option"><summary>{}</summary>{}</details>'
    html = option.format("six", "Right: 2 · 3.") + option.format("Right", "That is a word.") + option.format("x", "")
    made = document(nodes.raw("", html, format="html"), nodes.raw("", "<p>Right</p>", format="html"))
    pages.mark_options(None, made, "page")
    marked, other = (raw.astext() for raw in made.findall(nodes.raw))
    assert [part.split('"')[1] for part in marked.split("<details")[1:]] == ["option right", *["option wrong"] * 2]
    assert marked.replace("option right", "option").replace("option wrong", "option") == html
    assert other == "<p>Right</p>"


def test_the_options_of_a_guess_are_a_row_of_which_one_is_open():
    options = '<details class="option"><summary>six</summary>Right: so.</details>\n' * 2
    asked = nodes.paragraph("", "", nodes.raw("", "<em>"))
    made = document(nodes.block_quote("", asked, nodes.raw("", options), nodes.raw("", options)))
    pages.mark_options(None, made, "page")
    inline, *rows = (raw.astext() for raw in made.findall(nodes.raw))
    assert inline == "<em>" and len(rows) == 2
    for row in rows:
        assert row.startswith('<div class="guess"><details name="guess-') and row.endswith("</div>")
        assert row.count('class="option right"') == 2
    names = [set(re.findall(r'<details name="([^"]*)"', row)) for row in rows]
    assert [len(name) for name in names] == [1, 1] and names[0] != names[1]


@pytest.mark.parametrize(("address", "is_public"), [("https://example.invalid/x", False), ("https://c.org/x", True)])
def test_without_a_public_address_a_page_offers_its_notebook(address, is_public):
    class App:
        class builder:  # noqa: N801
            @staticmethod
            def get_relative_uri(at, to):
                return f"../{to}.html"

        class config:  # noqa: N801
            root_doc = "chapters/00_start"

        class env:  # noqa: N801
            found_docs = {"exercises/03_ddp", "chapters/03_ddp"}

    made = document(nodes.raw("", f'<p class="kick">A <a class="colab" href="{address}">Open in Colab</a></p>'))
    pages.offer_links(App, made, "chapters/03_ddp")
    (text,) = (raw.astext() for raw in made.findall(nodes.raw))
    assert ("Open in Colab" in text) == is_public and ("example.invalid" in text) is False
    assert '<a class="colab" href="../exercises/03_ddp.html">Exercises</a>' in text
    assert is_public or 'href="../_sources/chapters/03_ddp.ipynb" download' in text
    assert is_public or 'href="../chapters/00_start.html#how-to-run-it"' in text
    for page, leads in (("chapters/03c_more", True), ("chapters/03b_deeper", False), ("exercises/03_ddp", False)):
        made = document(nodes.raw("", f'<p class="kick">A <a class="colab" href="{address}">Open in Colab</a></p>'))
        pages.offer_links(App, made, page)
        assert [">Exercises</a>" in raw.astext() for raw in made.findall(nodes.raw)] == [leads]


def test_an_answer_folds_to_the_next_heading_or_question():
    def paragraph(words, bold=False):
        first = nodes.Text("")  # as MyST begins a paragraph
        return nodes.paragraph("", "", first, nodes.strong("", words) if bold else nodes.Text(words))

    answer = nodes.container(hide_mode="all")
    behind = [paragraph("It is so."), nodes.container(), paragraph("And so.", bold=True)]
    made = document(
        paragraph("1. Why?", bold=True), answer, *behind, paragraph("2. How?", bold=True), paragraph("Text.")
    )
    pages.fold_answers(None, made)
    assert answer.children == behind and answer["prompt_show"] == "Show the answer"
    assert [part.astext() for part in made.children[2:]] == ["2. How?", "Text."]
    last = nodes.container(hide_mode="all")
    made = document(last, nodes.paragraph("", "So."), nodes.section("", nodes.title("", "Next")))
    pages.fold_answers(None, made)
    assert len(last.children) == 1 and isinstance(made.children[1], nodes.section)


LISTED = "01_memory", "02_collectives", "02c_more"


@pytest.mark.parametrize(
    ("page", "before", "after"),
    [
        ("chapters/00_start", None, "chapters/01_memory"),
        ("chapters/01_memory", "chapters/00_start", "chapters/02_collectives"),
        ("exercises/01_memory", "chapters/01_memory", "chapters/02_collectives"),
        ("chapters/01b_deeper", "chapters/01_memory", "chapters/02_collectives"),
        ("chapters/02_collectives", "chapters/01_memory", "chapters/02c_more"),
        ("chapters/02c_more", "chapters/02_collectives", None),
        ("solutions/02_collectives", "chapters/02_collectives", "chapters/02c_more"),
        ("book/claims", "theme", "theme"),
    ],
)
def test_previous_and_next_walk_through_chapters(page, before, after):
    class App:
        builder = type("", (), {"get_relative_uri": lambda self, at, to: to})()
        config = type("", (), {"root_doc": "chapters/00_start"})()

        class env:  # noqa: N801
            toctree_includes = {"chapters/00_start": [*(f"chapters/{name}" for name in LISTED), "book/claims"]}
            titles = dict.fromkeys([*toctree_includes["chapters/00_start"], "chapters/00_start"], nodes.Text("T"))

    alone = type("", (App,), {"env": type("", (), {"toctree_includes": {}, "titles": {}})})
    pages.walk_chapters(alone, "exercises/03_x", "page.html", {}, None)  # a page that is built alone
    context = {"prev": {"link": "theme"}, "next": {"link": "theme"}}
    pages.walk_chapters(App, page, "page.html", context, None)
    links = [context[name] and context[name]["link"] for name in ("prev", "next")]
    assert links == [before, after if after or page != "chapters/02c_more" else "theme"]


def test_a_long_name_may_be_broken_at_its_joints_and_a_short_one_nowhere():
    (long, by), *_ = [(pattern, by) for pattern, by in pages.TIDY if pattern is pages.LONG_CODE]

    def tidy(words: str) -> str:
        return long.sub(by, f'<code><span class="pre">{words}</span></code>.')

    once = tidy("torch/distributed/_x.py")
    assert once == '<code><span class="pre">torch/<wbr>distributed/_<wbr>x.<wbr>py</span></code>.'
    assert tidy("RendezvousTimeoutError").count("<wbr>") == 2
    assert long.sub(by, once) == once, "a build that goes on from an older one does it once"
    assert "<wbr>" not in tidy("lib/comm.py") and "<wbr>" not in tidy("--an-option-with-a-name")
    assert "&lt;<wbr>" not in tidy("Callable[&lt;int&gt;]")
