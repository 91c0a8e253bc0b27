"""The picture of a page that others show beside its address: what it shows, and what the head says of it."""

import numpy as np
import pytest
from bs4 import BeautifulSoup
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from book.figures.mechanisms.split_backward import play_split_backward
from book.figures.schedule import draw_gantt
from book.figures.svg import PALETTE, PAPER
from lib.pipeline.schedules.zero_bubble import zb_h1
from lib.pipeline.simulate import simulate
from tests.book.book_project import build, load

previews = load("book_previews")
BASE = "https://org.example/book/"


def gantt():
    return draw_gantt(simulate(zb_h1(2, 3)), title="ZB-H1", alt='Two "ranks" &amp; <wait>.')


def share(picture: np.ndarray, color: str) -> float:
    """How much of a picture has a colour."""
    return float(np.isclose(picture[..., :3], to_rgb(color), atol=0.01).all(axis=-1).mean())


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    figure = f"<div>{gantt()._repr_html_()}</div>"
    later = f"<div>{play_split_backward(2, 3)._repr_html_()}</div>"
    pages = {
        "index": "# Book\n\nIt has pages.\n\n```{toctree}\na/drawn\n```\n",
        "a/drawn": f"# Zero bubble: a *title*\n\nText.\n\n{figure}\n\n{later}\n",
    }
    tags = {"ogp_site_url": BASE, "ogp_image": "cover.png", "ogp_image_alt": "The book."}
    return build(tmp_path_factory.mktemp("site"), pages, ["book_previews", "sphinxext.opengraph"], **tags)


def tags_of(site, page: str) -> dict[str, str]:
    head = BeautifulSoup((site / f"{page}.html").read_text(encoding="utf-8"), "html.parser").head
    return {tag["property"]: tag["content"] for tag in head.find_all("meta", property=True)}


def test_a_page_says_where_the_picture_of_its_first_figure_lies(site):
    tags = tags_of(site, "a/drawn")
    assert tags["og:title"] == "Zero bubble: a title" and tags["og:description"].startswith("Text.")
    assert tags["og:image"] == f"{BASE}previews/a/drawn.png" and tags["og:image:alt"] == 'Two "ranks" &amp; <wait>.'
    height, width, _ = imread(site / "previews" / "a" / "drawn.png").shape
    assert (tags["og:image:width"], tags["og:image:height"]) == (str(width), str(height)) == ("1200", "630")


def test_a_page_without_a_figure_keeps_the_cover(site):
    tags = tags_of(site, "index")
    assert (tags["og:image"], tags["og:image:alt"]) == (f"{BASE}cover.png", "The book.")
    height, width, _ = imread(previews.HERE / "cover.png").shape
    assert (tags["og:image:width"], tags["og:image:height"]) == (str(width), str(height))
    assert [path.name for path in (site / "previews").rglob("*.png")] == ["drawn.png"]


def test_the_picture_has_the_figure_in_the_colours_of_the_light_theme(site):
    picture = imread(site / "previews" / "a" / "drawn.png")
    words, figure = picture[:, : previews.COLUMN], picture[:, previews.COLUMN :]
    for name in ("forward", "backward", "weight"):
        assert share(figure, PALETTE[name][0]) > 0.01, name
        assert share(words[150:], PALETTE[name][0]) == 0, name
    assert share(words, PALETTE["text"][0]) > 0.02 and share(picture, PAPER["light"]) > 0.6
    assert share(picture[:, -24:], PAPER["light"]) == 1, "nothing is cut off"


@pytest.mark.parametrize(
    "title", ["Interleaving", "Sequence parallelism: sharding activations between tensor-parallel layers"]
)
def test_a_title_can_be_read_at_a_quarter_and_stays_beside_the_figure(title):
    sheet = previews.card(title, "Parallel by Hand", gantt()._repr_html_())
    sheet.draw_without_rendering()
    book, subject, *_ = words = sheet.texts
    assert " ".join(text.get_text() for text in words[1:]) == title.replace(":", "")
    assert min(text.get_size() for text in words) >= 36 and subject.get_size() >= 60  # 9 and 15 pixels at a quarter
    boxes = [text.get_window_extent() for text in words]
    assert max(box.x1 for box in boxes) < previews.COLUMN and min(box.y0 for box in boxes) > 24
    assert all(above.y0 > below.y0 + 36 for above, below in zip(boxes, boxes[1:], strict=False))
