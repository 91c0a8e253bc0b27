"""08.6: a simulator of schedules, and its chart in letters."""

import re
from itertools import pairwise

from course.check.compare import SEEN
from course.check.edits import exercise
from course.check.exercise import kind, several, whole
from lib.pipeline.schedules.action import Op
from lib.pipeline.schedules.gpipe import gpipe
from lib.pipeline.schedules.one_f_one_b import one_f_one_b


def inputs(generator, n):
    def case(schedule, change=lambda rows: rows):
        rows = change([[*map(str, row)] for row in schedule.actions])
        forward = [whole(generator, 1, 3) for _ in rows]
        backward = [units + whole(generator, 1, 3) for units in forward]
        units = {a: forward[rank] if Op.F in a else backward[rank] for rank, row in enumerate(rows) for a in row}
        return rows, needs_of(schedule), units

    def swapped(rows):
        """Two backwards of one rank."""
        row = rows[whole(generator, 0, len(rows))]
        row[-1], row[-2] = row[-2], row[-1]
        return rows

    def too_early(rows):
        """A backward before a forward which the next rank waits for."""
        half = len(rows[0]) // 2
        rows[0].insert(half - 1, rows[0].pop(half))
        return rows

    cases = [case(gpipe(2, 2)), case(one_f_one_b(3, 3)), case(gpipe(4, 4), swapped), case(one_f_one_b(4, 6))]
    cases += [case(gpipe(3, 3), too_early), other_names(generator)]
    return [{"cases": cases, "right": [facts_of(chart(*one)) for one in cases]}]


def other_names(generator):
    """Two stages on a rank, of two digits, and a rank whose actions are no forward or backward."""
    rows = [
        ["10F7", "12F7", "12B7", "10B7", "10W7"],
        ["11F7", "13F7", "13B7", "11B7", "11W7"],
        ["load", "save"],
    ]
    needs = {a: needs_by_name(a, sum(rows, [])) for a in rows[0][:-1] + rows[1][:-1]}
    needs = {a: needed for a, needed in needs.items() if needed} | {"save": ["11B7", "12B7"]}
    needs["11F7"].append("load")
    needs |= {"10W7": ["10B7"], "11W7": ["11B7"]}
    units = {a: whole(generator, 1, 4) for a in sum(rows, [])}
    return rows, needs, units | {"load": units["10F7"] + whole(generator, 1, 4)}


def needs_by_name(action, actions):
    """Those of these actions that a forward or backward with this name needs in a chain of stages."""
    if not (found := re.fullmatch(r"(\d+)([FB])(\d+)", action)):
        return []
    stage, op, m = int(found[1]), found[2], found[3]
    needed = [f"{stage - 1}F{m}"] if op == "F" else [f"{stage}F{m}", f"{stage + 1}B{m}"]
    return [a for a in needed if a in actions]


def needs_of(schedule):
    needs = {}
    for stage, op, m in (action for row in schedule.actions for action in row):
        if op == Op.F and stage:
            needs[f"{stage}F{m}"] = [f"{stage - 1}F{m}"]
        if op == Op.B:
            needs[f"{stage}B{m}"] = [f"{stage}F{m}"]
            needs[f"{stage}B{m}"] += [f"{stage + 1}B{m}"] if stage < schedule.num_stages - 1 else []
    return needs


def body(answer, group, given):
    found = {}
    for (rows, needs, units), right, name in zip(given["cases"], given["right"], "ABCDEF", strict=True):
        facts = facts_of(answer([[*row] for row in rows], {a: [*of] for a, of in needs.items()}, dict(units)))
        found |= {f"case {name}: {what}": fact for what, fact in facts.items()}
        if SEEN not in found and facts != right:
            lines = [f"case {name}, rows: {rows}", f"units: {units}"]
            found[SEEN] = "\n".join([*lines, "your chart:", str(facts.get("the chart", facts))])
    return found


def facts_of(result):
    if kind(result) != "2 results":
        return {"what was returned": "None" if result is None else kind(result)}
    starts, text = several(result, 2)
    return {
        "what was returned": "2 results",
        "starts": {a: int(start) for a, start in starts.items()} if isinstance(starts, dict) else kind(starts),
        "the chart": "\n".join(map(str.rstrip, text.strip("\n").split("\n")))
        if isinstance(text, str)
        else kind(text),
    }


def chart(rows, needs, units):
    starts, ends = {}, {}
    place = [0] * len(rows)  # of the next action of each rank
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            for action in row[place[rank] :]:
                needed = needs.get(action, [])
                if not all(a in ends for a in needed):
                    break
                previous = row[: place[rank]][-1:]
                times = [ends[a] for a in [*needed, *previous]]
                starts[action] = max(times, default=0)
                ends[action] = starts[action] + units[action]
                place[rank] += 1
                moved = True
    if len(starts) < sum(map(len, rows)):
        return None
    lines = []
    for row in rows:
        cells = [".."] * max(ends.values())
        for action in row:
            bar = [action[-2:]] + ["--"] * (units[action] - 1)
            cells[starts[action] : ends[action]] = bar
        lines.append(" ".join(cells))
    return starts, "\n".join(lines)


def by_recursion(rows, needs, units):
    before = {b: [a] for row in rows for a, b in pairwise(row)}

    def start(action, above=()):
        if action in above:
            raise RecursionError
        if action not in starts:
            all_needs = needs.get(action, []) + before.get(action, [])
            starts[action] = max((start(a, (*above, action)) + units[a] for a in all_needs), default=0)
        return starts[action]

    starts = {}
    try:
        starts = {a: start(a) for row in rows for a in row}
    except RecursionError:
        return None
    return starts, drawn(rows, starts, units)


def drawn(rows, starts, units):
    text = ""
    for row in rows:
        cells = {starts[a] + unit: "--" if unit else a[-2:] for a in row for unit in range(units[a])}
        text += " ".join(cells.get(unit, "..") for unit in range(max(starts[a] + units[a] for a in starts))) + " \n"
    return text


def one_after_the_other(rows, needs, units):
    """No two ranks at the same time."""
    found = chart(rows, needs, units)
    order = sorted(sum(rows, []), key=found[0].get) if found else []
    return chart(rows, {b: [a] for a, b in pairwise(order)}, units)


MISTAKES = """
in case A, case B, case C, case D:
needs.get(action, []) => []
    A rank does not wait for messages: its actions run without a gap.
        They also wait for what they need of any rank.
row[: place[rank]][-1:] => []
    A rank does two things at the same time.
        An action also waits for the previous action of its rank.
needed = needs.get(action, []) => needed = [a for a in needs.get(action, []) if a in ends]
    A backward does not wait for the gradient of the next stage. Either you look only at the first action that it needs,
    or you go through the ranks once, and take 0 where a later rank has no end yet.
        Repeat until nothing more can start.

ends[a] for a in [*needed, *previous] => ends[a] + (a not in row) for a in [*needed, *previous]
    A message takes one unit.
        It takes none: an action may start when what it needs on another rank ends.
in all:
needed = needs.get(action, []) => needed = needs_by_name(action, units)
    You take what an action needs from its name: right for a chain of stages, and not for case F.
        Names mean nothing here: `needs` says what an action waits for.

in starts:
returns result and ({a: start + 1 for a, start in result[0].items()}, result[1])
    You count units from 1.
        The first action starts at 0.
starts[action] + units[action] => starts[action] + units[action] + 1
    Every action starts one unit too late.
        An action from 3 that takes 2 units ends at 5, where the next one starts.
=> starts[action] + 1
    You start each action one unit after those before it.
        Wait for their end, start + units.

in case A, case B, case C, case D:
enumerate(rows) => enumerate(sorted(row, key=lambda a: a[-1]) for row in rows)
    You run the actions of a rank by microbatch. The order in `rows` is the schedule.
        Keep it.
one_after_the_other
    Only one rank works at a time.
        Each has its own clock: an action waits for its needs and its own rank alone.

in all:
" ".join(cells) => "".join(cells)
    The starts are right, and no blank is between the cells of the chart.
        Put one between them: " ".join.
cells = [".."] * max(ends.values()) => cells = []
    The starts are right, and the chart leaves idle units out.
        Draw `..` for each unit in which a rank waits.
max(ends.values()) => ends[row[-1]]
    The starts are right, and each line ends with its last action.
        Draw idle units, a part of the bubble, to the end.
["--"] * (units[action] - 1) => [".."] * (units[action] - 1)
or
max(ends.values()) => (max(starts.values()) + 1)
cells[starts[action] : ends[action]] = bar => cells[starts[action]] = action[-2:]
    The starts are right, and each action has one cell, whatever its length.
        Draw `--` for each further unit.
action[-2:] => action[1:3]
or action[-2:] => action[1:]
    The starts are right, and a cell has not the last two characters of an action: case F has stages of two digits.
        Count from the end: action[-2:].
["--"] * (units[action] - 1) => [action[-2:]] * (units[action] - 1)
    The starts are right, and the chart repeats the name in every unit.
        Draw `--` for each further unit.
return None => pass
for action in row: => for action in [a for a in row if a in starts]:
or
return None => return {}, ""
    Case E cannot be executed: rank 0 has a backward before a forward that the next rank waits for.
        Return None when a round starts nothing and actions are left.
"""

ALSO_RIGHT = r"""
for rank, row in enumerate(rows): => for rank, row in reversed([*enumerate(rows)]):
return starts, "\n".join(lines) => return [starts, "\n".join(["", *lines, ""])]
    The last rank first.
"""

EXERCISE = exercise(globals(), points=3, right=(chart, by_recursion), ranks=(1,))
