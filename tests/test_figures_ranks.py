"""Ranks on a board, and what of a step each of them has."""

import re

from lib.figures.ranks import draw_board, draw_nested, draw_rank
from lib.figures.svg import color


def texts(figure):
    return re.findall(r"<text[^>]*>([^<]*)</text>", figure.svg)


def test_a_board_has_a_frame_for_each_group():
    figure = draw_board(2, 3, row="a tp group", column="a dp group", alt="a", caption="c")
    assert [words for words in texts(figure) if words.startswith("rank")] == [f"rank {r}" for r in range(6)]
    assert texts(figure).count("a tp group") == 2 and texts(figure).count("a dp group") == 3
    across = {float(x) for x in re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="90"', figure.svg)}
    assert len(across) == 3 and (figure.alt, figure.caption) == ("a", "c")


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
    (first,) = re.findall(rf'<g fill="{re.escape(color("comm", True))}">(.*?)</g>', figure.svg)
    (others,) = re.findall(rf'<g fill="{re.escape(color("forward", True))}">(.*?)</g>', figure.svg)
    assert (first.count("<rect"), others.count("<rect")) == (2, 8 + 15 + 127)
