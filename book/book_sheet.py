"""The sheet to pin up: its two sides on a page, and as PDF and SVG beside the pages."""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from book_home import HIGH, ICONS, WIDE, Box
from docutils import nodes
from live_page import add_live_page, table

from book.axes import DATA, MODEL, Technique
from book.figures.sheet import Band, Block, Line, as_pdf, as_svg, draw_sheet, picture_of, small_gantt
from book.figures.svg import Figure
from book.sheet import ENOUGH, EXAMPLE, LETTERS, SPLIT_NOTE, TOGETHER
from book.sheet_schedules import SCHEDULES, Pipelined
from book.terms import Term
from lib.pipeline.simulate import simulate

PAGE = "book/sheet"
PDF = "parallel-by-hand-sheet.pdf"
SVGS = "parallel-by-hand-sheet-1.svg", "parallel-by-hand-sheet-2.svg"
PRINTED, SHOWN = 810.0, 680.0  # pixels that a side is wide, on paper and on a page
DRAWN = 4, 8, 2  # ranks, microbatches and stages per rank of the pictures: larger ones would be grey
USED = "book/axes.py", "book/sheet.py", "book/figures/sheet.py", "lib/cost/*.py"
HEAD = "technique", "a rank", "formula", "in numbers"
THIRDS = (1 / 3, 1 / 3, 1 / 3)
TITLE = "Parallel training on one sheet"
SIDES = {  # heading → how it is said to those who do not see it
    "1: what ranks of data parallelism share": "Side 1: data parallelism, ZeRO-1 to 3, and recomputation",
    "2: what ranks divide of the model": "Side 2: tensor, sequence and pipeline parallelism, and five schedules",
}


def _lines(said: Sequence[Term | str]) -> list[Line]:
    found = []
    for one in said:
        found += [Line(one)] if isinstance(one, str) else [Line(one.words), Line(_unbroken(one.said()), "strong")]
    return found


def _unbroken(said: str) -> str:
    """A formula may be broken before a · or =, and nowhere else."""
    return said.replace(" ", "\u00a0").replace("\u00a0·", " ·").replace("\u00a0=", " =")


def states(stage: int) -> Iterator[Box]:
    """Four ranks, each with weights, gradients and optimizer states: all of them, or the shard that is left."""
    for rank in range(4):
        for y, high, ink, cut_from in ((0, 10, "param", 3), (12, 10, "gradient", 2), (24, 20, "opt", 1)):
            x, shard = 8 + 21 * rank, 17 / 4
            if stage < cut_from:
                yield x, y, 17, high, ink
            else:
                yield x, y, 17, high, "idle"
                yield x + shard * rank, y, shard, high, ink


def _names(names: dict[str, str]) -> Band:
    there = [
        [Line(framework, "label"), Line(name or "not there", "strong" if name else "label")]
        for framework, name in names.items()
    ]
    return Band(there, THIRDS)


def card(one: Technique) -> list[Band]:
    top: list[Block] = [picture_of(ICONS[one.icon - 1]() if one.icon > 0 else states(-one.icon), WIDE, HIGH)]
    top.append([Line(one.name, "title"), Line(one.cut)])
    top.append([Line(f"Use it (chapter {one.chapters})", "label"), Line(one.use)])
    middle = [[Line("A rank keeps", "label"), *_lines(one.memory)]]
    middle.append([Line("A rank sends in a step", "label"), *_lines(one.sends)])
    middle.append([Line("When", "label"), Line(one.when)])
    return [Band(top, (0.17, 2 / 3 - 0.17, 1 / 3), begins=True), Band(middle, THIRDS), _names(one.names)]


def line(one: Pipelined) -> Band:
    names = [Line(f"{name}: {asked}", "label") for name, asked in one.names.items() if asked]
    blocks: list[Block] = [small_gantt(simulate(one.drawn(*DRAWN)), 124)]
    blocks.append([Line(one.name, "title"), Line(f"{one.order} Chapter\u00a0{one.chapter}.")])
    blocks.append(_lines([one.bubble, one.sends]))
    blocks.append([*_lines([one.kept]), *names])
    return Band(blocks, (0.2, 0.24, 0.25, 0.31), begins=True)


def sides() -> list[list[Band]]:
    """The rows of both sides."""
    heads = [Band([[Line(f"{TITLE} · {name}", "title")]], (1,)) for name in SIDES]
    first = [heads[0], Band([[Line(EXAMPLE)]], (1,)), *(row for one in DATA for row in card(one))]
    first.append(Band([[Line(LETTERS, "label")]], (1,), begins=True))
    second = [heads[1], *(row for one in MODEL for row in card(one)), *map(line, SCHEDULES)]
    ranks, microbatches, _ = DRAWN
    enough = f"{ENOUGH.words} m\u00a0≥\u00a0{ENOUGH.said()}."
    note = f"Pictures: {ranks} ranks, {microbatches} microbatches. {SPLIT_NOTE} {enough}"
    second.append(Band([[Line(note, "label"), Line(TOGETHER)]], (1,), begins=True))
    return [first, second]


def quantities() -> str:
    """All formulas as a table: for readers who do not see the picture, and for those who search."""
    rows = []
    for one in (*DATA, *MODEL):
        said = [("keeps", one.memory), ("sends", one.sends)]
        rows += [(one.name, what, t) for what, of in said for t in of if isinstance(t, Term)]
    rows += [(one.name, "", term) for one in SCHEDULES for term in (one.bubble, one.kept, one.sends)]
    cells = ([name, f"{what} {term.words}".strip(" :,"), *term.said().rsplit(" = ", 1)] for name, what, term in rows)
    return table(
        "quantities", HEAD, ("<tr>" + "".join(f"<td>{escape(x)}</td>" for x in row) + "</tr>" for row in cells)
    )


def links(root: str) -> str:
    """The files; `root` leads from a page to where they lie."""
    files = {PDF: "PDF of both sides", SVGS[0]: "SVG of side 1", SVGS[1]: "SVG of side 2"}
    return " · ".join(f'<a href="{root}{name}">{words}</a>' for name, words in files.items())


def drawn(width: float) -> list[Figure]:
    return [draw_sheet(rows, alt=alt, width=width) for rows, alt in zip(sides(), SIDES.values(), strict=True)]


def shown() -> str:
    """The files, both sides, and the table behind a line."""
    figures = "".join(side._repr_html_() for side in drawn(SHOWN))
    behind = f"<details><summary>All formulas as a table</summary>{quantities()}</details>"
    return f"<p>{links('../' * PAGE.count('/'))}</p>{figures}{behind}"


def offer_files(app, doctree, docname):
    """The first page has the files behind its words about the sheet. A notebook alone has no site that has them."""
    if docname == app.config.root_doc and PAGE in app.env.found_docs:
        to = app.builder.get_relative_uri(docname, PAGE)
        for link in [one for one in doctree.findall(nodes.reference) if one.get("refuri") == to]:
            link.parent += nodes.raw("", f" {links('../' * docname.count('/'))}", format="html")


def write(folder: Path) -> None:
    """The files to print."""
    printed = drawn(PRINTED)
    (folder / PDF).write_bytes(as_pdf(printed, TITLE))
    for name, side in zip(SVGS, printed, strict=True):
        (folder / name).write_text(as_svg(side), encoding="utf-8")


def finish(app, exception):
    if exception is None and app.builder.name == "html" and PAGE in app.env.found_docs:
        write(Path(app.outdir))


def setup(app):
    app.connect("doctree-resolved", offer_files)
    app.connect("build-finished", finish, priority=900)  # before the site is packed
    return add_live_page(app, "sheet", shown, USED, [])
