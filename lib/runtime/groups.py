"""Process groups that only their members make, under names of ours.

The problem: torch names a new group by the number of groups that a process has, or has ever made. As soon as two
members made different groups before, each waits under a different name, forever.
The idea: the name follows from the ranks, the purpose, and a count of equal groups, which is the same on all members.
To make a group is a call like others: the call table compares it, and a hang report shows it.
"""

import time
from collections import Counter
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from lib.runtime.calls import Call, Record

timeout: timedelta | None = None  # of new groups; torch's own without one
_made: Counter[str] = Counter()  # groups of the same ranks and purpose


def process_group(ranks: tuple[int, ...], axis: str, purpose: str) -> dist.ProcessGroup:
    """A new process group of these global ranks, all of which call this, and no other rank.

    `axis` is its name in traces. Ranks that make groups for different purposes in different orders get an error.
    """
    me, n, channel = dist.get_rank(), len(ranks), new_group_of(ranks)
    what = f"{channel} for {purpose}"
    with Record(Call("new_group", None, axis, me, n, channel, ranks, what, ranks, what), time.perf_counter()).waiting:
        _made[what] += 1
        backend, store = c10d._world.pg_map[dist.group.WORLD]
        limit = timeout or c10d._get_default_timeout(dist.Backend(backend))
        more = backend, store, f"{what}, {_made[what]}"  # `dist.new_group` is this with a name of its own
        pg, _ = c10d._new_process_group_helper(n, ranks.index(me), [*ranks], *more, timeout=limit, group_desc=axis)
        c10d._world.pg_group_ranks[pg] = {rank: i for i, rank in enumerate(ranks)}
    return pg


def new_group_of(ranks: tuple[int, ...]) -> str:
    """The call that makes a group, as the call table shows it."""
    return f"new_group(ranks {', '.join(map(str, ranks))})"
