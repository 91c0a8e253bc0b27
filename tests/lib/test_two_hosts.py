"""Training on two hosts: it equals one process, sends what the plan says, and every mistake ends in one sentence.

The two hosts are network namespaces on this machine, node0 and node1, joined by a cable that counts.
"""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from lib.layout import Layout
from lib.planner.plan import bytes_out_of_a_node
from lib.train import main, planned
from lib.training.config import TrainConfig

ROOT = Path(__file__).parents[2]
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


ADDRESSES = {"node0": "10.77.0.1", "node1": "10.77.0.2"}
EVERYONE = "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in ADDRESSES.items())


@functools.cache
def cannot() -> str:
    """Why there can be no two hosts here; "" if there can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "needs root and ip (iproute2): it lays out two hosts in network namespaces"
    tried = subprocess.run(["ip", "netns", "add", "pbh_try"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", "pbh_try"], capture_output=True)
    return f"no network namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


class TwoHosts:
    """A context; `start` runs a command on a host, with that host's name and an /etc/hosts of its own.

    Args:
        folder: for files of this test.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.tag = folder, f"pbh{os.getpid()}_"
        self.running: list[subprocess.Popen] = []
        self.hosts = dict.fromkeys(ADDRESSES, EVERYONE)
        self.mounts = {name: "" for name in ADDRESSES}  # shell commands in the host's own view of the files

    def __enter__(self) -> "TwoHosts":
        for name in ADDRESSES:
            self._ip("netns", "add", self.tag + name)
            self._ip("-n", self.tag + name, "link", "set", "lo", "up")
        self.cable("cable0", "10.77.0.")
        return self

    def cable(self, name: str, net: str) -> None:
        """Join both hosts by one more cable, with the addresses `net`1 and `net`2; gloo takes no name of one letter."""
        ends = [f"pbh{name[-1]}{os.getpid()}{i}" for i in (0, 1)]  # at most 15 letters
        self._ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for i, (host, end) in enumerate(zip(ADDRESSES, ends, strict=True)):
            self._ip("link", "set", end, "netns", self.tag + host)
            self._ip("-n", self.tag + host, "link", "set", end, "name", name)
            self._ip("-n", self.tag + host, "addr", "add", f"{net}{i + 1}/24", "dev", name)
            self._ip("-n", self.tag + host, "link", "set", name, "up")

    def __exit__(self, *error: object) -> None:
        for host in ADDRESSES:
            listed = subprocess.run(["ip", "netns", "pids", self.tag + host], capture_output=True, text=True)
            for pid in map(int, listed.stdout.split()):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self._ip("netns", "del", self.tag + host)
        for one in self.running:
            one.wait()

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def start(self, host: str, *command: str, **more: str) -> subprocess.Popen:
        """Start a command; its output goes to the file `host`."""
        names = Path(tempfile.mkstemp(dir=self.folder)[1])
        names.write_text(self.hosts[host])
        prepare = f'hostname {host}; mount --bind {names} /etc/hosts; {self.mounts[host] or ":"}; exec "$@"'
        inside = ["ip", "netns", "exec", self.tag + host, "unshare", "-u", "-m", "sh", "-c", prepare, "sh", *command]
        with open(self.folder / host, "ab") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | more
            self.running.append(subprocess.Popen(inside, cwd=ROOT, stdout=log, stderr=log, env=environment))
        return self.running[-1]

    def torchrun(self, host: str, program: str, options: str = "", ranks: int = 1, **more: str) -> subprocess.Popen:
        """Start torchrun on a host, to run `program`: its name and arguments."""
        run = (
            f"--nnodes 2 --nproc-per-node {ranks} --rdzv-backend c10d --rdzv-endpoint node0:29500 {options} {program}"
        )
        return self.start(host, sys.executable, "-m", "torch.distributed.run", *run.split(), **more)

    def both(self, program: str, on_node1: str | None = None, options: str = "", limit_s: float = 90) -> list[int]:
        """Run torchrun on both hosts, perhaps with other words on node1; return the exit codes."""
        started = [self.torchrun("node0", program, options), self.torchrun("node1", on_node1 or program, options)]
        return [one.wait(limit_s) for one in started]

    def refuse(self, program: str, says: str) -> bool:
        """Whether both end with an error that says this."""
        return self.both(program) == [1, 1] and all(says in self.said(host) for host in ADDRESSES)

    def said(self, host: str) -> str:
        return (self.folder / host).read_text(errors="replace").replace("\r", "\n")

    def ranks(self, host: str) -> list[int]:
        """The processes of the ranks on a host."""
        listed = subprocess.run(["ip", "netns", "pids", self.tag + host], capture_output=True, text=True).stdout
        told = {int(pid): Path(f"/proc/{pid}/environ") for pid in listed.split()}
        found = []
        for pid, path in told.items():
            with contextlib.suppress(OSError):
                if b"\0TORCHELASTIC_RUN_ID=" in b"\0" + path.read_bytes():
                    found.append(pid)
        return found

    def sent_bytes(self, host: str) -> int:
        """Bytes that left a host over the first cable, with the headers of the packets."""
        path = "/sys/class/net/cable0/statistics/tx_bytes"
        inside = ["ip", "netns", "exec", self.tag + host, "cat", path]
        return int(subprocess.run(inside, check=True, capture_output=True).stdout)


def until(true, limit_s: float = 60.0) -> None:
    """Wait until a function returns true."""
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, f"not within {limit_s} s"
        time.sleep(0.05)


@pytest.fixture
def hosts(tmp_path):
    if why := cannot():
        pytest.skip(why)
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
    return pytest.approx(losses_of(report), rel=1e-12)


def starts_as_the_readme_says(tmp_path, words):
    """Start the README's line for two machines on two hosts; where there can be none, two agents on this one."""
    text = README.read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = re.findall(r"^\.venv/bin/torchrun (.*--nnodes 2 .*)$", text, re.MULTILINE)
    with socket.create_server(("localhost", 0)) as free:
        here = f"localhost:{free.getsockname()[1]}" if cannot() else "node0:29500"
    for there, other in (("node0:29500", here), ("--nproc-per-node 8", "--nproc-per-node 1"), ("--dp 16", "--dp 2")):
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
    assert starts_as_the_readme_says(tmp_path, f"{FLAGS} --steps 20 --report {report}") == [0, 0]
    assert losses_of(report) == one_process(tmp_path, 20)
    said = capfd.readouterr().out + "".join((tmp_path / host).read_text() for host in ADDRESSES if not cannot())
    assert said.count("validation:") == 1, "one rank in all reports"
    ranks = json.loads(report.read_text(encoding="utf-8"))["ranks"]
    assert ranks[0]["losses"] == ranks[1]["losses"] and "reduce_scatter dp" in ranks[0]["traffic"]


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
    assert [one.wait(60) for one in both] == [0, 0], hosts.said("node0") + hosts.said("node1")
    assert losses_of(report) == one_process(tmp_path, 300)


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
