"""09.1: the fastest order in which no rank keeps more than so many microbatches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from lib.check.exercise import SEEN, Data, Exercise, Mistake, call, same, whole
from lib.check.written import KEPT, KIND, ORDERS, SIZES, STAGES, TIME, WORKS, YES, schedule_facts, size
from lib.mesh import Group
from lib.pipeline.schedules.action import Action, Op
from lib.pipeline.schedules.gpipe import gpipe, naive
from lib.pipeline.schedules.one_f_one_b import in_turns, one_f_one_b
from lib.pipeline.simulate import Costs

NAME = "in_memory"
COSTS = Costs(1, 1, 1)
DURATION = {"F": 1, "B": 2}
EXCESS = "microbatches above the limit, by rank"


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    """Small cases first: a FAIL shows the first wrong case. Last a limit that limits nothing."""
    cases = [(3, 4, 2), (4, whole(generator, 6, 9), 2), (4, whole(generator, 7, 10), 3), (5, 8, 3), (2, 3, 1)]
    return [{"cases": [*cases, (3, whole(generator, 4, 7), 5)]}]


def body(answer: Callable, group: Group, given: Data) -> Data:
    found: Data = {}
    for case in given["cases"]:
        title = call(NAME, case)
        facts = schedule_facts(answer(*case), title, COSTS)
        shown = facts.pop(SEEN)
        if KEPT in facts:
            facts[EXCESS] = [max(kept - case[2], 0) for kept in facts.pop(KEPT)]
        if not same(facts, right_facts(*case)):
            found.setdefault(SEEN, shown)
        found |= {f"{title}: {what}": value for what, value in facts.items() if what not in (STAGES, ORDERS)}
    return found


def reference(given: list[Data]) -> list[Data]:
    facts = {call(NAME, case): right_facts(*case) for case in given[0]["cases"]}
    return [{f"{title}: {what}": value for title, fact in facts.items() for what, value in fact.items()}]


def right_facts(ranks: int, m: int, limit: int) -> Data:
    """Microbatch k + limit begins when k is back, after all ranks' forwards and backwards."""
    rounds, last = divmod(m - 1, min(limit, ranks))
    return {WORKS: YES, SIZES: size(ranks, m), EXCESS: [0] * ranks, TIME: 3.0 * (ranks * (rounds + 1) + last)}


# ---- programs -------------------------------------------------------------------------------------------------------


def as_soon_as_it_can(ranks, m, limit, first="BF"):
    """Unit by unit: a rank that is free runs a backward if it can, else a forward."""
    rows, ends, now = [[] for _ in range(ranks)], {}, 0
    free, done = [0] * ranks, {"F": [0] * ranks, "B": [0] * ranks}

    def can(r, op):
        k, ahead = done[op][r], done["F"][r] - done["B"][r]
        before = (r - 1, "F", k) if op == "F" else (r + 1, "B", k)
        came = before[0] in (-1, ranks) or ends.get(before, now + 1) <= now
        return came and (k < m and ahead < limit if op == "F" else ahead > 0)

    while len(ends) < 2 * ranks * m:
        for r in range(ranks):
            if op := next((op for op in first if free[r] <= now and can(r, op)), None):
                k = done[op][r]
                rows[r].append(f"{r}{op}{k}")
                free[r] = ends[r, op, k] = now + DURATION[op]
                done[op][r] += 1
        now += 1
    return "\n".join(map(" ".join, rows))


def in_rounds(ranks, m, limit):
    """By a formula for the time of each action: microbatches run in groups of `limit`."""
    limit, rows = min(limit, ranks), [[] for _ in range(ranks)]
    for r, row in enumerate(rows):
        when = {}
        for k in range(m):
            begin = 3 * (ranks * (k // limit) + k % limit)  # on rank 0, with a unit for each third
            when["F", k] = begin + r
            when["B", k] = begin + ranks + 2 * (ranks - 1 - r)
        row += [Action(r, Op(op), k) for op, k in sorted(when, key=when.get)]
    return rows


def turns(forwards=lambda rank, ranks, limit: min(limit, ranks - rank) - 1, pair="FB", cooldown=True, first=0):
    """1F1B with so many forwards first, with a place for each mistake."""

    def answer(ranks, m, limit):
        lines = []
        for r in range(ranks):
            order = [(str(op), first + k) for op, k in in_turns(m, forwards(r, ranks, limit))]
            if pair == "BF":
                warm = min(forwards(r, ranks, limit), m)
                order = order[:warm] + [a for i in range(warm, 2 * m - warm, 2) for a in reversed(order[i : i + 2])]
            lines.append(" ".join(f"{r}{op}{k}" for op, k in order if cooldown or op == "F" or k < first + m - 1))
        return "\n".join(lines)

    return answer


def one_group_after_the_other(ranks, m, limit):
    """Of as many as there is memory for; the next group begins when this one ends."""
    rows = [[] for _ in range(ranks)]
    for begin in range(0, m, limit):
        for row, new in zip(rows, gpipe(ranks, min(limit, m - begin)).actions, strict=True):
            row += [Action(s, op, begin + k) for s, op, k in new]
    return rows


def rewritten(change):
    """Right, except for the names of the actions in each line."""
    return lambda *case: [
        change([*map(Action.parse, line.split())]) for line in as_soon_as_it_can(*case).splitlines()
    ]


KINDS = (KIND,)
ON_TWO_RANKS = (
    "A stage is on two ranks. A line is a rank; the first number of an action is the stage, which stays on its rank, "
    "and the second is the microbatch."
)

EXERCISE = Exercise(
    id="09.1",
    title=NAME,
    points=3,
    body=body,
    inputs=inputs,
    reference=reference,
    ranks=(1,),
    right=(as_soon_as_it_can, in_rounds),
    mistakes=(
        Mistake(
            "That is 1F1B without a limit: rank 0 keeps p microbatches. Before each forward, count the "
            "microbatches that the rank keeps.",
            lambda ranks, m, limit: one_f_one_b(ranks, m),
        ),
        Mistake(
            "That is GPipe: each rank keeps every microbatch. Run a backward as soon as its gradient arrives.",
            lambda ranks, m, limit: gpipe(ranks, m),
        ),
        Mistake(
            "This is 1F1B with a shorter warmup, and it keeps to the limit. But a rank that always alternates waits "
            "for a forward that rank 0 may not start yet, while a backward is ready. Let each rank run whichever is "
            "ready, the backward first.",
            turns(),
        ),
        Mistake(
            "Each group of microbatches runs to its end before the next group begins. Rank 0 may start a forward as "
            "soon as its first backward frees memory.",
            one_group_after_the_other,
        ),
        Mistake(
            "A rank prefers a forward where both are ready. Rank 0 waits for the gradient, and may start nothing until "
            "the gradient arrives: run the backward first.",
            partial(as_soon_as_it_can, first="FB"),
        ),
        Mistake(
            "You stop one microbatch too early. A rank that keeps one microbatch less than the limit may start one "
            "more forward.",
            lambda ranks, m, limit: as_soon_as_it_can(ranks, m, max(limit - 1, 1)),
        ),
        Mistake(
            "You keep one microbatch more than the limit. Compare before the forward: it adds one.",
            lambda ranks, m, limit: as_soon_as_it_can(ranks, m, limit + 1),
        ),
        Mistake(
            "One microbatch at a time, for every limit: the naive pipeline. As many may be in flight as rank 0 keeps.",
            lambda ranks, m, limit: naive(ranks, m),
        ),
        Mistake(
            "Ranks wait for each other: a later rank waits for a forward that an earlier rank starts only after a "
            "backward of that later rank. No rank can have more in flight than the rank before it.",
            turns(lambda rank, ranks, limit: min(limit, rank + 1) - 1),
            about=KINDS,
        ),
        Mistake(
            "Backwards are missing. A rank ends with as many backwards as it was ahead by forwards.",
            turns(cooldown=False),
            about=KINDS,
        ),
        Mistake(
            "A backward comes before its own forward. The last rank has nothing to run backward before its first "
            "forward.",
            turns(pair="BF"),
            about=KINDS,
        ),
        Mistake(ON_TWO_RANKS, rewritten(lambda row: [a._replace(stage=0) for a in row]), about=KINDS),
        Mistake(
            ON_TWO_RANKS,
            rewritten(lambda row: [Action(m, op, s) if op == Op.B else Action(s, op, m) for s, op, m in row]),
            about=KINDS,
        ),
        Mistake(
            "You number the stages from 1. The first stage is number 0.",
            rewritten(lambda row: [a._replace(stage=a.stage + 1) for a in row]),
            about=KINDS,
        ),
        Mistake(
            "You number the microbatches from 1. The first microbatch is number 0.",
            rewritten(lambda row: [a._replace(microbatch=a.microbatch + 1) for a in row]),
            about=KINDS,
        ),
        Mistake(
            "A forward is missing: each of the m microbatches, 0 to m - 1, goes through every stage. Or a microbatch "
            "occurs that does not exist.",
            rewritten(lambda row: [*row, Action(row[-1].stage, Op.B, max(a.microbatch for a in row) + 1)]),
            about=KINDS,
        ),
        Mistake(
            "All is in one line, so one rank does everything. Each rank has its own line.",
            lambda *case: as_soon_as_it_can(*case).replace("\n", " "),
            about=KINDS,
        ),
    ),
)
