"""What `python -m lib.doctor numbers` prints: the first link that differs, its cause, where that is shown, a table."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from textwrap import fill

from lib.doctor.numbers.comparison import Comparison
from lib.doctor.numbers.share import ROUGHLY, TIMES, UNKNOWN, Share
from lib.runtime.places import ROOT
from lib.runtime.words import aligned, counted

WORDS = {
    "weights": "the weights before the step",
    "data": "the data",
    "loss": "the loss",
    "gradients": "the gradients before the clip",
    "norm": "the norm that clips",
    "clipped": "the gradients after the clip",
    "options": "the options of the optimizer",
    "updates": "the updates",
    "buffers": "the buffers",
}
SHOWN = "numbers_shown.toml"  # in a folder next to this library: cause → the places that explain it
MOST_TENSORS, MOST_RANKS, WIDTH = 10, 8, 80


@cache
def shown_in(folder: str = ROOT) -> dict[str, list[str]]:
    """Cause → the places that explain it, from all packages that use this library; empty without one."""
    found: dict[str, list[str]] = {}
    for path in sorted(Path(folder).glob(f"*/{SHOWN}")):
        for cause, places in tomllib.loads(path.read_text(encoding="utf-8")).items():
            found.setdefault(cause, []).extend(places)
    return found


def page_of_numbers(found: Comparison) -> str:
    """The page for a terminal."""
    lines = [*_filled([_heading(found)]), ""]
    if found.looked_at:
        parts = [_counted(found, link) for link in WORDS if link in found.looked_at]
        lines += _filled([f"compared: {', '.join(parts)}"])
    lines += _filled([f"not compared: {sentence}" for sentence in found.not_seen])
    lines += _filled([f"note: {sentence}" for sentence in found.remarks])
    lines += ["", *_verdict(found)]
    return "\n".join(lines)


def _heading(found: Comparison) -> str:
    runs = [run for run in (found.ours, found.one, found.exact) if run is not None]
    names = [Path(run.folder).name for run in runs]
    if len({*names}) < len(names):
        names = [run.folder for run in runs]
    ours, one, *exact = names
    axes = " · ".join(f"{axis} {size}" for axis, (_, size) in found.ours.ranks[0].axes.items()) or "one process"
    exactly = f", exact: {exact[0]}" if exact else ""
    kind = "every element" if found.ours.whole else "64 sums of each tensor"
    return (
        f"{ours} ({counted(len(found.ours.ranks), 'rank')}, {axes}) beside {one}{exactly}: "
        f"{counted(found.ours.steps, 'step')}, {kind}"
    )


def _counted(found: Comparison, link: str) -> str:
    """A link that was compared, and how many tensors of it."""
    tensors, zeros = found.looked_at[link]
    if not tensors:
        return WORDS[link]
    rounding = f", {zeros} of them zero except for rounding" if zeros else ""
    return f"{WORDS[link]} ({counted(tensors, 'tensor')}{rounding})"


def _verdict(found: Comparison) -> list[str]:
    if not found.findings:
        if found.exit_code:
            return ["could not see: all compared links agree, and too many were not compared", *_hidden(found)]
        return ["the same training: no link that was compared differs", *_hidden(found)]
    first = found.findings[0]
    lines = [f"step {first.step}: the first link that differs is {WORDS[first.link]}"]
    for finding in found.findings:
        lines += _filled([finding.text], "  ")
        lines += _filled([f"shown in {place}" for place in shown_in().get(finding.cause, [])], "  ")
    if found.shares:
        lines += ["", *_table(found.shares)]
    return [*lines, *_hidden(found)]


def _table(shares: list[Share]) -> list[str]:
    """A line for each tensor that differs, the worst first: its shares, its distance, the allowed distance."""
    by_name: dict[str, dict[int, Share]] = {}
    for share in shares:
        by_name.setdefault(share.own_name, {})[share.rank] = share
    worst = {name: max(of.values(), key=_badness) for name, of in by_name.items()}
    sick = [name for name, of in by_name.items() if any(share.is_sick for share in of.values())]
    names = sorted(sick, key=lambda name: -_badness(worst[name]))
    ranks = sorted({share.rank for share in shares})
    shown = ranks[:MOST_RANKS]
    rows = [["share of the right one", *(f"rank {rank}" for rank in shown), "apart", "allowed"]]
    for name in names[:MOST_TENSORS]:
        of = by_name[name]
        cells = [f"{of[rank].share:.4f}" if rank in of else "·" for rank in shown]
        rows.append([name[-40:], *cells, f"{worst[name].apart:.2g}", f"{worst[name].allowed:.1g}"])
    width = max(len(row[0]) for row in rows)
    lines = aligned([row[0].ljust(width), *row[1:]] for row in rows)
    more = [(len(names) - MOST_TENSORS, "tensor"), (len(ranks) - MOST_RANKS, "rank")]
    lines += [f"  … and {counted(number, f'more {word}')}" for number, word in more if number > 0]
    if healthy := len(by_name) - len(names):
        lines.append(f"  {counted(healthy, 'tensor')} as in the reference")
    lines.append("  apart: distance from the right one, as a fraction; allowed: for rounding")
    return lines


def _badness(share: Share) -> float:
    return float("inf") if share.apart != share.apart else share.apart / share.allowed + bool(share.copies_differ)


def _hidden(found: Comparison) -> list[str]:
    """What rounding hides, as far as it is known."""
    allowed = [found.allowed[kind] for kind in ("gradients", "clipped") if kind in found.allowed]
    if not allowed or max(allowed) < 1e-8:
        return []
    known, narrow = f"less than {max(allowed):.1g} of a gradient", "gradients added in the program's own type"
    how = f", {TIMES:.0f} times the rounding of one process"
    if found.exact is None:
        known, narrow = f"less than {UNKNOWN:.0%} of a gradient", "gradients added in a narrower type"
        how = "; one process in a wider type (--exact) shows how large rounding is"
    later = f"less than {ROUGHLY:.0%} of an update {'after step 1' if found.ours.whole else ''}".rstrip()
    return ["", *_filled([f"hidden by rounding: {known}{how}; {narrow}; {later}"])]


def _filled(sentences: list[str], indent: str = "") -> list[str]:
    """Lines that a terminal shows whole."""
    texts = [fill(one, WIDTH, initial_indent=indent, subsequent_indent=indent or "  ") for one in sentences]
    return [line for text in texts for line in text.splitlines()]
