"""What the kernel counts of one thread's time: where Linux does not say it, all is 0, and `is_told` is False.

/proc/thread-self/schedstat   seconds in which the thread was ready to run, and had no processor
/proc/stat                    seconds in which each processor was idle, or in use by another virtual machine
cpu.stat of the cgroups       seconds in which their CPU quotas held processes back
"""

import os
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

CGROUPS = Path("/sys/fs/cgroup")
TICK_S = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01


@dataclass(frozen=True)
class Counters:
    """Seconds that the kernel has counted until now.

    Args:
        wall_s: by the clock.
        cpu_s: in which this thread ran.
        ready_s: in which this thread waited for a processor; if several compute, the sum of all threads.
        throttled_s: in which a CPU quota held processes of its cgroups back.
        throttled_periods: in which a quota was used up, of `periods`, mostly of 0.1 s.
        idle_s: in which its processors had nothing to do, the sum of all.
        stolen_s: in which another virtual machine had its processors, the mean of all.
        is_told: whether the system counts `ready_s`.
    """

    wall_s: float
    cpu_s: float
    ready_s: float
    throttled_s: float
    throttled_periods: int
    periods: int
    idle_s: float
    stolen_s: float
    is_told: bool

    @classmethod
    def now(cls, cores: Collection[int], threads: int) -> "Counters":
        """As they are.

        Args:
            cores: the numbers of the processors on which this process may run.
            threads: that compute in this process; of several, each may keep the others waiting.
        """
        ready_s = _ready_s(threads)
        idle_s, stolen_s = _idle_and_stolen_s(cores)
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        return cls(wall_s, cpu_s, ready_s or 0.0, *_quotas(), idle_s, stolen_s, ready_s is not None)


def _ready_s(threads: int) -> float | None:
    """Seconds that threads of this process were ready, and had no processor; None if the system does not say."""
    tasks, waited_ns, told = [threading.get_native_id()], 0, False
    if threads > 1:
        with suppress(OSError):
            tasks = os.listdir("/proc/self/task")
    for task in tasks:
        with suppress(OSError, ValueError, IndexError):
            ran_ns, ready_ns, _ = map(int, Path(f"/proc/self/task/{task}/schedstat").read_text().split())
            waited_ns, told = waited_ns + ready_ns, told or ran_ns > 0
    return waited_ns / 1e9 if told else None


def _idle_and_stolen_s(cores: Collection[int]) -> tuple[float, float]:
    """Seconds in which these processors were idle, all together; and in which a hypervisor took them, the mean."""
    idle = stolen = 0
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/stat").read_text().splitlines():
            name, *ticks = line.split()
            if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in cores:
                idle += int(ticks[3]) + int(ticks[4])  # idle, and idle while the disk works
                stolen += int(ticks[7])
    return idle * TICK_S, stolen * TICK_S / max(1, len(cores))


def _quotas() -> tuple[float, int, int]:
    """What CPU quotas did to this process's cgroups, and those around them: seconds of throttling, periods in which a
    quota was used up, and all periods."""
    every = [(0.0, 0, 0)]
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            root = CGROUPS / "cpu" if controllers else CGROUPS  # version 1, or version 2
            group = PurePosixPath(name)
            every += map(_quota_of, {root / str(one).lstrip("/") for one in (group, *group.parents)})
    seconds, used_up, periods = zip(*every, strict=True)
    return sum(seconds), sum(used_up), max(periods)


def _quota_of(folder: Path) -> tuple[float, int, int]:
    """What the file of one cgroup says; zeros where there is none."""
    with suppress(OSError, ValueError):
        said = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
        seconds = int(said.get("throttled_usec", 0)) / 1e6 + int(said.get("throttled_time", 0)) / 1e9
        return seconds, int(said.get("nr_throttled", 0)), int(said.get("nr_periods", 0))
    return 0.0, 0, 0
