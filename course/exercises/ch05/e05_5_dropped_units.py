"""05.5: units that a rank skips must be gathered all the same, if another rank computes them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from course.check.exercise import AS_NEEDED, MORE, Data, Exercise, Mistake, random, shards_of
from course.check.listen import listen
from lib import comm
from lib.mesh import Group

UNITS, WIDTH = 6, 16
FLAGS_BYTES = 8 * 8 * UNITS  # a few numbers per unit may be exchanged, in any way


class GivenUnit:
    """What the learner is given: `shard`, a flat tensor, and `compute(full, x)`."""

    def __init__(self, shard: Tensor) -> None:
        self.shard = shard

    def compute(self, full: Tensor, x: Tensor) -> Tensor:
        """The output of the unit for the input x."""
        return x + torch.tanh(x @ full[: WIDTH * WIDTH].view(WIDTH, WIDTH))


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    """Each rank skips two units, and unit 1 is skipped by all. Calls are equally many, so a wrong program ends."""
    units = [shards_of(random(generator, WIDTH * WIDTH), n) for _ in range(UNITS)]
    skipped = [{1, 0}, {1, 2}, {1, 3}, {1, 5}][:n]
    kept = [[i not in mine for i in range(UNITS)] for mine in skipped]
    return [{"x": random(generator, 2, WIDTH), "shards": [u[r] for u in units], "kept": kept[r]} for r in range(n)]


def body(answer: Callable, group: Group, given: Data) -> Data:
    heard = listen()
    units = [GivenUnit(shard.clone()) for shard in given["shards"]]
    y = answer(given["x"].clone(), units, list(given["kept"]), group)
    most = (UNITS - 1) * (group.size - 1) * units[0].shard.nbytes + FLAGS_BYTES
    return {"y": y, "what was sent": MORE if heard.sent_bytes(group.size) > most else AS_NEEDED}


def reference(given: list[Data]) -> list[Data]:
    units = [GivenUnit(torch.cat(shards)) for shards in zip(*(g["shards"] for g in given), strict=True)]
    found = []
    for g in given:
        y = g["x"]
        for unit, mine in zip(units, g["kept"], strict=True):
            y = unit.compute(unit.shard, y) if mine else y
        found.append({"y": y, "what was sent": AS_NEEDED})
    return found


# ---- right programs -------------------------------------------------------------------------------------------------


def forward(x, units, kept, group, op="max", computes=lambda mine, any_rank: mine):
    needed = comm.all_reduce(torch.tensor(kept, dtype=torch.int64), group, op=op)
    for unit, mine, any_rank in zip(units, kept, needed.tolist(), strict=True):
        if any_rank:
            full = comm.all_gather(unit.shard, group)
            x = unit.compute(full, x) if computes(mine, any_rank) else x
    return x


def forward_with_a_flag_before_each(x, units, kept, group):
    for unit, mine in zip(units, kept, strict=True):
        flags = comm.all_gather(torch.tensor([mine]), group)
        full = comm.all_gather(unit.shard, group) if flags.any() else None
        x = unit.compute(full, x) if mine else x
    return x


# ---- wrong programs -------------------------------------------------------------------------------------------------


def only_its_own(x, units, kept, group):
    for unit, mine in zip(units, kept, strict=True):
        if mine:
            x = unit.compute(comm.all_gather(unit.shard, group), x)
    return x


def gathers_all(x, units, kept, group):
    for unit, mine in zip(units, kept, strict=True):
        full = comm.all_gather(unit.shard, group)
        x = unit.compute(full, x) if mine else x
    return x


def as_rank_0(x, units, kept, group):
    kept = comm.broadcast(torch.tensor(kept), group, src=0).tolist()
    return only_its_own(x, units, kept, group)


EXERCISE = Exercise(
    id="05.5",
    title="forward_with_drops",
    points=2,
    body=body,
    inputs=inputs,
    reference=reference,
    right=(forward, forward_with_a_flag_before_each),
    mistakes=(
        Mistake(
            "You gather only the units that this rank computes. In this run all ranks skip equally many, so nothing "
            "hangs, and it is worse: all-gathers of different units meet, and the result mixes the units.",
            only_its_own,
            about=("y",),
        ),
        Mistake(
            "The output is right, but you gather units that no rank computes. Find out first which units are needed: "
            "one small all-reduce of the flags.",
            gathers_all,
        ),
        Mistake(
            "A rank computes every unit that any rank computes. It must take part in the all-gather, and still skip "
            "the units that it drew itself.",
            lambda *given: forward(*given, computes=lambda mine, any_rank: True),
            about=("y",),
        ),
        Mistake(
            "You keep a unit only if all ranks compute it. One rank that needs the unit is enough: the maximum of the "
            "flags, not the minimum.",
            lambda *given: forward(*given, op="min"),
            about=("y",),
        ),
        Mistake(
            "All ranks skip the units that rank 0 drew. That cannot hang, but each rank must skip the units of its "
            "own list.",
            as_rank_0,
            about=("y",),
        ),
    ),
)
