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


@pytest.mark.skipif(not has_cgroups(), reason="needs a cgroup that it may make, to give a rank a CPU quota")
def test_a_rank_with_a_quota_is_slow(monkeypatch):
    report = found(monkeypatch, "quota")
    if report.not_judged and "busy machine" in report.not_judged[0]:
        pytest.skip(f"{report.not_judged[0]}: it may use less than its quota")
    assert is_named(report), report.findings
    assert "held back by a CPU quota" in report.findings[0].text
