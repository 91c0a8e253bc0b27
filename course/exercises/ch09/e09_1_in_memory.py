"""09.1: the fastest order in which no rank keeps more than so many microbatches."""

from course.check.compare import SEEN, same
from course.check.edits import exercise
from course.check.exercise import call, whole
from course.check.written import KEPT, ORDERS, SIZES, STAGES, TIME, WORKS, YES, schedule_facts, size
from lib.pipeline.schedules.action import Action, Op
from lib.pipeline.schedules.gpipe import gpipe
from lib.pipeline.schedules.one_f_one_b import in_turns
from lib.pipeline.simulate import Costs

NAME = "in_memory"
COSTS = Costs(1, 1, 1)
EXCESS = "microbatches above the limit, by rank"


def inputs(generator, n):
    """Small cases first: a FAIL shows the first wrong case. Last limits that limit nothing, or less than a batch."""
    cases = [(3, 4, 2), (4, whole(generator, 6, 9), 2), (4, whole(generator, 7, 10), 3), (5, 8, 3), (2, 3, 1)]
    return [{"cases": [*cases, (3, whole(generator, 4, 7), 5), (5, 2, 3), (3, 1, 2)]}]


def body(answer, group, given):
    found = {}
    for case in given["cases"]:
        title = call(NAME, case)
        facts = schedule_facts(answer(*case), title, COSTS)
        shown = facts.pop(SEEN)
        if KEPT in facts:
            facts[EXCESS] = [max(kept - case[2], 0) for kept in facts.pop(KEPT)]
        if not same(facts, right_facts(*case)):
            found.setdefault(SEEN, shown)
        found |= {f"{title}: {what}": value for what, value in facts.items() if what != ORDERS}
    return found


def reference(given):
    facts = {call(NAME, case): right_facts(*case) for case in given[0]["cases"]}
    return [{f"{title}: {what}": value for title, fact in facts.items() for what, value in fact.items()}]


def right_facts(ranks, m, limit):
    """Microbatch k + limit begins when k is back, after all ranks' forwards and backwards."""
    rounds, last = divmod(m - 1, min(limit, ranks))
    return {
        WORKS: YES,
        SIZES: size(ranks, m),
        STAGES: [*range(ranks)],
        EXCESS: [0] * ranks,
        TIME: 3.0 * (ranks * (rounds + 1) + last),
    }


def in_memory(num_ranks, num_microbatches, limit):
    rows, ends, now = [[] for _ in range(num_ranks)], {}, 0
    free, forwards, backwards = ([0] * num_ranks for _ in range(3))

    def has_come(*action):
        return ends.get(action, now + 1) <= now

    def run(rank, op, k, duration):
        rows[rank].append(f"{rank}{op}{k}")
        free[rank] = ends[rank, op, k] = now + duration

    while len(ends) < 2 * num_ranks * num_microbatches:
        for r in range(num_ranks):
            f, b = forwards[r], backwards[r]
            may_start = f < num_microbatches and f - b < limit
            if free[r] > now:
                continue
            if b < f and (r + 1 == num_ranks or has_come(r + 1, "B", b)):
                run(r, "B", b, duration=2)
                backwards[r] += 1
            elif may_start and (r == 0 or has_come(r - 1, "F", f)):
                run(r, "F", f, duration=1)
                forwards[r] += 1
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


def turns(ahead=lambda rank, ranks, limit: min(limit, ranks - rank) - 1):
    """1F1B with so many forwards first."""
    return lambda ranks, m, limit: [
        [Action(r, op, k) for op, k in in_turns(m, ahead(r, ranks, limit))] for r in range(ranks)
    ]


def one_group_after_the_other(ranks, m, limit):
    """Of as many as there is memory for; the next group begins when this one ends."""
    rows = [[] for _ in range(ranks)]
    for begin in range(0, m, limit):
        for row, new in zip(rows, gpipe(ranks, min(limit, m - begin)).actions, strict=True):
            row += [Action(s, op, begin + k) for s, op, k in new]
    return rows


MISTAKES = r"""
turns(lambda rank, ranks, limit: ranks - rank - 1)
    That is 1F1B without a limit: rank 0 keeps p microbatches.
        Before each forward, count those that the rank keeps.
lambda ranks, m, limit: gpipe(ranks, m)
    That is GPipe: each rank keeps every microbatch.
        Run a backward as soon as its gradient arrives.
turns()
    This is 1F1B with a shorter warmup, and it keeps to the limit. But a rank that always alternates waits for a forward
    that rank 0 may not start yet, while a backward is ready.
        Let each rank run whichever is ready, the backward first.
one_group_after_the_other
    Each group of microbatches ends before the next begins.
        Rank 0 may go on once its first backward frees memory.
if b < f and => if b < f and not (may_start and (r == 0 or has_come(r - 1, "F", f))) and
    A rank prefers a forward where both are ready.
        Rank 0 may start nothing until its gradient arrives: backward first.
f - b < limit => f - b < max(limit - 1, 1)
    You stop one microbatch too early.
        A rank that keeps one microbatch less than the limit may start one more forward.
f - b < limit => f - b <= limit
    You keep one microbatch more than the limit.
        Compare before the forward: it adds one.
f - b < limit => f - b < 1
    One microbatch at a time, for every limit: the naive pipeline.
        As many may be in flight as rank 0 keeps.
in ranks of its stages:
map(" ".join, rows) => map(" ".join, reversed(rows))
    Your lines are not in the order of the ranks: rank r has stage r.
        Begin with rank 0, which has the first stage.
in the kind of fault:
turns(lambda rank, ranks, limit: min(limit, rank + 1) - 1)
    Ranks wait for each other: a later rank waits for a forward that an earlier rank starts only after a backward of
    that later rank.
        No rank can have more in flight than the rank before it.
rows[rank].append(f"{rank}{op}{k}") => rows[rank] += [f"{rank}{op}{k}"] * ((op, k) != ("B", num_microbatches - 1))
    Backwards are missing.
        A rank ends with as many backwards as it was ahead by forwards.
" ".join, rows => " ".join, map(sorted, rows)
    A backward comes before its own forward.
        The last rank has nothing to run backward before its first forward.
{rank}{op} => 0{op}
or
f"{rank}{op}{k}" => f"{k}{op}{rank}" if op == "B" else f"{rank}{op}{k}"
    A stage is on two ranks.
        A line is a rank; of an action the first number is the stage, the second the microbatch.
{rank}{op} => {rank + 1}{op}
    You number the stages from 1.
        The first stage is number 0.
{k} => {k + 1}
    You number the microbatches from 1.
        The first microbatch is number 0.
map(" ".join, rows) => (" ".join([*row, f"{r}B{num_microbatches}"]) for r, row in enumerate(rows))
    A forward is missing, or there is one of a microbatch that does not exist.
        Each microbatch, 0 to m - 1, goes through every stage.
"\n".join => " ".join
    All is in one line, so one rank does everything.
        Each rank has its own line.
"""

EQUIVALENT = """
ends.get(action, now + 1) => ends.get(action, (2 * (now + 1)))
or ends.get(action, now + 1) => ends.get(action, (100 * (now + 1)))
    Any time that is still to come will do.
"""

EXERCISE = exercise(globals(), points=3, right=(in_memory, in_rounds), ranks=(1,))
