"""Players: what stands in each step, what a reader without a script has, and how they are played."""

import re

import pytest

from book.figures.canvas import Canvas
from book.figures.mechanisms.ring import play_all_reduce
from book.figures.player import NARROW, Player, Scene, Step, Thing

SENTENCES = ["A box is here.", "It has moved, and another is there.", "It is gone & the other is <wide>."]


def draw(width: float) -> Scene:
    steps = [
        Step(SENTENCES[0], {"one": Thing(0, 0, 40, 20, words="a")}),
        Step(SENTENCES[1], {"one": Thing(100, 0, 40, 20, "comm", "b"), "two": Thing(0, 50, 10, 10, "idle")}),
        Step(SENTENCES[2], {"two": Thing(0, 50, width / 2, 10, "frame")}),
    ]
    return Scene(Canvas(f"moves {width}"), 100, steps)


# ---- without a browser ----------------------------------------------------------------------------------------------


def test_without_a_script_one_step_is_what_there_is():
    html = Player("Moves", draw, still=1)._repr_html_()
    before_script = html.split("<script")[0]
    assert "It has moved" in before_script and "gone" not in before_script
    assert before_script.count("<svg") == 2 and 'aria-label="It has moved' in before_script
    assert '<div class="pbh-controls" hidden>' in before_script, "buttons that do nothing are not shown"
    assert repr(Player("Moves", draw)) == f"Moves: {SENTENCES[2]}", "the last one, if nothing is said"
    assert "gone &amp; the other is &lt;wide&gt;" in Player("Moves", draw)._repr_html_()


def test_what_a_step_does_not_name_is_not_there():
    html = Player("Moves", draw, still=0)._repr_html_().split("<script")[0]
    one, two = re.findall(r'<g class="pbh-thing" data-ink="(\w+)" style="transform:(.*?);opacity:(.*?)"', html)[:2]
    assert one == ("forward", "translate(0px, 0px)", "1")
    assert two == ("idle", "translate(0px, 50px)", "0"), "it waits where it will come"


def test_each_width_has_the_same_steps():
    def other(width):
        scene = draw(width)
        return scene._replace(steps=scene.steps[: 2 if width == NARROW else 3])

    with pytest.raises(ValueError, match="'Moves': each width needs the same steps"):
        Player("Moves", other)
    with pytest.raises(ValueError, match="at least one"):
        Player("Moves", lambda width: draw(width)._replace(steps=[]))


def test_a_page_stays_light():
    def crowd(width):
        steps = [Step(f"{k}", {f"{i}": Thing(i * k % 601, i * k % 307, 9, 9) for i in range(900)}) for k in range(60)]
        return Scene(Canvas("crowd"), 400, steps)

    with pytest.raises(ValueError, match=r"takes [\d,]+ bytes compressed, at most 60,000; use fewer things"):
        Player("A crowd", crowd)


@pytest.mark.parametrize("algorithm", ["naive", "tree", "ring"])
def test_an_all_reduce_ends_with_all_sums_everywhere(algorithm):
    player = play_all_reduce(algorithm, 4)
    for scene in player.scenes:
        last = scene.steps[-1].things
        assert [last[f"cell {rank} {chunk}"].words for rank in range(4) for chunk in range(4)] == ["Σ"] * 16
    first = player.scenes[0].steps[0].things
    assert [first[f"cell {rank} 2"].words for rank in range(4)] == ["0", "1", "2", "3"]


def test_a_ring_is_two_halves_and_each_rank_sends_twice_three_quarters():
    ring = play_all_reduce("ring", 4)
    assert "that is a reduce-scatter" in ring.sentences[3] and ring.still == 3
    assert "The busiest sent 1.5 arrays." in ring.sentences[-1]
    half = ring.scenes[0].steps[3].things
    assert sum(half[f"cell {rank} {chunk}"].words == "Σ" for rank in range(4) for chunk in range(4)) == 4


# ---- in a browser ---------------------------------------------------------------------------------------------------


@pytest.fixture
def played(opened):
    """A page with a player, and a clock that stands still."""

    def open_at(width: int = 800, **options):
        page = opened(
            f"<!doctype html><title>x</title>{Player('Moves', draw, still=1)._repr_html_()}", "", width, **options
        )
        page.clock.install()
        return page

    return open_at


def sentence(page) -> str:
    return page.inner_text("figcaption")


def test_buttons_slider_and_keys(played):
    page = played()
    assert sentence(page) == SENTENCES[1] and page.locator("svg:visible").count() == 1
    page.click("[aria-label='next step']")
    assert sentence(page) == SENTENCES[2] and page.is_disabled("[aria-label='next step']")
    page.focus(".pbh-play")
    page.keyboard.press("ArrowLeft")
    assert sentence(page) == SENTENCES[1]
    page.keyboard.press("Home")
    assert sentence(page) == SENTENCES[0] and page.is_disabled("[aria-label='step back']")
    page.focus("input")
    page.keyboard.press("ArrowRight")
    assert sentence(page) == SENTENCES[1], "the slider moves by itself, once"
    assert page.get_attribute("input", "aria-valuetext") == "step 1 of 2"
    assert page.get_attribute("svg:visible", "aria-label") == SENTENCES[1]


def test_it_plays_to_the_end_and_stops(played):
    page = played()
    page.click("[aria-label='step back']")
    page.clock.fast_forward(60_000)
    assert sentence(page) == SENTENCES[0], "nothing moves before somebody presses Play"
    page.click(".pbh-play")
    assert page.inner_text(".pbh-play") == "Pause"
    page.clock.run_for(500)
    assert sentence(page) == SENTENCES[1]
    page.clock.run_for(60_000)
    assert sentence(page) == SENTENCES[2] and page.inner_text(".pbh-play") == "Play"
    page.click(".pbh-play")
    page.clock.run_for(500)
    assert sentence(page) == SENTENCES[1], "from the beginning again"
    page.click(".pbh-play")
    page.clock.run_for(60_000)
    assert sentence(page) == SENTENCES[1], "paused"


def test_things_glide_unless_motion_is_unwelcome(played):
    def duration(page):
        page.clock.run_for(100)
        return page.evaluate("getComputedStyle(document.querySelector('.pbh-thing')).transitionDuration")

    assert duration(played(reduced_motion="no-preference")).startswith("0.6s")
    assert duration(played(reduced_motion="reduce")) == "0s"


def test_a_narrow_page_has_a_drawing_of_its_own(played):
    assert played(800).locator("svg.pbh-wide:visible").count() == 1
    page = played(390)
    assert page.locator("svg.pbh-wide:visible").count() == 0
    box = page.locator("svg.pbh-narrow").bounding_box()
    assert box["width"] <= 390 and page.evaluate("document.documentElement.scrollWidth") <= 390


def test_on_paper_it_is_the_chosen_step(played):
    page = played()
    page.click("[aria-label='next step']")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert sentence(page) == SENTENCES[1]
    page.emulate_media(media="print")
    assert not page.is_visible(".pbh-controls")
