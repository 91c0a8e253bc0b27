"""The pattern of two recordings, and what shares do not show: tensors that only one of the two has, and rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from lib.doctor.numbers.patterns import Pattern, Said, said_of
from lib.doctor.numbers.share import Share, Sides
from lib.runtime.hang import named_ranks
from lib.runtime.words import counted


def said_of_sides(sides: Sides, kind: str, shares: list[Share]) -> list[Said]:
    """Cause and sentence for each difference of the tensors of a kind; empty if nothing differs."""
    pattern = Pattern(
        kind,
        shares,
        names=sides.right.names(kind),
        axes=[rank.axes for rank in sides.ours.run.ranks],
        step=sides.step,
        were_gradients_right=bool(sides.ours.held("gradients") and sides.right.held("gradients")),
        rows_of=partial(_rows_of, sides, kind),
    )
    return [*_missing(sides, kind), *said_of(pattern)]


def _missing(sides: Sides, kind: str) -> Iterator[Said]:
    """Tensors that only one of the two runs has."""
    ours, right = sides.ours, sides.right
    here = {(held.rank, held.name) for held in ours.held(kind)}
    there = {held.name for held in right.held(kind) if held.part.square > 0}
    without: dict[str, list[int]] = {}
    for held in ours.held("weights"):
        if held.name in there and (held.rank, held.name) not in here and held.part.region.numel:
            without.setdefault(held.name, []).append(held.rank)
    if without:
        name, ranks = next(iter(without.items()))
        yield (
            "no gradient",
            f"{counted(len(without), 'tensor')} without a gradient, such as {name} on {named_ranks(sorted(ranks))}, "
            "where one process has one: frozen, unused, or cut off by a detach",
        )
    known = {held.name for held in right.held(kind)}
    odd = [held.name for held in ours.held(kind) if held.name not in known and held.part.square > 0]
    if odd:
        yield (
            "no gradient",
            f"{counted(len({*odd}), 'tensor')} with a gradient, such as {odd[0]}, where one process has none: frozen "
            "there, or unused",
        )


def _rows_of(sides: Sides, kind: str, name: str) -> str:
    """Which rows of a wrong matrix differ, if few do."""
    shape = next(held.part.region.shape for held in sides.ours.held(kind) if held.name == name)
    if len(shape) < 2 or not sides.ours.run.whole:
        return ""
    apart = sides.ours.vectors(kind)[name] - sides.right.vectors(kind)[name]
    off = torch.linalg.vector_norm(apart.view(shape[0], -1), dim=1)
    rows = (off > 0.1 * off.max()).nonzero().flatten().tolist()
    if len(rows) >= 0.5 * shape[0]:
        return ""
    listed = ", ".join(map(str, rows[:6])) + ", …" * (len(rows) > 6)
    return f"; of {name} only rows {listed} of {shape[0]} differ"
