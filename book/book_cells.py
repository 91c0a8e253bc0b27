"""Folded code: what the kinds of cells become on a page.

A notebook says by a cell's tag what its code is, and by the cell's first line, `#@title ...`, under which words it is
folded (tools/notebooks.py puts that line there; Colab shows it too). On the page an evidence cell is one line that
opens to its claims, a figure leads and its code follows, imports are one line. A section has one such line, which opens
to everything that was measured and drawn there. All of it is `<details>`: it opens without a script. The script of the
switch, which opens all code at once, comes with the pages that have such cells.
"""

import re
from html import escape

from docutils import nodes

from lib.lab.claims import BUSY

TITLE = re.compile(r"\A#@title (.*)\n")
# The comment at the top of a cell that says what its claims mean.
MEANING = re.compile(r"\A# ((?:Measured|Modelled|Emulated): .*(?:\n# .*)*)\n")
SAID = re.compile(r"</span> (Measured|Modelled|Emulated): ")  # in the line of a cell
CLAIM = re.compile(
    r'<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td><td class="(ok|busy|bad)">(.*?)</td></tr>', re.DOTALL
)
DEEPER = "Going deeper"
DEEPER_LINE = "Optional, and not counted in the minutes to read"


class Folded(nodes.General, nodes.Element):
    """A line of HTML that opens to the node's children; `open` where they are seen from the start."""


def visit_folded(self, node):
    classes, is_open = " ".join(node["classes"]), " open" * node.get("open", False)
    self.body.append(f'<details class="{classes}"{is_open}><summary>{node["line"]}</summary>\n')


def depart_folded(self, node):
    self.body.append("</details>\n")


def say_measured(html: str, meaning: str = "") -> str:
    """The line for the claims in a cell's output, with the sentence that they prove; empty if there are none."""
    rows = CLAIM.findall(html)
    hold, busy = counted(html)
    if not rows:
        return ""
    if meaning and hold + busy == len(rows):
        said = escape(meaning) + f' <span class="claim">· {busy} {BUSY}</span>' * bool(busy)
    elif len(rows) > 1 or not hold:
        return say_how_many(hold, busy, len(rows))
    else:
        ((claim, predicted, measured, _, verdict),) = rows
        margin = verdict.removeprefix("holds") if verdict.startswith("holds ±") else ""
        compared = "as predicted" if predicted == measured else f"predicted {predicted}{margin}"
        said = f'measured: {measured}, {compared} <span class="claim">· {claim}</span>'
    return marked(hold, busy, len(rows), said)


def counted(html: str) -> tuple[int, int]:
    """Of the claims in the output of cells: how many hold, and for how many the machine was busy."""
    kinds = [kind for *_, kind, _ in CLAIM.findall(html)]
    return kinds.count("ok"), kinds.count("busy")


def say_how_many(hold: int, busy: int, of: int) -> str:
    return marked(hold, busy, of, f"{hold} of {of} hold" + f", {busy} {BUSY}" * bool(busy))


def marked(hold: int, busy: int, of: int, said: str) -> str:
    kind, mark = ("ok", "✓") if hold == of else ("busy", "–") if hold + busy == of else ("bad", "✗")
    return f'<span class="{kind}" aria-hidden="true">{mark}</span> {said}'


def fold_cell(cell: nodes.container) -> None:
    """Put what a cell of a kind shows into its order, and fold it."""
    parts = {child.get("nb_element"): child for child in cell.children}
    source, output = parts.get("cell_code_source"), parts.get("cell_code_output")
    block = source and next(source.findall(nodes.literal_block), None)
    title = block and TITLE.match(block.astext())
    if not title:
        return
    block.rawsource = TITLE.sub("", block.astext())
    meaning = MEANING.match(block.rawsource)
    block.children = [nodes.Text(block.rawsource)]
    code = Folded("", source, line=title[1], classes=["folded", "code"])
    outputs = [output] if output else []
    html = "".join(raw.astext() for raw in output.findall(nodes.raw)) if output else ""
    said = meaning[1].replace("\n#", "") if meaning else ""
    if "tag_evidence" in cell["classes"] and (line := say_measured(html, said)):
        is_open = "tag_open" in cell["classes"]
        cell.children = []
        cell += Folded("", *outputs, code, line=line, open=is_open, classes=["folded", "evidence"])
    else:
        cell.children = []
        cell.extend([*outputs, code])


def folds_of(section: nodes.section, tag: str, kind: str) -> list[Folded]:
    """The closed lines of a kind in the cells with a tag, of this section alone and not of those inside it."""
    cells = [child for child in section.children if tag in child.get("classes", [])]
    folds = [fold for cell in cells for fold in cell.children if isinstance(fold, Folded)]
    return [fold for fold in folds if kind in fold["classes"] and not fold.get("open", False)]


def gather(section: nodes.section) -> None:
    """One line for a section: what else was measured and drawn there opens with it.

    A fold and the cell that it leaves get the same class, `of-...`: so a tool can put it back beside its text.
    """
    evidence, drawings = folds_of(section, "tag_evidence", "evidence"), folds_of(section, "tag_figure", "code")
    if len(evidence) + len(drawings) < 2:
        return
    last = (evidence or drawings)[-1].parent
    if len(evidence) == 1:
        (mark,) = evidence
    else:
        line = say_all(evidence) if evidence else drawings[0]["line"]
        mark = Folded("", line=line, classes=["folded", "evidence" if evidence else "code"])
        last += mark
    for number, fold in enumerate([*evidence, *drawings]):
        if fold is mark:
            continue
        cell, name = fold.parent, f"of-{section['ids'][0]}-{number}"
        cell["classes"].append(name)
        fold["classes"].append(name)
        cell.remove(fold)
        mark += fold
        if not cell.children:
            cell["classes"].append("moved")


def say_all(evidence: list[Folded]) -> str:
    """The line of several evidence cells: the first sentence that one of them proves, and how many claims hold."""
    html = "".join(raw.astext() for fold in evidence for raw in fold.findall(nodes.raw))
    (hold, busy), of = counted(html), len(CLAIM.findall(html))
    said = next((fold["line"] for fold in evidence if SAID.search(fold["line"])), None)
    if hold < of or said is None:
        return say_how_many(hold, busy, of)
    return f'{said} <span class="claim">· and {len(evidence) - 1} more, {hold} of {of} hold</span>'


def fold_section(section: nodes.section, line: str) -> None:
    """Leave its heading, and put all else behind a line."""
    section[1:] = [Folded("", *section[1:], line=line, classes=["deeper"])]


def put_imports_behind(doctree: nodes.document) -> None:
    """A page opens with its picture: imports that a notebook needs before it stand behind what opens the page."""
    for imports in [cell for cell in doctree.findall(nodes.container) if "tag_setup" in cell["classes"]]:
        page = imports.parent
        figures = [cell for cell in page.children if "tag_figure" in cell.get("classes", [])]
        section = next((part for part in page.children if isinstance(part, nodes.section)), None)
        if figures and section and page.index(imports) < page.index(figures[0]) < page.index(section):
            page.remove(imports)
            page.insert(page.index(section), imports)


def fold(app, doctree, docname):
    put_imports_behind(doctree)
    for cell in list(doctree.findall(nodes.container)):
        if cell.get("nb_element") == "cell_code":
            fold_cell(cell)
    for section in list(doctree.findall(nodes.section)):
        gather(section)
        if section.children[0].astext() == DEEPER:
            fold_section(section, DEEPER_LINE)


def add_switch(app, pagename, templatename, context, doctree):
    if doctree and any("code" in node["classes"] for node in doctree.findall(Folded)):
        app.add_js_file("all_code.js", loading_method="defer")


def setup(app):
    app.add_node(Folded, html=(visit_folded, depart_folded))
    app.connect("doctree-resolved", fold)
    app.connect("html-page-context", add_switch)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
