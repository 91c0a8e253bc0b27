"""The exhibits of the museum as pictures: each room has one; what is wrong is marked, and nothing that is right."""

import pytest
import torch

from book.figures.calls import draw_calls
from book.figures.dots import BAD, DOT, NOTHING, RING, draw_dots
from book.figures.exhibits import DRAWN, shard_of, share_of_right
from book.figures.fingerprint import apart, draw_fingerprint
from book.figures.museum import (
    FALSE_ALARM,
    FIRES,
    NOT_HERE,
    SILENT,
    UNWRITTEN,
    Verdicts,
    differs_from_one_process,
    exhibit_drawn,
    rooms,
)
from book.figures.svg import NARROW, WIDE
from course.museum.room import RunSeen
from tests.book.drawn import painted, parse, texts
from tests.book.test_figures_gallery import check_words

ABOUT = {"title": "t", "alt": "a"}
GRADIENT = torch.tensor([3.0, -1.0, 2.0], dtype=torch.float64)


def frames(figure) -> int:
    """Red ones, without the legend's."""
    red = [
        own
        for element, own in painted(parse(figure))
        if element.tag == "rect" and "--pbh-bad" in own.get("stroke", "")
    ]
    widths = [own["width"] for own in red if own["width"] != "10"]
    return len(widths) - ("14.4" in widths)  # among dots, the legend's frame is as wide as those of the rows


def test_each_room_has_a_picture():
    assert [*DRAWN] == [*rooms()]


@pytest.mark.thorough("a sick program runs on ranks in each room", keep=2)
@pytest.mark.parametrize("id", DRAWN)
def test_the_picture_of_a_room_has_its_words_inside_and_its_numbers_behind_a_fold(id):
    drawn = exhibit_drawn(id)
    for svg, most in ((drawn.figure.svg, WIDE), (drawn.figure.narrow, NARROW)):
        check_words(svg)
        assert float(parse(svg).get("viewBox").split()[2]) <= most
    assert (frames(drawn.figure) > 0) == (id != "15.14"), "what is wrong is framed; a hang is in the order"
    assert drawn.figure.caption
    html = drawn._repr_html_()
    assert html.index("<figure") < html.index("<details><summary>The numbers") < html.index('class="exhibit"')


def token_run(gradient, loss=2.0):
    alone = RunSeen({"dp": 1}, 0, [{"loss": 2.0, "gradient": GRADIENT, "tokens": 7}])
    ranks = [{"loss": loss, "gradient": gradient, "tokens": tokens} for tokens in (3, 4)]
    return RunSeen({"dp": 2}, 0, ranks, alone=alone)


def test_a_room_shows_what_differs_from_one_process_and_nothing_else():
    healthy, sick = (DRAWN["15.4"](token_run(k * GRADIENT), lambda: None) for k in (1, 1.5))
    assert (frames(healthy), frames(sick)) == (0, 2), "the gradient on two ranks"
    assert texts(sick).count("1.50") == 2 and "1.50" not in texts(healthy)
    assert {"3", "4"} <= {*texts(sick)}
    assert sick.alt.endswith("the loss: 1.00 everywhere; the gradient: 1.50 everywhere; tokens of the rank: 3, 4.")


def test_a_share_is_of_the_shard_that_a_rank_has():
    whole = torch.arange(24.0).reshape(4, 6)
    assert shard_of(whole, (4, 6), 1) is whole
    assert shard_of(whole, (2, 6), 1).equal(whole[2:]) and shard_of(whole, (4, 2), 2).equal(whole[:, 4:])
    assert share_of_right(3 * whole, whole) == 3


@pytest.mark.parametrize(
    ("value", "right", "words"),
    [(1.5, 1, "1.50"), (1.0023, 1, "1.002"), (51.14, 1, "51.1"), (-0.3, 1, "−0.30"), (0.004, 0, "0.004")],
)
def test_a_wrong_number_never_reads_as_the_right_one(value, right, words):
    assert apart(value, right) == words


def test_words_in_a_fingerprint_have_no_frame_and_the_right_number_may_be_zero():
    framed = [
        frames(draw_fingerprint({"a": values}, right=right, near=1e-9, **ABOUT))
        for values, right in ((["24", "45"], 1), ([1.0, 1 + 1e-6], 1), ([0.0, 1.0], 0))
    ]
    assert framed == [0, 1, 1]


VERDICTS = [["room", "15.4", "15.5"], ("a", FIRES, SILENT), ("b", NOT_HERE, FALSE_ALARM)]


def test_verdicts_are_dots():
    figure = Verdicts(VERDICTS).drawn("Who?")
    assert figure.alt.endswith("15.4 to 15.5. a: fires in 15.4. b: false alarm in 15.5.")
    assert {"4", "5", "a", "b", "finds it", "looks, and is silent", "false alarm", "cannot look"} <= {*texts(figure)}
    assert "false alarm" not in texts(Verdicts(VERDICTS[:2]).drawn("Who?")), "a legend has what is there"
    with pytest.raises(NotImplementedError, match="c is not written yet"):
        Verdicts([*VERDICTS, ("c", UNWRITTEN, UNWRITTEN)]).drawn("Who?")


def test_each_kind_of_place_looks_different():
    def shapes(kind):
        figure = draw_dots({"a": [kind]}, ["4"], legend={}, **ABOUT)
        return {
            (e.tag, own.get("width"), own["fill"], own.get("stroke"))
            for e, own in painted(parse(figure))
            if e.tag == "rect" and own["height"] != "0.8"
        }

    assert len({frozenset(shapes(kind)) for kind in (DOT, RING, BAD, NOTHING)}) == 4
    assert shapes(DOT) < shapes(BAD), "a dot, and a frame around it"


def test_an_arrow_leads_from_a_send_to_its_receive_and_no_call_is_lost():
    two = [[("run", 0, "0F0"), ("send", 1, "1F0"), ("send", 1, "1F1")], [("recv", 0, "1F0"), ("run", 1, "1B0")]]
    figure = draw_calls(two, **ABOUT)
    tips = [e for e, _ in painted(parse(figure)) if e.tag == "path" and e.get("d").endswith("z")]
    assert len(tips) == 1, "1F1 is not received here"
    assert {"run 0F0", "send 1F0", "send 1F1", "receive 1F0", "run 1B0"} <= {*texts(figure)}
    with pytest.raises(ValueError, match="two columns of calls are drawn, and there are 3 ranks"):
        draw_calls([*two, []], **ABOUT)


def test_the_comparison_with_one_process_looks_at_what_is_not_cut_and_says_when_there_is_nothing():
    sick, healthy = token_run(2 * GRADIENT), token_run(GRADIENT)
    assert differs_from_one_process(sick).startswith("gradient:") and differs_from_one_process(healthy) == ""
    assert differs_from_one_process(token_run(GRADIENT[:1])) == "", "a shard is not compared with the whole"
    with pytest.raises(KeyError, match="no loss, output or gradient"):
        differs_from_one_process(RunSeen({"dp": 1}, 0, [{}], alone=RunSeen({"dp": 1}, 0, [{}])))
    with pytest.raises(AttributeError):
        differs_from_one_process(RunSeen({"dp": 1}, 0, [{"loss": 1.0}]))
