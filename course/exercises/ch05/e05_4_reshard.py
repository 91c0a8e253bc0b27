"""05.4: a rank's shard, out of the shards that a different number of ranks saved."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import torch
from torch import Tensor
from torch.nn.functional import pad

from course.check.exercise import ANYTHING, Data, Exercise, Mistake, random, shards_of
from lib.mesh import Group

NO_MORE, MORE = "no more than it keeps", "more than it keeps"


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    """Different numbers of ranks; the padding is not zero, so that an answer which keeps it fails."""
    sizes = ((7 - n, 10 * n), (7 - n, 10 * n - 1), (2 * n + 1, 11 * n + 2))
    cases = [
        {"size": size, "old_n": old_n, "saved": list(random(generator, old_n * ceil(size / old_n)).chunk(old_n))}
        for old_n, size in sizes
    ]
    return [{"cases": cases}] * n


def entry(case: Data, what: str) -> str:
    return f"{case['size']} elements from {case['old_n']} ranks: {what}"


def body(answer: Callable, group: Group, given: Data) -> Data:
    found: Data = {}
    for case in given["cases"]:
        taken: list[int] = []

        def read(rank: int, start: int, stop: int, case: Data = case, taken: list[int] = taken) -> Tensor:
            if not 0 <= rank < case["old_n"]:
                raise ValueError(f"read({rank}, {start}, {stop}): there were {case['old_n']} ranks, counted from 0")
            length = len(case["saved"][rank])
            if not 0 <= start <= stop <= length:
                raise ValueError(f"read({rank}, {start}, {stop}): each of the ranks saved {length} elements")
            taken.append(stop - start)
            return case["saved"][rank][start:stop].clone()

        found[entry(case, "the shard of this rank")] = answer(read, case["size"], case["old_n"], group)
        found[entry(case, "what was read")] = MORE if sum(taken) > ceil(case["size"] / group.size) else NO_MORE
    return found


def reference(given: list[Data]) -> list[Data]:
    found: list[Data] = [{} for _ in given]
    for case in given[0]["cases"]:
        shards = shards_of(torch.cat(case["saved"])[: case["size"]], len(given))
        for mine, shard in zip(found, shards, strict=True):
            mine |= {entry(case, "the shard of this rank"): shard, entry(case, "what was read"): NO_MORE}
    return found


# ---- right programs -------------------------------------------------------------------------------------------------


def reshard(read, size, old_n, group, padded=True):
    new, old = ceil(size / group.size), ceil(size / old_n)
    begin, end = group.rank * new, min((group.rank + 1) * new, size)
    pieces = [torch.empty(0, dtype=torch.float64)]
    for rank in range(old_n):
        low, high = max(begin, rank * old), min(end, (rank + 1) * old)
        if low < high:
            pieces.append(read(rank, low - rank * old, high - rank * old))
    shard = torch.cat(pieces)
    return pad(shard, (0, new - len(shard))) if padded else shard


def element_by_element(read, size, old_n, group):
    new, old = -(-size // group.size), -(-size // old_n)
    shard = torch.zeros(new, dtype=torch.float64)
    for i in range(new):
        place = group.rank * new + i
        if place < size:
            shard[i] = read(place // old, place % old, place % old + 1)[0]
    return shard


# ---- wrong programs -------------------------------------------------------------------------------------------------


def reads_all(of: Callable) -> Callable:
    """of(all old shards, size, n, r)."""

    def program(read, size, old_n, group):
        return of([read(rank, 0, ceil(size / old_n)) for rank in range(old_n)], size, group.size, group.rank)

    return program


def with_old_padding(saved, size, n, r):
    new = ceil(size / n)
    part = torch.cat(saved)[r * new :][:new]
    return pad(part, (0, new - len(part)))


EXERCISE = Exercise(
    id="05.4",
    title="reshard",
    points=2,
    body=body,
    inputs=inputs,
    reference=reference,
    right=(reshard, element_by_element),
    mistakes=(
        Mistake(
            "You cut the tensor of the old ranks with its padding. Elements after the first `size` are no parameters, "
            "and they move every cut: the new shards have ceil(size/n) elements.",
            reads_all(lambda saved, size, n, r: shards_of(torch.cat(saved), n)[r]),
            about=("shard",),
        ),
        Mistake(
            "The cuts are right, but the last shard ends in the padding of the old ranks. Stop at `size`, and fill up "
            "with zeros.",
            reads_all(with_old_padding),
            about=("shard",),
        ),
        Mistake(
            "You took over the shard of the old rank with the same number. It was cut for a different number of "
            "ranks: rank r now begins at r · ceil(size/n).",
            reads_all(lambda saved, size, n, r: saved[r] if r < len(saved) else ANYTHING),
            about=("shard",),
        ),
        Mistake(
            "You cut each old shard into n pieces and took one of each. That changes the order of the elements: a new "
            "shard is one contiguous piece of the flat tensor.",
            reads_all(lambda saved, size, n, r: torch.cat([shard.tensor_split(n)[r] for shard in saved])),
            about=("shard",),
        ),
        Mistake(
            "The last shard is too short. Each shard has ceil(size/n) elements: fill up with zeros.",
            lambda *given: reshard(*given, padded=False),
            about=("shard",),
        ),
        Mistake(
            "The shard is right, but you read more than you keep. The full tensor may not fit on one rank: read from "
            "each old rank only the part that overlaps with your shard.",
            reads_all(lambda saved, size, n, r: shards_of(torch.cat(saved)[:size], n)[r]),
        ),
    ),
)
