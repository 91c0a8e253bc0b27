"""A page on paper: which code is printed, what stays whole, and answers at the end of their chapter."""

import pytest

from tests.book.book_project import BOOK
from tests.book.test_figures_guess import QUESTION, WHY, guess
from tests.book.test_figures_player import place

OPTION = '<details class="option {}"><summary>{}</summary>{}</details>\n'
OPTIONS = OPTION.format("wrong", "4", "Too few.") + OPTION.format("right", "6", "Right: <em>so</em>.")


def pre(part: str, text: str) -> str:
    return f'<div class="cell_{part}"><div class="output"><div class="highlight"><pre>{text}</pre></div></div></div>'


def cell(tag: str, *parts: str) -> str:
    return f'<div class="cell {tag}">{"".join(parts)}</div>'


def fold(kind: str, *parts: str, line="a line") -> str:
    return f'<details class="{kind}"><summary>{line}</summary>{"".join(parts)}</details>'


def answer(*parts: str) -> str:
    return cell("tag_hide-cell", fold("hide above-input", *parts, line="Show the answer"))


FIGURE = '<figure class="pbh-figure"><svg width="400" height="80"></svg><figcaption>So.</figcaption></figure>'
CHART = "rank 0  " + "F0 . " * 19  # about a hundred columns, as a text Gantt has
CLAIMS = '<div class="output text_html"><table class="claims"><tr><td>claim</td></tr></table></div>'
PAGE = f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>t</title>
<link rel="stylesheet" href="{{css}}"><script src="{{js}}"></script>
<body><article class="bd-article"><section><h1>Chapter</h1>
<section><h2>Idea</h2>
<blockquote><div><p><strong>Guess.</strong> Of 9?</p><div class="guess">{OPTIONS}</div></div></blockquote>
{cell("tag_setup", fold("folded code", pre("input", "imports")))}
{cell("tag_figure", FIGURE, fold("folded code", pre("input", "drawn")))}
{cell("", pre("input", "an idea"), pre("output", CHART).replace('"output"', '"output wide"'))}
{cell("tag_evidence", fold("folded evidence", CLAIMS, fold("folded code", pre("input", "x"))))}
</section>
<section><h2>Going deeper</h2>{fold("deeper", "<p>More.</p>", cell("", pre("input", "deeper")))}</section>
<section><h2>Practice</h2><p><strong>1.</strong> Why?</p>
{answer(pre("input", "because"), "<p>Two parts:</p>", answer("<p>and.</p>"))}
<p><strong>2.</strong> How?</p>{answer(pre("output", "thus"), CLAIMS)}</section>
<section id="quiz"><h2>Quiz<a class="headerlink">#</a></h2><p>Open an answer.</p>
<p><strong>1. Which?</strong></p>{OPTIONS}</section>
</section></article></body></html>"""
TEXTS = "at => [...document.querySelectorAll(at)].map((part) => part.innerText.replace(/\\s+/g, ' ').trim())"
SEEN = """at => [...document.querySelectorAll(at)].filter((e) => e.checkVisibility({contentVisibilityAuto: true}))
    .map((e) => e.textContent.trim())"""
A4_PX = 650  # between the margins of make pdf


@pytest.fixture
def on_screen(opened):
    static = BOOK / "static"
    return opened(PAGE.format(css=(static / "book.css").as_uri(), js=(static / "on_paper.js").as_uri()), width=A4_PX)


@pytest.fixture
def page(on_screen):
    on_screen.emulate_media(media="print")
    on_screen.evaluate("dispatchEvent(new Event('beforeprint'))")
    return on_screen


def test_answers_stand_at_the_end_and_what_is_optional_behind_them(page):
    assert page.evaluate(TEXTS, "h2") == ["Idea", "Practice", "Quiz", "Answers", "Going deeper"]
    said = "a Too few. b ✓ Right: so."
    assert page.evaluate(TEXTS, ".sentences p") == [f"Guess 1 {said}", f"Quiz 1 {said}"]
    assert page.evaluate(TEXTS, ".programs > div") == ["Practice 1 because Two parts: and.", "Practice 2 thus"]
    letters = "[...document.querySelectorAll('summary[data-letter]')].map((e) => e.dataset.letter + e.innerText)"
    assert page.evaluate(letters) == ["a4", "b6", "a4", "b6"]
    assert not page.evaluate(SEEN, "#quiz > p:not(:has(strong))"), "nothing opens"


def test_after_printing_all_is_in_its_place(on_screen):
    before = on_screen.content()
    for event in ("beforeprint", "beforeprint", "afterprint"):
        on_screen.evaluate("name => dispatchEvent(new Event(name))", event)
        assert (on_screen.content() == before) == (event == "afterprint")


def test_only_ideas_and_answers_show_their_code(page):
    assert page.evaluate(SEEN, ".cell_input pre") == ["an idea", "because", "deeper"]
    assert page.evaluate(SEEN, "summary") == ["4", "6", "a line", "4", "6"], "options, and one line of evidence"
    assert not page.evaluate(SEEN, "table.claims, .tag_setup")


def test_a_chart_is_whole_and_what_may_go_on_overleaf_scrolls_nowhere(page):
    looks = "([selector, name]) => getComputedStyle(document.querySelector(selector))[name]"
    assert page.evaluate(looks, [".wide pre", "whiteSpaceCollapse"]) == "preserve"
    assert page.evaluate(looks, [".wide pre", "textWrapMode"]) == "nowrap"
    assert page.evaluate("document.querySelector('.wide pre').scrollWidth") <= A4_PX
    for kept in ("figure", "figcaption", ".cell_output pre", ".evidence", "blockquote"):
        assert page.evaluate(looks, [kept, "breakInside"]) == "avoid", kept
    for cut in (".cell_input", ".cell_input .output", ".cell_input .highlight", ".cell_input pre"):
        found = {page.evaluate(looks, [cut, name]) for name in ("overflowX", "breakInside", "display")}
        assert found == {"visible", "auto", "block"}, cut
    assert page.evaluate(looks, [".answers ~ section", "breakBefore"]) == "page"


def test_the_answer_to_a_guess_on_a_picture_stands_at_the_end_with_the_picture_that_gives_it(opened):
    static = BOOK / "static"
    html = PAGE.format(css=(static / "book.css").as_uri(), js=(static / "on_paper.js").as_uri())
    page = opened(html.replace("<blockquote>", f"{guess()._repr_html_()}<blockquote>", 1), width=A4_PX)
    page.emulate_media(media="print")
    for name in ("beforeprint", "afterprint", "beforeprint"):
        page.evaluate("name => dispatchEvent(new Event(name))", name)
    answers = page.evaluate(TEXTS, ".sentences p")
    assert answers[0].startswith(f"Guess 1 a {WHY['50']} b ✓ {WHY['150']} c ") and answers[1].startswith("Guess 2 ")
    assert place(page) == 0 and page.inner_text("figcaption >> nth=0") == QUESTION
    shown = page.locator(".sentences figure.pbh-player svg:visible")
    assert shown.count() == 1
    assert shown.evaluate("e => parseFloat(e.querySelector('.pbh-thing').style.transform.slice(10))") == 150
