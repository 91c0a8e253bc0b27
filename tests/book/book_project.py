"""A Sphinx project of a few lines, to try one of the book's extensions on."""

import sys
from importlib import import_module
from pathlib import Path

from bs4 import BeautifulSoup
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace

BOOK = Path(__file__).resolve().parents[2] / "book"
AXE = Path(__file__).with_name("vendor") / "axe.min.js"


def load(name: str):
    """An extension of book/, as Sphinx finds it."""
    if str(BOOK) not in sys.path:
        sys.path.append(str(BOOK))
    return import_module(name)


def build(folder: Path, pages: dict[str, str], extensions: list[str], **config) -> Path:
    """Write the pages (name to MyST, or to what its end says), build them; returns where the HTML lies."""
    for name in extensions:
        load(name)
    for name, text in pages.items():
        path = folder / (name if "." in name else f"{name}.md")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    settings = {
        "extensions": ["myst_parser", *extensions] if "myst_nb" not in extensions else extensions,
        "source_suffix": {".rst": "restructuredtext"},  # not the default: it would keep what parsers add to it
        "myst_enable_extensions": ["dollarmath"],
        "project": "Tiny",
        "html_theme": "basic",
        "suppress_warnings": ["myst.header"],
        **config,
    }
    out = folder / "_build"
    with docutils_namespace():
        app = Sphinx(folder, None, out, folder / "_doctrees", "html", settings, status=None, warningiserror=True)
        app.build()
    assert app.statuscode == 0
    return out


def soup(site: Path, page: str) -> BeautifulSoup:
    return BeautifulSoup((site / f"{page}.html").read_text(encoding="utf-8"), "html.parser")


def violations(page) -> list[str]:
    """What axe finds that somebody cannot read or reach."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    return page.evaluate("axe.run().then(r => r.violations.map(v => v.id + ': ' + v.nodes[0].html.slice(0, 200)))")


def live_html(extension) -> str:
    """What an extension puts into its page, with its scripts."""
    scripts = (f'<script src="{(BOOK / "static" / name).as_uri()}"></script>' for name in extension.SCRIPTS)
    return extension.html() + "".join(scripts)
