"""08.6: a simulator of schedules, and its chart in letters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from course.check.exercise import SEEN, Data, Exercise, Mistake, kind, whole
from lib.mesh import Group
from lib.pipeline.schedules.action import Op, Schedule
from lib.pipeline.schedules.gpipe import gpipe
from lib.pipeline.schedules.one_f_one_b import one_f_one_b

Rows = list[list[str]]  # of each rank, its actions in order
Needs = dict[str, list[str]]
Units = dict[str, int]


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    def case(schedule: Schedule, change: Callable = lambda rows: rows) -> tuple[Rows, Needs, Units]:
        rows = change([[*map(str, row)] for row in schedule.actions])
        forward = [whole(generator, 1, 3) for _ in rows]
        backward = [units + whole(generator, 1, 3) for units in forward]
        units = {a: forward[rank] if Op.F in a else backward[rank] for rank, row in enumerate(rows) for a in row}
        return rows, needs_of(schedule), units

    def swapped(rows: Rows) -> Rows:
        """Two backwards of one rank."""
        row = rows[whole(generator, 0, len(rows))]
        row[-1], row[-2] = row[-2], row[-1]
        return rows

    def too_early(rows: Rows) -> Rows:
        """A backward before a forward which the next rank waits for."""
        half = len(rows[0]) // 2
        rows[0].insert(half - 1, rows[0].pop(half))
        return rows

    cases = [case(gpipe(2, 2)), case(one_f_one_b(3, 3)), case(gpipe(4, 4), swapped), case(one_f_one_b(4, 6))]
    return [{"cases": [*cases, case(gpipe(3, 3), too_early)]}]


def needs_of(schedule: Schedule) -> Needs:
    needs: Needs = {}
    for stage, op, m in (action for row in schedule.actions for action in row):
        if op == Op.F and stage:
            needs[f"{stage}F{m}"] = [f"{stage - 1}F{m}"]
        if op == Op.B:
            needs[f"{stage}B{m}"] = [f"{stage}F{m}"]
            needs[f"{stage}B{m}"] += [f"{stage + 1}B{m}"] if stage < schedule.num_stages - 1 else []
    return needs


def body(answer: Callable, group: Group, given: Data) -> Data:
    found: Data = {}
    for (rows, needs, units), name in zip(given["cases"], "ABCDE", strict=True):
        result = answer([[*row] for row in rows], {a: [*of] for a, of in needs.items()}, dict(units))
        facts = facts_of(result)
        found |= {f"case {name}: {what}": fact for what, fact in facts.items()}
        right = facts_of(chart()(rows, needs, units))
        if SEEN not in found and facts != right:
            lines = [f"case {name}, rows: {rows}", f"units: {units}"]
            found[SEEN] = "\n".join([*lines, "your chart:", str(facts.get("the chart", facts))])
    return found


def facts_of(result: Any) -> Data:
    if result is None:
        return {"what was returned": "None"}
    if not isinstance(result, (list, tuple)) or len(result) != 2:
        return {"what was returned": kind(result)}
    starts, text = result
    starts = {a: int(start) for a, start in starts.items()} if isinstance(starts, dict) else kind(starts)
    return {
        "what was returned": "2 results",
        "starts": starts,
        "the chart": text.strip("\n") if isinstance(text, str) else kind(text),
    }


# ---- simulators, right and wrong ------------------------------------------------------------------------------------


def chart(
    waits_for: Callable = lambda needs: needs,
    own: bool = True,
    lasts: Callable = lambda units: units,
    late: int = 0,
    sorts: Callable = lambda row: row,
    draw: Callable | None = None,
    stuck: Callable = lambda starts, text: None,
) -> Callable:
    """The answer, with a place for each mistake."""

    def program(rows, needs, units):
        rows, starts, ends, count = [sorts(row) for row in rows], {}, {}, -1
        while len(starts) > count:  # until a round in which nothing could start
            count = len(starts)
            for row in rows:
                for before, action in zip([None, *row], row, strict=False):
                    needed = [*waits_for(needs.get(action, [])), *([before] if own and before else [])]
                    if action in starts or not all(a in ends for a in needed):
                        continue
                    starts[action] = max((ends[a] for a in needed), default=0)
                    ends[action] = starts[action] + lasts(units[action]) + late
        text = (draw or drawn)(rows, starts, units)
        return stuck(starts, text) if len(starts) < sum(map(len, rows)) else (starts, text)

    return program


def drawn(rows: Rows, starts: dict, units: Units, more: Callable = lambda label: "--", idle: str = "..") -> str:
    end = max((starts[a] + units[a] for a in starts), default=0)
    lines = []
    for row in rows:
        cells = [idle] * end
        for a in row:
            if a in starts:
                cells[starts[a] : starts[a] + units[a]] = [a[-2:], *[more(a[-2:])] * (units[a] - 1)]
        lines.append(" ".join(cells))
    return "\n".join(lines)


def without_idle(rows: Rows, starts: dict, units: Units) -> str:
    cells = [[cell for a in row for cell in (a[-2:], *["--"] * (units[a] - 1)) if a in starts] for row in rows]
    return "\n".join(map(" ".join, cells))


def without_the_end(rows: Rows, starts: dict, units: Units) -> str:
    return "\n".join(line.rstrip(". ") for line in drawn(rows, starts, units).split("\n"))


def a_cell_each(rows: Rows, starts: dict, units: Units) -> str:
    return drawn(rows, starts, dict.fromkeys(units, 1))


def with_names(rows: Rows, starts: dict, units: Units) -> str:
    return drawn(rows, starts, units, more=lambda label: label)


def by_recursion(rows, needs, units):
    before = {b: [a] for row in rows for a, b in zip(row, row[1:], strict=False)}

    def start(action, above=()):
        if action in above:
            raise RecursionError
        if action not in starts:
            all_needs = needs.get(action, []) + before.get(action, [])
            starts[action] = max((start(a, (*above, action)) + units[a] for a in all_needs), default=0)
        return starts[action]

    starts: dict[str, int] = {}
    try:
        starts = {a: start(a) for row in rows for a in row}
    except RecursionError:
        return None
    return starts, drawn(rows, starts, units)


def by_a_clock(rows, needs, units):
    """Unit by unit: a rank that is free starts its next action if it can."""
    rows, starts, free, time = [[*row] for row in rows], {}, [0] * len(rows), 0
    while any(rows):
        if time > sum(units.values()):
            return None
        for rank, row in enumerate(rows):
            ready = row and all(a in starts and starts[a] + units[a] <= time for a in needs.get(row[0], []))
            if ready and free[rank] <= time:
                starts[row[0]] = time
                free[rank] = time + units[row.pop(0)]
        time += 1
    ranks = range(len(free))
    lines = [[".."] * max(free) for _ in ranks]
    for a, begin in starts.items():
        for unit in range(units[a]):
            lines[int(a[0])][begin + unit] = "--" if unit else a[-2:]
    return starts, "\n".join(map(" ".join, lines))


def one_pass(rows, needs, units):
    """Rank by rank: an action of a later rank has not started yet, and is not waited for."""
    starts, ends = {}, {}
    for row in rows:
        clock = 0
        for a in row:
            starts[a] = max([clock, *(ends.get(need, 0) for need in needs.get(a, []))])
            clock = ends[a] = starts[a] + units[a]
    return starts, drawn(rows, starts, units)


def one_after_the_other(rows, needs, units):
    """No two ranks at the same time."""
    found = by_recursion(rows, needs, units)
    if found is None:
        return None
    starts, clock = {}, 0
    for a in sorted(found[0], key=found[0].get):
        starts[a], clock = clock, clock + units[a]
    return starts, drawn(rows, starts, units)


def by_microbatch(row: list[str]) -> list[str]:
    return sorted(row, key=lambda a: a[-1])


ABLE = tuple(f"case {name}" for name in "ABCD")  # the cases that can be executed
HANG = (
    "Case E cannot be executed: rank 0 has a backward before a forward that the next rank waits for. Return None when "
    "a round starts nothing and actions are left."
)

EXERCISE = Exercise(
    id="08.6",
    title="chart",
    points=3,
    body=body,
    inputs=inputs,
    ranks=(1,),
    right=(by_recursion, chart(), by_a_clock),
    mistakes=(
        Mistake(
            "A rank does not wait for messages: its actions run without a gap. An action also waits for every action "
            "that it needs, on any rank.",
            chart(waits_for=lambda needs: []),
            about=ABLE,
        ),
        Mistake(
            "A rank does two things at the same time. An action waits for the actions that it needs, and for the "
            "previous action of its rank.",
            chart(own=False),
            about=ABLE,
        ),
        Mistake(
            "A backward does not wait for the gradient of the next stage. Either you look only at the first action "
            "that it needs, or you go through the ranks once, and take 0 where a later rank has no end yet: repeat "
            "until nothing more can start.",
            one_pass,
            about=ABLE,
        ),
        Mistake(
            "Every action starts one unit too late. An action that starts at 3 and takes 2 units ends at 5, and at 5 "
            "the next one starts.",
            chart(late=1),
            about=("starts",),
        ),
        Mistake(
            "You start each action one unit after the start of those before it. They take different numbers of units: "
            "wait for their end, start + units.",
            chart(lasts=lambda units: 1),
            about=("starts",),
        ),
        Mistake(
            "You run the actions of a rank by microbatch. The order in `rows` is the schedule: keep it.",
            chart(sorts=by_microbatch),
            about=ABLE,
        ),
        Mistake(
            "Only one rank works at a time. Each rank has its own clock: an action waits for its needs and for its own "
            "rank, not for the rest.",
            one_after_the_other,
            about=ABLE,
        ),
        Mistake(
            "The starts are right, and the chart leaves idle units out, so all lines begin at the left edge. Draw `..` "
            "for each unit in which a rank waits.",
            chart(draw=without_idle),
        ),
        Mistake(
            "The starts are right, and the chart ends each line with its last action. Draw idle units up to the end of "
            "the step: that is a part of the bubble.",
            chart(draw=without_the_end),
        ),
        Mistake(
            "The starts are right, and each action has one cell in the chart, regardless of its length. Draw `--` for "
            "each further unit.",
            chart(draw=a_cell_each),
        ),
        Mistake(
            "The starts are right, and the chart repeats the name in every unit: it looks like several actions. Draw "
            "`--` for each further unit.",
            chart(draw=with_names),
        ),
        *(
            Mistake(HANG, chart(stuck=stuck))
            for stuck in (lambda starts, text: (starts, text), lambda starts, text: ({}, ""))
        ),
    ),
)
