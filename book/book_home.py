"""Cards of the chapters for the first page: `{cards}` becomes a list of them, each with its chapter's first picture.

The pictures are those of the chapters in this very build, as they stand still. A chapter without one has words alone.
"""

import re
from html import escape

from book_pages import lead_of
from docutils import nodes
from live_page import add_place

from book.figures.player import STYLE

CHAPTER = re.compile(r"chapters/(\d\d)_")
PICTURES = re.compile(  # what can be played; any other figure
    r'<svg class="pbh-wide".*?</svg>|<figure class="pbh-figure".*?(<svg.*?</svg>)', re.DOTALL
)
NAMES = re.compile(r' (?:role|aria-label|class|tabindex)="[^"]*"')


def picture(doctree: nodes.document) -> str:
    """The page's first picture, without a name: its card has one."""
    for raw in doctree.findall(nodes.raw):
        if found := PICTURES.search(raw.astext()):
            opening, rest = (found[1] or found[0]).split(">", 1)
            return f'{NAMES.sub("", opening)} aria-hidden="true">{rest}'
    return ""


def question(doctree: nodes.document) -> str:
    """The first question of the page's lead; or its first sentence."""
    sentences = re.split(r"(?<=[.?]) ", lead_of(doctree))
    return next((sentence for sentence in sentences if sentence.endswith("?")), sentences[0])


def card(app, home: str, page: str) -> str:
    doctree = app.env.get_doctree(page)
    number, title = int(CHAPTER.match(page)[1]), escape(app.env.titles[page].astext())
    link = app.builder.get_relative_uri(home, page)
    return (
        f'<li><a href="{link}"><span class="picture">{picture(doctree)}</span>'
        f"<b>{number} · {title}</b><span>{escape(question(doctree))}</span></a></li>"
    )


def cards(app, page: str) -> nodes.raw:
    pages = [one for one in app.env.toctree_includes.get(app.config.root_doc, []) if CHAPTER.match(one)]
    made = "".join(card(app, page, one) for one in pages)
    return nodes.raw("", f'<style>{STYLE}</style><ul class="cards">{made}</ul>', format="html")


def setup(app):
    add_place(app, "cards", cards)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
