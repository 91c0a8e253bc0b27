"""A drawing as pixels is what a browser shows: shapes, colours, words, and what a player's stylesheet says."""

import re
from io import BytesIO

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Sheet
from matplotlib.image import imread

from book.figures.canvas import Canvas
from book.figures.mechanisms.deadlock import play_deadlock
from book.figures.mechanisms.fsdp_units import play_fsdp_units
from book.figures.raster import FONT, draw
from book.figures.scatter import Dot, draw_scatter
from book.figures.schedule import draw_gantt
from book.figures.svg import OUTLINE, css
from lib.pipeline.schedules.zero_bubble import zb_h1
from lib.pipeline.simulate import simulate

DOTS = {"fits": [Dot(x, 7 + x % 9, "tip", "#page") for x in range(1, 70, 3)], "too large": [Dot(90, 9)]}
AXES = {"x": "GB", "y": "seconds", "limit": ("80 GB", 80)}
FIGURES = {
    "bars, hatching, frames": lambda: draw_gantt(
        simulate(zb_h1(2, 3)), predicted=simulate(zb_h1(2, 3)), title="A title", alt="a"
    ),
    "axes and curves": lambda: draw_scatter(DOTS, **AXES, title="A dot per layout", alt="a"),
    "a player": lambda: play_deadlock(["x of 0", "x of 1"]),
    "pale things": lambda: play_fsdp_units([3, 1, 2], 4),
}
ALONE = f"body{{margin:0;width:340px}}figure{{background:#fff!important}}*{{font-family:{FONT}!important}}"
AT_ITS_SIZE = "s => { s.style = `display:block;width:${s.viewBox.baseVal.width}px;max-width:none` }"


def in_browser(browser, html: str) -> np.ndarray:
    """The drawing for a phone, each of its pixels one of the screen."""
    page = browser.new_page(viewport={"width": 400, "height": 900})
    still = re.sub("<script.*?</script>", "", html, flags=re.DOTALL)
    page.set_content(f"<!doctype html><style>{css()}{ALONE}</style>{still}")
    svg = page.locator("svg:visible").first
    svg.evaluate(AT_ITS_SIZE)
    picture = imread(BytesIO(svg.screenshot()))[..., :3]
    page.close()
    return picture


def drawn(html: str, width: int, height: int) -> np.ndarray:
    sheet = Sheet(figsize=(width / 72, height / 72), dpi=72, facecolor="white")
    draw(html, sheet, (0, 0, width, height))
    canvas = FigureCanvasAgg(sheet)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3] / 255


def blurred(picture: np.ndarray, side: int = 6) -> np.ndarray:
    """Means of squares: letters differ in their edges, and not in their place."""
    height, width = (length // side * side for length in picture.shape[:2])
    return picture[:height, :width].reshape(height // side, side, width // side, side, 3).mean(axis=(1, 3))


@pytest.mark.parametrize("name", FIGURES)
def test_it_is_what_a_browser_shows(browser, name):
    html = FIGURES[name]()._repr_html_()
    shown = in_browser(browser, html)
    there = drawn(html, *shown.shape[1::-1])
    apart = np.abs(blurred(shown) - blurred(there)).max(axis=-1)
    assert apart.mean() < 0.02 and (apart > 0.2).mean() < 0.01


def test_corners_are_round_frames_dashed_and_idle_time_hatched():
    canvas = Canvas("a")
    canvas.rect(0, 0, 10, 10, radius=5, fill="#000000")
    canvas.rect(21, 1, 18, 8, fill="none", **OUTLINE)
    canvas.rect(40, 0, 10, 10, fill=canvas.hatched)
    circle, frame, idle = np.split(
        drawn(canvas.figure(60, 10)._repr_html_(), 600, 100).min(axis=-1)[:, :600], [200, 400], 1
    )
    assert circle[5, 5] == 1 and circle[50, 5] == circle[50, 50] == 0, "a circle"
    edge = frame[10, 20:180] < 0.5
    assert 0.4 < edge.mean() < 0.9 and np.diff(edge).sum() >= 3
    stripes = idle[50, 5:95] < 0.9
    assert 0.15 < stripes.mean() < 0.5 and np.diff(stripes).sum() >= 4


def test_an_element_that_is_not_known_is_named():
    svg = '<svg viewBox="0 0 9 9"><g><circle r="3"/></g></svg>'
    with pytest.raises(ValueError, match="<circle>"):
        drawn(svg, 9, 9)
