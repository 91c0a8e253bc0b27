"""The page of loops: two tables of the habits that `tests/lib/test_loops.py` runs, made from the same data.

A page says `{habits-that-work}` and `{habits-that-are-refused}`.
"""

import re
from collections.abc import Iterable
from html import escape
from itertools import groupby

from live_page import add_live_page, table

USED = ["book/trials/habits.py"]


def coded(text: str) -> str:
    """HTML of a text with code in backticks."""
    return re.sub("`([^`]+)`", r'<code class="literal">\1</code>', escape(text, quote=False))


def names(wrappers: Iterable[str]) -> list[str]:
    """DDP, ZeRO and FSDP, each if it is among these wrappers, else ""; `ZeRO-1` if ZeRO-2 is not."""
    from book.trials.habits import DDP, FSDP_ALONE, ZERO  # torch is imported only where a table is made

    found = []
    for family, members in (("DDP", DDP), ("ZeRO", ZERO), ("FSDP", FSDP_ALONE)):
        some = [one for one in members if one in wrappers]
        alone = [re.sub(r"(\d)", r"-\1", one) for one in some]
        found.append(family if len(some) == len(members) else " ".join(alone))
    return found


def row(*cells: str) -> str:
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def works() -> str:
    from book.trials.habits import ALL, WORKS

    rows = []
    for one in WORKS:
        only = f" ({', '.join(filter(None, names(one.wrappers)))})" if one.wrappers != ALL else ""
        rows.append(row(coded(one.habit) + only, coded(one.write)))
    return table("habits works", ("habit", "you write"), rows)


def refused() -> str:
    """A row for each habit and code to write, though wrappers may refuse it in different sentences."""
    from book.trials.habits import REFUSED

    rows = []
    for (habit, write), same in groupby(REFUSED, key=lambda one: (one.habit, one.write)):
        wrappers = [name for one in same for name in one.wrappers]
        by = "".join(f"<span>{name}</span> " for name in names(wrappers))
        rows.append(row(coded(habit), by, coded(write)))
    return table("habits refused", ("habit", "refused by", "instead"), rows)


def setup(app):
    add_live_page(app, "habits-that-work", works, USED, [])
    return add_live_page(app, "habits-that-are-refused", refused, USED, [])
