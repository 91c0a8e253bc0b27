"""The run that goes through the book: its road is the one that the chapters tell, and its picture shows it to scale."""

from itertools import pairwise

import pytest

from book.our_run import KINDS, RUN, STATIONS, our_run, road
from lib.planner import best_layouts, memory_bytes, step_s
from tests.book.drawn import check_words, painted, parse, paths, texts


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


PAIRS = [(after, None) for after in STATIONS] + [(after, since) for since, after in pairwise(STATIONS)]


def circles(svg):
    """(x, y, whether it is filled) of the stops of both lanes, from left to right."""
    found = []
    for box, own in painted(parse(svg)):
        if box.tag == "rect" and float(own["rx"]) == float(own["width"]) / 2:
            half = float(own["rx"])
            found.append((float(own["x"]) + half, float(own["y"]) + half, "panel" not in own["fill"]))
    return found[: len(found) // 2], found[len(found) // 2 :]


@pytest.mark.parametrize(("after", "since"), PAIRS)
def test_its_picture(after, since):
    figure, one = our_run(after, since=since), STATIONS[after]
    finding = texts(figure)[0]
    assert f"{one.memory_bytes / 1e9:,.0f} GB" in finding
    assert ("53 minutes" if after == 1 else f"{one.step_s:.1f} s") in finding
    assert finding.startswith("It fits") == one.fits and ("now" in finding) == (since in (4, 6, 8))
    assert one.words in figure.alt and finding in figure.alt
    check_words(figure.svg)
    check_words(figure.narrow)


def test_what_a_stop_shows():
    """Filled fits, above the line is too large, and a lane has the order of its numbers."""
    for svg in (our_run(12).svg, our_run(12).narrow):
        memory, seconds = circles(svg)
        assert len(memory) == len(seconds) == len(STATIONS)
        limit = next(line for line in paths(svg, stroke="bad")).middle[1]
        for one, (x, y, is_filled), (same_x, _, also) in zip(STATIONS.values(), memory, seconds, strict=True):
            assert x == same_x and is_filled == also == one.fits == (y > limit)
        for lane, of in ((memory, "memory_bytes"), (seconds, "step_s")):
            heights = {getattr(one, of): y for one, (_, y, _) in zip(STATIONS.values(), lane, strict=True)}
            assert [y for _, y in sorted(heights.items())] == sorted(heights.values(), reverse=True)


def test_a_bracket_has_the_difference_from_one_stop_to_the_next():
    figure = our_run(7, since=6)
    was, now = STATIONS[6], STATIONS[7]
    assert f"−{round(was.step_s, 1) - round(now.step_s, 1):.1f} s" in texts(figure), "of the numbers that are shown"
    assert f"−{(was.memory_bytes - now.memory_bytes) / 1e9:.0f} GB" in texts(figure)
    assert f"÷ {STATIONS[3].memory_bytes / STATIONS[4].memory_bytes:.2g}" in texts(our_run(4, since=3))
    for lane, bracket in zip(circles(figure.svg), paths(figure, stroke="text"), strict=True):
        (*_, (_, start, _), (_, end, _)), (_, top, _, bottom) = lane, bracket.box
        assert sorted((start, end)) == pytest.approx([top, bottom], abs=0.2)


def test_what_is_equal_has_no_bracket():
    equal = our_run(3, since=1), our_run(9, since=8)  # the same memory; the same seconds
    assert [len(paths(figure, stroke="text")) for figure in equal] == [1, 1]
    assert not paths(our_run(9), stroke="text")


def test_a_road_goes_on_with_layouts_of_ours():
    last = STATIONS[12]
    rows = road({"again": last.layout, "without a cut": STATIONS[3].layout})
    assert list(rows)[:-2] == list(road()) and rows["again"] == rows["12: ZB-V"]
    assert sum(rows["again"].values()) == pytest.approx(last.step_s) and list(rows)[-1] == "without a cut, too large"


def test_a_caption_names_the_parts_of_a_step():
    for after, one in STATIONS.items():
        for kind, words in KINDS.items():
            said = f"{one.seconds[kind]:.1f} s {words}" in our_run(after).caption
            assert said == (one.seconds[kind] > 0 and after > 1), (after, kind)
