"""What the suite demands of its own tests."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tools.mutants import faults, table

TESTS = Path(__file__).resolve().parents[1]
LONG = """
import conftest, time, pytest
conftest.busy = lambda: 1.0
def test_quick(): pass
def test_long(): time.sleep(0.3)
@pytest.mark.slow("it sleeps")
def test_long_and_says_why(): time.sleep(0.3)
@pytest.fixture
def prepared(): time.sleep(0.3)
def test_prepared(prepared): pass
def test_wrong(): assert not time.sleep(0.3) and False
"""


def run_pytest(folder: Path, source: str, *options: str, insists: str = "1") -> tuple[int, str]:
    (folder / "test_it.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-c", TESTS.parent / "pyproject.toml", "--rootdir", folder]
    command += ["-p", "conftest", "--longest-s=0.2", *options, folder / "test_it.py"]
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
        "INSIST_ON_TIME": insists,
        "PYTHONDONTWRITEBYTECODE": "1",  # of the next file of this size, in the same second, the old code would be run
    }
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_a_test_that_takes_long_says_why(tmp_path):
    code, said = run_pytest(tmp_path, LONG)
    assert code == 1 and "2 failed, 2 passed, 1 error" in said, said
    assert "It passed, but its call took 0 s, and a test may take 0.2 s: make it shorter" in said
    assert "It passed, but its setup took" in said and "assert (not None and False)" in said
    code, said = run_pytest(tmp_path, LONG.replace("1.0", "9.0"))
    assert "1 failed, 4 passed" in said and "It passed" not in said, said  # the machine was busy


def test_only_where_the_machine_must_be_quiet_is_a_long_test_a_failure(tmp_path):
    code, said = run_pytest(tmp_path, LONG.replace("and False", ""), insists="")
    assert code == 0 and "5 passed" in said, said


TIMED = """
import conftest, pytest
from tests.on_time import on_time
conftest.busy, conftest.RERUN_S = lambda: 2.4, 0
@pytest.mark.timed("it measures time")
def test_late():
    with on_time():
        assert 3 < 2
@pytest.mark.timed("it measures time, and says what it saw")
def test_says(): assert "hang" == "a hang"
def test_wrong(): assert 5 < 4
"""


def test_a_time_that_a_busy_machine_misses_is_no_failure(tmp_path):
    """Where CI insists, or nothing else runs, it is one; and a wrong text or verdict is one anywhere."""
    code, said = run_pytest(tmp_path, TIMED, insists="")
    assert code == 1 and "2 failed, 1 skipped" in said and "assert 3 < 2" not in said and "assert 5 < 4" in said, said
    assert "FAILED test_it.py::test_says" in said, said
    assert "not measured here: the machine was busy, a loop took 2.4 times its processor time" in said
    assert "3 failed, 6 rerun" in run_pytest(tmp_path, TIMED, insists="1")[1]
    quiet = TIMED.replace("2.4", "1.0")
    assert "3 failed, 6 rerun" in run_pytest(tmp_path, quiet, insists="")[1]


def test_a_mark_that_needs_a_reason_has_one(tmp_path):
    for mark in ("slow", "alone", "thorough", "timed"):
        code, said = run_pytest(tmp_path, f"import pytest\n@pytest.mark.{mark}\ndef test_it(): pass")
        assert code == 4 and f'test_it is marked as {mark}, but not why: {mark}("...")' in said, said


GROUPED = """
import os, pytest
PAGES = [pytest.param(i, marks=pytest.mark.xdist_group(str(i))) for i in range(3)]
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("what", range(5))
def test_page(page, what): print("page", page, "by", os.environ["PYTEST_XDIST_WORKER"])
"""


def test_the_tests_of_a_page_run_in_one_process(tmp_path):
    """As make site starts them; otherwise each process opens each page."""
    code, said = run_pytest(tmp_path, GROUPED, "-n", "2", "--dist", "loadgroup", "-rP")
    by = set(re.findall(r"page (\d) by (gw\d)", said))
    assert code == 0 and len(by) == 3 and {page for page, _ in by} == {"0", "1", "2"}, said


MANY = """
import pytest
def test_one(): pass
@pytest.mark.thorough("there are many")
def test_another(): pass
@pytest.mark.thorough("there are many", keep=2)
@pytest.mark.parametrize("n", range(5))
def test_many(n): pass
"""


def test_each_test_is_quick_or_thorough(tmp_path):
    ran = {}
    for part in ("all", "quick", "thorough"):
        _, said = run_pytest(tmp_path, MANY, "-v", f"--part={part}")
        ran[part] = set(re.findall(r"test_it\.py::(\S+) PASSED", said))
    assert ran["quick"] == {"test_one", "test_many[0]", "test_many[1]"}
    assert (
        ran["quick"] | ran["thorough"] == ran["all"] and not ran["quick"] & ran["thorough"] and len(ran["all"]) == 7
    )


REFUSED = """
from lib.pipeline.schedules.action import Schedule
def refuse(*_, **__): raise AssertionError("a schedule was made before its test began")
Schedule.__init__ = refuse
"""


@pytest.mark.slow("it imports hundreds of tests")
@pytest.mark.thorough("it imports hundreds of tests")
def test_no_schedule_is_made_before_its_test_begins(tmp_path):
    """A generator that never ends would keep pytest from starting at all; in a test it is that test's failure."""
    (tmp_path / "refused.py").write_text(REFUSED)
    command = [sys.executable, "-m", "pytest", "-p", "refused", "--collect-only", "-q", TESTS / "lib", TESTS / "book"]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(TESTS.parent)])}
    done = subprocess.run(command, cwd=TESTS.parent, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr


def test_no_two_files_of_tests_have_one_name():
    """Pytest takes the second of them for the first, and collects neither, where it is asked for both."""
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name, files in names.items() if files > 1] == []


def test_ci_runs_both_parts():
    run, commands = (
        (TESTS.parent / ".ci" / name).read_text(encoding="utf-8").splitlines() for name in ("run", "long")
    )
    assert {"make test", "make test-course", "make test-book", "make lint", "make book", "make site"} <= {*run}
    assert {"make certificate", "make perturbed", "make soak"} <= {*commands}
    (thorough,) = (command for command in commands if command.endswith(" make thorough"))
    left_out = re.findall(r"--ignore (\S+\.py)", thorough)
    certificate = f"CERTIFICATE=all $(PY) -m pytest {' '.join(left_out)} -q"
    assert certificate in (TESTS.parent / "Makefile").read_text(encoding="utf-8"), "it runs all of these"


def test_each_mutant_is_one_piece_of_its_file_and_has_a_test():
    mutants = table()
    assert len({one.name for one in mutants}) == len(mutants) > 40
    assert [*faults(mutants)] == []
    wrong = mutants[0]._replace(old="no such piece", test="tests/lib/test_comm.py::test_nothing[2]")
    assert len([*faults([wrong])]) == 2, "neither is there"
