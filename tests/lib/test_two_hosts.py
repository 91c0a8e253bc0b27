"""Training on two hosts: it equals one process, sends what the plan says, and every mistake ends in one sentence."""

import json
import os
import re
import shutil
import signal

import pytest

from lib.layout import Layout
from lib.planner.traffic import bytes_out_of_a_node
from lib.train import main, planned
from lib.training.config import TrainConfig
from tests.lib.two_hosts import ADDRESSES, ROOT, TwoHosts, cannot, until

WHY_NOT = cannot()
pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    pytest.mark.thorough("two torchruns"),
    pytest.mark.slow("two torchruns, whose four processes import torch on two cores"),
]
README = ROOT / "README.md"
FLAGS = "--dp 2 --context 16 --d-model 24 --num-layers 1 --num-heads 2 --global-batch 4 --dtype float64"
TRAIN = f"-m lib.train {FLAGS} --validate-every 0"
DEBIAN = {
    "node0": "127.0.0.1 localhost\n127.0.1.1 node0\n10.77.0.2 node1\n",
    "node1": "127.0.0.1 localhost\n127.0.1.1 node1\n10.77.0.1 node0\n",
}
# The same program with shorter limits, so that a test need not wait as long as a reader may.
HASTY = """
import sys
from lib.torchrun import meeting, watchdog as dog
meeting.START_S = dog.START_S = float(sys.argv.pop(1))
dog.BEAT_S, dog.SILENT_S, dog.STILL_S = 0.5, 4.0, 4.0
"""
TRAINS = "from lib.train import main; main()"


@pytest.fixture
def hosts(tmp_path):
    with TwoHosts(tmp_path) as both:
        yield both


def hasty(tmp_path, more, start_s=120):
    path = tmp_path / "hasty.py"
    path.write_text(HASTY + more)
    return f"{path} {start_s}"


def losses_of(report):
    return json.loads(report.read_text(encoding="utf-8"))["losses"]


def one_process(tmp_path, steps):
    report = tmp_path / "one.json"
    main([*f"{FLAGS} --dp 1 --steps {steps} --validate-every 0 --report".split(), str(report)])
    return losses_of(report)


def the_readmes_line():
    text = README.read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = re.findall(r"^\.venv/bin/torchrun (.*--nnodes 2 .*)$", text, re.MULTILINE)
    assert line.count("--nproc-per-node 8") == 1 and line.count(" 16") == 1
    return line.replace("--nproc-per-node 8", "--nproc-per-node 1").replace("--dp 16", "--dp 2")


def test_the_readmes_line_on_hosts_that_call_themselves_127_0_1_1(hosts, tmp_path):
    hosts.hosts = DEBIAN
    report = tmp_path / "two.json"
    line = f"{the_readmes_line()} {FLAGS} --steps 40 --validate-every 0 --report {report}"
    both = [hosts.start(host, f"{ROOT}/.venv/bin/torchrun", *line.split()) for host in ADDRESSES]
    assert [one.wait(60) for one in both] == [0, 0], hosts.said("node0") + hosts.said("node1")
    assert losses_of(report) == pytest.approx(one_process(tmp_path, 40), rel=1e-12)


def test_the_plan_says_what_crosses_the_cable(hosts):
    """Of the ring of four ranks one link leaves each host; besides, the weights at the start, and headers."""
    config = TrainConfig(layout=Layout(tp=4), steps=30)
    both = [hosts.torchrun(host, "-m lib.train --tp 4 --steps 30 --validate-every 0", ranks=2) for host in ADDRESSES]
    assert [one.wait(90) for one in both] == [0, 0], hosts.said("node0")
    planned_bytes = 30 * bytes_out_of_a_node(planned(config), 2)["all_reduce", "tp"]
    assert [hosts.sent_bytes(host) for host in ADDRESSES] == [pytest.approx(planned_bytes, rel=0.04)] * 2


WRONG = {
    "a setting": ("", "--seed 7", "node1 was started with --seed 7, and node0 with --seed 0"),
    "a number of steps": ("", "--steps 9", "node1 was started with --steps 9, and node0 with --steps 3"),
    "a bucket": ("--zero 1", "--zero 1 --bucket-bytes 5", "node1 was started with --bucket-bytes 5, and node0 with"),
    "a profile": ("", "--profile /tmp/profile.json", "node1 was started with profile=True, and node0 with profile=F"),
    "impossible on one": ("", "--lr -1", "node1: --lr -1.0 must be a number above 0"),
    "impossible on rank 0": ("--checkpoint /proc/no", "--checkpoint /proc/no", "--checkpoint /proc/no cannot be wri"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_differs_is_said_on_both(hosts, what):
    on_node0, on_node1, says = WRONG[what]
    assert hosts.both(f"{TRAIN} --steps 3 {on_node0}", f"{TRAIN} --steps 3 {on_node1}") == [1, 1]
    for host in ADDRESSES:
        (line,) = [line for line in hosts.said(host).splitlines() if line.startswith("python -m lib.train: ")]
        assert says in line, line


def test_another_library(hosts, tmp_path):
    shutil.copytree(ROOT / "lib", tmp_path / "lib", ignore=shutil.ignore_patterns("__pycache__"))
    with open(tmp_path / "lib" / "masks.py", "a") as file:
        file.write("\n")
    hosts.mounts["node1"] = f"mount --bind {tmp_path}/lib {ROOT}/lib"
    assert hosts.both(f"{TRAIN} --steps 3") == [1, 1]
    says = "lib/masks.py on node1 differs from that on node0: copy one library to all machines"
    assert says in hosts.said("node0") and says in hosts.said("node1")


def test_a_folder_that_is_not_shared(hosts, tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    hosts.mounts["node1"] = f"mount -t tmpfs none {folder}"
    assert hosts.both(f"{TRAIN} --steps 3 --checkpoint {folder}") == [1, 1]
    says = f"--checkpoint {folder} is not one folder: rank 0 does not see what rank 1 wrote there"
    assert says in hosts.said("node0") and says in hosts.said("node1") and not os.listdir(folder)


def test_a_folder_that_one_host_cannot_write(hosts, tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    hosts.mounts["node1"] = f"mount --bind {folder} {folder} && mount -o remount,ro,bind {folder}"
    assert hosts.both(f"{TRAIN} --steps 3 --checkpoint {folder}") == [1, 1]
    says = f"--checkpoint {folder} cannot be written on node1: Read-only file system"
    assert says in hosts.said("node0") and says in hosts.said("node1")


def test_a_rank_that_dies_is_started_again(hosts, tmp_path):
    folder, report = tmp_path / "runs", tmp_path / "report.json"
    program = f"{TRAIN} --steps 300 --checkpoint {folder} --checkpoint-every 5 --resume auto --report {report}"
    both = [hosts.torchrun(host, program, "--max-restarts 2") for host in ADDRESSES]
    until(lambda: folder.is_dir() and any(path.name.startswith("step-") for path in folder.iterdir()))
    (rank,) = hosts.ranks("node1")
    os.kill(rank, signal.SIGKILL)
    assert [one.wait(60) for one in both] == [0, 0], hosts.said("node0") + hosts.said("node1")
    alone = tmp_path / "one.json"
    main(
        [
            *FLAGS.replace("--dp 2", "--dp 1").split(),
            "--steps",
            "300",
            "--validate-every",
            "0",
            "--report",
            str(alone),
        ]
    )
    losses = [json.loads(path.read_text(encoding="utf-8"))["losses"] for path in (report, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_a_rank_that_is_stopped(hosts, tmp_path):
    program = f"{hasty(tmp_path, TRAINS)} {FLAGS} --steps 100000 --validate-every 0"
    both = [hosts.torchrun(host, program) for host in ADDRESSES]
    until(lambda: "step " in hosts.said("node0"))
    (rank,) = hosts.ranks("node1")
    os.kill(rank, signal.SIGSTOP)
    assert both[0].wait(60) == 1
    said = hosts.said("node0")
    assert "rank 1 gave no sign of life for 4 s: its process is stopped, or its machine or network is gone" in said
    assert re.search(r"rank 0 on node0  waits in all_reduce.*: rank 1 did not call it +for ", said)
    assert re.search(r"rank 1 on node1  has said nothing for \d+ s", said)


def test_calls_that_differ(hosts, tmp_path):
    more = """
import torch
from lib import comm
from lib.launch import init
world = init()
comm.all_reduce(torch.ones(4), world)
if world.rank == 0:
    comm.all_gather(torch.ones(4), world)
else:
    comm.recv(torch.ones(4), world, 0).wait()
"""
    assert hosts.both(hasty(tmp_path, more)) == [1, 1]
    for host in ADDRESSES:
        said = hosts.said(host)
        assert "deadlock: ranks 0 and 1 wait for each other. Nothing has moved for" in said
        assert re.search(
            r"rank 0 on node0  waits in all_gather dim=0 float32\[4\]: rank 1 did not call it .*hasty.py", said
        )
        assert re.search(r"rank 1 on node1  waits in recv from 0, float32\[4\] .*hasty.py", said)


def test_a_network_that_the_other_host_does_not_reach(hosts, tmp_path):
    hosts.cable("away", "10.99.0.")
    hosts.start("node1", "ip", "link", "set", "away", "down").wait()
    program = f"{hasty(tmp_path, TRAINS, 8)} {FLAGS} --steps 3"
    both = [hosts.torchrun(host, program, GLOO_SOCKET_IFNAME="away") for host in ADDRESSES]
    assert [one.wait(90) for one in both] == [1, 1]
    said = hosts.said("node0") + hosts.said("node1")
    assert re.search(
        r"rank \d on node\d cannot connect to the other ranks over (cable0|away): .*GLOO_SOCKET_IFNAME", said
    )


def test_a_host_that_does_not_come(hosts, tmp_path):
    stays_away = (
        "import os, sys, time\nif os.environ['RANK'] == '1': time.sleep(30)\nfrom lib.train import main; main()"
    )
    program = f"{hasty(tmp_path, stays_away, 5)} {FLAGS} --steps 3"
    both = [hosts.torchrun(host, program) for host in ADDRESSES]
    assert both[0].wait(60) == 1
    assert "rank 1 of 2 did not come to node0:" in hosts.said("node0")
