"""The picture that others show where someone passes on a link to a page: its title, and its first figure.

A page without a figure has the picture of the book, cover.png. `sphinxext.opengraph` writes the tags; a card of its own
has words only.
"""

import re
import struct
from html import escape, unescape
from pathlib import Path

from docutils import nodes
from matplotlib.figure import Figure as Sheet

from book.figures.raster import FONT, draw
from book.figures.svg import PALETTE, PAPER, lines_of

HERE = Path(__file__).parent
FOLDER = "previews"  # in the site
SIZE = 1200, 630  # pixels; a quarter of it is what a list of links shows
MARGIN, COLUMN = 48, 540  # pixels; the words stand in a column at the left
FIGURE = re.compile(r'<figure class="pbh-.*?</figure>', re.DOTALL)
NAMED = re.compile(r'aria-label="([^"]*)"')


def first_figure(doctree: nodes.document) -> str:
    """The HTML of the first figure of a page; empty if there is none."""
    found = (FIGURE.search(raw.astext()) for raw in doctree.findall(nodes.raw))
    return next((match[0] for match in found if match), "")


def alternative(figure: str) -> str:
    """The sentence that screen readers get for a figure. The box around a `Figure` is just called so."""
    return next(unescape(name) for name in NAMED.findall(figure) if name != "figure")


def size_of(png: Path) -> tuple[int, int]:
    """Width and height of a picture, in pixels, from the beginning of its file."""
    return struct.unpack(">2I", png.read_bytes()[16:24])


def card(title: str, book: str, figure: str) -> Sheet:
    """The title of a page, the name of the book, and a figure, large enough to be read at a quarter of its size."""
    width, height = SIZE
    sheet = Sheet(figsize=(width / 72, height / 72), dpi=72, facecolor=PAPER["light"])

    def write(words: str, left: float, top: float, size: float, weight: str = "normal") -> float:
        """As many lines as it takes; returns where they end."""
        wide = 1.05 if weight == "bold" else 1
        lines = lines_of(words, COLUMN - left, wide * size)
        look = {"family": FONT, "size": size, "weight": weight, "color": PALETTE["text"][0], "parse_math": False}
        for i, line in enumerate(lines):
            sheet.text(left / width, 1 - (top + size * (1 + 1.2 * i)) / height, line, **look)
        return top + 1.2 * size * len(lines)

    draw((HERE / "logo.svg").read_text(encoding="utf-8"), sheet, (MARGIN, MARGIN, 64, 64))
    if title != book:
        write(book, MARGIN + 84, MARGIN + 10, 36)
    subject, _, more = title.partition(": ")
    end = write(subject, MARGIN, 190, 60, "bold")
    if more:
        write(more, MARGIN, end + 20, 36)
    draw(figure, sheet, (COLUMN + MARGIN, MARGIN, width - COLUMN - 2 * MARGIN, height - 2 * MARGIN))
    return sheet


def show_preview(app, pagename, templatename, context, doctree):
    """Draw the card of a page, and say in its head where the card lies."""
    if doctree is None or app.builder.name != "html":
        return
    image, alt, size = app.config.ogp_image, app.config.ogp_image_alt, size_of(HERE / app.config.ogp_image)
    if figure := first_figure(doctree):
        image, alt, size = f"{FOLDER}/{pagename}.png", alternative(figure), SIZE
        path = Path(app.outdir) / image
        path.parent.mkdir(parents=True, exist_ok=True)
        card(app.env.titles[pagename].astext(), app.config.project, figure).savefig(path)
    width, height = map(str, size)
    tags = {"og:image": image, "og:image:alt": escape(alt), "og:image:width": width, "og:image:height": height}
    context["meta"] = {**(context.get("meta") or {}), **tags}


def setup(app):
    app.connect("html-page-context", show_preview, priority=400)  # before the extension that writes the og: tags
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
