"""12.2: a schedule for unequal halves and little memory that is faster than the greedy one of the page."""

import re
from dataclasses import replace
from functools import cache, partial
from math import inf

from course.check.compare import SEEN
from course.check.edits import exercise
from course.check.exercise import with_variants
from course.check.written import KIND, NO, WORKS, YES, kind_of, text_of
from course.workshop.typed import SLACK, Par, workshop
from lib.pipeline.gantt import gantt
from lib.pipeline.schedules.action import Fault, Schedule, ScheduleError
from lib.pipeline.schedules.v_shape import v_half
from lib.pipeline.schedules.zero_bubble import zb_h1
from lib.pipeline.simulate import Costs

RANKS, LIMIT = 4, 3
COSTS = Costs(1, 2, 1)
KEPT, MAY = "microbatches that a rank keeps", "at most three"
TIME, SOON, LATE = "units of time", "as few as asked", "more than asked"
WRITTEN = "a schedule for different sizes"  # not judged: an answer to a different row is told by it


def body(answer, group, given, m, most):
    par = Par(RANKS, m, LIMIT, COSTS)
    try:
        seen = workshop(text_of(answer()), par)
    except ScheduleError as error:  # no text at all
        return {WORKS: NO, KIND: kind_of(error), SEEN: str(error)}
    if seen.error:
        found = {WORKS: NO, KIND: kind_of(seen.error), SEEN: f"{seen.problem}\n{seen.advice}"}
        return found | ({WRITTEN: seen.schedule.to_text()} if seen.error.kind == Fault.OTHER_SIZES else {})
    score, per_rank = seen.score, seen.schedule.num_stages // RANKS
    ops = {str(slot.action.op) for slot in seen.timeline.compute}
    kept = " ".join(f"{count:g}" for count in score.kept)
    said = f"It takes {score.time:g} units, and the ranks keep {kept} microbatches."
    return {
        WORKS: YES,
        KEPT: MAY if score.in_limit else "more than three",
        TIME: SOON if score.time <= most + SLACK else LATE,
        "its backwards": "in two halves" if "B" not in ops else "some full" if "I" in ops else "full",
        "stages on each rank": {1: "one", 2: "two"}.get(per_rank, "three or more"),
        SEEN: "\n".join([said, gantt(seen.timeline), seen.advice]),
    }


@cache
def greedy(v=4, priority="IFW", turns=False, spare=1, m=8):
    """As on the page, the action that can begin first, with v stages on each rank.

    Args:
        turns: every second row of stages runs from the last rank to the first, as in a V.
        spare: places for a forward in the last row of stages.
    """
    rank_of = [rank for row in range(v) for rank in range(RANKS)[:: -1 if turns and row % 2 else 1]]
    last = len(rank_of) - 1
    takes = {"F": COSTS.F / v, "I": COSTS.I / v, "W": COSTS.W / v}
    done = {(stage, op): 0 for stage in range(last + 1) for op in "FIW"}  # how many microbatches
    ended = {end: 0.0 for k in range(m) for end in ((-1, "F", k), (last + 1, "I", k))}
    rows, free, kept = [[] for _ in range(RANKS)], [0.0] * RANKS, [0] * RANKS

    def begins(stage, op):
        k, rank = done[stage, op], rank_of[stage]
        needs = {"F": [(stage - 1, "F", k)], "I": [(stage, "F", k), (stage + 1, "I", k)], "W": [(stage, "I", k)]}[op]
        is_full = op == "F" and kept[rank] >= v * LIMIT - spare * (stage <= last - RANKS)
        return inf if is_full or k == m else max(free[rank], *(ended.get(a, inf) for a in needs))

    for _ in range(3 * m * (last + 1)):
        stage, op = min(done, key=lambda a: (begins(*a), priority.index(a[1]), done[a], a[0]))
        k, rank = done[stage, op], rank_of[stage]
        free[rank] = ended[stage, op, k] = begins(stage, op) + takes[op]
        kept[rank] += (op == "F") - (op == "W")
        done[stage, op] += 1
        rows[rank].append(f"{stage}{op}{k}")
    return "\n".join(map(" ".join, rows))


def unit_by_unit(v=4, priority="IFW", m=8):
    """In units of 1/v: each rank that is free runs the first action that it can, the oldest microbatch first."""
    last, ends, free = RANKS * v - 1, {}, [0] * RANKS
    rows, now = [[] for _ in range(RANKS)], 0

    def ended(*action):
        return ends.get(action, now + 1) <= now

    def can(s, op, k):
        if op == "F":
            ran = [op for _, op, _ in rows[s % RANKS]]
            has_memory = ran.count("F") - ran.count("W") < v * LIMIT - (s <= last - RANKS)
            return has_memory and (s == 0 or ended(s - 1, "F", k))
        return ended(s, "I", k) if op == "W" else ended(s, "F", k) and (s == last or ended(s + 1, "I", k))

    while len(ends) < 3 * (last + 1) * m:
        for rank in (rank for rank in range(RANKS) if free[rank] <= now):
            wanted = ((s, op, k) for op in priority for k in range(m) for s in range(rank, last + 1, RANKS))
            if action := next((a for a in wanted if a not in ends and can(*a)), None):
                rows[rank].append(action)
                free[rank] = ends[action] = now + (2 if action[1] == "I" else 1)
        now += 1
    return rows


def half(m):
    """V-Half, which a mistake then changes."""
    return v_half(RANKS, m).to_text()


def unequal(m):
    """Five stages: rank 0 has the first and the last."""
    stages = [0, 1, 2, 3, 4]
    rows = [[s for s in stages if s % RANKS == rank] for rank in range(RANKS)]
    forward = [[f"{s}F{k}" for k in range(m) for s in row] for row in rows]
    back = [[f"{s}B{k}" for k in range(m) for s in row[::-1]] for row in rows]
    return "\n".join(" ".join(f + b) for f, b in zip(forward, back, strict=True))


MISTAKES = r"""
in whether it can work, microbatches that a rank keeps:
lambda: zb_h1(RANKS, {m})
    It runs, but a rank keeps more than three microbatches. With memory for four, ZB-V also takes less time: the task is
    to be fast with little memory.
        Start fewer forwards before the first I, or run a W sooner.

in whether it can work, microbatches that a rank keeps, units of time, its backwards:
lambda: re.sub(r" \dW\d+", "", greedy(2, "FIW", turns=True, m={m})).replace("I", "B")
    It runs, and takes more than {most} units: your backwards are full, and ranks wait for weight gradients.
        Write I and W.
lambda: half({m}).replace(" 2W3", "").replace("2I3", "2B3")
    It runs, and takes more than {most} units: some backwards are full, and the stage before waits.
        Write I and W instead.

in whether it can work, microbatches that a rank keeps, units of time, stages on each rank:
lambda: greedy(1, "FWI", spare=0, m={m})
    It runs, and takes more than {most} units.
        With one stage on each rank three microbatches do not fill the time until the first gradient returns from the
        last rank. What shortens that wait in chapter 11?
lambda: greedy(2, "FIW", turns=True, m={m})
    It runs, and takes more than {most} units.
        With two stages on each rank in a V, the greedy scheduler takes {greedy} units. Memory is limited in
        microbatches of a full rank: what changes if the same layers are more and shorter stages?
lambda: greedy(4, "WIF", m={m})
    It runs, and takes more than {most} units. Short stages are a good idea.
        Use all the memory (three microbatches in four stages each are twelve), compare all priorities, and both
        directions of the rows of stages.

in the kind of fault:
lambda: re.sub(r" \d[IW]\d+", "", half({m}))
    Nothing runs backward.
        Each microbatch also needs an I and a W, or a B, on each stage.
lambda: half({m}).replace(" 1W3", "")
or
lambda: half({m}).replace(" 1I3", "")
    A W is missing, or an I.
        Each runs once for each microbatch and stage; no rank waits for a W, so it is forgotten.
lambda: re.sub(" 1[IW]3", "", half({m}))
    A microbatch does not run backward through one of the stages.
        Each stage needs a backward of it, or I and W.
lambda: re.sub(" 1[FIW]3", "", half({m}))
    A stage has no forward of some microbatch.
        There are {m}, from 0, and each passes through all stages.
lambda: half({m}).replace(" 7F0", "").replace("0F0 0F1", "0F0 7F0 0F1")
    Ranks wait for each other.
        Move the action that a rank waits for, so that it runs before the wait on its rank.
lambda: unequal({m})
    Ranks have different numbers of stages.
        A rank with more of them would have more layers. Give each rank as many.
lambda: greedy(m=7)
    It is for different sizes.
        The task has four ranks, a line for each, and {m} microbatches, 0 to {last}.

in whether it can work:
lambda: None
    It cannot run.
        The reason is below.
"""

EQUIVALENT = """
row % 2 else => row % 1 else
    The answer does not use `turns`.
"""

TASK = """
There are {m} microbatches instead of eight, and your schedule takes at most {most} units. V-Half takes {half} units,
and the greedy scheduler of the page, with forwards first and `room=6`, takes {greedy}. In `score`, write
`Par({ranks}, {m}, limit=3, costs=costs)`.
"""


def units(text, m):
    par = Par(RANKS, m, LIMIT, COSTS)
    return par.play(Schedule.from_text(text)).makespan


def row(m, most, priority):
    """The exercise with so many microbatches and units, and a priority with which four stages a rank are in time."""
    known = {"greedy": units(greedy(2, "FIW", turns=True, m=m), m), "half": units(half(m), m)}
    numbers = {"ranks": RANKS, "m": m, "most": most, "last": m - 1} | {name: f"{x:g}" for name, x in known.items()}
    return exercise(
        globals() | {"MISTAKES": MISTAKES.format(**numbers), "body": partial(body, m=m, most=most)},
        points=3,
        right=(
            partial(unit_by_unit, priority=priority, m=m),
            partial(greedy, priority=priority, m=m),
            lambda: greedy(2, "FWI", spare=0, m=m),
            lambda: greedy(6, "FWI", m=m),
            lambda: Schedule.from_text(greedy(4, "FWI", m=m)),
        ),
        edited=(greedy,),
        title="beats_greedy",
        inputs=lambda generator, n: [{}],
        reference=lambda given: [{WORKS: YES, KEPT: MAY, TIME: SOON}],
        ranks=(1,),
        task=" ".join(TASK.format(**numbers).split()),
    )


EXERCISE = with_variants(replace(row(8, 39, "IFW"), task=""), row(6, 31, "IFW"), row(12, 56, "FWI"))
