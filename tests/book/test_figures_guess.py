"""Guesses on pictures: who says what is right, what a reader without a script has, and how a picture opens."""

import re

import pytest

from book.figures import Explorer
from book.figures.guess import Guess
from book.figures.svg import Figure
from tests.book.test_figures_player import SENTENCES, place, player, sentence

QUESTION = "How far will <it> go?"
WHY = {
    "50": "That is its first step & no more.",
    "150": "Three steps of 50.",
    "200": "It stops before, and " + "so on, " * 20,
}
STILL = Figure('<svg viewBox="0 0 9 9"><g data-answer=""><text x="1" y="8">150</text></g></svg>', "a number")
SLIDER = Explorer(lambda k: (STILL.svg, f"{k} steps"), "Steps", k=[1, 2, 3])


def guess(picture=None, **options) -> Guess:
    return Guess(
        picture or player(), QUESTION, WHY, **{"answer": 150, "shown": "Over" if picture is None else ""} | options
    )


# ---- without a browser ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"answer": 100}, r"go\?': the page computes 100, and the options are 50, 150, 200"),
        ({"shown": "Under"}, r"answered by no beat 'Under'; there are Over, Gone"),
        ({"shown": "Before"}, "answered by no beat 'Before'"),
        ({"at": "Gone"}, "'Moves' cannot ask after 'Gone'; there are Before, Over"),
    ],
)
def test_a_right_answer_that_changes_stops_the_page(changed, message):
    with pytest.raises(ValueError, match=message):
        guess(**changed)


def test_it_has_three_or_four_options():
    for options in ({1: "a", 2: "b"}, dict.fromkeys(range(5), "a")):
        with pytest.raises(ValueError, match=f"has {len(options)} options, .*give 3 or 4"):
            Guess(player(), QUESTION, options, 1)


def test_without_a_script_each_option_opens_below_the_picture():
    html = guess()._repr_html_()
    seen = re.sub(r"<(script|style).*?</\1>", "", html, flags=re.DOTALL)
    assert "How far will &lt;it&gt; go?" in seen and seen.index('pbh-question"') < seen.index("<svg")
    options = re.findall(r'<details class="option (\w+)" name="(.*?)"><summary>(.*?)</summary>(.*?)</details>', seen)
    assert [option[0] for option in options] == ["wrong", "right", "wrong"] and len(
        {option[1] for option in options}
    ) == 1
    assert [option[2] for option in options] == list(WHY) and "first step &amp; no more" in options[0][3]
    assert "50" in repr(guess()) and QUESTION in repr(guess())


def test_the_question_is_the_first_sentence_and_may_stand_at_a_later_beat():
    asked = guess(at="Over", shown="Gone").picture
    assert [beat.name for beat in asked.beats] == ["Before", "Gone"] and asked.sentences == [QUESTION, SENTENCES[2]]
    assert [beat.until for beat in asked.beats] == [0, 1] and asked.still == 1
    for scene, whole in zip(asked.scenes, player().scenes, strict=True):
        assert scene.frames == whole.frames[3:] and scene.times == whole.times[3:]


# ---- in a browser ---------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(opened):
    def open_at(made: Guess, **options):
        return opened(
            f"<!doctype html><meta charset='utf-8'><title>x</title>{made._repr_html_()}",
            "",
            **{"width": 800} | options,
        )

    return open_at


def said(page) -> str:
    status = page.locator("[role=status]")
    return status.inner_text() if status.is_visible() else ""


def press(page, words: str) -> None:
    page.get_by_role("button", name=words, exact=True).click()


def buttons(page) -> list[str]:
    return page.locator(".guess button:visible").all_inner_texts()


def test_a_player_waits_until_a_guess_and_then_goes_on(asked):
    page = asked(guess())
    assert sentence(page) == QUESTION and buttons(page) == [*WHY, "Skip"] and not page.is_visible(".pbh-controls")
    assert not page.is_visible(".pbh-question"), "the picture asks"
    assert page.get_attribute("svg:visible", "aria-label") == QUESTION, "no answer in it"
    box = page.locator("svg:visible").bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 50)
    assert place(page) == 0, "a finger does not open it"
    page.focus(".guess button")
    page.keyboard.press("ArrowRight")
    assert sentence(page) == QUESTION and place(page) == 0
    page.keyboard.press("Enter")
    assert place(page) == 150 and sentence(page) == SENTENCES[1], "it plays on"
    assert buttons(page) == [] and page.evaluate("document.activeElement.className") == "pbh-play"


def test_a_guess_stays_in_sight_until_the_picture_answers_it(asked):
    page = asked(guess(shown="Gone"))
    press(page, "50")
    assert said(page) == "You guessed 50." and page.get_attribute(".pbh-guess", "data-verdict") == ""
    page.click(".pbh-play")
    assert said(page) == f"You guessed 50. {WHY['50']} It is 150."
    assert page.get_attribute(".pbh-guess", "data-verdict") == "wrong"
    page.click(".pbh-play")
    assert sentence(page) == QUESTION and said(page) == "" and len(buttons(page)) == 4, "the beginning asks again"
    assert page.get_attribute(".guess button >> nth=0", "aria-pressed") == "true"
    press(page, "150")
    page.click(".pbh-play")
    assert said(page) == f"You guessed 150: right. {WHY['150']}"
    assert page.get_attribute(".pbh-guess", "data-verdict") == "right"


def test_who_skips_sees_the_picture_and_what_is_right(asked):
    page = asked(guess())
    press(page, "Skip")
    assert sentence(page) == SENTENCES[1] and said(page) == f"It is 150. {WHY['150']}"
    page.reload()
    assert not page.is_visible(".pbh-controls"), "and is asked the next time"


def test_a_guess_is_remembered_and_somebody_elses_record_is_no_guess(asked):
    page = asked(guess())
    press(page, "200")
    page.reload()
    assert page.is_visible(".pbh-controls") and sentence(page) == QUESTION
    assert page.locator(".guess button[aria-pressed=true]").inner_text() == "200"
    page.click(".pbh-play")
    assert said(page).startswith("You guessed 200.")
    page.evaluate("localStorage.setItem('parallel-by-hand.guesses', '{')")
    page.reload()
    assert not page.is_visible(".pbh-controls")


@pytest.mark.parametrize(("picture", "hidden"), [(STILL, "[data-answer] >> nth=0"), (SLIDER, ".pbh-knobs")])
def test_a_picture_without_beats_opens_with_the_answer(asked, picture, hidden):
    page = asked(guess(picture))
    assert page.inner_text(".pbh-question") == QUESTION and not page.is_visible(hidden)
    press(page, "50")
    assert page.is_visible(hidden) and said(page) == f"You guessed 50. {WHY['50']} It is 150." and not buttons(page)
    assert page.evaluate("document.activeElement.getAttribute('role')") == "status", "it is read out"


def test_a_group_of_buttons_has_the_question_as_its_name_and_a_verdict_is_announced(asked):
    page = asked(guess())
    group = page.get_by_role("group", name=QUESTION)
    assert group.get_by_role("button").all_inner_texts() == [*WHY, "Skip"]
    assert page.get_by_role("status", include_hidden=True).count() == 1


def test_on_paper_the_picture_asks_and_says_nothing_of_its_answer(asked):
    """Whatever has been played before; afterwards the reader is where he was."""
    page = asked(guess())
    press(page, "50")
    assert place(page) == 150
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert sentence(page) == QUESTION and buttons(page) == list(WHY) and said(page) == "" and place(page) == 0
    assert page.get_attribute("svg:visible", "aria-label") == QUESTION
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert place(page) == 150
    drawn = asked(guess(STILL))
    press(drawn, "50")
    drawn.emulate_media(media="print")
    assert drawn.is_visible(".pbh-question") and not drawn.is_visible("[data-answer] >> nth=0")


def test_nothing_below_moves_when_the_verdict_comes(asked):
    page = asked(guess(shown="Gone"), width=390)
    press(page, "200")
    before = page.locator(".pbh-guess").bounding_box()
    page.click(".pbh-play")
    assert said(page) and page.locator(".pbh-guess").bounding_box() == before
