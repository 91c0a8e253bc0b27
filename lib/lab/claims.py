"""Claims: a prediction of a chapter next to its measurement.

The problem: books on this subject print formulas and numbers that were never run, and some are wrong by a factor.
The idea: a claim is a line of code in the chapter, with a prediction from a formula and a measurement from a run. It
prints both, and if they disagree, the build of the book fails. This file does not import torch.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from html import escape
from importlib import metadata

# Seconds before each measurement of a time, until its claim holds: whatever disturbed the first may still be running.
PAUSES_S = 0, 0, 2, 4, 8
BUSY = "not measured here: the machine was busy"
HEAD = "quantity", "formula", "measured", "agrees"

_RELATIONS = {
    "=": lambda predicted, measured, slack: abs(predicted - measured) <= slack,
    "<=": lambda predicted, measured, slack: measured <= predicted + slack,
    ">=": lambda predicted, measured, slack: measured >= predicted - slack,
}
_pauses_s = PAUSES_S  # fewer once the machine was found to be busy


class ClaimError(AssertionError):
    """The measurement contradicts the prediction."""


def claim(
    name: str,
    predicted: float | bool,
    measured: float | bool | Callable[[], float | bool],
    rel: float = 0,
    abs: float = 0,
    unit: str = "",
    relation: str = "=",
) -> None:
    """Show one row, predicted next to measured, and raise if they disagree.

    Args:
        name: the measured quantity, in the reader's words.
        predicted: from `lib.cost` or a formula in the same cell; True or False for a statement.
        measured: from a run, a trace or a memory counter. A time is given as the function that measures it, because
            other programs lengthen it: it is called up to five times until the claim holds, first without and then
            after a pause. If it never holds, the row says so and nothing fails, unless `$INSIST_ON_TIME` is set.
        rel, abs: tolerance rel · |predicted| + abs. Both 0 means exact.
        unit: unit of both values, such as `"bytes"`.
        relation: `"="`, or `"<="` and `">="` if the prediction is a bound on the measurement.

    Raises:
        ClaimError: it does not hold, and is no time on a busy machine. Infinite values and NaN never hold.
        ValueError: unknown relation, or a tolerance that is negative or not finite.
    """
    if relation not in _RELATIONS:
        raise ValueError(f"relation={relation!r} must be one of {', '.join(_RELATIONS)}")
    if not (0 <= rel < math.inf and 0 <= abs < math.inf):
        raise ValueError(f"rel={rel} and abs={abs} must be finite and not below 0")
    global _pauses_s
    predicted, is_time = _plain(predicted), callable(measured)
    slack = rel * math.fabs(predicted) + abs
    for pause_s in _pauses_s if is_time else (0,):
        time.sleep(pause_s)
        value = _plain(measured() if is_time else measured)
        holds = math.isfinite(predicted + value) and _RELATIONS[relation](predicted, value, slack)
        if holds:
            break
    kind = "ok" if holds else "bad"
    if not holds and is_time and math.isfinite(value) and not os.environ.get("INSIST_ON_TIME"):
        kind, _pauses_s = "busy", PAUSES_S[:2]  # it will be busy for the next claims too
    row = _Row(name, predicted, value, rel, abs, unit, relation, kind)
    _show(row)
    _file(row)
    if kind == "bad":
        raise ClaimError("{}: predicted {}, measured {} ({})".format(*row.cells))


def _plain(x: float) -> float | int | bool:
    """A Python number from a number, tensor or array of one element; integers stay exact, beyond a float's 2⁵³."""
    x = x.item() if hasattr(x, "item") else x
    return x if isinstance(x, bool) else int(x) if isinstance(x, int) else float(x)


class _Row:
    def __init__(self, name, predicted, measured, rel, abs, unit, relation, kind) -> None:
        self.kind = kind
        sign = {"=": "", "<=": "≤ ", ">=": "≥ "}[relation]
        # Enough digits to show that they differ.
        shown = [(number(predicted, n), number(measured, n)) for n in range(4, 18 if kind == "bad" else 8)]
        ours, theirs = next((pair for pair in shown if pair[0] != pair[1]), shown[0])
        parts = [f"{100 * rel:g}%" if rel >= 1e-4 else f"{rel:g} of it"] * bool(rel) + [f"{abs:g}"] * bool(abs)
        within = ("holds ± " + " + ".join(parts) if parts else "exact") if relation == "=" else "holds"
        verdict = {"ok": within, "busy": BUSY, "bad": "fails"}[kind]
        self.cells = name, f"{sign}{ours} {unit}".rstrip(), f"{theirs} {unit}".rstrip(), verdict


class _Table(list):
    """The claims of one cell, a `_Row` each, as a table in the notebook."""

    def __repr__(self) -> str:
        rows = [HEAD, *(row.cells for row in self)]
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join(f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip() for a, b, c, d in rows)

    def _repr_html_(self) -> str:
        head = "".join(f'<th scope="col">{word}</th>' for word in HEAD)
        body = "".join(
            "<tr>"
            + "".join(f"<td>{escape(text)}</td>" for text in row.cells[:3])
            + f'<td class="{row.kind}">{escape(row.cells[3])}</td></tr>'
            for row in self
        )
        return f'<table class="claims"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


_cell: tuple[int, _Table, object] | None = None  # execution count, its table, and the handle to update it


def _show(row: _Row) -> None:
    global _cell
    ipython = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if getattr(ipython, "kernel", None) is None:
        print("  ".join(row.cells))
        return
    from IPython.display import display

    if _cell is not None and _cell[0] == ipython.execution_count:
        _cell[1].append(row)
        _cell[2].update(_cell[1])
    else:
        table = _Table([row])
        _cell = (ipython.execution_count, table, display(table, display_id=True))


def _file(row: _Row) -> None:
    """Append the claim to the file in `$BOOK_CLAIMS`, from which the appendix of the book is made."""
    path = os.environ.get("BOOK_CLAIMS")
    if not path:
        return
    record = {"page": os.environ.get("BOOK_PAGE", "")}
    record |= zip(("claim", "predicted", "measured", "verdict"), row.cells, strict=True)
    record["machine"] = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    record["versions"] = f"Python {platform.python_version()}"
    with suppress(metadata.PackageNotFoundError):
        record["versions"] += f", torch {metadata.version('torch')}"
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")


def number(x: float | bool, digits: int = 4) -> str:
    """Format a number as the book does: groups of three digits, four significant digits if not an integer; yes, no."""
    if isinstance(x, bool):
        return "yes" if x else "no"
    whole = math.isfinite(x) and x == int(x)
    if math.fabs(x) < 1e15 and (whole or math.fabs(x) >= 1000):
        return f"{int(x) if whole else float(f'{x:.{digits}g}'):,}".removesuffix(".0").replace(",", "\u2009")
    return f"{x:.{digits}g}"
