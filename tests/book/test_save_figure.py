"""A picture that is saved from a page stands alone: its colours, its words, and where it is from."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from book.figures.mechanisms.split_backward import play_split_backward
from book.figures.schedule import draw_gantt
from book.figures.svg import css
from lib.pipeline.schedules.zero_bubble import zb_h1
from lib.pipeline.simulate import simulate

SCRIPT = Path(__file__).parents[2] / "book" / "static" / "save_figure.js"


@pytest.fixture
def page(opened):
    figures = draw_gantt(simulate(zb_h1(2, 3)), title="ZB-H1", alt="a")._repr_html_()
    figures += play_split_backward(2, 3)._repr_html_()
    style = f"<style>{css()} :root {{ --paper: #ffffff }}</style>"
    script = f"<script>{SCRIPT.read_text(encoding='utf-8')}</script>"
    return opened(f"<!doctype html><meta charset='utf-8'><title>Zero bubble</title>{style}{figures}{script}")


@pytest.mark.parametrize(("figure", "words"), [(0, "ZB-H1"), (1, "rank 1")])
def test_an_svg_needs_no_page(page, figure, words):
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save this picture as SVG").nth(figure).click()
    assert saved.value.suggested_filename == f"page-{figure + 1}.svg"
    text = Path(saved.value.path()).read_text(encoding="utf-8")
    found = [element.text for element in ElementTree.fromstring(text).iter() if element.tag.endswith("text")]
    assert words in found and any("Zero bubble" in (said or "") for said in found), "its words, and where it is from"
    assert "var(" not in text and re.search(r"fill=\"#0b5cad\"|fill: rgb\(11, 92, 173\)", text), (
        "with the page's colours"
    )


def test_a_png_is_a_picture(page):
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save this picture as PNG").first.click()
    content = Path(saved.value.path()).read_bytes()
    assert (
        saved.value.suggested_filename == "page-1.png" and content[:8] == b"\x89PNG\r\n\x1a\n" and len(content) > 5000
    )
