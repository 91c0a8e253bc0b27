"""One command moves the dates of all homeworks, around holidays and the beginning of summer time."""

import datetime
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from course.grade.assignment import read_assignment
from course.release.calendar import day_in, main
from tests.course.homework import ROOT, Course

FILES = sorted((ROOT / "course" / "assignments").glob("*.json"))
DAY = datetime.date.fromisoformat
# Good Friday, Easter, Labour Day, Ascension, Whit Monday; 2027, as in the book's files.
HOLIDAYS = {DAY(f"2027-{day}") for day in ("03-26", "03-28", "03-29", "05-01", "05-06", "05-17")}


@pytest.fixture
def files(tmp_path):
    """Copies of the book's homeworks."""
    return [shutil.copy(path, tmp_path) for path in FILES]


def due(files):
    return {path.stem: json.loads(path.read_text())["due"] for path in map(Path, files)}


def test_the_dates_of_the_book_are_those_of_the_command_of_its_page_and_no_holidays(files):
    before = due(files)
    page = (ROOT / "book" / "teaching.md").read_text().replace("\\\n", "")
    command = re.search(r"-m course.release.calendar (.*)", page)[1]
    assert main([*shlex.split(command.replace("course/assignments/*.json", " ".join(map(str, files))))]) == 0
    assert due(files) == before
    for moment in before.values():
        day = datetime.datetime.fromisoformat(moment).date()
        assert day.year == 2027 and day not in HOLIDAYS and day.weekday() < 5


def test_what_changes_is_the_date_alone(files, capsys):
    texts = {path: path.read_text() for path in map(Path, files)}
    assert main(["2028-01-31", "America/New_York", *map(str, files)]) == 0
    for path, text in texts.items():
        changed = [(a, b) for a, b in zip(text.split("\n"), path.read_text().split("\n"), strict=True) if a != b]
        assert len(changed) == 1 and changed[0][1].startswith(' "due": "2028-')
    hours = {moment[-14:] for moment in due(files).values()}
    assert hours == {"23:59:00-05:00", "23:59:00-04:00"}, "before and in summer time, the same hour"
    assert due(files)["hw3"] == "2028-03-06T23:59:00-05:00" and due(files)["hw4"] == "2028-03-20T23:59:00-04:00"
    table = capsys.readouterr().out.splitlines()
    titles = ["Homework 1", "Homework 2", "Homework 3", "Homework 4", "Homework 5", "Homework 6", "Capstone"]
    assert [row.split(":")[0].removeprefix("| ") for row in table[2:-2]] == titles
    assert "| 1, 2 | Monday, 7 February 2028 | Monday, 14 February 2028, 23:59 | 7 | 24 |" in table[2]
    assert table[-1] == "Times are those of America/New_York."


def test_weeks_around_holidays():
    monday, friday = DAY("2027-02-01"), DAY("2027-02-05")
    holiday = {DAY("2027-02-08")}
    assert [str(day_in(week, monday, holiday)) for week in (1, 2, 3)] == ["2027-02-01", "2027-02-09", "2027-02-15"]
    days_off = {DAY(f"2027-02-{day:02}") for day in range(8, 13)}  # Monday to Friday: no week of the course
    assert [str(day_in(week, monday, days_off)) for week in (1, 2, 3)] == ["2027-02-01", "2027-02-15", "2027-02-22"]
    assert str(day_in(2, monday, days_off - {DAY("2027-02-12")})) == "2027-02-12"
    assert str(day_in(2, friday, {DAY("2027-02-12")})) == "2027-02-15", "after a weekend"
    assert str(day_in(2, friday, {DAY("2027-02-12"), DAY("2027-02-15")})) == "2027-02-16"


def test_a_break_moves_what_comes_later(files):
    assert (
        main(["2027-02-01", "Europe/Berlin", *map(str, files), "--skip", "2027-03-22..2027-04-02", "2027-04-05"]) == 0
    )
    days = {name: moment[:10] for name, moment in due(files).items()}
    assert days["hw3"] == "2027-03-08" and days["hw4"] == "2027-04-06" and days["hw5"] == "2027-04-12"


@pytest.mark.parametrize(
    ("changes", "more", "words"),
    [
        ({}, (), 'has weeks []: write "weeks": [2, 3]'),
        ({"weeks": [3, 3]}, (), "has weeks [3, 3]"),
        ({"weeks": [0, 3]}, (), "has weeks [0, 3]"),
        ({"weeks": [1, 2.5]}, (), "has weeks [1, 2.5]"),
        ({"weeks": 3}, (), "is not an assignment"),
        ({"weeks": [1, 2], "due": None}, (), "has no time"),
        ({"weeks": [1, 2]}, ("--skip", "2027-02-09..2027-02-08"), "2027-02-09..2027-02-08 ends before it begins"),
        ({"weeks": [1, 2]}, ("--skip", "Easter"), "Invalid isoformat string: 'Easter'"),
        (
            {"weeks": [1, 8], "due": "2027-03-01T02:30:00+01:00"},
            (),
            "on 2027-03-28 there is no 02:30 in Europe/Berlin",
        ),
    ],
)
def test_what_cannot_be_moved_is_one_sentence_and_no_file_changes(tmp_path, files, changes, more, words, capsys):
    late = {"due": "2027-03-01T23:59:00+01:00", "late": {"max_days": 0}}
    Course(tmp_path, **late | changes)
    before = due(files)
    begin = "2027-02-07" if "02:30" in words else "2027-02-01"
    assert main([begin, "Europe/Berlin", *map(str, files), str(tmp_path / "hw.json"), *more]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and due(files) == before


def test_a_zone_that_is_none(files, capsys):
    for zone in ("Europe/Nowhere", "../etc/passwd", ""):
        assert main(["2027-02-01", zone, str(files[0])]) == 2
        assert f"{zone!r} is no time zone" in capsys.readouterr().err


def test_a_date_in_another_place_is_not_mistaken_for_the_due_date(tmp_path, capsys):
    Course(tmp_path, goals=["x"])
    path = tmp_path / "hw.json"
    fields = json.loads(path.read_text()) | {"weeks": [1, 2], "late": {"max_days": 0}}
    fields["text"] = 'Write "due": "never" on the board.'
    path.write_text(json.dumps(fields | {"due": "2027-03-01T23:59:00+01:00"}, indent=1))
    assert main(["2027-02-01", "Europe/Berlin", str(path)]) == 0
    assert read_assignment(str(path)).due.isoformat() == "2027-02-08T23:59:00+01:00"
    assert json.loads(path.read_text())["text"] == fields["text"]
