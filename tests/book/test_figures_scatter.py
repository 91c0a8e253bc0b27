"""Dots over two axes."""

import pytest

from book.figures.scatter import Dot, draw_scatter
from tests.book.drawn import check_words, parse, paths

SAID = {"x": "GB", "y": "s", "title": "Layouts", "alt": "Two groups of dots."}


def test_each_dot_is_a_mark_with_its_words_and_its_address():
    groups = {
        "fits": [Dot(1, 2, "tp 8", "https://example.org/?a=1&b=2"), Dot(3, 4, "tp <4>")],
        "too large": [Dot(5, 1)],
    }
    figure = draw_scatter(groups, **SAID, limit=("4 GB", 4))
    dots = [path for path in paths(figure) if path.paint.get("fill-opacity") == "0.8"]
    assert len(dots) == 3 + len(groups), "dots, and a sample of each group"
    assert [path.tip for path in paths(figure) if path.tip] == ["tp 8", "tp <4>"]
    assert [link.get("href") for link in parse(figure).iter("a")] == ["https://example.org/?a=1&b=2"]
    assert parse(figure).get("role") == "group"
    assert "fits (2)" in figure.svg and "4 GB" in figure.svg


def test_equal_numbers_lie_on_the_diagonal():
    figure = draw_scatter({"runs": [Dot(1, 1), Dot(10, 10), Dot(100, 100)]}, **SAID, log=True, equal=True)
    (line,) = [path.lines[0] for path in paths(figure, stroke="soft") if "stroke-dasharray" in path.paint]
    (x0, y0), (x1, y1) = line
    dots = [path.middle for path in paths(figure, fill="series-0") if path.middle[0] >= x0]
    assert len(dots) == 3
    for x, y in dots:
        assert (y - y0) / (y1 - y0) == pytest.approx((x - x0) / (x1 - x0), abs=0.002)


def test_groups_differ_in_color_and_in_shape():
    figure = draw_scatter({str(i): [Dot(i, i)] for i in range(8)}, **SAID)
    dots = [path for path in paths(figure) if path.paint.get("fill-opacity") == "0.8"][:8]
    looks = {(path.paint["fill"], len(path.lines[0])) for path in dots}
    assert len({fill for fill, _ in looks}) == 8
    assert len({corners for _, corners in looks}) >= 3, "a circle, a square or diamond, a triangle"
    assert max(right - left for left, _, right, _ in (path.box for path in dots)) < 13


def test_names_of_many_groups_have_lines_above_the_axes():
    figure = draw_scatter({f"a group with a rather long name {i}": [Dot(i, i)] for i in range(8)}, **SAID)
    check_words(figure.svg)
    names = {float(t.get("y")) for t in parse(figure).iter("text") if "rather long" in t.text}
    assert len(names) > 1 and max(names) < min(path.box[1] for path in paths(figure, stroke="rule")) - 20


@pytest.mark.parametrize("groups", [{}, {"none": []}, {str(i): [Dot(1, 1)] for i in range(9)}])
def test_what_cannot_be_told_apart_is_refused(groups):
    with pytest.raises(ValueError, match="draw at least a dot, in at most 8 groups"):
        draw_scatter(groups, **SAID)


def test_a_logarithm_needs_numbers_above_zero():
    with pytest.raises(ValueError, match="finite numbers above 0"):
        draw_scatter({"a": [Dot(0, 1)]}, **SAID, log=True)
