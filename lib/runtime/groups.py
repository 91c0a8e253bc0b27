"""Process groups that only their members make, under names of ours.

The problem: torch names a new group by the number of groups that this process has, or has ever made. As soon as two
members made different groups before, each waits for the other under a different name, forever.
The idea: the name follows from the ranks, the purpose, and a count of equal groups, which is the same on all members.
To make a group is a call like others: the call table compares it, and a hang report shows it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from lib.runtime.calls import Call, Record

_made: Counter[str] = Counter()  # groups of the same ranks and purpose


def process_group(ranks: Sequence[int], axis: str, purpose: str) -> dist.ProcessGroup:
    """A new process group of these global ranks, all of which call this, and no other rank.

    Args:
        axis: its name in traces.
        purpose: members that make two groups must make them in the same order; different purposes are compared.
    """
    me, shown = dist.get_rank(), f"{new_group_of(ranks)} for {purpose}"
    call = Call(
        "new_group", None, axis, me, len(ranks), new_group_of(ranks), tuple(ranks), shown, tuple(ranks), shown
    )
    with Record(call, time.perf_counter()).waiting:
        _made[shown] += 1
        backend, store = c10d._world.pg_map[dist.group.WORLD]
        name, limit = f"{shown}, {_made[shown]}", c10d._get_default_timeout(dist.Backend(backend))
        where = len(ranks), ranks.index(me), list(ranks)
        # `dist.new_group` is this function with a name of its own.
        group, _ = c10d._new_process_group_helper(*where, backend, store, name, timeout=limit, group_desc=axis)
        c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
    return group


def new_group_of(ranks: Sequence[int]) -> str:
    """The call that makes a group, as the call table shows it."""
    return f"new_group(ranks {', '.join(map(str, ranks))})"
