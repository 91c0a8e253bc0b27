"""Sections and pages that moved: an address that a reader kept leads to the place where it is today.

The problem: a page that grew too long becomes two, or two become one, and links in mails, notes and bookmarks name the
old places. A server redirects pages, but the part of an address after `#` never reaches it, and a book on a disk has no
server. The idea: `moved.toml` has the old and the new place of each section, and a script on the old page leads on. Of
a page that is no more, only such a script is left. A place that no page has stops the build.
"""

import json
import re
import tomllib
from html import escape
from pathlib import Path

from docutils import nodes

MOVED = Path(__file__).with_name("moved.toml")
# What is left of a page that is no more. The end of an address (a section, a schedule) goes along.
LEFT = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><meta name="robots" content="noindex">
<script>location.replace("{to}" + location.hash);</script>
<noscript><meta http-equiv="refresh" content="0; url={to}"></noscript></head>
<body><p><a href="{to}">{title}</a></p></body></html>
"""
ADDRESS = re.compile(r'data-address="([^"]+)"')  # of an Explorer, whose setting can be in an address


def moved_places() -> dict[str, dict[str, str]]:
    return tomllib.loads(MOVED.read_text(encoding="utf-8"))


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
    moved = moved_places().get(pagename)
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


def leave_pages(app, exception):
    if exception is not None or app.builder.name != "html":
        return
    gone = {page: moved[""] for page, moved in moved_places().items() if "" in moved}
    for page, to in gone.items():
        if to not in app.env.found_docs:
            continue  # a few chapters are built alone
        target = Path(app.builder.get_outfilename(page))
        target.parent.mkdir(parents=True, exist_ok=True)
        title, link = escape(app.env.titles[to].astext()), app.builder.get_relative_uri(page, to)
        target.write_text(LEFT.format(title=title, to=link), encoding="utf-8")


def setup(app):
    app.connect("html-page-context", lead_on)
    app.connect("build-finished", leave_pages)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
