"""05.5: units that a rank skips must be gathered all the same, if another rank computes them."""

from functools import partial
from types import SimpleNamespace

import torch

from course.check.edits import exercise
from course.check.exercise import AS_NEEDED, random, shards_of, with_variants
from course.check.hung import hang_report
from course.check.listen import listen
from lib import comm
from lib.runtime.hang import AwaitedCall

UNITS, WIDTH = 6, 16
COMPUTED = "units that this rank computed"
FACTS = {"what was sent": AS_NEEDED}
FLAGS_BYTES = 8 * 8 * UNITS  # a few numbers per unit may be exchanged, in any way


def compute(full, x):
    return x + torch.tanh(x @ full[: WIDTH * WIDTH].view(WIDTH, WIDTH))


def inputs(generator, n, skipped=({1, 0}, {1, 2}, {1, 3}, {1, 5})):
    """Each rank skips two units, and unit 1 is skipped by all. Calls are equally many, so a wrong program ends."""
    units = [shards_of(random(generator, WIDTH * WIDTH), n) for _ in range(UNITS)]
    kept = [[i not in mine for i in range(UNITS)] for mine in skipped]
    return [{"x": random(generator, 2, WIDTH), "shards": [u[r] for u in units], "kept": kept[r]} for r in range(n)]


def body(answer, group, given, gathered=UNITS - 1):
    """Calls an answer, which may gather so many units."""
    heard, computed = listen(), []

    def of_unit(i):
        return lambda full, x: (computed.append(i), compute(full, x))[1]

    units = [SimpleNamespace(shard=shard.clone(), compute=of_unit(i)) for i, shard in enumerate(given["shards"])]
    y = answer(given["x"].clone(), units, list(given["kept"]), group)
    most = gathered * (group.size - 1) * units[0].shard.nbytes + FLAGS_BYTES
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

# ---- row A: early exits ----------------------------------------------------------------------------------------------

DEEPEST = 4
# Two units are computed before the first that is skipped, or four, one, none. Of those after it, some are not skipped.
SKIPPED = {2, 3, 5}, {4, 5}, {1, 4}, {0, 3, 4}


def until_exit(kept):
    """For each unit whether a rank computes it, if it exits at its first False."""
    return [all(kept[: i + 1]) for i in range(len(kept))]


def reference_of_exits(given):
    return reference([of_rank | {"kept": until_exit(of_rank["kept"])} for of_rank in given])


def forward_with_exits(x, units, kept, group):
    depth = kept.index(False)
    deepest = comm.all_reduce(torch.tensor(depth), group, op="max")
    for i, unit in enumerate(units[:deepest]):
        full = comm.all_gather(unit.shard, group)
        if i < depth:
            x = unit.compute(full, x)
    return x


def asked_at_each_unit(x, units, kept, group):
    """Before each unit all ranks learn whether any rank goes on; without one, they stop."""
    goes_on = True
    for unit, mine in zip(units, kept, strict=True):
        goes_on = goes_on and mine
        if not any_of(goes_on, group):
            break
        full = comm.all_gather(unit.shard, group)
        x = unit.compute(full, x) if goes_on else x
    return x


def any_flag(kept, group):
    """For each unit how many ranks have a True, also after their exit."""
    return comm.all_reduce(torch.tensor(kept).long(), group)


MISTAKES_OF_EXITS = """
hangs
units[:deepest] => units[:depth]
    That is still the given program: a rank that exits makes no more all-gathers, and the others wait for it.
        All must gather the same units. How do they find out how many?
if i < depth: => if True:
x = unit.compute(full, x) => x = unit.compute(full, x) if i < depth else (unit.compute(full, x), x)[1]
    The output is right, but a rank still computes units after its exit, and drops their results: that takes as long as
    no exit.
        Gather those units, and do not call compute.
units[:deepest] => units
or
op="max" => op="sum"
or
units[:deepest] => units[: deepest + 1]
or
comm.all_reduce(torch.tensor(depth), group, op="max") => any_flag(kept, group).count_nonzero()
    The output is right, but you gather units that no rank computes.
        A True after a rank's first False counts for nothing. Gather as far as the deepest rank: the maximum of the
        depths.
in y:
if i < depth: => if True:
    All ranks exit where the last one does.
        Each must gather as far as that, and compute only the units before its own first False.
op="max" => op="min"
    All ranks exit where the first one does.
        One rank that goes on is enough: the maximum of the depths, not the minimum.
comm.all_reduce(torch.tensor(depth), group, op="max") => comm.broadcast(torch.tensor(depth), group, src=0)
    You gather as far as rank 0 goes, and a rank that would go on stops there.
        Gather as far as the rank that goes furthest.
=> depth = int(comm.broadcast(torch.tensor(depth), group, src=0))
    All ranks exit where rank 0 does.
        That cannot hang, but each rank exits by its own list.
if i < depth => if kept[i]
or kept.index(False) => sum(kept)
or kept.index(False) => len(kept) - kept[::-1].index(True)
    You count a True after the first False.
        A rank does not return after its exit: its depth is the place of its first False.
kept.index(False) => kept.index(False) + 1
    A rank computes one unit too many: the first that is False for it.
        It exits before that unit.
"""

TASK = """
Ranks do not skip single units, but exit: a rank computes the units before the first `False` in its list `kept`, and
no unit after it.

For each unit, the list says whether the samples of this rank need it, as a small network has estimated. Each list has
a `False`; the entries after the first one count for nothing, and some are `True`. This is the forward pass:

```python
def wrong_forward(x, units, kept, group):
    for unit, mine in zip(units, kept):
        if not mine:
            break
        full = comm.all_gather(unit.shard, group)
        x = unit.compute(full, x)
    return x
```

In one step with six units, rank 0 exited after two units, rank 1 after four, and rank 2 after one. It hung:

{report}

Correct the function, with the name `forward_with_drops`.

- Return the output of this rank, with exactly the units before its exit computed.
- Gather no unit that no rank computes. You may send a few numbers more.
"""

GATHER = AwaitedCall(
    "all_gather dim=0 float32[100]",
    "step.py, line 10, in wrong_forward: full = comm.all_gather(unit.shard, group)",
    peers=(0, 1, 2),
    late=(2,),
    for_s=2.1,
)

EARLY_EXITS = {
    "inputs": partial(inputs, skipped=SKIPPED),
    "body": partial(body, gathered=DEEPEST),
    "reference": reference_of_exits,
    "MISTAKES": MISTAKES_OF_EXITS,
    "ALSO_RIGHT": "",
    "EQUIVALENT": "",
}

EXERCISE = with_variants(
    exercise(globals(), points=2, right=(forward_with_drops,)),
    exercise(
        globals() | EARLY_EXITS,
        points=2,
        right=(forward_with_exits, asked_at_each_unit),
        title=forward_with_drops.__name__,
        task=TASK.format(report=hang_report({0: GATHER, 1: GATHER}, finished=[2])).strip(),
    ),
)
