"""The doctor on two hosts: a slow cable, a throttled rank, a rank that is killed, a machine that never comes.

The two hosts are those of `hosts.py`.
"""

import json
import os
import re
import signal
import sys
import time
from contextlib import contextmanager, suppress

import pytest

from tests.lib.hosts import ADDRESSES, until
from tests.lib.test_doctor_throttled import NEEDS_CGROUPS, cgroup

pytestmark = [
    pytest.mark.thorough("two torchruns"),
    pytest.mark.slow("two torchruns, whose processes import torch on two cores"),
]
# The same program, which measures for a minute, and says when it begins.
LONG = """
import sys
from pathlib import Path
from lib.doctor import links
measure, began = links.measure, Path(sys.argv.pop(1))
links.ROUNDS, links.BUDGET_S = 10**6, 60.0
def for_long(*args):
    began.touch()
    return measure(*args)
links.measure = for_long
from lib.doctor.__main__ import main
main()
"""


def examined(hosts, path, words="", ranks=1):
    """Exit codes of both torchruns, and what the doctor wrote."""
    program = f"-m lib.doctor --json {path} {words}"
    both = [hosts.torchrun(host, program, ranks=ranks) for host in ADDRESSES]
    codes = [one.wait(180) for one in both]
    print(hosts.said("node0"))
    return codes, json.loads(path.read_text(encoding="utf-8"))


def kinds_of(found):
    return [(one["kind"], tuple(one["ranks"])) for one in found["findings"]]


@pytest.mark.hosts("a slow cable")
def test_a_slow_cable_is_found_by_what_its_driver_says(hosts, tmp_path):
    hosts.limit("40mbit")
    codes, found = examined(hosts, tmp_path / "found.json")
    assert codes == [1, 1] and kinds_of(found) == [("network", (0, 1))]
    says = r"it is [45](\.\d+)? MB/s, 0\.\d+ % of the 1.25 GB/s that the driver of cable0"
    assert re.search(says, found["findings"][0]["text"])
    assert found["transport"][0]["over"] == "cable0 (10.77.0.1)"
    assert "gloo on rank 0: TCP over cable0 (10.77.0.1) (10 Gb/s by its driver)" in hosts.said("node0")


def test_a_slow_cable_beside_links_within_a_host(hosts, tmp_path):
    hosts.limit("40mbit")
    codes, found = examined(hosts, tmp_path / "found.json", "--axes dp=2,tp=2", ranks=2)
    assert codes == [1, 1] and ("network", (0, 1, 2, 3)) in kinds_of(found)
    assert any("times as much as usual between hosts" in one["text"] for one in found["findings"])


@pytest.mark.parametrize(("rate", "expect", "codes"), [("1gbit", "", 0), ("1gbit", "--expect 10Gb", 1), ("", "", 0)])
def test_a_cable_that_is_as_fast_as_it_should_be(hosts, tmp_path, rate, expect, codes):
    if rate:
        hosts.limit(rate)
    seen, found = examined(hosts, tmp_path / "found.json", expect, ranks=2)
    assert seen == [codes] * 2, found["findings"]
    assert kinds_of(found) == [("network", (0, 1, 2, 3))] * codes


@contextmanager
def throttled(pids):
    """A CPU quota of 40 of each 100 ms for these processes, each in a cgroup of its own."""
    folder = cgroup()
    folder.mkdir()
    try:
        version_1 = (folder / "cpu.cfs_quota_us").exists()
        (folder / ("cpu.cfs_quota_us" if version_1 else "cpu.max")).write_text(
            "40000" if version_1 else "40000 100000"
        )
        for pid in pids:
            (folder / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for pid in (folder / "cgroup.procs").read_text().split():
            with suppress(OSError):
                (folder.parent / "cgroup.procs").write_text(pid)
        folder.rmdir()


@NEEDS_CGROUPS
def test_a_rank_with_a_quota_that_sees_no_cgroup(hosts, tmp_path):
    """In the namespace of `ip netns` the files of cgroups are not there: idle processors tell."""
    path = tmp_path / "found.json"
    both = [hosts.torchrun(host, f"-m lib.doctor --json {path}") for host in ADDRESSES]
    until(lambda: hosts.ranks("node1"))
    with throttled(hosts.ranks("node1")):
        codes = [one.wait(180) for one in both]
    found = json.loads(path.read_text(encoding="utf-8"))
    print(found["page"])
    if not found["findings"] and any("busy machine" in what for what in found["not_judged"]):
        pytest.skip("busy machine: it may use less than its quota")
    assert codes == [1, 1] and kinds_of(found) == [("slow", (1,))]


@pytest.mark.hosts("a rank is killed")
@pytest.mark.parametrize(("host", "ranks"), [("node1", 2), ("node1", 1), ("node0", 2), ("node0", 1)])
def test_a_rank_that_is_killed_is_named_on_every_host(hosts, tmp_path, host, ranks):
    program, began = tmp_path / "long.py", tmp_path / "began"
    program.write_text(LONG)
    both = [hosts.torchrun(one, f"{program} {began}", ranks=ranks) for one in ADDRESSES]
    until(began.exists)
    time.sleep(2)
    victim = dict(rank_of(pid) for pid in hosts.ranks(host))
    rank = max(victim)
    os.kill(victim[rank], signal.SIGKILL)
    assert [one.wait(60) for one in both] == [1, 1]
    for one in ADDRESSES:
        said = hosts.said(one)
        named = re.search(rf"rank {rank} on {host} died", said)
        assert named or one == host and "exitcode  : -9" in said, f"{one}: {said}"
    assert "Traceback" not in hosts.said("node0" if host == "node1" else "node1").split("torch/distributed")[0]


def rank_of(pid):
    """(rank, process) of a process that torchrun started."""
    words = dict(one.split("=", 1) for one in open(f"/proc/{pid}/environ").read().split("\0") if "=" in one)
    return int(words["RANK"]), pid


@pytest.mark.hosts("a machine that never comes")
def test_a_machine_that_never_comes(hosts):
    run = "--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint node0:29500 --rdzv-conf"
    words = f"-m lib.torchrun {run} join_timeout=5 -m lib.doctor".split()
    assert hosts.start("node0", sys.executable, *words).wait(120) == 1
    said = hosts.said("node0")
    assert "RendezvousTimeoutError" in said, "the traceback stays"
    assert said.splitlines()[-1].startswith(
        "python -m lib.torchrun: fewer than 2 machines came to node0:29500 in time: start torchrun on each of them"
    )


def test_a_machine_that_is_not_reached(hosts):
    hosts.hosts["node1"] = "127.0.0.1 localhost\n"  # it does not know node0
    run = "--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint node0:29500 --rdzv-conf"
    words = f"-m lib.torchrun {run} join_timeout=5,timeout=5 -m lib.doctor".split()
    assert hosts.start("node1", sys.executable, *words).wait(240) == 1
    assert "python -m lib.torchrun: this machine does not reach node0:29500" in hosts.said("node1")


def test_a_rank_that_never_comes_is_named_at_the_end_of_torchruns_words(hosts, tmp_path):
    program = tmp_path / "late.py"
    program.write_text(
        "import os, time\nfrom lib.doctor import exam\nexam.START_S = 5.0\n"
        "if os.environ['RANK'] == '1': time.sleep(60)\nfrom lib.doctor.__main__ import main\nmain()\n"
    )
    both = [hosts.torchrun(host, str(program)) for host in ADDRESSES]
    assert both[0].wait(120) == 1
    table = hosts.said("node0").split("Root Cause")[1]
    assert "python -m lib.doctor: rank 1 of 2 did not come within 5 s" in table
    hosts.kill("node1")
    both[1].wait(60)
