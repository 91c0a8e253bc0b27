"""Two hosts on one machine: network namespaces, node0 and node1, joined by a cable that counts, and can be slow.

Where one is not root, or has no `ip` (iproute2), there are none; the tests that need them say so.
"""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
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
            self.kill(host)
            self._ip("netns", "del", self.tag + host)
        for one in self.running:
            one.wait()

    def kill(self, host: str) -> None:
        """End all processes of a host in one moment, as a power failure does; its cable stays."""
        listed = subprocess.run(["ip", "netns", "pids", self.tag + host], capture_output=True, text=True)
        for pid in map(int, listed.stdout.split()):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def limit(self, rate: str) -> None:
        """Let both hosts send over the first cable no faster than `rate`, such as `20mbit`."""
        for host in ADDRESSES:
            queue = f"qdisc add dev cable0 root tbf rate {rate} burst 64kb latency 400ms"
            inside = ["ip", "netns", "exec", self.tag + host, "tc", *queue.split()]
            subprocess.run(inside, check=True, capture_output=True)

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

    def both(self, program: str, on_node1: str | None = None, options: str = "", limit_s: float = 180) -> list[int]:
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


def until(true, limit_s: float = 180.0) -> None:
    """Wait until a function returns true."""
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, f"not within {limit_s} s"
        time.sleep(0.05)
