"""Sections that moved to a different page: an address that a reader kept leads to the section where it is today.

The problem: a page that grew too long becomes two, and links in mails, notes and bookmarks name sections of the first.
A server redirects pages, but the part of an address after `#` never reaches it. The idea: `moved.toml` has the old and
the new place of each section, and a script on the old page leads on. A place that no page has stops the build.
"""

import json
import re
import tomllib
from pathlib import Path

from docutils import nodes

MOVED = Path(__file__).with_name("moved.toml")
ADDRESS = re.compile(r'data-address="([^"]+)"')  # of an Explorer, whose setting can be in an address


def places_on(app, page: str) -> set[str]:
    """The ends of all addresses on a page: its sections, and its Explorers."""
    tree = app.env.get_doctree(page)
    found = {name for node in tree.findall(nodes.Element) for name in node.get("ids", [])}
    return found.union(*(ADDRESS.findall(raw.astext()) for raw in tree.findall(nodes.raw)))


def lead_on(app, pagename, templatename, context, doctree):
    """
    Raises:
        ValueError: a section that is still on its old page, or that the new page lacks.
    """
    moved = tomllib.loads(MOVED.read_text(encoding="utf-8")).get(pagename)
    if moved is None:
        return
    links = {}
    for section, to in moved.items():
        page, _, place = to.partition("#")
        if page not in app.env.found_docs:
            continue  # a few chapters are built alone
        if place not in places_on(app, page) or section in places_on(app, pagename):
            raise ValueError(f"moved.toml: {pagename}#{section} is said to be {to} now; give the places of today")
        links[section] = f"{app.builder.get_relative_uri(pagename, page)}#{place}"
    app.add_js_file(None, body=f"const movedSections = {json.dumps(links)};")
    app.add_js_file("moved_sections.js", loading_method="defer")


def setup(app):
    app.connect("html-page-context", lead_on)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
