"""Chapter 05, shards that were saved by another number of ranks: exercise 05.4."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lib.check.exercise import Data, Exercise, Mistake, random
from lib.mesh import Group

ONLY_ITS_OWN, MORE = "no more than it keeps", "more than it keeps"


def _saved_inputs(generator: torch.Generator, n: int) -> list[Data]:
    """What other numbers of ranks have saved; their padding is not zero, so that whoever keeps it can be told."""
    cases = []
    for old_n, size in ((7 - n, 10 * n), (7 - n, 10 * n - 1), (2 * n + 1, 11 * n + 2)):
        saved = random(generator, old_n * ceil(size / old_n))
        cases.append({"size": size, "old_n": old_n, "saved": list(saved.chunk(old_n))})
    return [{"cases": cases}] * n


def _name(case: Data, what: str) -> str:
    return f"{case['size']} numbers from {case['old_n']} ranks: {what}"


def _reshard(answer: Callable, group: Group, given: Data) -> Data:
    found: Data = {}
    for case in given["cases"]:
        taken = 0

        def read(rank: int, start: int, stop: int, case: Data = case) -> Tensor:
            nonlocal taken
            if not 0 <= rank < case["old_n"]:
                raise ValueError(f"read({rank}, {start}, {stop}): there were {case['old_n']} ranks, counted from 0")
            length = len(case["saved"][rank])
            if not 0 <= start <= stop <= length:
                raise ValueError(f"read({rank}, {start}, {stop}): each of the ranks has saved {length} numbers")
            taken += stop - start
            return case["saved"][rank][start:stop].clone()

        found[_name(case, "this rank's shard")] = answer(read, case["size"], case["old_n"], group)
        found[_name(case, "what was read")] = MORE if taken > ceil(case["size"] / group.size) else ONLY_ITS_OWN
    return found


def _shards(of: Callable[[Data, int, int], Tensor | None], reads: str = "") -> Callable:
    """Rank r's shard is of(case, r, n), or anything where that is None."""

    def answers(given: list[Data], want: Any = None) -> list[Data]:
        found: list[Data] = [{} for _ in given]
        for r, g in enumerate(given):
            for case in g["cases"]:
                shard = of(case, r, len(given))
                found[r] |= {} if shard is None else {_name(case, "this rank's shard"): shard}
                found[r] |= {_name(case, "what was read"): reads} if reads else {}
        return found

    return answers


def _cut(flat: Tensor, r: int, n: int) -> Tensor:
    return pad(flat, (0, -len(flat) % n)).chunk(n)[r]


def _right(case: Data, r: int, n: int) -> Tensor:
    return _cut(torch.cat(case["saved"])[: case["size"]], r, n)


def _with_old_padding(case: Data, r: int, n: int) -> Tensor:
    """Cut in the right places, but what lies behind the last number comes along."""
    size = ceil(case["size"] / n)
    part = torch.cat(case["saved"])[r * size :][:size]
    return pad(part, (0, size - len(part)))


def _shards_of_shards(case: Data, r: int, n: int) -> Tensor:
    return torch.cat([shard.tensor_split(n)[r] for shard in case["saved"]])


def _as_it_was(case: Data, r: int, n: int) -> Tensor | None:
    return case["saved"][r] if r < case["old_n"] else None


RESHARD = Exercise(
    id="05.4",
    title="reshard",
    points=2,
    body=_reshard,
    inputs=_saved_inputs,
    reference=_shards(_right, ONLY_ITS_OWN),
    mistakes=(
        Mistake(
            "You cut the old ranks' tensor with its padding. What lies behind the first `size` numbers belongs to "
            "nobody, and it moves every cut: the new shards are ceil(size/n) long.",
            _shards(lambda case, r, n: _cut(torch.cat(case["saved"]), r, n)),
        ),
        Mistake(
            "The cuts are right, but the last shard ends in what the old ranks had behind the last number. Stop at "
            "`size`, and fill up with zeros.",
            _shards(_with_old_padding),
        ),
        Mistake(
            "You took over what the old rank of the same number has saved. Its cuts are those of another number of "
            "ranks: rank r now begins at r · ceil(size/n).",
            _shards(_as_it_was),
        ),
        Mistake(
            "You cut each old shard into n pieces and took one of each. The numbers are then in another order: a new "
            "shard is one piece of the whole tensor.",
            _shards(_shards_of_shards),
        ),
        Mistake(
            "The last shard is too short. All of them have ceil(size/n) numbers: fill up with zeros.",
            _shards(lambda case, r, n: _right(case, r, n)[: max(0, case["size"] - r * ceil(case["size"] / n))]),
        ),
        Mistake(
            "The shard is right, but you read more than you keep. The whole may not fit on one rank: read from each "
            "old rank only what overlaps with your shard.",
            _shards(_right, MORE),
        ),
    ),
)

EXERCISES = (RESHARD,)
