"""Advice on a typed schedule leads from 1F1B to par, however a reader understands "defer"."""

import re

import pytest

from course.workshop.typed import Par, Verdict, workshop
from lib.pipeline.schedules.one_f_one_b import one_f_one_b

MOST_STEPS = 60
# A rank's actions without the W, the W's old place, the action that it delayed, the one after the next idle time.
PLACES = {
    "behind the action that it delays": lambda row, at, delayed, hole: row.index(delayed) + 1,
    "one action later still": lambda row, at, delayed, hole: row.index(delayed) + 2,
    "until its rank is idle": lambda row, at, delayed, hole: row.index(hole) if hole else len(row),
    "with the next W": lambda row, at, delayed, hole: next(
        (i for i in range(at, len(row)) if "W" in row[i]), len(row)
    ),
    "to the end": lambda row, at, delayed, hole: len(row),
}


def after_idle(verdict: Verdict, row: list[str], at: int) -> str:
    """The first action from this place on before which its rank waits; empty if it waits no more."""
    slots = {str(slot.action): slot for slot in verdict.timeline.compute}
    for before, action in zip(row[max(at - 1, 0) :], row[max(at, 1) :], strict=False):
        if slots[action].start > slots[before].end:
            return action
    return ""


def followed(verdict: Verdict, rows: list[list[str]], place) -> list[list[str]]:
    """The schedule that the advice asks for; an advice that is no move fails."""
    advice = verdict.advice
    if "the same elsewhere" in advice:
        return [re.sub(r"(\d+)B(\d+)", r"\1I\2 \1W\2", " ".join(row)).split() for row in rows]
    fill = re.search(r"Its (\w+) could run then: put it before (\w+)\.", advice)
    put_off = re.match(r"(\w+) delays (\w+), ", advice)
    assert fill or put_off, advice
    weight, action = (fill or put_off).groups()
    row = next(row for row in rows if weight in row)
    at = row.index(weight)
    hole = after_idle(verdict, row, at + 1)
    row.remove(weight)
    row.insert(row.index(action) if fill else place(row, at, action, hole), weight)
    return rows


@pytest.mark.parametrize("sizes", [(4, 6), (3, 6), (2, 4), (4, 4)])
@pytest.mark.parametrize("reading", PLACES)
def test_who_follows_the_advice_comes_to_par(reading, sizes):
    par, seen = Par(*sizes), set()
    rows = [line.split(":")[1].split() for line in one_f_one_b(*sizes).to_text().splitlines()]
    while (verdict := workshop("\n".join(map(" ".join, rows)), par)).advice[:15] != "No order is fas":
        assert verdict.score, verdict.problem
        key = tuple(map(tuple, rows))
        assert key not in seen and len(seen) < MOST_STEPS, f"at {verdict.score.time:g} it turns in a circle"
        seen.add(key)
        rows = followed(verdict, rows, PLACES[reading])
    assert verdict.score.time == par.time and verdict.score.in_limit
