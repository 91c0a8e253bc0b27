"""Dots over two axes."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from lib.figures.scatter import Dot, draw_scatter

SAID = {"x": "GB", "y": "s", "title": "Layouts", "alt": "Two groups of dots."}


def test_each_dot_is_a_mark_with_its_words_and_its_address():
    groups = {
        "fits": [Dot(1, 2, "tp 8", "https://example.org/?a=1&b=2"), Dot(3, 4, "tp <4>")],
        "too large": [Dot(5, 1)],
    }
    figure = draw_scatter(groups, **SAID, limit=("4 GB", 4))
    picture = ElementTree.fromstring(figure.svg)
    space = "{http://www.w3.org/2000/svg}"
    marks = [path for path in picture.iter(space + "path") if path.get("fill-opacity")]
    assert len(marks) == 3 + len(groups), "dots, and a sample of each group"
    assert [title.text for title in picture.iter(space + "title")] == ["tp 8", "tp <4>"]
    assert [link.get("href") for link in picture.iter(space + "a")] == ["https://example.org/?a=1&b=2"]
    assert "fits (2)" in figure.svg and "4 GB" in figure.svg


def test_equal_numbers_lie_on_the_diagonal():
    figure = draw_scatter({"runs": [Dot(1, 1), Dot(10, 10), Dot(100, 100)]}, **SAID, log=True, equal=True)
    line = re.search(r'd="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)"', figure.svg)
    x0, y0, x1, y1 = map(float, line.groups())
    dots = re.findall(r'd="M([\d.]+) ([\d.]+)m-4\.5', figure.svg)[1:]
    assert len(dots) == 3
    for x, y in ((float(x), float(y)) for x, y in dots):
        assert (y - y0) / (y1 - y0) == pytest.approx((x - x0) / (x1 - x0), abs=0.002)


@pytest.mark.parametrize("groups", [{}, {"none": []}, {str(i): [Dot(1, 1)] for i in range(9)}])
def test_what_cannot_be_told_apart_is_refused(groups):
    with pytest.raises(ValueError, match="draw at least a dot, in at most 8 groups"):
        draw_scatter(groups, **SAID)


def test_a_logarithm_needs_numbers_above_zero():
    with pytest.raises(ValueError, match="finite numbers above 0"):
        draw_scatter({"a": [Dot(0, 1)]}, **SAID, log=True)
