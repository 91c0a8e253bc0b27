"""Training on two hosts: it equals one process, sends what the plan says, and every mistake ends in one sentence.

The two hosts are those of `hosts.py`.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from lib.train import main
from tests.lib.hosts import ADDRESSES, ROOT, TwoHosts, cannot, until

pytestmark = [
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
from lib.torchrun import meeting
from lib.torchrun.watchdog import Watchdog
meeting.START_S = Watchdog.start_s = float(sys.argv.pop(1))
Watchdog.beat_s, Watchdog.silent_s, Watchdog.still_s = 0.5, 4.0, 4.0
"""
TRAINS = "from lib.train import main; main()"


def hasty(tmp_path, more, start_s=120):
    path = tmp_path / "hasty.py"
    path.write_text(HASTY + more)
    return f"{path} {start_s}"


def losses_of(report):
    return json.loads(report.read_text(encoding="utf-8"))["losses"]


def one_process(tmp_path, steps):
    report = tmp_path / "one.json"
    main([*f"{FLAGS} --dp 1 --steps {steps} --validate-every 0 --report".split(), str(report)])
    return pytest.approx(losses_of(report), rel=1e-12)


def starts_as_the_readme_says(tmp_path, program, words):
    """Start the README's line for two machines on two hosts; where there can be none, two agents on this one."""
    text = README.read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = re.findall(rf"^\.venv/bin/torchrun (.*--nnodes 2 .* -m {program} .*)$", text, re.MULTILINE)
    with socket.create_server(("localhost", 0)) as free:
        here = f"localhost:{free.getsockname()[1]}" if cannot() else "node0:29500"
    two = {"lib.train": ("--dp 16", "--dp 2"), "lib.doctor": ("dp=8,tp=2", "dp=2,tp=1")}[program]
    for there, other in (("node0:29500", here), ("--nproc-per-node 8", "--nproc-per-node 1"), two):
        assert line.count(there) == 1
        line = line.replace(there, other)
    command = [sys.executable, "-m", "torch.distributed.run", *line.split(), *words.split()]
    with contextlib.ExitStack() as stack:
        if cannot():
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            both = [subprocess.Popen(command, cwd=tmp_path, env=environment) for _ in range(2)]
            for agent in both:
                stack.callback(agent.terminate)  # it ends its ranks
        else:
            hosts = stack.enter_context(TwoHosts(tmp_path))
            hosts.hosts = DEBIAN  # hosts that call themselves 127.0.1.1
            both = [hosts.start(host, *command) for host in ADDRESSES]
        return [one.wait(180) for one in both]


def test_the_readmes_line_for_two_machines(tmp_path, capfd):
    report = tmp_path / "two.json"
    assert starts_as_the_readme_says(tmp_path, "lib.train", f"{FLAGS} --steps 20 --report {report}") == [0, 0]
    assert losses_of(report) == one_process(tmp_path, 20)
    said = capfd.readouterr().out + "".join((tmp_path / host).read_text() for host in ADDRESSES if not cannot())
    assert said.count("validation:") == 1, "one rank in all reports"
    ranks = json.loads(report.read_text(encoding="utf-8"))["ranks"]
    assert ranks[0]["losses"] == ranks[1]["losses"] and "reduce_scatter dp" in ranks[0]["traffic"]


@pytest.mark.hosts("the doctor sees both")
def test_the_readmes_line_for_the_doctor(tmp_path, capfd):
    path = tmp_path / "found.json"
    assert starts_as_the_readme_says(tmp_path, "lib.doctor", f"--json {path}") == [0, 0]
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["findings"] == [] and len(found["transfer"]) == 2 and found["all_reduce"][0]["axis"] == "dp"
    assert cannot() or [one["host"] for one in found["ranks"]] == sorted(ADDRESSES)
    said = capfd.readouterr().out + "".join((tmp_path / host).read_text() for host in ADDRESSES if not cannot())
    assert said.count("nothing looks wrong") == 1, "one rank prints the page"


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
    says = "lib/masks.py on node1 differs from that on node0: copy one library to all machines"
    assert hosts.refuse(f"{TRAIN} --steps 3", says)


def test_a_folder_that_is_not_shared(hosts, tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    hosts.mounts["node1"] = f"mount -t tmpfs none {folder}"
    says = f"--checkpoint {folder} is not one folder: rank 0 does not see what rank 1 wrote there"
    assert hosts.refuse(f"{TRAIN} --steps 3 --checkpoint {folder}", says) and not os.listdir(folder)


def test_a_folder_that_one_host_cannot_write(hosts, tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    hosts.mounts["node1"] = f"mount --bind {folder} {folder} && mount -o remount,ro,bind {folder}"
    says = f"--checkpoint {folder} cannot be written on node1: Read-only file system"
    assert hosts.refuse(f"{TRAIN} --steps 3 --checkpoint {folder}", says)


def test_a_rank_that_dies_is_started_again(hosts, tmp_path):
    folder, report = tmp_path / "runs", tmp_path / "report.json"
    program = f"{TRAIN} --steps 300 --checkpoint {folder} --checkpoint-every 5 --resume auto --report {report}"
    both = [hosts.torchrun(host, program, "--max-restarts 2") for host in ADDRESSES]
    until(lambda: folder.is_dir() and any(path.name.startswith("step-") for path in folder.iterdir()))
    (rank,) = hosts.ranks("node1")
    os.kill(rank, signal.SIGKILL)
    assert [one.wait(180) for one in both] == [0, 0], hosts.said("node0") + hosts.said("node1")
    assert losses_of(report) == one_process(tmp_path, 300)


def test_a_rank_that_is_stopped(hosts, tmp_path):
    program = f"{hasty(tmp_path, TRAINS)} {FLAGS} --steps 100000 --validate-every 0"
    both = [hosts.torchrun(host, program) for host in ADDRESSES]
    until(lambda: "step " in hosts.said("node0"))
    (rank,) = hosts.ranks("node1")
    os.kill(rank, signal.SIGSTOP)
    assert both[0].wait(180) == 1
    said = hosts.said("node0")
    assert "rank 1 gave no sign of life for 4 s: its process is stopped, or its machine or network is gone" in said
    assert re.search(r"rank 0 on node0  waits in all_reduce.*for ", said)
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
    assert [one.wait(180) for one in both] == [1, 1]
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
    assert both[0].wait(180) == 1
    assert "rank 1 of 2 did not come to node0:" in hosts.said("node0")


def test_a_host_that_comes_late(hosts):
    first = hosts.torchrun("node0", f"{TRAIN} --steps 3")
    time.sleep(8)
    second = hosts.torchrun("node1", f"{TRAIN} --steps 3")
    assert [first.wait(180), second.wait(180)] == [0, 0], hosts.said("node0")


def test_an_address_that_does_not_exist(hosts):
    """torchrun says it, on each host in its own words."""
    hosts.hosts["node1"] = "127.0.0.1 localhost\n"  # it does not know node0
    both = [
        hosts.torchrun(host, f"{TRAIN} --steps 3", "--rdzv-conf join_timeout=10,timeout=10") for host in ADDRESSES
    ]
    assert [one.wait(240) for one in both] == [1, 1]
    assert "RendezvousTimeoutError" in hosts.said("node0")
    assert "socket.gaierror" in hosts.said("node1") or "failed to connect to" in hosts.said("node1")


def test_unequal_numbers_of_ranks(hosts):
    for dp, says in ((4, "--dp 4 needs 4 ranks, but torchrun started 3"), (3, "")):
        both = [
            hosts.torchrun(host, f"{TRAIN} --steps 3 --dp {dp} --global-batch {dp}", ranks=ranks)
            for host, ranks in zip(ADDRESSES, (2, 1), strict=True)
        ]
        assert [one.wait(180) for one in both] == ([1, 1] if says else [0, 0])
        assert all(says in hosts.said(host) for host in ADDRESSES)


def test_two_runs_in_one_folder(hosts, tmp_path):
    program = f"{TRAIN} --steps 100000 --checkpoint {tmp_path / 'runs'} --checkpoint-every 100000"
    for host in ADDRESSES:
        hosts.torchrun(host, program)
    until(lambda: "step " in hosts.said("node0"))
    second = [hosts.torchrun(host, program, "--rdzv-endpoint node0:29501") for host in ADDRESSES]
    assert [one.wait(180) for one in second] == [1, 1], hosts.said("node0")
    for host in ADDRESSES:
        assert re.search(r"runs is used by process \d+ on node0: wait until it has ended, or give", hosts.said(host))


def test_a_full_disk(hosts, tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "none", folder], check=True)
    try:
        wide = FLAGS.replace("--d-model 24", "--d-model 64")
        codes = hosts.both(f"-m lib.train {wide} --validate-every 0 --steps 4 --checkpoint {folder}")
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
    assert codes == [1, 1]
    assert f"could not be written to {folder}: rank " in hosts.said("node0")
    assert "No space left on device" in hosts.said("node0")


def test_a_host_that_dies_and_the_other_layout(hosts, tmp_path):
    """Across both hosts cut by data; then on the one that is left by tensors, from the newest checkpoint."""
    folder, report = tmp_path / "runs", tmp_path / "report.json"
    steps = f"--steps 40 --checkpoint {folder} --checkpoint-every 5 --resume auto --report {report}"
    first = hosts.torchrun("node0", f"{hasty(tmp_path, TRAINS)} {FLAGS} --validate-every 0 {steps}")
    hosts.torchrun("node1", f"{hasty(tmp_path, TRAINS)} {FLAGS} --validate-every 0 {steps}")
    until(lambda: folder.is_dir() and any(path.name.startswith("step-") for path in folder.iterdir()))
    hosts.kill("node1")
    assert first.wait(180) != 0
    assert re.search(
        "Connection (closed|reset) by peer|gave no sign of life|RendezvousConnectionError", hosts.said("node0")
    )
    agent = "-m torch.distributed.run --nnodes 1 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint node0:29600"
    other = f"-m lib.train {FLAGS.replace('--dp 2', '--dp 1 --tp 2')} --validate-every 0 {steps}"
    assert hosts.start("node0", sys.executable, *f"{agent} {other}".split()).wait(240) == 0, hosts.said("node0")
    assert losses_of(report) == one_process(tmp_path, 40)
