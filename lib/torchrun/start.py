"""The start and the end of a rank under torchrun: ranks meet, choose a network, connect, and are watched.

By its variables torchrun tells a process which rank it is; clusters and containers may set some of them. torch is
imported when a rank starts, not with this file: the server of `lib.launch` starts before torch is there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from lib.runtime import own_rank
from lib.runtime.errors import StartError

if TYPE_CHECKING:
    import torch.distributed as dist

    from lib.mesh import Group
    from lib.torchrun.watchdog import Watchdog

NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")
_watchdogs: list[Watchdog] = []  # of this process: one, because torch has one default group


def init(
    device: str | None = None,
    *,
    timeout_s: float = 600,
    settings: Mapping[str, object] | None = None,
    problem: str = "",
) -> Group:
    """The group of all ranks under `torchrun` (NCCL with CUDA devices, else gloo), or a group of one without it.

    A thread watches the ranks of all machines: if they hang, they print a report like that of `run`, and exit.

    Args:
        device: `"cpu"` to use gloo even if there are CUDA devices.
        timeout_s: the longest wait for a rank that computes.
        settings: what must be equal on all ranks; numbers and texts by name.
        problem: why this rank cannot start; then no rank starts.

    Raises:
        StartError: this is a rank of `run`; torchrun's variables are incomplete, there are fewer CUDA devices than
            ranks, a rank did not come or cannot connect, or the machines differ in settings, library or torch; on every
            rank.
    """
    from lib import mesh
    from lib.torchrun.meeting import choose_interface, meet
    from lib.torchrun.watchdog import Watchdog

    if own_rank.is_here:
        raise StartError(
            "run() has started and connected this rank: use the `world` that it gives to your function; init() is for "
            "a process that torchrun started"
        )
    rank, size = of_torchrun()
    if not size:
        return mesh.Group()
    backend = choose_backend(device)
    store, members = meet(rank, size, {**(settings or {}), "backend": backend}, problem)
    watchdog = Watchdog(store, rank, members, timeout_s, choose_interface(rank, members))
    return connect(backend, store, watchdog)


def choose_backend(device: str | None = None) -> str:
    """NCCL if there are CUDA devices, of which this rank takes one; else, or with `device="cpu"`, gloo."""
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return "gloo"
    torch.cuda.set_device(_gpu_of_rank(torch.cuda.device_count()))
    return "nccl"


def connect(backend: str, store: dist.Store, watchdog: Watchdog) -> Group:
    """Make the group of all ranks, whose calls the watchdog sees from now on.

    Raises:
        StartError: this rank cannot connect.
    """
    import torch.distributed as dist

    from lib import mesh
    from lib.runtime import calls, record_torch_calls
    from lib.runtime.hang import RUNNING

    rank, size = watchdog.rank, len(watchdog.members)
    mesh.timeout = timedelta(seconds=watchdog.limit_s + 60)  # the report comes first
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=mesh.timeout)
    except RuntimeError as error:
        watchdog.stop()
        text, ranks, _ = watchdog.give_up(watchdog.cannot_connect(str(error).splitlines()[0]))
        raise StartError(text, ranks) from None
    if calls.table is None:
        record_torch_calls.watch_calls()
    calls.table = watchdog.table
    calls.table.state(RUNNING)
    _watchdogs.append(watchdog)
    return mesh.Group("world", tuple(range(size)), rank)


def close(world: Group, report: object) -> list:
    """End a run under `torchrun`: all-gather the reports in rank order, then destroy the groups."""
    import torch.distributed as dist

    reports = [report] * world.size
    if dist.is_initialized():
        dist.all_gather_object(reports, report)
        while _watchdogs:
            _watchdogs.pop().stop()
        dist.destroy_process_group()
    return reports


# ---- torchrun's variables -------------------------------------------------------------------------------------------


def of_torchrun() -> tuple[int, int]:
    """Number of this rank, and of all ranks; 0 and 0 without torchrun, also for a single rank without an address, and
    for a program that a rank of `run` started.

    Raises:
        StartError: a variable is missing or invalid.
    """
    if own_rank.says_so():
        return 0, 0
    given = _given()
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ.get("SLURM_NTASKS") or "1"
    if "SLURM_PROCID" in os.environ and tasks != "1" and not given.keys() & {"RANK", "WORLD_SIZE"}:
        raise StartError(
            f"srun started {tasks} tasks, and each would train alone: let srun start one torchrun per node (srun "
            "--ntasks-per-node 1 torchrun ...), or unset SLURM_PROCID to train in this process alone"
        )
    alone = given.get("WORLD_SIZE") == "1" and given.get("RANK", "0") == "0"
    if alone and not given.keys() >= {"MASTER_ADDR", "MASTER_PORT"} or not given.keys() & {"RANK", "WORLD_SIZE"}:
        return 0, 0
    rank, size, _ = (_whole(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if "MASTER_ADDR" not in given or rank >= size:
        raise _error(f"RANK={rank} must be below WORLD_SIZE={size}" if rank >= size else "MASTER_ADDR is not set")
    return rank, size


def machines() -> int:
    """How many machines torchrun started ranks on; 1 without torchrun."""
    return int(os.environ.get("GROUP_WORLD_SIZE") or 1)


def speaks(rank: int) -> bool:
    """Whether this rank prints errors that all ranks have: the first on its machine."""
    return (os.environ.get("LOCAL_RANK") or str(rank)) == "0"


def _gpu_of_rank(visible: int) -> int:
    """The number of this rank's GPU; a StartError if it is not among the visible ones."""
    local, ranks = _whole("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE") or "too many"
    if local >= visible:
        limit = f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}"
        raise StartError(
            f"LOCAL_RANK={local} has no GPU: {ranks} ranks on this machine, but {visible} visible ({limit}); start "
            f'torchrun with --nproc-per-node {visible}, or use the CPU: init(device="cpu"), or CUDA_VISIBLE_DEVICES=""'
        )
    return local


def _given() -> dict[str, str]:
    return {name: value for name in NAMES if (value := os.environ.get(name, "").strip())}


def _whole(name: str) -> int:
    value = _given().get(name, "")
    if not value.isdecimal():
        raise _error(f"{name}={value!r} is not a whole number" if value else f"{name} is not set")
    return int(value)


def _error(problem: str) -> StartError:
    said = ", ".join(f"{name}={value}" for name, value in _given().items())
    way_out = f"start with torchrun, which sets {', '.join(NAMES)}, or unset them to run without it"
    return StartError(f"{problem} (the environment has {said}); {way_out}")
