"""Where one process calls an answer with several sizes, each right one counts: alike in check and in the grader."""

import io
import re
from contextlib import redirect_stdout

import pytest

import course.check
from course.check import check, find
from course.check.judge import CaseVerdict, judge
from tests.course.homework import SETUP, Course


def share(exercise_id, answer, seed=1):
    ((case,),) = judge(find(exercise_id), [answer], seed)
    return case.status, case.share


def test_each_size_that_is_right_has_its_part():
    wrong = [mistake.wrong for mistake in find("08.1").mistakes if not mistake.hangs]
    shares = [one.share for (one,) in judge(find("08.1"), wrong, seed=1)]
    assert 0 < max(shares) < 1 and all(round(7 * x, 9) % 1 == 0 for x in shares), "seven calls"
    assert share("08.1", find("08.1").right[0])[0] == "PASS"
    assert any(one.share for (one,) in judge(find("01.1"), [m.wrong for m in find("01.1").mistakes[:6]], seed=1))


def test_what_returns_the_same_for_all_has_none():
    """Of 01.4, None is right for some."""
    assert share("01.4", lambda *given: None) == ("FAIL", 0.0)


@pytest.mark.parametrize("exercise_id", ["10.3", "12.2", "15.4", "03.1"])
def test_findings_checks_and_ranks_have_no_sizes(exercise_id):
    """In a table one can guess; a check that is silent is right about half of the runs; ranks are cases."""
    wrong = [mistake.wrong for mistake in find(exercise_id).mistakes if not mistake.hangs][:4]
    found = [case.share for cases in judge(find(exercise_id), wrong, seed=1) for case in cases]
    assert found and not any(found)


@pytest.mark.parametrize(
    ("points", "sizes", "got"), [(2, 1 / 3, 0.66), (0.01, 0.99, 0), (3, 2 / 3, 2.0), (1, 0.29, 0.29)]
)
def test_points_for_sizes_are_hundredths_and_never_all(points, sizes, got):
    assert CaseVerdict("several sizes", "FAIL", share=sizes).of(points) == got
    assert CaseVerdict("several sizes", "PASS").of(points) == points


def test_the_notebook_nbgrader_and_the_grader_agree(tmp_path, monkeypatch):
    mistakes = [m.wrong for m in find("08.1").mistakes if not m.hangs and m.wrong.expression == "cut"]
    shares = [one.share for (one,) in judge(find("08.1"), mistakes, seed=1)]
    wrong = mistakes[shares.index(max(shares))]
    homework = Course(tmp_path, exercises={"08.1": 2})
    homework.hands_in("ann", SETUP, wrong.text)
    assert homework.grade() == 0
    given, told = homework.given("ann"), homework.told("ann")
    (row,) = given["results"]
    assert 0 < row["points"] == given["score"] < 2 and row["status"] == "FAIL"
    got = f"{row['points']:g}"
    assert f"## 08.1 cut: {got} of 2 points" in told and f"[ ] several sizes, {got} points" in told
    seed = int(re.search(r"seed=(\d+)", row["again"])[1])
    with redirect_stdout(io.StringIO()) as said:
        check("08.1", wrong.load(), seed=seed, points=2)
    assert f"cut   {got}/2 points\n  [ ] several sizes, {got} points\n" in said.getvalue()
    monkeypatch.setattr(course.check, "NBGRADER", True)
    with redirect_stdout(io.StringIO()):
        assert check("08.1", wrong.load(), seed=seed, points=2) == row["points"]
