"""05.5: units that a rank skips must be gathered all the same, if another rank computes them."""

import torch

from course.check.edits import exercise
from course.check.exercise import AS_NEEDED, MORE, random, shards_of
from course.check.listen import listen
from lib import comm

UNITS, WIDTH = 6, 16
FLAGS_BYTES = 8 * 8 * UNITS  # a few numbers per unit may be exchanged, in any way


class GivenUnit:
    """What the learner is given: `shard`, a flat tensor, and `compute(full, x)`."""

    def __init__(self, shard):
        self.shard = shard

    def compute(self, full, x):
        """The output of the unit for the input x."""
        return x + torch.tanh(x @ full[: WIDTH * WIDTH].view(WIDTH, WIDTH))


def inputs(generator, n):
    """Each rank skips two units, and unit 1 is skipped by all. Calls are equally many, so a wrong program ends."""
    units = [shards_of(random(generator, WIDTH * WIDTH), n) for _ in range(UNITS)]
    skipped = [{1, 0}, {1, 2}, {1, 3}, {1, 5}][:n]
    kept = [[i not in mine for i in range(UNITS)] for mine in skipped]
    return [{"x": random(generator, 2, WIDTH), "shards": [u[r] for u in units], "kept": kept[r]} for r in range(n)]


def body(answer, group, given):
    heard = listen()
    units = [GivenUnit(shard.clone()) for shard in given["shards"]]
    y = answer(given["x"].clone(), units, list(given["kept"]), group)
    most = (UNITS - 1) * (group.size - 1) * units[0].shard.nbytes + FLAGS_BYTES
    return {"y": y, "what was sent": MORE if heard.sent_bytes(group.size) > most else AS_NEEDED}


def reference(given):
    units = [GivenUnit(torch.cat(shards)) for shards in zip(*(g["shards"] for g in given), strict=True)]
    found = [{"y": g["x"], "what was sent": AS_NEEDED} for g in given]
    for of_rank, g in zip(found, given, strict=True):
        for unit in [unit for unit, mine in zip(units, g["kept"], strict=True) if mine]:
            of_rank["y"] = unit.compute(unit.shard, of_rank["y"])
    return found


def forward_with_drops(x, units, kept, group):
    needed = comm.all_reduce(torch.tensor(kept).long(), group)
    for unit, mine, ranks in zip(units, kept, needed.tolist()):
        if ranks:  # so many compute it, and all gather it
            full = comm.all_gather(unit.shard, group)
            if mine:
                x = unit.compute(full, x)
    return x


def with_a_flag_before_each(x, units, kept, group):
    for unit, mine in zip(units, kept, strict=True):
        flags = comm.all_gather(torch.tensor([mine]), group)
        full = comm.all_gather(unit.shard, group) if flags.any() else None
        x = unit.compute(full, x) if mine else x
    return x


MISTAKES = """
in y:
if ranks: => if mine:
    You gather only the units that this rank computes. In this run all ranks skip equally many, so nothing hangs, and it
    is worse: all-gathers of different units meet, and the result mixes the units.
in all:
if ranks: => if True:
    The output is right, but you gather units that no rank computes. Find out which are needed: all-reduce the flags.
in y:
if mine: => if True:
    A rank computes every unit that any rank computes. It must gather all of these, and still skip those that it drew.
comm.all_reduce(torch.tensor(kept).long(), group) => comm.all_reduce(torch.tensor(kept).long(), group, op="min")
    You keep a unit only if all ranks compute it. One rank that needs it is enough: the flags' maximum, not minimum.
=> comm.broadcast(torch.tensor(kept), group, src=0)
if mine: => if ranks:
    All ranks skip the units that rank 0 drew. That cannot hang, but each rank must skip the units of its own list.
"""

EXERCISE = exercise(globals(), points=2, right=(forward_with_drops, with_a_flag_before_each))
