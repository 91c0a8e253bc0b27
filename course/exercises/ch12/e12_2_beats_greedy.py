"""12.2: a schedule for unequal halves and little memory that is faster than the greedy one of the page."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from math import inf

import torch

from course.check.exercise import SEEN, Data, Exercise, Mistake
from course.check.written import KIND, NO, WORKS, YES, kind_of, text_of
from lib.lab.workshop import SLACK, Par, workshop
from lib.mesh import Group
from lib.pipeline.gantt import gantt
from lib.pipeline.schedules.action import Schedule
from lib.pipeline.schedules.fault import ScheduleError
from lib.pipeline.schedules.v_shape import v_half
from lib.pipeline.schedules.zero_bubble import zb_h1
from lib.pipeline.simulate import Costs

RANKS, MICROBATCHES, LIMIT = 4, 8, 3
COSTS = Costs(1, 2, 1)
MOST = 39.0  # units; the greedy schedule of the page takes 39.5, V-Half 43
KEPT, MAY, TOO_MANY = "microbatches that a rank keeps", "at most three", "more than three"
TIME, SOON, LATE = "units of time", "at most 39", "more than 39"
BACKWARD, HALVES, WHOLE, SOME = "its backwards", "in two halves", "full", "some full"
STAGES, ONE, TWO, SHORTER = "stages on each rank", "one", "two", "three or more"


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    return [{}]


def body(answer: Callable, group: Group, given: Data) -> Data:
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
        KEPT: MAY if score.in_limit else TOO_MANY,
        TIME: SOON if score.time <= MOST + SLACK else LATE,
        BACKWARD: HALVES if "B" not in ops else SOME if "I" in ops else WHOLE,
        STAGES: ONE if per_rank == 1 else TWO if per_rank == 2 else SHORTER,
        SEEN: "\n".join([said, gantt(seen.timeline), seen.advice]),
    }


def reference(given: list[Data]) -> list[Data]:
    return [{WORKS: YES, KEPT: MAY, TIME: SOON}]


# ---- schedules ------------------------------------------------------------------------------------------------------


@cache
def greedy(
    v: int = 4, priority: str = "IFW", turns: bool = False, spare: int = 1, limit: int = LIMIT, m: int = MICROBATCHES
) -> str:
    """As on the page, the action that can begin first, with v stages on each rank.

    Args:
        turns: every second row of stages runs from the last rank to the first, as in a V.
        spare: places for a forward in the last row of stages.
    """
    rows_of = [range(RANKS)[:: -1 if turns and row % 2 else 1] for row in range(v)]
    rank_of = [rank for row in rows_of for rank in row]
    last = len(rank_of) - 1
    takes = {"F": COSTS.F / v, "I": COSTS.I / v, "W": COSTS.W / v}
    done = {(stage, op): 0 for stage in range(last + 1) for op in "FIW"}  # how many microbatches
    ended: dict[tuple[int, str, int], float] = {(-1, "F", k): 0.0 for k in range(m)}
    ended |= {(last + 1, "I", k): 0.0 for k in range(m)}
    rows, free, kept = [[] for _ in range(RANKS)], [0.0] * RANKS, [0] * RANKS

    def begins(stage: int, op: str) -> float:
        k, rank = done[stage, op], rank_of[stage]
        needs = {"F": [(stage - 1, "F", k)], "I": [(stage, "F", k), (stage + 1, "I", k)], "W": [(stage, "I", k)]}[op]
        is_full = op == "F" and kept[rank] >= v * limit - spare * (stage <= last - RANKS)
        return inf if is_full or k == m else max(free[rank], *(ended.get(a, inf) for a in needs))

    for _ in range(3 * m * (last + 1)):
        stage, op = min(done, key=lambda a: (begins(*a), priority.index(a[1]), done[a], a[0]))
        k, rank = done[stage, op], rank_of[stage]
        free[rank] = ended[stage, op, k] = begins(stage, op) + takes[op]
        kept[rank] += (op == "F") - (op == "W")
        done[stage, op] += 1
        rows[rank].append(f"{stage}{op}{k}")
    return "\n".join(map(" ".join, rows))


def unit_by_unit(order="IFW", v=4):
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
            wanted = ((s, op, k) for op in order for k in range(MICROBATCHES) for s in range(rank, last + 1, RANKS))
            if action := next((a for a in wanted if a not in ends and can(*a)), None):
                rows[rank].append(action)
                free[rank] = ends[action] = now + (2 if action[1] == "I" else 1)
        now += 1
    return rows


def with_full_backwards(text: str) -> str:
    return re.sub(r"I(\d)", r"B\1", re.sub(r" \d+W\d", "", text))


def typed(old: str, new: str, text: Callable[[], str] = lambda: v_half(RANKS, MICROBATCHES).to_text()) -> Callable:
    """A schedule, with a change by hand."""
    return lambda: re.sub(old, new, text())


WRONG_KIND = (KIND,)
HALF = (
    "A W is missing, or an I. Each runs once for each microbatch and stage. No rank waits for a W, so it is easily "
    "forgotten."
)
ENTIRE = "It runs, and takes more than 39 units."

EXERCISE = Exercise(
    id="12.2",
    title="beats_greedy",
    points=3,
    body=body,
    inputs=inputs,
    reference=reference,
    ranks=(1,),
    right=(unit_by_unit, greedy, lambda: greedy(6, "FWI"), lambda: Schedule.from_text(greedy(4, "FWI"))),
    mistakes=(
        Mistake(
            "It runs, but a rank keeps more than three microbatches. With memory for four, ZB-V also takes less time: "
            "the task is to be fast with little memory. Start fewer forwards before the first I, or run a W sooner.",
            lambda: zb_h1(RANKS, MICROBATCHES),
            about=(WORKS, KEPT),
        ),
        Mistake(
            f"{ENTIRE} Your backwards are full, so each rank waits for weight gradients that it does not need. Write I "
            "and W.",
            lambda: with_full_backwards(greedy(2, "FIW", turns=True)),
            about=(WORKS, KEPT, TIME, BACKWARD),
        ),
        Mistake(
            f"{ENTIRE} Some of your backwards are full, and the previous stage waits for all of such a backward. Write "
            "I and W instead.",
            typed("2I3", "2B3", typed(" 2W3", "")),
            about=(WORKS, KEPT, TIME, BACKWARD),
        ),
        Mistake(
            f"{ENTIRE} With one stage on each rank three microbatches do not fill the time until the first "
            "gradient returns from the last rank. What shortens that wait in chapter 11?",
            lambda: greedy(1, "FWI", spare=0),
            about=(WORKS, KEPT, TIME, STAGES),
        ),
        Mistake(
            f"{ENTIRE} With two stages on each rank in a V, the greedy scheduler takes 39.5 units. Memory is limited "
            "in microbatches of a full rank: what changes if the same layers are more and shorter stages?",
            lambda: greedy(2, "FIW", turns=True),
            about=(WORKS, KEPT, TIME, STAGES),
        ),
        Mistake(
            f"{ENTIRE} Short stages are a good idea. Use all the memory (three microbatches in four stages each are "
            "twelve), compare all priorities, and both directions of the rows of stages.",
            lambda: greedy(4, "WIF"),
            about=(WORKS, KEPT, TIME, STAGES),
        ),
        Mistake(
            "Nothing runs backward. Each microbatch also needs an I and a W, or a B, on each stage.",
            typed(r" \d[IW]\d", ""),
            about=WRONG_KIND,
        ),
        Mistake(HALF, typed(" 1W3", ""), about=WRONG_KIND),
        Mistake(HALF, typed(" 1I3", ""), about=WRONG_KIND),
        Mistake(
            "A microbatch does not run backward through one of the stages. Each stage needs a backward of it, or I and "
            "W.",
            typed(" 1[IW]3", ""),
            about=WRONG_KIND,
        ),
        Mistake(
            "A stage has no forward of some microbatch. There are eight of them, numbered from 0, and each passes "
            "through all stages.",
            typed(" 1[FIW]3", ""),
            about=WRONG_KIND,
        ),
        Mistake(
            "Ranks wait for each other. Move the action that a rank waits for, so that it runs before the wait on its "
            "rank.",
            typed("0F0 0F1(.*?) 7F0", r"0F0 7F0 0F1\1"),
            about=WRONG_KIND,
        ),
        Mistake(
            "It is for different sizes. The task has four ranks, a line for each, and eight microbatches, 0 to 7.",
            lambda: greedy(m=7),
            about=WRONG_KIND,
        ),
        Mistake("It cannot run. The reason is below.", lambda: None, about=(WORKS,)),
    ),
)
