"""Two hundred submissions, one in four of them hostile, graded unattended: `make grading` (minutes)."""

import json
import os

import pytest

from course.grade.__main__ import USER, main
from course.grade.jail import processes_of
from tests.course.homework import OTHER, RIGHT, SETUP, WRONG, Course, needs_jail
from tests.course.test_grade import CASES, HOSTILE, first, points
from tests.course.test_grade_jail import CALLS, LEAVES, of_user

STUDENTS = 200


@needs_jail
@pytest.mark.skipif(not os.environ.get("GRADING"), reason="make grading")
@pytest.mark.alone("grades as the user of students' code, who is one")
@pytest.mark.slow("grades two hundred submissions")
@pytest.mark.timeout(1800)
def test_nobody_is_lost_and_none_takes_long(tmp_path, say, capsys):
    hostile = [(cells, wanted) for name, (cells, *wanted) in HOSTILE.items() if name != "the network"]
    hostile += [(first(CALLS + code), [0, 2]) for code in LEAVES.values()]
    course, expected = Course(tmp_path), {}
    course.has_cases(*CASES)
    for k in range(STUDENTS):
        honest = ([SETUP, RIGHT, OTHER], [3, 2]) if k % 2 else ([SETUP, WRONG, OTHER], [0, 2])
        cells, expected[f"student{k:03}"] = honest if k % 4 else hostile[k // 4 % len(hostile)]
        course.hands_in(f"student{k:03}", *cells)
    assert main(course.command("--jobs", "2")) == 0
    grades = [json.loads(path.read_text()) for path in (course.grades / "students").glob("*.json")]
    assert {given["student"]: [*points(given)] for given in grades} == expected
    assert not processes_of(USER) and not processes_of(USER + 1) and not of_user(USER) and not of_user(USER + 1)
    seconds = sorted(given["seconds"] for given in grades)
    honest = sorted(given["seconds"] for given in grades if int(given["student"][-3:]) % 4)
    mean, middle = sum(seconds) / len(seconds), honest[len(honest) // 2]
    say(f"{len(grades)} submissions, {mean:.1f} s each; honest ones {middle:.1f} s, the longest {seconds[-1]:.1f} s")
    assert mean / 2 <= 3, "two at a time: seconds of the course's teacher for each"
