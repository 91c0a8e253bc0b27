"""Move the dates of all homeworks: `python -m course.release.calendar 2027-02-01 Europe/Berlin hw1.json hw2.json`.

The file of a homework says in `weeks` in which week of the course it is set, and in which it is due: on the weekday on
which the course begins. Days to skip are `--skip 2027-03-29`, or `--skip 2027-04-05..2027-04-09` for several. What
falls on such a day moves to the next working day; a week without a working day is no week of the course.

Writes `due` of each file, and prints a table in Markdown for the syllabus. The time of the day stays, in the time zone
that you name: summer time has a different offset.

Exit code: 0, or 2 with a sentence; a file that is no homework leaves all as they were.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import re
import sys
import zoneinfo
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from course.grade.assignment import Assignment, read_assignment

Days = Collection[datetime.date]
_DAY = datetime.timedelta(days=1)
_DUE = re.compile(r'("due"\s*:\s*)"[^"]*"')


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m course.release.calendar", description=__doc__.splitlines()[0])
    parser.add_argument("begin", type=datetime.date.fromisoformat, help="the first day of the course, 2027-02-01")
    parser.add_argument("zone", help="its time zone, Europe/Berlin")
    parser.add_argument("assignments", nargs="+", metavar="ASSIGNMENT", help="its JSON file")
    parser.add_argument("--skip", nargs="+", default=[], metavar="DAY", help="2027-03-29, or FIRST..LAST")
    args = parser.parse_args(argv)
    try:
        skipped = {day for text in args.skip for day in _days(text)}
        zone = _zone(args.zone)
        moved = [_moved(path, args.begin, skipped, zone) for path in args.assignments]
        for path, text, *_ in moved:
            path.write_text(text, encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"course.release.calendar: {error}", file=sys.stderr)
        return 2
    print(_table([row for _, _, *row in moved], args.zone))
    return 0


def weeks_of(begin: datetime.date, skipped: Days) -> Iterator[datetime.date]:
    """The first day of each week of a course; a week without a working day is skipped."""
    for number in itertools.count():
        week = [begin + (7 * number + k) * _DAY for k in range(7)]
        if any(day.weekday() < 5 and day not in skipped for day in week):
            yield week[0]


def day_in(week: int, begin: datetime.date, skipped: Days) -> datetime.date:
    """The day in this week of the course, from 1, on which homeworks are set and due."""
    day = next(itertools.islice(weeks_of(begin, skipped), week - 1, None))
    if day in skipped:
        while day in skipped or day.weekday() > 4:
            day += _DAY
    return day


def _moved(
    name: str, begin: datetime.date, skipped: Days, zone: zoneinfo.ZoneInfo
) -> tuple[Path, str, Assignment, datetime.date, datetime.datetime]:
    """A file, its new text, the homework, the day on which it is set, and when it is due."""
    path, assignment = Path(name), read_assignment(name)
    if not assignment.due:
        raise ValueError(f'{name} has no time: write "due": "2027-03-01T23:59:00+01:00", of which the time stays')
    weeks = assignment.weeks
    if len(weeks) != 2 or not all(type(week) is int for week in weeks) or not 0 < weeks[0] < weeks[1]:
        raise ValueError(
            f'{name} has weeks {list(weeks)}: write "weeks": [2, 3] if it is set in week 2 and due in week 3'
        )
    set_on, due_on = (day_in(week, begin, skipped) for week in weeks)
    due = datetime.datetime.combine(due_on, assignment.due.time(), zone)
    if due.astimezone(datetime.UTC).astimezone(zone).time() != due.time():
        raise ValueError(f"{name}: on {due_on} there is no {due:%H:%M} in {zone.key}, because summer time begins")
    text = path.read_text(encoding="utf-8")
    new = _DUE.sub(rf'\g<1>"{due.isoformat()}"', text, count=1)
    if json.loads(new) != json.loads(text) | {"due": due.isoformat()}:
        raise ValueError(f'{name} has "due" in another place first: move the line of the date to the top')
    return path, new, assignment, set_on, due


def _table(rows: Sequence[Sequence], zone: str) -> str:
    """The homeworks in the order of their dates, in Markdown."""
    lines = ["| homework | chapters | set on | due on | hours | points |", "|---|---|---|---|---|---|"]
    for asked, set_on, due in sorted(rows, key=lambda row: row[2]):
        chapters = ", ".join(str(int(chapter)) for chapter in asked.chapters)
        points = asked.max_score + asked.points_by_hand
        days = f"{_day(set_on)} | {_day(due)}, {due:%H:%M}"
        lines.append(f"| {asked.title} | {chapters} | {days} | {asked.hours:g} | {points:g} |")
    return "\n".join([*lines, "", f"Times are those of {zone}."])


def _day(day: datetime.date) -> str:
    return f"{day:%A}, {day.day} {day:%B %Y}"


def _days(text: str) -> Iterator[datetime.date]:
    """The days of `2027-03-29` or of `2027-04-05..2027-04-09`."""
    first, *last = map(datetime.date.fromisoformat, text.split("..", 1))
    last = last[0] if last else first
    if last < first:
        raise ValueError(f"{text} ends before it begins")
    return (first + k * _DAY for k in range((last - first).days + 1))


def _zone(name: str) -> zoneinfo.ZoneInfo:
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(
            f"{name!r} is no time zone that this machine knows; write one such as Europe/Berlin"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
