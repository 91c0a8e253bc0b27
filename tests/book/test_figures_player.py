"""Players: what stands in each step, what a reader without a script has, and how they are played."""

import random
import re

import pytest

from book.figures.canvas import Canvas
from book.figures.mechanisms.ring import play_all_reduce
from book.figures.player import NARROW, Beat, Player, Scene, Thing
from lib.cost.steps import ALL_REDUCE

BEATS = [
    Beat("Before", "A box is here.", 0),
    Beat("Over", "It goes over, and another comes along.", 3),
    Beat("Gone", "It is gone & the other is <wide>.", 4),
]
SENTENCES = [beat.sentence for beat in BEATS]


def draw(width: float) -> Scene:
    moving = [{"one": Thing(50 * k, 0, 40, 20, words="a"), "two": Thing(0, 50, 10, 10, "idle")} for k in range(1, 4)]
    moments = [{"one": Thing(0, 0, 40, 20, words="a")}, *moving, {"two": Thing(0, 50, width / 2, 10, "frame")}]
    return Scene(Canvas(f"moves {width}"), 100, moments, [width * k / 4 for k in range(5)])


def player(**options) -> Player:
    return Player("Moves", draw, BEATS, **options)


# ---- without a browser ----------------------------------------------------------------------------------------------


def test_without_a_script_one_beat_is_what_there_is():
    html = player(still=1)._repr_html_()
    before_script = html.split("<script")[0]
    assert "It goes over" in before_script and SENTENCES[2][:8] not in before_script
    assert before_script.count("<svg") == 2 and 'aria-label="It goes over' in before_script
    assert '<div class="pbh-controls" hidden>' in before_script, "buttons that do nothing are not shown"
    assert repr(player()) == f"Moves: {SENTENCES[2]}", "the last one, if nothing is said"
    assert "gone &amp; the other is &lt;wide&gt;" in player()._repr_html_()


def test_what_a_moment_does_not_name_is_not_there():
    html = player(still=0)._repr_html_().split("<script")[0]
    one, two = re.findall(r'<g class="pbh-thing" data-ink="(\w+)" style="transform:(.*?);opacity:(.*?)"', html)[:2]
    assert one == ("forward", "translate(0px, 0px)", "1")
    assert two == ("idle", "translate(0px, 50px)", "0"), "it waits where it will come"


@pytest.mark.parametrize(
    ("ends", "message"),
    [([0, 3], r"end with \[0, 3\].*up to 4"), ([1, 4], "from 0"), ([0, 3, 2, 4], "from 0"), ([], "use 1 to 7")],
)
def test_beats_cover_all_moments_in_order(ends, message):
    with pytest.raises(ValueError, match=f"'Moves': its beats {message}" if "end" in message else message):
        Player("Moves", draw, [Beat("a", "b", end) for end in ends])


def test_each_width_has_the_same_moments():
    with pytest.raises(ValueError, match="'Moves': each width needs the same frames"):
        Player(
            "Moves",
            lambda width: draw(width)._replace(frames=draw(width).frames[: 4 if width == NARROW else 5]),
            BEATS,
        )


def test_a_page_stays_light():
    def crowd(width):
        return Scene(Canvas("crowd"), 400, [{"one": Thing(0, 0, 9, 9)}])

    with pytest.raises(ValueError, match=r"takes [\d,]+ bytes compressed, at most 60,000; use fewer things"):
        letters = random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=150_000)
        Player("A crowd", crowd, [Beat("a", "".join(letters), 0)])


def inside(things, name) -> set[int]:
    """The ranks whose numbers are in a chunk: its stripes, without those that still wait at their sender."""
    stripes = {key: thing for key, thing in things.items() if key.startswith(f"{name} of ")}
    return {int(key.rpartition(" of ")[2]) for key, thing in stripes.items() if thing.seen}


@pytest.mark.parametrize("algorithm", ["naive", "tree", "ring"])
def test_an_all_reduce_ends_with_all_sums_everywhere(algorithm):
    ring = play_all_reduce(algorithm, 4)
    cells = [f"cell {rank} {chunk}" for rank in range(4) for chunk in range(4)]
    for scene in ring.scenes:
        first, last = scene.frames[0], scene.frames[-1]
        assert [inside(first, name) for name in cells] == [{rank} for rank in range(4) for _ in range(4)]
        assert all(inside(last, name) == {0, 1, 2, 3} and last[name].ink == "frame" for name in cells)
        inks = [last[f"{cells[0]} of {rank}"].ink for rank in range(4)]
        assert inks == [f"rank-{rank}" for rank in range(4)], "a hue for each rank"


def framed(things) -> set[tuple[int, int]]:
    """(rank, chunk) of all finished sums."""
    cells = [key.split()[1:] for key, thing in things.items() if key.startswith("cell") and thing.ink == "frame"]
    return {(int(rank), int(chunk)) for rank, chunk in cells}


def test_a_ring_is_two_halves_and_its_finished_sums_are_a_diagonal():
    ring = play_all_reduce("ring", 4)
    half = next(beat for beat in ring.beats if beat.name == "Reduce-scatter")
    for scene in ring.scenes:
        assert [framed(scene.frames[done]) for done in range(3)] == [set()] * 3
        assert framed(scene.frames[half.until]) == {(rank, rank) for rank in range(4)}
    assert ring.beats[-1].name == "All-gather" and ring.sentences[-1].endswith("after 6 steps, and sent 1.5 arrays.")
    assert play_all_reduce("tree", 2).sentences[-1].endswith("The busiest rank sent 1 array.")


def test_the_bar_of_a_ring_says_what_a_rank_sent_and_hides_the_end_at_first():
    for scene in play_all_reduce("ring", 4).scenes:
        said = ["0 arrays", *(f"{sent:g} of 1.5 arrays" for sent in (0.25, 0.5, 0.75, 1, 1.25, 1.5))]
        assert [things["words"].words for things in scene.frames] == said
        bars = [things["sent"].width for things in scene.frames]
        assert [bar / bars[-1] for bar in bars[1:]] == pytest.approx([k / 6 for k in range(1, 7)])


@pytest.mark.parametrize("algorithm", ["naive", "tree", "ring"])
def test_an_arrow_is_next_to_the_row_that_sends_and_over_the_chunks_that_it_carries(algorithm):
    for scene in play_all_reduce(algorithm, 4).scenes:
        cells = {key: thing for key, thing in scene.frames[0].items() if re.fullmatch(r"cell \d \d", key)}
        for things, moves in zip(scene.frames[1:], ALL_REDUCE[algorithm](4), strict=True):
            arrows = {key: thing for key, thing in things.items() if key.startswith("arrow")}
            assert set(arrows) == {f"arrow {move.src} {move.dst}" for move in moves}
            for src, dst, chunks, _ in moves:
                arrow, first, last = (
                    arrows[f"arrow {src} {dst}"],
                    *(cells[f"cell {src} {chunks[k]}"] for k in (0, -1)),
                )
                down = algorithm == "ring" or dst > src
                assert arrow.words == ("↓" if down else "↑") + ("" if abs(dst - src) == 1 else f" rank {dst}")
                above, below = (first, arrow) if down else (arrow, first)
                assert 1 < below.y - above.y - above.height < 10
                assert arrow.x + arrow.width / 2 == pytest.approx((first.x + last.x + last.width) / 2)


# ---- in a browser ---------------------------------------------------------------------------------------------------


@pytest.fixture
def played(opened):
    """A page with a player, and a clock that stands still."""

    def open_at(width: int = 800, **options):
        options = {"reduced_motion": "no-preference", **options}
        page = opened(
            f"<!doctype html><meta charset='utf-8'><title>x</title>{player(still=1)._repr_html_()}",
            "",
            width,
            **options,
        )
        page.clock.install()
        return page

    return open_at


def sentence(page) -> str:
    return page.inner_text("figcaption")


def place(page) -> float:
    """How far the box has come, of its places 0, 50, 100, 150."""
    return page.evaluate("parseFloat(document.querySelector('.pbh-thing').style.transform.slice(10))")


def test_it_opens_with_its_question_and_play_runs_one_beat(played):
    page = played()
    page.clock.run_for(60_000)
    assert sentence(page) == SENTENCES[0] and page.inner_text(".pbh-count") == "1 of 3", "not with what is on paper"
    assert page.inner_text(".pbh-play") == "▶ Start"
    page.click(".pbh-play")
    assert sentence(page) == SENTENCES[1] and page.inner_text(".pbh-play") == "❚❚ Pause", "told as it begins"
    page.clock.run_for(60_000)
    assert place(page) == 150 and sentence(page) == SENTENCES[1] and page.inner_text(".pbh-count") == "2 of 3"
    assert page.inner_text(".pbh-play") == "▶ Next: Gone", "it stops, and says what comes next"
    page.click(".pbh-play")
    page.clock.run_for(60_000)
    assert sentence(page) == SENTENCES[2] and page.inner_text(".pbh-play") == "↺ Again"
    page.click(".pbh-play")
    assert sentence(page) == SENTENCES[0] and place(page) == 0


def test_pause_stops_within_a_beat_and_play_goes_on(played):
    page = played()
    page.click(".pbh-play")
    page.click(".pbh-play")
    page.clock.run_for(60_000)
    assert place(page) == 50 and page.inner_text(".pbh-play") == "▶ Next: Over"
    page.click(".pbh-play")
    page.clock.run_for(60_000)
    assert place(page) == 150


def test_keys_and_marks_go_from_beat_to_beat(played):
    page = played()
    page.focus(".pbh-play")
    page.keyboard.press("ArrowRight")
    assert sentence(page) == SENTENCES[1] and place(page) == 150
    page.keyboard.press("End")
    assert sentence(page) == SENTENCES[2]
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Home")
    assert sentence(page) == SENTENCES[0]
    page.click("[aria-label='Gone']")
    assert sentence(page) == SENTENCES[2] and page.get_attribute("svg:visible", "aria-label") == SENTENCES[2]
    assert page.locator("[aria-current=step]").get_attribute("aria-label") == "Gone"
    assert page.locator(".pbh-beats [tabindex='-1']").count() == 3, "one tab stop, the button"


def test_a_finger_on_the_picture_moves_time(played):
    page = played()
    box = page.locator("svg:visible").bounding_box()
    page.mouse.move(box["x"] + 1, box["y"] + 50)
    page.mouse.down()
    for share, at in ((0.25, 50), (0.5, 100), (0.74, 150), (0.24, 50)):
        page.mouse.move(box["x"] + share * box["width"], box["y"] + 50)
        assert place(page) == at, share
    page.mouse.up()
    page.mouse.move(box["x"] + box["width"] - 1, box["y"] + 50)
    assert place(page) == 50, "let go"


def test_things_glide_unless_motion_is_unwelcome(played):
    moving, still = played(), played(reduced_motion="reduce")
    for page in (moving, still):
        page.clock.run_for(100)
        page.click(".pbh-play")
    look = "getComputedStyle(document.querySelector('.pbh-thing')).transitionDuration"
    assert moving.evaluate(look).startswith("0.7s") and still.evaluate(look) == "0s"
    assert place(still) == 150, "at the end of the beat at once"


def test_a_narrow_page_has_a_drawing_of_its_own(played):
    assert played(800).locator("svg.pbh-wide:visible").count() == 1
    page = played(390)
    assert page.locator("svg.pbh-wide:visible").count() == 0
    box = page.locator("svg.pbh-narrow").bounding_box()
    assert box["width"] <= 390 and page.evaluate("document.documentElement.scrollWidth") <= 390


def test_on_paper_it_is_the_chosen_beat(played):
    page = played()
    page.focus(".pbh-play")
    page.keyboard.press("End")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert sentence(page) == SENTENCES[1]
    page.emulate_media(media="print")
    assert not page.is_visible(".pbh-controls")
