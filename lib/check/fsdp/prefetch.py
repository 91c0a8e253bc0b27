"""Chapter 05, the next unit's parameters on their way while this one computes: exercise 05.3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lib.check.exercise import Data, Exercise, Mistake, random
from lib.check.fsdp.units import ROWS, shards_of
from lib.check.listen import listen
from lib.mesh import Group

_UNITS, _WIDTH = 5, 4
AHEAD = "each while the one before it computes"
NOT_AHEAD, NO_OVERLAP = "each just before it computes", "ahead, and waited for at once"
ALL_AT_ONCE, TOO_FAR = "all at the beginning", "more than one ahead"
NOT_THERE, TOO_MANY = "one that has not arrived computes", "one more than there are"


class GivenUnit:
    """What 05.3 is given: `shard`, a flat tensor, and `compute(whole, x)`."""

    def __init__(self, shard: Tensor, note: Callable[[], None]) -> None:
        self.shard, self._note = shard, note

    def compute(self, whole: Tensor, x: Tensor) -> Tensor:
        """What comes out of the unit when x goes in."""
        self._note()
        return _compute(whole, x)


def _compute(whole: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ whole[: _WIDTH * _WIDTH].view(_WIDTH, _WIDTH))


def _units_inputs(generator: torch.Generator, n: int) -> list[Data]:
    units = [shards_of(random(generator, _WIDTH * _WIDTH), n) for _ in range(_UNITS)]
    return [{"x": random(generator, ROWS, _WIDTH), "shards": [u[r] for u in units]} for r in range(n)]


def _prefetched(answer: Callable, group: Group, given: Data) -> Data:
    asked = waited = 0
    computes: list[tuple[int, int]] = []  # at each compute, for how many units it was asked and waited

    def ask() -> None:
        nonlocal asked
        asked += 1

    def wait() -> None:
        nonlocal waited
        waited += 1

    listen(ask, wait)
    units = [GivenUnit(shard.clone(), lambda: computes.append((asked, waited))) for shard in given["shards"]]
    y = answer(given["x"].clone(), units, group)
    return {"y": y, "when units were asked for": _order(computes, asked)}


def _order(computes: list[tuple[int, int]], asked: int) -> str:
    """In words; unit i is the (i+1)-th to be asked for."""
    ahead = [asked - i - 1 for i, (asked, _) in enumerate(computes)]
    arrived = [waited - i - 1 for i, (_, waited) in enumerate(computes)]
    if any(a < 0 for a in arrived):
        return NOT_THERE
    if asked > _UNITS:
        return TOO_MANY
    if ahead and ahead[0] == _UNITS - 1:
        return ALL_AT_ONCE
    if any(a > 1 for a in ahead):
        return TOO_FAR
    if not all(ahead[: _UNITS - 1]):
        return NOT_AHEAD
    return NO_OVERLAP if any(arrived) else AHEAD


def _chained(wholes: Callable[[list[Tensor]], list[Tensor]] = lambda wholes: wholes, when: str = AHEAD) -> Callable:
    def answers(given: list[Data], want: Any = None) -> list[Data]:
        units = [torch.cat(shards) for shards in zip(*(g["shards"] for g in given), strict=True)]
        found = []
        for g in given:
            y = g["x"]
            for whole in wholes(units):
                y = _compute(whole, y)
            found.append({"y": y, "when units were asked for": when})
        return found

    return answers


def _in_order(when: str) -> Callable:
    """The right output, units asked for in another order."""
    return _chained(when=when)


PREFETCHED = Exercise(
    id="05.3",
    title="prefetched",
    points=3,
    body=_prefetched,
    inputs=_units_inputs,
    reference=_chained(),
    mistakes=(
        Mistake(
            "The output is right, and nothing overlaps: you ask for a unit when it is to compute. Ask for the next "
            "one first, and compute while it travels.",
            _in_order(NOT_AHEAD),
        ),
        Mistake(
            "You ask for the next unit in time, and wait for it before this one computes. Keep what all_gather_start "
            "returns, and wait when the next one's turn comes.",
            _in_order(NO_OVERLAP),
        ),
        Mistake(
            "You ask for all units at the beginning. Each needs its memory from then on, and the model is whole. Ask "
            "for one more at a time.",
            _in_order(ALL_AT_ONCE),
        ),
        Mistake(
            "You ask for more than the next unit. Two are in memory anyway, the one that computes and the one that "
            "comes: more was not asked for.",
            _in_order(TOO_FAR),
        ),
        Mistake(
            "A unit computes before its parameters have arrived: whatever is in that memory takes part. wait() comes "
            "before compute.",
            lambda given, want: [{"when units were asked for": NOT_THERE}] * len(given),
        ),
        Mistake(
            "The output is right, but you ask for one unit more than there are: behind the last there is none to "
            "prefetch.",
            _in_order(TOO_MANY),
        ),
        Mistake(
            "The last unit has not computed. A loop over pairs of neighbours ends one too early: it is still on its "
            "way when the loop is through.",
            _chained(lambda wholes: wholes[:-1]),
        ),
    ),
)

EXERCISES = (PREFETCHED,)
