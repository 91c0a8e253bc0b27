"""A finger that scrolls a phone leaves players and Explorers as they are; one that goes sideways moves them."""

import pytest

from book.figures.explorer import Explorer
from tests.book.test_figures_explorer import buckets
from tests.book.test_figures_explorer_page import BOOK, page_of, shapes
from tests.book.test_figures_guess import guess
from tests.book.test_figures_player import place, player, sentence

PHONE = {"has_touch": True, "is_mobile": True, "width": 390}
ROOM = "<p style='height:3000px'>below</p>"
UP, ALONG, ASKEW = (0, -200), (-120, 0), (-12, -200)
STATE = """() => [location.hash, ...[...document.querySelectorAll('.pbh-player, .pbh-explorer')].map(figure =>
    [figure.querySelector('figcaption').innerText, figure.querySelector('svg').innerHTML,
     ...[...figure.querySelectorAll('input')].map(input => input.type === 'radio' ? input.checked : input.value)])]"""


def swipe(page, x: float, y: float, by: tuple[float, float]) -> float:
    """One finger, in eight steps; returns by how much the page has scrolled."""
    before = page.evaluate("scrollY")
    touch = page.context.new_cdp_session(page)
    places = [{"x": x + by[0] * k / 8, "y": y + by[1] * k / 8} for k in range(9)]
    for kind, points in [("touchStart", places[:1]), *(("touchMove", [at]) for at in places[1:]), ("touchEnd", [])]:
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
        page.evaluate("new Promise(requestAnimationFrame)")
    touch.detach()
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return page.evaluate("scrollY") - before


def touched(page, selector: str, by: tuple[float, float]) -> float:
    page.evaluate("scrollTo(0, 0)")
    box = page.locator(selector).first.bounding_box()
    return swipe(page, box["x"] + 0.7 * box["width"], box["y"] + box["height"] / 2, by)


@pytest.fixture
def phone(opened):
    def open_at(shown: object):
        return opened(page_of(shown, ROOM).replace("<main>", BOOK), **PHONE)

    return open_at


def steps() -> Explorer:
    return Explorer(shapes, "Steps", n=[1, 2, 4, 8], way=["TP", "SP"])


@pytest.mark.parametrize("by", [UP, ASKEW])
@pytest.mark.parametrize(
    ("make", "where"),
    [
        (player, "svg:visible"),
        (guess, "svg:visible"),
        (buckets, "input[type=range]"),
        (buckets, "svg:visible"),
        (steps, "input[type=range]"),
        (steps, "fieldset label:last-child"),
    ],
)
def test_a_finger_that_scrolls_changes_nothing(phone, make, where, by):
    page = phone(make())
    before = page.evaluate(STATE)
    assert touched(page, where, by) > 50, "the page scrolls"
    assert page.evaluate(STATE) == before


def test_a_finger_that_goes_sideways_moves_time(phone):
    page = phone(player())
    assert touched(page, "svg:visible", (-6, 0)) == 0 and place(page) == 0, "it rests, and trembles"
    assert touched(page, "svg:visible", ALONG) == 0 and place(page) > 0


def test_a_finger_that_the_browser_takes_away_brings_time_back(phone):
    page = phone(player())
    page.click("[aria-label='Gone']")
    before = page.evaluate(STATE)
    page.evaluate("""() => { const svg = document.querySelector('svg.pbh-narrow'), box = svg.getBoundingClientRect();
        svg.setPointerCapture = () => {};
        const send = (type, x) => svg.dispatchEvent(new PointerEvent(type,
            { pointerId: 7, isPrimary: true, pointerType: 'touch', clientX: box.left + x * box.width }));
        send('pointerdown', 0.9); send('pointermove', 0.3);
        window.between = document.querySelector('figcaption').innerText;
        send('pointercancel', 0.3); }""")
    assert page.evaluate("between") != sentence(page), "it was dragged"
    assert page.evaluate(STATE) == before


def test_a_slider_follows_a_finger_sideways_and_a_tap(phone):
    page = phone(steps())
    slider = page.locator("input[type=range]")
    slider.press("Home")
    page.evaluate("scrollTo(0, 0)")
    box = slider.bounding_box()
    y = box["y"] + box["height"] / 2
    assert swipe(page, box["x"] + 12, y, (0.6 * box["width"], 0)) == 0 and slider.input_value() == "2"
    assert "on 4 ranks" in sentence(page) and page.evaluate("location.hash").startswith("#steps=2")
    page.touchscreen.tap(box["x"] + box["width"] - 12, y)
    assert slider.input_value() == "3" and "on 8 ranks" in sentence(page)
