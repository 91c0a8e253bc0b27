"""What a cell prints, made for a page: the report of a hang is a table, and sentences wrap.

In a terminal a report keeps to its lines. On a page a line that is too long would be cut at the edge, and that is where
the source line stands, and the cure.
"""

import re
from html import escape

from docutils import nodes

RANK = re.compile(r"  (rank \d+(?: on \S+)?)  +(\S.*?)(?:  +for ([\d.]+) s  (.*))?")
HEAD = ("rank", "waits in", "for", "line")
MOST = 79  # characters of a line that a page has room for


def lines_of(text: str) -> list[tuple[str, list[re.Match] | str]]:
    """The text in pieces: ("rows", matches) of a report, and ("words", a line) for the rest."""
    pieces = []
    for line in text.rstrip().split("\n"):
        row = RANK.fullmatch(line)
        if row and pieces and pieces[-1][0] == "rows":
            pieces[-1][1].append(row)
        else:
            pieces.append(("rows", [row]) if row else ("words", line))
    return pieces


def as_table(rows: list[re.Match]) -> str:
    """Rank, what it waits in, for how long, and the line that called it."""
    head = "".join(f'<th scope="col">{name}</th>' for name in HEAD)
    body = ""
    for row in rows:
        rank, does, for_s, where = (escape(part or "") for part in row.groups())
        does = does.removeprefix("waits in ")
        cells = rank.removeprefix("rank "), f"<code>{does}</code>" if for_s else does, for_s and f"{for_s} s", where
        body += "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    return f'<table class="hang"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def is_report(pieces: list[tuple[str, list[re.Match] | str]]) -> bool:
    """Whether some rank waits in a line of it."""
    return any(kind == "rows" and any(row[3] for row in piece) for kind, piece in pieces)


def is_prose(text: str) -> bool:
    """Whether a line that is too long consists of words with single spaces: tables and drawings get small instead."""
    return any(len(line) > MOST and "  " not in line.strip() for line in text.split("\n"))


def shape(app, doctree, docname):
    for output in [part for part in doctree.findall(nodes.container) if part.get("nb_element") == "cell_code_output"]:
        for block in list(output.findall(nodes.literal_block)):
            text = block.astext()
            if is_report(pieces := lines_of(text)):
                parts = (as_table(piece) if kind == "rows" else f"<p>{escape(piece)}</p>" for kind, piece in pieces)
                block.replace_self(nodes.raw("", f'<div class="report">{"".join(parts)}</div>', format="html"))
            elif max(map(len, text.split("\n"))) > MOST:
                block["classes"].append("prose" if is_prose(text) else "wide")


def setup(app):
    app.connect("doctree-resolved", shape)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
