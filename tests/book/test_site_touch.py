"""A finger that scrolls a built page leaves all its players, Explorers and blocks of a schedule as they are."""

import pytest

from tests.book.test_site import LISTED, SITE, each
from tests.book.test_touch import ASKEW, PHONE, STATE, swipe

TOUCHED = ":is(.pbh-player, .pbh-explorer) :is(svg, input[type=range], fieldset label), .grid .block"
BLOCKS = """() => [...document.querySelectorAll('.grid .block')].map(block =>
    [block.getAttribute('class'), block.style.transform, block.querySelector('title').textContent])"""
EVERY = 7  # of a schedule's blocks, which are all alike, each seventh is touched


def live(name: str) -> bool:
    """Whether the page has something that a finger moves."""
    html = (SITE / name).read_text(encoding="utf-8")
    return any(mark in html for mark in ('<figure class="pbh-player', '<figure class="pbh-explorer', "workshop.js"))


def state(page) -> list:
    return [*page.evaluate(STATE), page.evaluate(BLOCKS)]


def settled(page) -> list:
    """When nothing moves by itself any more."""
    before = None
    while (now := state(page)) != before:
        before = now
        page.wait_for_timeout(120)
    return now


@pytest.mark.skipif(not LISTED, reason="no built book: make book")
@pytest.mark.parametrize("name", each([one for one in LISTED if live(one)]))
def test_a_finger_that_scrolls_changes_nothing_on_a_page(opened, name):
    page = opened(SITE / name, **PHONE)
    asks = page.locator(".pbh-guess.pbh-asks .guess button:last-child")
    while asks.count():
        asks.first.tap()  # then it can be played
    settled(page)
    things = [one for one in page.locator(TOUCHED).all() if one.is_visible()]
    things = [
        one for k, one in enumerate(things) if "block" not in (one.get_attribute("class") or "") or k % EVERY == 0
    ]
    assert things, "nothing that a finger could move: is the page's script broken?"
    scrolled = 0
    for thing in things:
        thing.evaluate("one => one.scrollIntoView({ block: 'center', behavior: 'instant' })")
        before, box = state(page), thing.bounding_box()
        up = page.evaluate("scrollY + innerHeight + 220 < document.documentElement.scrollHeight")
        x, y = box["x"] + min(0.7 * box["width"], 200), box["y"] + box["height"] / 2
        scrolled += abs(swipe(page, x, y, ASKEW if up else (ASKEW[0], -ASKEW[1]))) > 50
        assert state(page) == before, thing.evaluate("one => one.outerHTML.slice(0, 200)")
    assert scrolled == len(things), f"{len(things) - scrolled} of {len(things)} fingers did not scroll the page"
