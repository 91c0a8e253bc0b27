"""The start and the end of a rank under torchrun: ranks meet, choose a network, connect, and are watched.

torch is imported when a rank starts, not with this file: the server of `lib.launch` starts before torch is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from lib.torchrun.environment import StartError, gpu_of_rank, of_torchrun

if TYPE_CHECKING:
    from lib.mesh import Group
    from lib.torchrun.watchdog import Watchdog

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
        StartError: torchrun's variables are incomplete, there are fewer CUDA devices than ranks, a rank did not come or
            cannot connect, or the machines differ in settings, library or torch; on every rank.
    """
    import torch
    import torch.distributed as dist

    from lib.mesh import Group
    from lib.runtime import calls, groups, spy
    from lib.runtime.hang import RUNNING
    from lib.torchrun.meeting import choose_interface, meet
    from lib.torchrun.watchdog import Watchdog

    rank, size = of_torchrun()
    if not size:
        return Group()
    cuda = device != "cpu" and torch.cuda.is_available()
    backend = "nccl" if cuda else "gloo"
    if cuda:
        torch.cuda.set_device(gpu_of_rank(torch.cuda.device_count()))
    store, members = meet(rank, size, {**(settings or {}), "backend": backend}, problem)
    watchdog = Watchdog(store, rank, members, timeout_s, choose_interface(rank, members))
    groups.timeout = timedelta(seconds=timeout_s + 60)  # the report comes first
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=groups.timeout)
    except RuntimeError as error:
        watchdog.stop()
        raise StartError(watchdog.give_up(watchdog.cannot_connect(str(error).splitlines()[0]))) from None
    if calls.table is None:
        spy.watch()
    calls.table = watchdog.row
    watchdog.row.state(RUNNING)
    _watchdogs.append(watchdog)
    return Group("world", tuple(range(size)), rank)


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
