"""What extensions share: directives for what Markdown cannot say, their scripts, and tables."""

from collections.abc import Callable, Iterable
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive

ROOT = Path(__file__).resolve().parent.parent


class Place(nodes.General, nodes.Element):
    """Stands where something will be that is made of all pages."""


def places(doctree: nodes.document, name: str) -> list[Place]:
    return [place for place in doctree.findall(Place) if place["name"] == name]


def add_place(app, name: str, fill: Callable[[object, str], nodes.Node]) -> None:
    """Where a page says `{name}`, `fill(app, page)` stands, called when all pages have been read."""

    class PlaceDirective(Directive):
        def run(self):
            return [Place(name=name)]

    def put(app, doctree, page):
        for place in places(doctree, name):
            place.replace_self(fill(app, page))

    app.add_directive(name, PlaceDirective)
    app.connect("doctree-resolved", put)


def add_live_page(app, name: str, html: Callable[[], str], used: Iterable[str], scripts: Iterable[str]) -> dict:
    """Where a page says `{name}`, `html()` stands, and the scripts are loaded; what an extension's `setup` returns.

    Args:
        used: patterns of files in the repository; the page is built again when one of them changes.
    """

    class Live(Directive):
        def run(self):
            for pattern in used:
                for path in ROOT.glob(pattern):
                    self.state.document.settings.env.note_dependency(str(path))
            return [nodes.raw("", html(), format="html", classes=[name])]

    def add_scripts(app, pagename, templatename, context, doctree):
        if doctree and any(name in node["classes"] for node in doctree.findall(nodes.raw)):
            for script in scripts:
                app.add_js_file(script, loading_method="defer")

    app.add_directive(name, Live)
    app.connect("html-page-context", add_scripts)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def table(name: str, head: Iterable[str], rows: Iterable[str]) -> str:
    """In a box of the theme that can be scrolled; each row is HTML."""
    titles = "".join(f'<th scope="col">{word}</th>' for word in head)
    return (
        f'<div class="pst-scrollable-table-container"><table class="{name}"><thead><tr>{titles}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
