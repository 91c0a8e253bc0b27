"""The run that goes through the book: its road is the one that the chapters tell, and its picture shows it to scale."""

import re
from itertools import pairwise

import pytest

from book.our_run import KINDS, RUN, STATIONS, our_run, road
from lib.planner import best_layouts, memory_bytes, step_s
from tests.book.drawn import check_words, texts


def test_what_the_chapters_tell():
    """Each sentence of the text that orders two stations stands here as well."""
    fits = {chapter: one.fits for chapter, one in STATIONS.items()}
    assert fits == {1: False, 3: False, 4: False, 5: True, 6: False, 7: True, 8: False, 9: True, 11: True, 12: True}
    assert STATIONS[3].memory_bytes > STATIONS[4].memory_bytes > STATIONS[5].memory_bytes
    road = [STATIONS[chapter].step_s for chapter in (5, 6, 7, 9, 11, 12)]
    assert all(after < before for before, after in pairwise(road)), road
    assert STATIONS[12].step_s >= best_layouts(RUN, best=1)[0].seconds.total * 0.98, "the planner's own is no slower"


def test_numbers_are_those_of_the_planner():
    for one in STATIONS.values():
        assert one.step_s == pytest.approx(step_s(one.training, one.layout).total)
        if not one.keeps_all:
            assert one.memory_bytes == memory_bytes(one.training, one.layout).total
    gpipe, after = STATIONS[8], STATIONS[9]
    kept = memory_bytes(RUN, after.layout).activations
    m, in_flight = 1024 // 4, 4
    assert gpipe.memory_bytes - after.memory_bytes == pytest.approx((m / in_flight - 1) * kept)


@pytest.mark.parametrize("after", STATIONS)
def test_its_picture(after):
    figure = our_run(after)
    said = " ".join(texts(figure))
    assert f"{STATIONS[after].memory_bytes / 1e9:,.0f} GB" in said in said
    assert ("53 minutes" if after == 1 else f"{STATIONS[after].step_s:.1f} s") in said
    assert ("it fits" in said) == STATIONS[after].fits and "before this chapter" not in said
    assert STATIONS[after].words in figure.alt
    check_words(figure.svg)


def test_it_is_compared_with_an_earlier_one():
    said, change = " ".join(texts(our_run(6, since=5))), STATIONS[6].step_s - STATIONS[5].step_s
    assert "before this chapter" in said and "too much" in said and f"(−{-change:.1f})" in said
    assert "it fits now" in " ".join(texts(our_run(7, since=6)))


def test_a_road_goes_on_with_layouts_of_ours():
    last = STATIONS[12]
    rows = road({"again": last.layout, "without a cut": STATIONS[3].layout})
    assert list(rows)[:-2] == list(road()) and rows["again"] == rows["12: ZB-V"]
    assert sum(rows["again"].values()) == pytest.approx(last.step_s) and list(rows)[-1] == "without a cut, too large"


def test_a_legend_names_what_a_bar_has():
    for after, one in STATIONS.items():
        said = texts(our_run(after))
        for kind, words in KINDS.items():
            assert (words in said) == (one.seconds[kind] > 0), (after, kind)


def test_a_line_of_before_that_leaves_the_axis_is_torn_and_says_its_number():
    assert "1,333 GB before" in texts(our_run(4, since=3)) and "247 GB before" in texts(our_run(5, since=4))
    assert not [words for words in texts(our_run(6, since=5)) if words.endswith("GB before")], "it is on the axis"

    def lines(figure):  # of before, on the first of its two drawings
        wide = figure.svg.partition("</svg>")[0]
        return len(re.findall(r'<rect[^>]*height="5"[^>]*>', wide))

    assert lines(our_run(4, since=3)) - lines(our_run(6, since=5)) == 2
