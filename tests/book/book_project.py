"""A Sphinx project of a few lines, to try one of the book's extensions on."""

import sys
from importlib import import_module
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace

BOOK = Path(__file__).resolve().parents[2] / "book"


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


def check_live_page(folder: Path, extension, directive: str) -> None:
    """Raises AssertionError unless a page with the directive, and no other, has its HTML and its scripts."""
    pages = {"index": "# Home\n\n```{toctree}\nlive\n```\n", "live": f"# Live\n\n```{{{directive}}}\n```\n"}
    out = build(folder, pages, [extension.__name__], html_static_path=[str(BOOK / "static")])
    built = {name: (out / f"{name}.html").read_text() for name in pages}
    assert extension.html() in built["live"]
    for script in extension.SCRIPTS:
        assert f'defer="defer" src="_static/{script}' in built["live"] and script not in built["index"]
