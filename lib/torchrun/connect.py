"""Connect the ranks that torchrun started: they meet, choose a network, make the group of all, and watch each other."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from lib.runtime import calls, groups, spy
from lib.runtime.waits import RUNNING
from lib.torchrun.environment import StartError
from lib.torchrun.meeting import choose_interface, meet
from lib.torchrun.watchdog import Watchdog

_watches: list[Watchdog] = []  # of this process; torch has one default group


def connect(
    rank: int, size: int, backend: str, timeout_s: float, settings: Mapping[str, object], problem: str
) -> None:
    """Make the default process group, on all ranks.

    Raises:
        StartError: a rank did not come, cannot connect, or differs from rank 0.
    """
    store, members = meet(rank, size, {**settings, "backend": backend}, problem)
    watch = Watchdog(store, rank, members, timeout_s, choose_interface(rank, members))
    groups.timeout = timedelta(seconds=timeout_s + 60)  # the report comes first
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=groups.timeout)
    except RuntimeError as error:
        watch.stop()
        raise StartError(watch.give_up(watch.cannot_connect(str(error).splitlines()[0]))) from None
    if calls.table is None:
        spy.watch()
    calls.table = watch.row
    watch.row.state(RUNNING)
    _watches.append(watch)


def disconnect() -> None:
    """Destroy all groups, on all ranks."""
    while _watches:
        _watches.pop().stop()
    dist.destroy_process_group()
