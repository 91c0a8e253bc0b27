"""The page of all claims: what the chapters predicted and measured while this very book was built.

Each claim of a chapter is a line in the file $BOOK_CLAIMS (see lib/lab/claims.py). The chapters were executed before,
two at a time, so the lines of two of them are mixed.
"""

import json
import os
import re
from html import escape, unescape
from itertools import groupby
from pathlib import Path

from docutils import nodes
from live_page import add_place, table

from lib.lab.claims import BUSY

HEAD, MEASURED = ("quantity", "formula", "measured", "agrees"), ("predicted", "measured")


def records() -> list[dict]:
    path = Path(os.environ.get("BOOK_CLAIMS", "/dev/null"))
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return sorted(map(json.loads, lines), key=lambda record: record["page"])


def sections(doctree: nodes.document) -> dict[str, str]:
    """Claim to the id of the section whose output shows it."""
    found = {}
    for raw in doctree.findall(nodes.raw):
        if 'class="claims"' in raw.astext():
            section = raw.parent
            while not isinstance(section, nodes.section):
                section = section.parent
            for row in re.findall(r"<tr><td>(.*?)</td>", raw.astext()):
                found.setdefault(unescape(row), section["ids"][0])
    return found


def claims(app, here: str) -> nodes.raw:
    found = records()
    if not found:
        return nodes.raw("", "<p>No chapter made a claim in this build.</p>", format="html")
    conditions = "; ".join(sorted({f"{record['machine']}, {record['versions']}" for record in found}))
    rows = []
    for page, of_page in groupby(found, key=lambda record: record["page"]):
        name = page.removesuffix(".ipynb")
        title = escape(app.env.titles[name].astext()) if name in app.env.titles else escape(page)
        link = app.builder.get_relative_uri(here, name)
        shown_in = sections(app.env.get_doctree(name)) if name in app.env.titles else {}
        rows.append(f'<tr><th scope="rowgroup" colspan="4"><a href="{link}">{title}</a></th></tr>')
        for record in of_page:
            claim = escape(record["claim"])
            if record["claim"] in shown_in:
                claim = f'<a href="{link}#{shown_in[record["claim"]]}">{claim}</a>'
            cells = "".join(f"<td>{text}</td>" for text in (claim, *(escape(record[key]) for key in MEASURED)))
            kind = "busy" if record["verdict"] == BUSY else "ok"
            rows.append(f'<tr>{cells}<td class="{kind}">{escape(record["verdict"])}</td></tr>')
    busy = sum(record["verdict"] == BUSY for record in found)
    hold = f"{len(found) - busy} claims hold" + f"; {busy} more {BUSY}" * bool(busy)
    said = f"<p>{hold}. Measured on {escape(conditions)}.</p>"
    return nodes.raw("", said + table("claims", HEAD, rows), format="html")


def setup(app):
    add_place(app, "claims", claims)
    return {"version": "1", "parallel_read_safe": False}
