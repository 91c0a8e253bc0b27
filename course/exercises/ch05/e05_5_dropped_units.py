"""05.5: units that a rank skips must be gathered all the same, if another rank computes them."""

from types import SimpleNamespace

import torch

from course.check.edits import exercise
from course.check.exercise import AS_NEEDED, random, shards_of
from course.check.listen import listen
from lib import comm

UNITS, WIDTH = 6, 16
COMPUTED = "units that this rank computed"
FACTS = {"what was sent": AS_NEEDED}
FLAGS_BYTES = 8 * 8 * UNITS  # a few numbers per unit may be exchanged, in any way


def compute(full, x):
    return x + torch.tanh(x @ full[: WIDTH * WIDTH].view(WIDTH, WIDTH))


def inputs(generator, n):
    """Each rank skips two units, and unit 1 is skipped by all. Calls are equally many, so a wrong program ends."""
    units = [shards_of(random(generator, WIDTH * WIDTH), n) for _ in range(UNITS)]
    skipped = [{1, 0}, {1, 2}, {1, 3}, {1, 5}][:n]
    kept = [[i not in mine for i in range(UNITS)] for mine in skipped]
    return [{"x": random(generator, 2, WIDTH), "shards": [u[r] for u in units], "kept": kept[r]} for r in range(n)]


def body(answer, group, given):
    heard, computed = listen(), []

    def of_unit(i):
        return lambda full, x: (computed.append(i), compute(full, x))[1]

    units = [SimpleNamespace(shard=shard.clone(), compute=of_unit(i)) for i, shard in enumerate(given["shards"])]
    y = answer(given["x"].clone(), units, list(given["kept"]), group)
    most = (UNITS - 1) * (group.size - 1) * units[0].shard.nbytes + FLAGS_BYTES
    return {"y": y, "what was sent": heard.calls_if_more(group.size, most), COMPUTED: computed}


def reference(given):
    ys = [g["x"] for g in given]
    for i, shards in enumerate(zip(*(g["shards"] for g in given), strict=True)):
        ys = [compute(torch.cat(shards), y) if g["kept"][i] else y for y, g in zip(ys, given, strict=True)]
    return [
        {"y": y, COMPUTED: [i for i, mine in enumerate(g["kept"]) if mine]} for y, g in zip(ys, given, strict=True)
    ]


def forward_with_drops(x, units, kept, group):
    needed = comm.all_reduce(torch.tensor(kept).long(), group)
    for unit, mine, ranks in zip(units, kept, needed.tolist()):
        if ranks:  # so many compute it, and all gather it
            full = comm.all_gather(unit.shard, group)
            if mine:
                x = unit.compute(full, x)
    return x


def any_of(mine, group):
    return comm.all_gather(torch.tensor([mine]), group).any()[None]


ALSO_RIGHT = """
comm.all_reduce(torch.tensor(kept).long(), group) => torch.cat([any_of(mine, group) for mine in kept])
    Each flag travels alone.
"""

MISTAKES = """
in y: if ranks: => if mine:
    You gather only the units that this rank computes.
        In this run all ranks skip equally many, so nothing hangs, and it is worse: all-gathers of different units meet,
        and the result mixes the units.
if ranks: => if True:
or
comm.all_reduce(torch.tensor(kept).long(), group) => torch.ones(len(units))
    The output is right, but you gather units that no rank computes.
        Find out which are needed: all-reduce the flags.
if mine: => if True:
x = unit.compute(full, x) => x = unit.compute(full, x) if mine else (unit.compute(full, x), x)[1]
    The output is right, but a rank computes units that it skips, and drops their results: that takes as long as no
    skipping.
        Gather those units, and do not call compute.
in y:
if mine: => if True:
    A rank computes every unit that any rank computes.
        It must gather all of these, and still skip those that it drew.
comm.all_reduce(torch.tensor(kept).long(), group) => comm.all_reduce(torch.tensor(kept).long(), group, op="min")
    You keep a unit only if all ranks compute it.
        One rank that needs it is enough: the flags' maximum, not minimum.
=> comm.broadcast(torch.tensor(kept), group, src=0)
if mine: => if ranks:
    All ranks skip the units that rank 0 drew.
        That cannot hang, but each rank must skip the units of its own list.
"""

EQUIVALENT = """
comm.all_reduce(torch.tensor(kept).long(), group) => (2 * (comm.all_reduce(torch.tensor(kept).long(), group)))
or comm.all_reduce(torch.tensor(kept).long(), group) => (100 * (comm.all_reduce(torch.tensor(kept).long(), group)))
    A count is only asked whether it is 0.
"""

EXERCISE = exercise(globals(), points=2, right=(forward_with_drops,))
