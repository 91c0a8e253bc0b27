"""12.2: a schedule for unequal halves and little memory that is faster than the greedy one of the page."""

import re
from functools import cache
from math import inf

from course.check.compare import SEEN
from course.check.edits import exercise
from course.check.written import KIND, NO, WORKS, YES, kind_of, text_of
from course.workshop.typed import SLACK, Par, workshop
from lib.pipeline.gantt import gantt
from lib.pipeline.schedules.action import Schedule, ScheduleError
from lib.pipeline.schedules.v_shape import v_half
from lib.pipeline.schedules.zero_bubble import zb_h1
from lib.pipeline.simulate import Costs

RANKS, MICROBATCHES, LIMIT = 4, 8, 3
COSTS = Costs(1, 2, 1)
MOST = 39.0  # units; the greedy schedule of the page takes 39.5, V-Half 43
KEPT, MAY = "microbatches that a rank keeps", "at most three"
TIME, SOON = "units of time", "at most 39"


def body(answer, group, given):
    par = Par(RANKS, MICROBATCHES, LIMIT, COSTS)
    try:
        seen = workshop(text_of(answer()), par)
    except ScheduleError as error:  # no text at all
        return {WORKS: NO, KIND: kind_of(error), SEEN: str(error)}
    if seen.error:
        return {WORKS: NO, KIND: kind_of(seen.error), SEEN: f"{seen.problem}\n{seen.advice}"}
    score, per_rank = seen.score, seen.schedule.num_stages // RANKS
    ops = {str(slot.action.op) for slot in seen.timeline.compute}
    kept = " ".join(f"{count:g}" for count in score.kept)
    said = f"It takes {score.time:g} units, and the ranks keep {kept} microbatches."
    return {
        WORKS: YES,
        KEPT: MAY if score.in_limit else "more than three",
        TIME: SOON if score.time <= MOST + SLACK else "more than 39",
        "its backwards": "in two halves" if "B" not in ops else "some full" if "I" in ops else "full",
        "stages on each rank": {1: "one", 2: "two"}.get(per_rank, "three or more"),
        SEEN: "\n".join([said, gantt(seen.timeline), seen.advice]),
    }


@cache
def greedy(v=4, priority="IFW", turns=False, spare=1, m=MICROBATCHES):
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


def unit_by_unit(v=4):
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

    while len(ends) < 3 * (last + 1) * MICROBATCHES:
        for rank in (rank for rank in range(RANKS) if free[rank] <= now):
            wanted = ((s, op, k) for op in "IFW" for k in range(MICROBATCHES) for s in range(rank, last + 1, RANKS))
            if action := next((a for a in wanted if a not in ends and can(*a)), None):
                rows[rank].append(action)
                free[rank] = ends[action] = now + (2 if action[1] == "I" else 1)
        now += 1
    return rows


def half():
    """V-Half, which a mistake then changes."""
    return v_half(RANKS, MICROBATCHES).to_text()


def unequal():
    """Five stages: rank 0 has the first and the last."""
    stages = [0, 1, 2, 3, 4]
    rows = [[s for s in stages if s % RANKS == rank] for rank in range(RANKS)]
    forward = [[f"{s}F{k}" for k in range(MICROBATCHES) for s in row] for row in rows]
    back = [[f"{s}B{k}" for k in range(MICROBATCHES) for s in row[::-1]] for row in rows]
    return "\n".join(" ".join(f + b) for f, b in zip(forward, back, strict=True))


MISTAKES = r"""
in whether it can work, microbatches that a rank keeps:
lambda: zb_h1(RANKS, MICROBATCHES)
    It runs, but a rank keeps more than three microbatches. With memory for four, ZB-V also takes less time: the task is
    to be fast with little memory.
        Start fewer forwards before the first I, or run a W sooner.

in whether it can work, microbatches that a rank keeps, units of time, its backwards:
lambda: re.sub(r" \dW\d", "", greedy(2, "FIW", turns=True)).replace("I", "B")
    It runs, and takes more than 39 units: your backwards are full, and ranks wait for weight gradients.
        Write I and W.
lambda: half().replace(" 2W3", "").replace("2I3", "2B3")
    It runs, and takes more than 39 units: some backwards are full, and the stage before waits.
        Write I and W instead.

in whether it can work, microbatches that a rank keeps, units of time, stages on each rank:
lambda: greedy(1, "FWI", spare=0)
    It runs, and takes more than 39 units.
        With one stage on each rank three microbatches do not fill the time until the first gradient returns from the
        last rank. What shortens that wait in chapter 11?
lambda: greedy(2, "FIW", turns=True)
    It runs, and takes more than 39 units.
        With two stages on each rank in a V, the greedy scheduler takes 39.5 units. Memory is limited in microbatches of
        a full rank: what changes if the same layers are more and shorter stages?
lambda: greedy(4, "WIF")
    It runs, and takes more than 39 units. Short stages are a good idea.
        Use all the memory (three microbatches in four stages each are twelve), compare all priorities, and both
        directions of the rows of stages.

in the kind of fault:
lambda: re.sub(r" \d[IW]\d", "", half())
    Nothing runs backward.
        Each microbatch also needs an I and a W, or a B, on each stage.
lambda: half().replace(" 1W3", "")
or
lambda: half().replace(" 1I3", "")
    A W is missing, or an I.
        Each runs once for each microbatch and stage; no rank waits for a W, so it is forgotten.
lambda: re.sub(" 1[IW]3", "", half())
    A microbatch does not run backward through one of the stages.
        Each stage needs a backward of it, or I and W.
lambda: re.sub(" 1[FIW]3", "", half())
    A stage has no forward of some microbatch.
        There are eight, from 0, and each passes through all stages.
lambda: half().replace(" 7F0", "").replace("0F0 0F1", "0F0 7F0 0F1")
    Ranks wait for each other.
        Move the action that a rank waits for, so that it runs before the wait on its rank.
unequal
    Ranks have different numbers of stages.
        A rank with more of them would have more layers. Give each rank as many.
lambda: greedy(m=7)
    It is for different sizes.
        The task has four ranks, a line for each, and eight microbatches, 0 to 7.

in whether it can work:
lambda: None
    It cannot run.
        The reason is below.
"""

EQUIVALENT = """
row % 2 else => row % 1 else
    The answer does not use `turns`.
"""

EXERCISE = exercise(
    globals(),
    points=3,
    right=(
        unit_by_unit,
        greedy,
        lambda: greedy(2, "FWI", spare=0),
        lambda: greedy(6, "FWI"),
        lambda: Schedule.from_text(greedy(4, "FWI")),
    ),
    edited=(greedy,),
    title="beats_greedy",
    inputs=lambda generator, n: [{}],
    reference=lambda given: [{WORKS: YES, KEPT: MAY, TIME: SOON}],
    ranks=(1,),
)
