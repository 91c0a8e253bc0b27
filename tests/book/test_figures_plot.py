"""Plots: marks are round, values lie where they should, and what matplotlib draws is the book's SVG."""

import itertools
import math
import warnings
from pathlib import Path

import matplotlib.style
import pytest

from book.figures.curves import draw_curves, draw_log_log
from book.figures.plot import Plot, marks
from book.figures.scatter import Dot, draw_scatter
from book.figures.svg import INK, color
from book.figures.timeline import draw_timeline
from tests.book.drawn import check_words, paths, texts

ROOT = Path(__file__).parents[2]


def plot(x=(0, 10), y=(0, 4), names=("x", "y"), **more) -> Plot:
    return Plot("A title", "alt", (400, 200), x, y, names, right=390, **more)


# ---- Marks


@pytest.mark.parametrize(
    ("low", "high"), [(0, 33), (0, 1), (-3, 4.2), (0.0001, 0.0002), (0, 1e9), (2.99, 3.01), (0, 0.3), (-1e-9, 7)]
)
def test_marks_are_few_round_and_inside(low, high):
    found = list(marks(low, high, 7))
    room = 1e-9 * max(abs(low), abs(high))
    assert 3 <= len(found) <= 8 and low - room <= found[0] and found[-1] <= high + room
    gaps = {round((b - a) / 10 ** math.floor(math.log10(b - a) + 1e-6), 6) for a, b in itertools.pairwise(found)}
    assert gaps <= {1, 2, 5} and len(gaps) == 1
    assert not any(words.startswith("-0") and float(words) == 0 for words in marks(low, high, 7).values())


def test_marks_are_written_as_people_do():
    assert ", ".join(marks(0.01, 2e7, 7, log=True).values()) == "0.01, 0.1, 1, 10, 100, 1 k, 10 k, 100 k, 1 M, 10 M"
    assert list(marks(1, 30, 7, log=True)) == [1, 2, 5, 10, 20], "few powers: twice and five times them, too"
    assert len(marks(21, 48, 7, log=True)) >= 2, "no power of ten, twice or five times it"
    assert list(marks(0, 1e4, 6).values()) == ["0", "2000", "4000", "6000", "8000", "10000"]


# ---- Places


@pytest.mark.parametrize(("log", "x", "y"), [(False, 2.5, 1), (True, 10, 10)])
def test_where_a_point_lies(log, x, y):
    """A quarter of the way across, and a quarter up."""
    axes = plot((1, 1e4), (1, 1e4), log=True) if log else plot()
    bottom = max(path.box[3] for path in paths(axes.figure("")) if path.paint.get("stroke") == color("rule"))
    assert axes.at(x, y) == pytest.approx(
        (axes.left + (axes.right - axes.left) / 4, bottom - (bottom - axes.top) / 4), abs=0.1
    )


def test_numbers_beside_and_below_an_axis_have_room():
    narrow, wide = (plot(y=(0, high)).left for high in (1, 1e5))
    assert wide - narrow > 15
    for figure in (
        plot(y=(0, 1e5)).figure(""),
        plot((1, 9e6), (1, 9e6), log=True).figure(""),
        Plot("", "", (400, 200), (0, 1e5), (0, 1), ("x", "y"), right=400).figure(""),
        draw_timeline([(0, "compute", "forward", "", 0, 0.004)], title="", alt=""),
    ):
        check_words(figure.svg)


def test_a_line_ends_at_the_axes():
    """What lies outside of the range that was asked for is not drawn over what stands there."""
    figure = draw_log_log({"a": ([1, 10, 100], [1, 1e6, 1])}, x="x", y="y", title="", alt="", height_range=(1, 1e3))
    left, top, right, bottom = paths(figure, stroke="series-0")[0].box
    levels = [path.box[1] for path in paths(figure, stroke="rule")]
    assert (top, bottom) == pytest.approx((min(levels), max(levels)), abs=1.1)


def test_one_value_is_enough():
    with warnings.catch_warnings(action="error"):
        figures = (
            draw_log_log({"a": ([5], [5])}, x="x", y="y", title="", alt=""),
            draw_scatter({"a": [Dot(5, 5)]}, x="x", y="y", title="", alt="", log=True, equal=True),
            draw_scatter({"a": [Dot(5, 5)], "none": []}, x="x", y="y", title="", alt=""),
        )
    assert not any("nan" in figure.svg for figure in figures)


# ---- SVG


def test_words_are_text_as_it_is_written():
    words = "costs $5 or $6 \\alpha a_b <&>"
    figure = draw_curves({words: [1, 2]}, x=(words, "b"), y=words, title=words, alt="", reference={words: 1.5})
    found = sorted(text for text in texts(figure) if text.startswith("costs"))
    assert found == [words] * 4 + [f"{words} 1.5"], "the curve's name, those of both axes, the title, the reference"
    assert "<use" not in figure.svg and "<style" not in figure.svg and " id=" not in figure.svg


def test_an_area_is_written_with_its_corners():
    axes = plot()
    axes.axes.fill_between([0, 1, 2, 3, 4], [1, 1, 4, 2, 2], step="post", color=INK["forward"], linewidth=0)
    (area,) = paths(axes.figure(""), fill="forward")
    ((start, *corners),) = area.lines
    for corner in [(0, 0), (0, 1), (2, 1), (2, 4), (3, 4), (3, 2), (4, 2), (4, 0)]:
        assert any(point == pytest.approx(axes.at(*corner), abs=0.15) for point in corners), corner
    twice = sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in itertools.pairwise([start, *corners, start]))
    across, up = (abs(b - a) for a, b in zip(axes.at(0, 0), axes.at(1, 1), strict=True))
    assert abs(twice) / 2 == pytest.approx((1 + 1 + 4 + 2) * across * up, rel=0.01)


def draw_all() -> list[str]:
    dots = {"a": [Dot(1, 2), Dot(2, 3)], "b": [Dot(2, 2)]}
    return [
        draw_curves(
            {"a": [1, 2], "b": [2, 1], "c": [3, 3]}, x="x", y="y", title="t", alt="a", reference={"r": 1}
        ).svg,
        draw_log_log({"a": ([1, 9], [1, 9]), "b": ([1, 9], [9, 1])}, x="x", y="y", title="t", alt="a").svg,
        draw_scatter(dots, x="x", y="y", title="t", alt="a", limit=("here", 1.5)).svg,
    ]


def test_a_style_chosen_for_other_plots_changes_nothing():
    before = draw_all()
    for style in ("ggplot", "dark_background", "Solarize_Light2"):
        with matplotlib.style.context(style):
            assert draw_all() == before, style
