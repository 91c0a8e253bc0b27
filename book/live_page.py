"""What pages that live in the browser share: a directive that puts in their HTML, and their own scripts."""

from collections.abc import Callable, Iterable
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive

ROOT = Path(__file__).resolve().parent.parent


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
