"""Many runs, nothing grows: 40 in `make test`, 500 in `make soak`.

A notebook is open for hours. What each run leaves is small, so it is measured over many, as a slope after a warmup.
"""

import gc
import os
import signal
import sys
import tempfile
import threading
import time

import cloudpickle
import psutil
import pytest
import torch
from conftest import left_behind, open_files

from lib import comm
from lib.launch import RankError, RunTimeout, run
from lib.runtime.server import start_server

cloudpickle.register_pickle_by_value(sys.modules[__name__])

RUNS = int(os.environ.get("SOAK_RUNS", 40))
WARM = 10  # the first runs import, cache and grow pools
MOST_BYTES_PER_RUN = 10_000
SLACK_BYTES = 3_000_000  # what allocators take and give back from one moment to the next


def works(world, i):
    x = comm.all_reduce(torch.full((1000,), float(i)), world)
    print("run", i)
    return x[0].item(), torch.ones(50_000)


def raises(world, i):
    if world.rank == i % world.size:
        raise ValueError(f"run {i}")
    comm.barrier(world)


def dies(world, i):
    if world.rank == i % world.size:
        os.kill(os.getpid(), signal.SIGSEGV if i % 2 else signal.SIGKILL)
    comm.barrier(world)


def waits(world, i):
    time.sleep(60)


def one(i: int) -> None:
    """Mostly runs that work; among them some that fail in the ways of a notebook."""
    if i % 10 == 3:
        with pytest.raises(RankError, match=f"rank {i % 4} of 4 raised ValueError"):
            run(raises, 4, i)
    elif i % 10 == 6:
        with pytest.raises(RankError, match=f"rank {i % 4} of 4 was killed by SIG"):
            run(dies, 4, i)
    elif i % 50 == 9:
        with pytest.raises(RunTimeout):
            run(waits, 4, i, timeout_s=0.2)
    else:
        got = run(works, 4, i, trace=i % 2 == 0)
        assert [x for x, _ in got] == [4.0 * i] * 4


def counts() -> dict[str, object]:
    """What must be the same after each run, to the last one."""
    server = psutil.Process(start_server().pid)
    shared = sorted(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else []
    return {
        "left behind": sorted(left_behind()),
        "descriptors": len(open_files()),
        "threads": threading.active_count(),
        "threads of the system": psutil.Process().num_threads(),
        "shared memory": [name for name in shared if "torch" in name or "parallel" in name],
        "descriptors of the server": server.num_fds(),
        "threads of the server": server.num_threads(),
        "children of the server": len(server.children()),
        "folders": sorted(os.listdir(tempfile.gettempdir())),
    }


def weights_bytes() -> dict[str, int]:
    """Memory of this process, as a kernel would be, and of the server."""
    gc.collect()
    server = psutil.Process(start_server().pid)
    return {"here": psutil.Process().memory_info().rss, "server": server.memory_info().rss}


@pytest.mark.thorough("`make soak` does it for longer")
@pytest.mark.alone("it measures memory, and counts what is left on this machine")
@pytest.mark.slow("what leaks in a run is seen in many; as many as SOAK_RUNS says")
@pytest.mark.usefixtures("machine")
@pytest.mark.timeout(60 + 2 * RUNS)
def test_many_runs_leave_nothing(capsys, say):
    for i in range(WARM):
        one(i)
    before, began, first = counts(), time.monotonic(), weights_bytes()
    for i in range(WARM, WARM + RUNS):
        one(i)
        capsys.readouterr()  # pytest keeps what is printed
        until = time.monotonic() + 1  # the server closes what belongs to a rank a moment after it is gone
        while counts() != before and time.monotonic() < until:
            time.sleep(0.01)
        assert counts() == before, f"after run {i}"
    took_s, last = time.monotonic() - began, weights_bytes()
    growth = {name: last[name] - first[name] for name in first}
    memory = ", ".join(f"{name} {n / RUNS / 1e3:+.1f} kB a run" for name, n in growth.items())
    say(f"soak: {RUNS} runs of 4 ranks, {took_s / RUNS:.2f} s each; memory {memory}")
    for name, n in growth.items():
        assert n < SLACK_BYTES + MOST_BYTES_PER_RUN * RUNS, f"{name} grew by {n:,} bytes in {RUNS} runs"
