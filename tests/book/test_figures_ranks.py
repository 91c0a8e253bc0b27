"""Ranks on a mesh, what of a step each of them has, and groups in groups."""

import re

from book.figures.ranks import draw_boxes, draw_nested, draw_rank, draw_sums
from book.figures.svg import color
from tests.book.drawn import texts


def test_a_rank_on_a_mesh_has_one_partner_on_each_long_axis():
    figure = draw_rank(2, {"dp": 2, "pp": 2, "tp": 2}, alt="a", caption="c")
    frames = re.findall(r'<rect [^>]*width="144"[^>]*stroke="([^"]*)" stroke-width="3"', figure.svg)
    order = [color(name) for name in ("activation", "text", "comm", "gradient")]  # of the ranks 0, 2, 3 and 6
    assert frames == order and len(re.findall(r'<rect [^>]*width="144"', figure.svg)) == 8
    words = texts(figure)
    assert {"pp: activations", "tp: sums", "dp: gradients", "you are here"} <= set(words) and words.count(
        "stage 1"
    ) == 4
    alone = texts(draw_rank(0, {"dp": 1, "pp": 3, "tp": 1}, alt="a"))
    assert alone.count("pp: activations") == 2 and "copy 0: 1/1 of the batch" in alone


def test_groups_in_groups_have_as_many_tiles_as_they_have_members():
    figure = draw_nested([("tp", 8, "a node"), ("pp", 16, ""), ("dp", 128, "")], alt="a")
    (first,) = re.findall(rf'<g fill="{re.escape(color("series-0", True))}">(.*?)</g>', figure.svg)
    (others,) = re.findall(rf'<g fill="{re.escape(color("series-1", True))}">(.*?)</g>', figure.svg)
    assert (first.count("<rect"), others.count("<rect")) == (2, 8 + 15 + 127)


def test_each_rank_adds_or_holds_the_same_or_something_else():
    figure = draw_sums({"a norm": ((0, 4), (0, 1, 4, 5)), "a matrix": ((0, 4), (0, 4))}, 8, title="t", alt="a")
    assert [texts(figure).count(sign) for sign in "+="] == [4, 2]
    assert figure.svg.count('fill="none"') == 2 * 8 - 6


def test_a_rank_reads_each_box_that_overlaps_its_rows():
    said = texts(draw_boxes(2, 3, 12, title="t", alt="a"))
    assert [words for words in said if "box" in words] == ["reads 2 boxes", "box of rank 0", "box of rank 1"]
    assert not [words for words in texts(draw_boxes(2, 4, 12, title="t", alt="a")) if "reads" in words]
