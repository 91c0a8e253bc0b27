"""Every link inside the built book, followed in a browser: its place is seen, also where it lies in a fold.

`make site` runs it on what `make book` left. Links are grouped by the page that they lead to: it is opened once, and
its address changes from place to place. A place in a fold is also opened anew, as somebody who was sent the link does.
"""

from collections import defaultdict
from functools import cache
from html import unescape
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

from tests.book.test_site import HTML, LINK, PAGES, SCRIPT, SITE, SOURCES, each

pytestmark = pytest.mark.skipif(not PAGES, reason="no built book: make book")


@cache
def places() -> dict[str, set[str]]:
    """Page → the places on it that any page of the book links to."""
    found, site = defaultdict(set), SITE.resolve()
    for name in set(HTML) - {"404.html", "lost.html", *SOURCES}:
        page = site / name
        for link in set(LINK.findall(SCRIPT.sub("", page.read_text(encoding="utf-8")))):
            path, fragment = urldefrag(unescape(link))
            if fragment and not urlsplit(link).scheme and not link.startswith("//"):
                target = (page.parent / unquote(path)).resolve() if path else page
                found[target.relative_to(site).as_posix()].add(unquote(fragment))
    return found


# Follows each link; returns the places that a reader then does not see, and those that a fold had hidden.
FOLLOW = """async (names) => {
    const folds = [...document.querySelectorAll('details')], were = folds.map((fold) => fold.open);
    const target = (name) => document.getElementById(name);
    const isBehind = (section) => section.querySelector(':scope > details.deeper:not([open])');
    const isSeen = (name) => {
        const box = target(name).getBoundingClientRect();
        return target(name).checkVisibility({contentVisibilityAuto: true, visibilityProperty: true})
            && !isBehind(target(name).closest('section') ?? document.body) && box.top < innerHeight && box.bottom >= -1;
    };
    const unseen = [], folded = [];
    for (const name of names) {
        folds.forEach((fold, i) => { fold.open = were[i]; });
        if (!target(name)) { unseen.push(name); continue; }
        const section = target(name).closest('section');
        if (target(name).closest('details:not([open])') || (section && isBehind(section))) folded.push(name);
        const changed = new Promise((done) => addEventListener('hashchange', done, {once: true}));
        location.hash = `#${encodeURIComponent(name)}`;
        await changed;
        if (!isSeen(name)) unseen.push(name);
    }
    return [unseen, folded];
}"""


@pytest.mark.parametrize("name", each([name for name in PAGES if name in places()]))
def test_every_link_shows_its_place(browser, name):
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce", offline=True)
    page = context.new_page()
    page.goto((SITE / name).as_uri())
    page.wait_for_function("!window.MathJax || !MathJax.startup || MathJax.startup.promise.then(() => true)")
    unseen, folded = page.evaluate(FOLLOW, sorted(places()[name]))
    assert unseen == []
    for one in folded[:5]:
        page.goto("about:blank")
        page.goto(f"{(SITE / name).as_uri()}#{one}", wait_until="load")
        assert page.evaluate(
            "name => document.getElementById(name).checkVisibility({contentVisibilityAuto: true})", one
        )
        closed = "name => !!document.getElementById(name).querySelector(':scope > details.deeper:not([open])')"
        assert not page.evaluate(closed, one)
    context.close()


def test_places_are_found_where_the_book_folds_something():
    """Else the test above follows nothing."""
    assert "how-to-run-it" in places()["chapters/00_start.html"]
    assert sum(map(len, places().values())) > 1000
