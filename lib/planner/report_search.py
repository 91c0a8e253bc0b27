"""Words on a search: its layouts, the choices that a library lacks, and the table of a sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lib.planner.choices import Choices, beyond, layout_text
from lib.planner.libraries import LIBRARIES
from lib.planner.margin import TIGHT, memory_verdict
from lib.planner.report import table, wrapped
from lib.planner.search import Planned, choices_of, compared, faster_or_slower, lacking
from lib.planner.sweep import SweptRow
from lib.planner.training import Layout4D, Training


def others_text(
    found: list[Planned],
    mine: Planned | None,
    nothing: str = "",
    room_bytes: float = math.inf,
    headroom: float = 0,
    more: Sequence[str] = (),
) -> str:
    """The fastest layouts of a search, or why there is `nothing`; how much slower others and `mine` are, and why.

    A layout that is tight says so, and one that does not fit is compared with none.

    Args:
        more: sentences on the choices of the search.
    """

    def words_of(planned: Planned) -> str:
        return memory_verdict(planned.memory.total, room_bytes, headroom)

    lines = ["the fastest layouts that fit:" if found else nothing]
    for place, planned in enumerate(found, 1):
        said = f"{layout_text(planned.layout)}, {planned.memory.total / 1e9:.1f} GB, {planned.seconds.total:.2f} s"
        said += ", tight" if words_of(planned) == TIGHT else ""
        lines.append(f"{place}. {said}" + (f": {faster_or_slower(found[0], planned)}" if place > 1 else ""))
    if mine and found:
        lines.append(compared(found[0], mine, words_of(mine)))
    return wrapped([*lines, *more])


def sweep_text(what: str, rows: Sequence[SweptRow]) -> str:
    """A table with the best layout of each value; below it why throughput per GPU fell, or why nothing fits."""
    unit, scale = {"batch": ("batch", 1), "gpus": ("GPUs", 1), "network": ("GB/s per GPU", 1e9)}[what]
    cells, said = [[unit, "step s", "tokens/s/GPU", "GB", "MFU", "layout"]], []
    for row in rows:
        value = f"{row.value / scale:,.5g}" if what == "network" else f"{row.value:,}"
        if planned := row.planned:
            mfu = row.training.utilisation(planned.seconds.total)
            numbers = [f"{planned.seconds.total:.2f}", f"{row.tokens_per_s_per_gpu:,.0f}"]
            held = f"{planned.memory.total / 1e9:.1f}"
            cells.append([value, *numbers, held, f"{mfu:.1%}", layout_text(planned.layout)])
        else:
            cells.append([value, "-", "-", "-", "-", "nothing fits"])
        if why := row.reason or row.nothing:
            said.append(f"{unit} {value}: {why}")
    return "\n\n".join([table(cells), *([wrapped(said)] if said else [])])


def choices_text(training: Training, found: list[Planned], choices: Choices) -> list[str]:
    """A sentence on the choices of a search: the parts of its best layout, or of a faster one, that a library lacks."""
    library, usual = LIBRARIES[training.stack.library].name, choices_of(training)
    if replace(choices, headroom=usual.headroom) == usual:
        faster = lacking(training, found[0], choices.headroom)
        if not faster:
            return []
        parts, planned = faster
        times = found[0].seconds.total / planned.seconds.total
        by = f"{times - 1:.0%} faster" if times < 2 else f"{times:.1f} times as fast"
        said = f"{layout_text(planned.layout)}, {planned.memory.total / 1e9:.1f} GB, {planned.seconds.total:.2f} s"
        return [f"with {listed(parts)}, which {library} does not have, {by}: {said}"]
    return needs_text(training, found[0].layout)


def needs_text(training: Training, layout: Layout4D) -> list[str]:
    """A sentence on the parts of the first layout that the library lacks, if there are any."""
    parts = beyond(choices_of(training), layout)
    library = LIBRARIES[training.stack.library].name
    return [f"the first needs {listed(parts)}, which {library} does not have"] if parts else []


def listed(words: Sequence[str]) -> str:
    """`a, b and c`."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
