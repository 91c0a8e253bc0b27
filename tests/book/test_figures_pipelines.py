"""Steps of pipelines: every setting of the chapters' Explorers can be read, on a page and on a phone."""

import re
from itertools import pairwise, product

import pytest

from book.figures.pipelines import GAP, HIGH, draw_bubble, draw_kept
from book.figures.svg import NARROW, color
from lib.pipeline.schedules.gpipe import gpipe
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.simulate import Costs, simulate
from tests.book.drawn import check_words

RANKS, MICROBATCHES, BACKWARDS = (2, 4, 8), (1, 2, 4, 8, 16), (1, 2)


def bubble_of(ranks, microbatches, backward=2):
    seen = simulate(gpipe(ranks, microbatches), Costs(F=1, I=backward / 2, W=backward / 2))
    return seen, draw_bubble(seen, title=f"One step of {ranks} ranks, {microbatches} microbatches", alt="a")


def kept_by_both(ranks, microbatches):
    both = [simulate(make(ranks, microbatches)) for make in (gpipe, one_f_one_b)]
    return both, draw_kept(both, title=f"One step of {ranks} ranks, {microbatches} microbatches", alt="a", most=16)


def height(svg):
    return float(re.search(r'viewBox="0 0 [\d.]+ ([\d.]+)"', svg)[1])


def blocks(svg, ink):
    """(left, middle, right) of each block of a colour."""
    group = rf'<g stroke="{re.escape(color(ink, True))}" [^>]*>(.*?)</g>'
    return [tuple(map(float, one)) for one in re.findall(r"M([\d.]+) ([\d.]+)H([\d.]+)", re.search(group, svg)[1])]


def numbers(svg):
    """What is written on blocks."""
    return [
        text
        for group in re.findall(r'<g [^>]*paint-order="stroke".*?</g>', svg)
        for text in re.findall(r">([^<>]+)</text>", group)
    ]


@pytest.mark.parametrize(("ranks", "microbatches", "backward"), list(product(RANKS, MICROBATCHES, BACKWARDS)))
def test_every_bubble_can_be_read(ranks, microbatches, backward):
    seen, figure = bubble_of(ranks, microbatches, backward)
    for svg in (figure.svg, figure.narrow):
        check_words(svg)
        for ink in ("forward", "backward"):
            found = blocks(svg, ink)
            assert len(found) == ranks * microbatches
            assert min(right - left for left, _, right in found) >= 2.5, "a block that can be seen"
        each, rows = [f"{slot.action.microbatch}" for slot in seen.compute], [f"0–{microbatches - 1}"] * 2 * ranks
        assert sorted(numbers(svg)) in (sorted(each), rows), "all blocks are numbered, or all rows of them"
        assert f">bubble {seen.bubble:.0%}</text>" in svg
    assert f'viewBox="0 0 {NARROW:g} ' in figure.narrow
    assert ">rank 0</text>" in figure.svg and ">rank 0</text>" not in figure.narrow, (
        "a phone has room for the number only"
    )


def test_wide_blocks_have_their_numbers_and_narrow_ones_the_first_and_the_last():
    assert sorted(numbers(bubble_of(2, 2)[1].svg)) == ["0"] * 4 + ["1"] * 4
    assert numbers(bubble_of(8, 16)[1].svg) == ["0–15"] * 16


def test_the_bubbles_part_of_the_area_is_its_part_of_the_time():
    seen, figure = bubble_of(8, 16)
    ground = float(re.search(rf'<rect [^>]*width="([\d.]+)" height="{HIGH / 8 - GAP:g}"', figure.svg)[1])
    covered = sum(right - left + 1 for ink in ("forward", "backward") for left, _, right in blocks(figure.svg, ink))
    assert covered / (8 * ground) == pytest.approx(1 - seen.bubble, abs=0.002)


@pytest.mark.parametrize("draw", [bubble_of, kept_by_both])
def test_frames_are_equally_high(draw):
    frames = [draw(ranks, microbatches)[1] for ranks, microbatches in product(RANKS, MICROBATCHES)]
    assert len({height(figure.svg) for figure in frames}) == len({height(figure.narrow) for figure in frames}) == 1


@pytest.mark.parametrize(("ranks", "microbatches"), list(product(RANKS, MICROBATCHES[1:])))
def test_a_tray_has_an_item_for_each_microbatch_that_is_kept(ranks, microbatches):
    both, figure = kept_by_both(ranks, microbatches)
    for svg in (figure.svg, figure.narrow):
        check_words(svg)
        (trays,) = re.findall(
            rf'<g stroke="{re.escape(color("activation", True))}" stroke-width="[\d.]+">(.*?)</g>', svg
        )
        kept = [timeline.peak(rank) for timeline in both for rank in range(ranks)]
        assert [len(re.findall(r"h[\d.]+", d)) for d in re.findall(r'd="([^"]*)"', trays)] == kept
        assert re.findall(r'font-weight="650">(\d+)</text>', svg) == [f"{count}" for count in kept]
        assert svg.count(f">bubble {both[0].bubble:.0%}</text>") == 2, "one bubble in both"
        assert min(right - left for ink in ("forward", "backward") for left, _, right in blocks(svg, ink)) >= 1


def test_both_schedules_are_on_one_clock():
    """What is done earlier ends farther to the left."""
    slow, fast = simulate(gpipe(4, 8)), simulate(gpipe(4, 8), Costs(F=0.5, I=0.5, W=0.5))
    svg = draw_kept([slow, fast], title="t", alt="a", most=16).svg
    found = blocks(svg, "backward")
    begin = min(left for left, *_ in blocks(svg, "forward"))
    (above, below) = (max(right for _, _, right in half) for half in (found[:32], found[32:]))
    assert (below + 1 - begin) / (above + 1 - begin) == pytest.approx(0.5, abs=0.005)


def test_the_line_follows_microbatch_0_there_and_back():
    _, figure = kept_by_both(4, 8)
    lines = re.findall(rf'<g stroke="{re.escape(color("text"))}"[^>]*>(.*?)</g>', figure.svg)
    paths = re.findall(r'd="M([^"]*)"', "".join(lines))
    assert len(paths) == 2
    (first, _, end), *_ = blocks(figure.svg, "forward")
    for path in paths:
        assert float(path.split()[0]) == pytest.approx((first + end + 1) / 2, abs=0.2), "it begins in the first block"
        ys = [float(point.split()[1]) for point in path.split("L")]
        assert len(ys) == 8 and ys[:4] == sorted(ys[:4]) and ys[4:] == ys[3::-1]
        xs = [float(point.split()[0]) for point in path.split("L")]
        assert all(a < b for a, b in pairwise(xs))
