"""A rank that gets too little of its processor is named, by the quota of a cgroup or by stops; load names nobody.

The kernel divides what a rank loses (`lib.doctor.products`), so that these tests hold on a busy machine, too.
"""

import os
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from lib.doctor import exam
from lib.mesh import MeshShape

SLOWED = 1  # the rank
STOPS = """
import os, signal, sys, time
rank = int(sys.argv[1])
while os.getppid() == rank:
    os.kill(rank, signal.SIGSTOP)
    time.sleep(0.04)
    os.kill(rank, signal.SIGCONT)
    time.sleep(0.06)
"""
examined = exam.examined


@contextmanager
def stopped():
    """This process is stopped for 40 of each 100 ms."""
    stops = subprocess.Popen([sys.executable, "-I", "-S", "-c", STOPS, str(os.getpid())])
    try:
        yield
    finally:
        stops.kill()
        stops.wait()
        with suppress(ProcessLookupError):
            os.kill(os.getpid(), 18)  # SIGCONT


@contextmanager
def quota():
    """This process runs for 40 of each 100 ms, in a cgroup of its own."""
    folder = cgroup()
    folder.mkdir()
    try:
        if (folder / "cpu.cfs_quota_us").exists():
            (folder / "cpu.cfs_quota_us").write_text("40000")
        else:
            (folder / "cpu.max").write_text("40000 100000")
        (folder / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (folder.parent / "cgroup.procs").write_text(str(os.getpid()))
        folder.rmdir()


def cgroup():
    """The folder of a new cgroup, below that of this process, in version 1 or 2."""
    lines = Path("/proc/self/cgroup").read_text().splitlines() if Path("/proc/self/cgroup").exists() else []
    for line in lines:
        number, controllers, name = line.split(":", 2)
        root = Path("/sys/fs/cgroup") / ("cpu" if number != "0" else "")
        if "cpu" in controllers.split(",") or number == "0" and (root / "cgroup.controllers").exists():
            return root / name.lstrip("/") / f"pbh_{os.getpid()}"
    return None


def has_cgroups():
    """Whether one can be made here."""
    try:
        with quota():
            return True
    except (OSError, AttributeError):
        return False


NEEDS_CGROUPS = pytest.mark.skipif(not has_cgroups(), reason="no cgroup can be made here, for a CPU quota")


def slowed(world, shape, how=None):
    """Examine ranks, one of which is slowed."""
    if how and world.rank == SLOWED:
        with {"stopped": stopped, "quota": quota}[how]():
            return examined(world, shape)
    return examined(world, shape)


def found(monkeypatch, how, ranks=2):
    """What the doctor finds, and what it did not judge."""
    with monkeypatch.context() as patched:
        patched.setattr(exam, "examined", lambda world, shape: slowed(world, shape, how))
        report = exam.on_this_machine(MeshShape(dp=ranks))
    print(report.page())
    return report


def is_named(report):
    return [(one.kind, one.ranks) for one in report.findings] == [("slow", (SLOWED,))]


def test_a_rank_that_is_stopped_is_slow(monkeypatch):
    report = found(monkeypatch, "stopped")
    assert is_named(report), report.findings
    assert "stood still for" in report.findings[0].text and report.exit_code == 1


@NEEDS_CGROUPS
def test_a_rank_with_a_quota_is_slow(monkeypatch):
    report = found(monkeypatch, "quota")
    if not report.findings and any("busy machine" in what for what in report.not_judged):
        pytest.skip(f"{report.not_judged[0]}: it may use less than its quota")
    assert is_named(report), report.findings
    assert "held back by a CPU quota" in report.findings[0].text


# ---- five of five ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["stopped", pytest.param("quota", marks=NEEDS_CGROUPS)])
@pytest.mark.thorough("five examinations")
@pytest.mark.slow("five examinations, each of which measures twice")
@pytest.mark.alone("a quota shows only where a rank could use more than that")
def test_five_of_five_are_named(monkeypatch, say, how):
    reports = [found(monkeypatch, how, ranks) for ranks in (2, 3, 4, 2, 4)]
    named = [*map(is_named, reports)]
    say(f"{how}: {sum(named)} of 5 are named")
    assert all(named), [report.findings for report in reports]


@pytest.mark.thorough("five examinations")
@pytest.mark.slow("five examinations")
@pytest.mark.alone("a machine that other tests keep busy is not judged")
def test_five_healthy_examinations(monkeypatch, say):
    reports = [found(monkeypatch, None, ranks) for ranks in (2, 3, 4, 2, 4)]
    judged = [not any("busy machine" in what for what in report.not_judged) for report in reports]
    say(f"{sum(not report.findings for report in reports)} of 5 are healthy, and {sum(judged)} of 5 speeds judged")
    assert not any(report.findings for report in reports), [report.findings for report in reports]


@pytest.mark.thorough("five examinations")
@pytest.mark.slow("five examinations")
@pytest.mark.alone("two endless loops")
def test_five_beside_two_endless_loops(monkeypatch, say):
    loops = [subprocess.Popen([sys.executable, "-I", "-S", "-c", "while True: pass"]) for _ in range(2)]
    try:
        reports = [found(monkeypatch, None, ranks) for ranks in (2, 3, 4, 2, 4)]
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    busy = sum(any("rank speeds: busy machine" in what for what in report.not_judged) for report in reports)
    ill = sum(bool(report.findings) for report in reports)
    say(f"{ill} of 5 have a finding beside two endless loops, and {busy} of 5 say that the machine is busy")
    assert not ill, [report.findings for report in reports]
    assert busy, "a system may favour the ranks in some"
