"""A phone of 390 px: what is wider scrolls by itself and shows that it does; full stops stay with what they end."""

import re

import pytest

from tests.book.test_site import LISTED, PAGES, SITE, each

pytestmark = pytest.mark.skipif(not PAGES, reason="no built book: make book")

# What sticks out of the window and is in no box that scrolls; and boxes that scroll and do not show it.
CUT = """() => {
    const scrolls = (e) => e.scrollWidth > e.clientWidth + 1 && /auto|scroll/.test(getComputedStyle(e).overflowX);
    const isShown = (e) => getComputedStyle(e).backgroundImage.includes('gradient');
    const parts = [...document.querySelectorAll('article :is(pre, table, mjx-container, figure, img, p, li, .output)')]
        .filter((e) => e.checkVisibility() && e.getBoundingClientRect().width > 0 && !e.closest('mjx-assistive-mml'));
    const found = [];
    for (const e of parts) {
        let box = e;
        while (box.tagName !== 'ARTICLE' && !scrolls(box)) box = box.parentElement;
        const name = `${e.tagName} ${e.innerText?.trim().slice(0, 40)}`;
        if (box.tagName === 'ARTICLE' && e.getBoundingClientRect().right > innerWidth + 1) found.push(`cut: ${name}`);
        if (box === e && !isShown(e)) found.push(`scrolls unseen: ${name}`);
    }
    return found;
}"""


@pytest.mark.parametrize("name", each([one for one in LISTED if one.startswith("chapters/")]))
def test_nothing_is_cut_on_a_phone_and_what_scrolls_shows_it(browser, name):
    page = browser.new_page(viewport={"width": 390, "height": 844})
    page.goto((SITE / name).as_uri())
    page.wait_for_function("!window.MathJax || !MathJax.startup || MathJax.startup.promise.then(() => true)")
    assert page.evaluate(CUT) == []
    if name == "chapters/12_zero_bubble.html":
        last = page.locator("table:has-text('each further step waits') tr > :last-child").all()
        assert last and all(one.bounding_box()["x"] + one.bounding_box()["width"] <= 390 for one in last)
    page.close()


@pytest.mark.parametrize("name", each([one for one in LISTED if one.startswith("chapters/")]))
def test_a_full_stop_stays_with_its_formula(name):
    html = (SITE / name).read_text(encoding="utf-8")
    torn = re.findall(r'(?<!class="whole">)<span class="math [^"]*">[^<]*</span>[.,;:]', html)
    assert torn == []


WIDTHS = 360, 390, 414
TORN = """() => {
    const found = [], all = document.createTreeWalker(document.querySelector('article'), NodeFilter.SHOW_TEXT);
    while (all.nextNode()) {
        const text = all.currentNode, before = text.previousSibling?.getClientRects?.();
        if (!/^[.,;:!?)]/.test(text.data) || !before?.length) continue;
        const stop = document.createRange();
        stop.setStart(text, 0);
        stop.setEnd(text, 1);
        const { width, top } = stop.getBoundingClientRect();
        if (width && top > before[before.length - 1].bottom - 4)
            found.push(text.previousSibling.textContent.slice(-60) + text.data.slice(0, 20));
    }
    return found;
}"""


@pytest.mark.parametrize("name", each(LISTED))
def test_no_full_stop_begins_a_line(browser, name):
    page = browser.new_page(viewport={"width": WIDTHS[0], "height": 844})
    page.goto((SITE / name).as_uri())
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 844})
        assert page.evaluate(TORN) == [], width
    page.close()
