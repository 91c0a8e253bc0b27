"""What `python -m lib.doctor numbers` prints: the first link that differs, its cause, where that is shown, a table."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

from lib.doctor.numbers.comparison import Comparison
from lib.doctor.numbers.share import TIMES, UNKNOWN, Share
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
SHOWN = "numbers_shown.toml"  # in a folder beside this library: cause → where a reader finds it explained
MOST_TENSORS, MOST_RANKS = 10, 8


@cache
def shown_in(folder: str = ROOT) -> dict[str, list[str]]:
    """Cause → the places that explain it, of whatever stands on this library; empty if it stands alone."""
    found: dict[str, list[str]] = {}
    for path in sorted(Path(folder).glob(f"*/{SHOWN}")):
        for cause, places in tomllib.loads(path.read_text(encoding="utf-8")).items():
            found.setdefault(cause, []).extend(places)
    return found


def page_of_numbers(found: Comparison) -> str:
    """The page for a terminal."""
    lines = [_heading(found), ""]
    if found.looked_at:
        parts = [_counted(found, link) for link in WORDS if link in found.looked_at]
        lines.append(f"compared: {', '.join(parts)}")
    lines += [f"not compared: {sentence}" for sentence in found.not_seen]
    lines += [f"note: {sentence}" for sentence in found.remarks]
    lines += ["", *_verdict(found)]
    return "\n".join(lines)


def _heading(found: Comparison) -> str:
    ours, one = found.ours, found.one
    exact = f", exact: {found.exact.folder}" if found.exact else ""
    axes = " · ".join(f"{axis} {size}" for axis, (_, size) in ours.ranks[0].axes.items()) or "one process"
    what = "every element" if ours.whole else "64 sums of each tensor"
    return (
        f"{ours.folder} ({counted(len(ours.ranks), 'rank')}, {axes}) beside {one.folder}{exact}: "
        f"{counted(ours.steps, 'step')}, {what}"
    )


def _counted(found: Comparison, link: str) -> str:
    """A link that was compared, and how many tensors of it."""
    tensors = link in ("weights", "gradients", "clipped", "updates")
    return f"{WORDS[link]} of {counted(found.looked_at[link], 'tensor')}" if tensors else WORDS[link]


def _verdict(found: Comparison) -> list[str]:
    if not found.findings:
        if found.exit_code:
            return ["could not see: neither gradients nor updates could be compared, so this says nothing"]
        return ["the same training: no link that was compared differs", *_hidden(found)]
    first = found.findings[0]
    lines = [f"step {first.step}: the first link that differs is {WORDS[first.link]}"]
    for finding in found.findings:
        lines.append(f"  {finding.text}")
        places = shown_in().get(finding.cause, [])
        lines += [f"  shown in {place}" for place in places]
    if found.shares:
        lines += ["", *_table(found.shares)]
    return [*lines, *_hidden(found)]


def _table(shares: list[Share]) -> list[str]:
    """A line for each tensor, the worst first: its shares of the right one, how far apart it is, what is allowed."""
    by_name: dict[str, dict[int, Share]] = {}
    for share in shares:
        by_name.setdefault(share.own_name, {})[share.rank] = share
    worst = {name: max(of.values(), key=_badness) for name, of in by_name.items()}
    names = sorted(by_name, key=lambda name: -_badness(worst[name]))
    ranks = sorted({share.rank for share in shares})
    shown = ranks[:MOST_RANKS]
    rows = [["share of the right one", *(f"rank {rank}" for rank in shown), "apart", "allowed"]]
    for name in names[:MOST_TENSORS]:
        of = by_name[name]
        cells = [f"{of[rank].share:.4f}" if rank in of else "·" for rank in shown]
        rows.append([name[-40:], *cells, f"{worst[name].apart:.2g}", f"{worst[name].allowed:.1g}"])
    width = max(len(row[0]) for row in rows)
    rows = [[row[0].ljust(width), *row[1:]] for row in rows]
    more = [f"  … and {counted(len(names) - MOST_TENSORS, 'tensor')} more"] if len(names) > MOST_TENSORS else []
    more += [f"  … and {counted(len(ranks) - MOST_RANKS, 'rank')} more"] if len(ranks) > MOST_RANKS else []
    return [*aligned(rows), *more]


def _badness(share: Share) -> float:
    return float("inf") if share.apart != share.apart else share.apart / share.allowed + bool(share.copies_differ)


def _hidden(found: Comparison) -> list[str]:
    """What rounding hides, as far as it is known."""
    kinds = [kind for kind in ("gradients", "clipped") if kind in found.allowed]
    if not kinds or found.allowed[kinds[0]] < 1e-8:
        return []
    most = max(found.allowed[kind] for kind in kinds)
    if found.exact is None:
        return [
            "",
            f"hidden by rounding: a mistake that changes less than {UNKNOWN:.0%} of a gradient, sums in a narrower "
            "type, and updates after step 1. One process in a wider type (--exact) shows how large rounding is",
        ]
    return [
        "",
        f"hidden by rounding: a mistake that changes less than {most:.1g} of a gradient ({TIMES:.0f} times the rounding "
        "of one process), sums in the type in which the program computes anyway, and updates after step 1",
    ]
