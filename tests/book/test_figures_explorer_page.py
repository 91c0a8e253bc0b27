"""Explorers and figures in a real browser: keyboard, screen reader, phone, dark mode, no script, no network."""

import pytest

from book.figures.explorer import Explorer
from book.figures.svg import css
from tests.book.book_project import violations
from tests.book.test_figures_explorer import HOSTILE, buckets, hostile, memory, step
from tests.book.test_figures_gallery import FIGURES

BOOK = '<main class="bd-article">'


def page_of(*shown: object, mode: str = "light") -> str:
    """A page with the book's palette, `shown` as notebook outputs in it."""
    paper = {"light": "#ffffff", "dark": "#12161c"}[mode]
    style = f"{css()} body{{background:{paper};color:var(--pbh-text);max-width:760px;margin:0 auto;padding:0 20px}}"
    body = "".join(f"<div>{item if isinstance(item, str) else item._repr_html_()}</div>" for item in shown)
    return (
        f'<!doctype html><html lang="en" data-theme="{mode}"><head><meta charset="utf-8"><title>page</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{style}</style></head>'
        f"<body><main><h1>Page</h1>{body}</main></body></html>"
    )


def test_sliders_answer_the_keyboard(opened):
    page = opened(page_of(buckets(), Explorer(memory, "Memory", ranks=[1, 2, 4, 8])))
    page.evaluate("addEventListener('keydown', () => { window.leaked = true })")
    figures = page.locator("figure.pbh-explorer")
    assert figures.count() == 2
    setting = [{"bucket_MB": 25, "ranks": 4, "bandwidth": 50}, {"ranks": 2}]
    moves = [
        (0, 0, "bucket size", "ArrowLeft", {"bucket_MB": 5}, "5 MB"),
        (0, 1, "ranks", "End", {"ranks": 16}, "16"),
        (0, 2, "bandwidth", "End", {"bandwidth": 400}, "400 Gbit/s"),
        (1, 0, "ranks", "ArrowRight", {"ranks": 4}, "4"),
        (1, 0, "ranks", "End", {"ranks": 8}, "8"),
    ]
    for which, number, name, key, change, words in moves:
        figure, other = figures.nth(which), figures.nth(1 - which)
        slider = figure.get_by_role("slider", name=name, exact=True)
        picture, sentence = figure.locator(".pbh-box"), figure.locator("figcaption")
        before = (picture.screenshot(), sentence.inner_text(), slider.get_attribute("aria-valuetext"))
        aside = other.inner_html()
        slider.press(key)
        setting[which].update(change)
        wanted = (step, memory)[which](**setting[which])[1]
        assert sentence.inner_text() == wanted == picture.get_attribute("aria-label")
        assert picture.get_attribute("role") == "img"
        assert slider.get_attribute("aria-valuetext") == words == figure.locator("output").nth(number).inner_text()
        after = (picture.screenshot(), sentence.inner_text(), words)
        assert all(a != b for a, b in zip(after, before, strict=True))
        assert other.inner_html() == aside
    assert page.evaluate("window.leaked") is None  # JupyterLab would move to another cell


def test_page_without_javascript_keeps_the_first_frame(opened):
    page = opened(page_of(buckets()), java_script_enabled=False)
    assert page.get_by_text(step(25, 4, 50)[1]).is_visible() and page.locator(".pbh-box svg:visible").count() == 1
    assert page.locator("input:disabled").count() == 3


def test_hostile_words_stay_words(opened):
    page = opened(page_of(hostile()))
    page.get_by_role("slider").press("End")
    assert page.locator("output").inner_text().endswith("2")
    assert page.locator("figcaption [aria-live]").text_content() == HOSTILE


def shapes(way: str, n: int) -> tuple[str, str]:
    svg = f'<svg viewBox="0 0 90 {10 * n}" style="width:100%"><rect width="9" height="9"/></svg>'
    return svg, f"{way} on {n} ranks{', which takes many more words than the others do' * (n == 4)}."


def test_words_are_buttons_and_nothing_below_jumps(opened):
    page = opened(
        page_of(Explorer(shapes, "Ways", way=["TP", "SP"], n=[1, 2, 4]), "<p id=below>below</p>"), width=390
    )
    place = page.locator("#below").bounding_box()
    page.get_by_role("radio", name="TP").focus()
    page.keyboard.press("ArrowRight")
    assert page.get_by_role("radio", name="SP").is_checked() and page.inner_text("figcaption") == "SP on 2 ranks."
    page.get_by_role("slider").press("End")
    assert "SP on 4 ranks, which" in page.inner_text("figcaption")
    assert page.locator("#below").bounding_box() == place and "#" not in page.url, "it is no page of the book"


def test_the_address_keeps_what_was_set(opened):
    html = page_of(Explorer(shapes, "Ways & means", way=["TP", "SP"], n=[1, 2, 4])).replace("<main>", BOOK)
    page = opened(html)
    page.get_by_role("radio", name="SP").check()
    page.get_by_role("slider").press("Home")
    assert page.url.endswith("#ways-means=1.0")
    page.reload()
    assert page.inner_text("figcaption") == "SP on 1 ranks." and page.get_by_role("radio", name="SP").is_checked()
    for sent, says in (
        ("0.2", "TP on 4"),
        ("7.0", "TP on 4"),
        ("1", "TP on 4"),
        ("x.y", "TP on 4"),
        ("1.1", "SP on 2"),
    ):
        page.evaluate(f"location.hash = '#ways-means={sent}'")
        page.wait_for_function(f"location.hash.endsWith('{sent}')")
        assert page.inner_text("figcaption").startswith(says), sent


def gallery() -> list[object]:
    return [buckets(), *(draw() for draw in FIGURES.values())]


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_everybody_can_read_it(opened, mode):
    page = opened(page_of(*gallery(), mode=mode))
    assert violations(page) == []


@pytest.mark.parametrize("width", [390, 1280])
def test_words_are_large_enough_and_inside_their_picture(opened, width):
    page = opened(page_of(*gallery()), width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    boxes = page.locator(".pbh-box")
    assert boxes.evaluate_all("all => all.filter((box) => box.scrollWidth > box.clientWidth).length") == 0
    shown = boxes.locator("svg:visible").evaluate_all("all => all.map((svg) => svg.parentElement.className)")
    assert shown == boxes.count() * ["pbh-narrow" if width == 390 else "pbh-wide"]
    words = page.evaluate(
        """[...document.querySelectorAll("svg text")].map((t) => {
            const box = t.getBoundingClientRect(), all = t.ownerSVGElement.getBoundingClientRect();
            const size = parseFloat(getComputedStyle(t).fontSize) * t.getScreenCTM().a;
            const inside = box.left >= all.left - 1 && box.right <= all.right + 1
                && box.top >= all.top - 1 && box.bottom <= all.bottom + 1;
            return [t.textContent, size, inside];
        })"""
    )
    assert len(words) > 50
    assert [w for w in words if w[1] < 11.99 or not w[2]] == []
