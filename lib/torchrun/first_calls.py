"""A call table that compares the calls of ranks on different machines, through torchrun's store.

The problem: ranks of several machines share no memory, so the table of `lib.runtime` cannot compare their calls, and
gloo adds an int32 to a float32 without an error.
The idea: of the first calls of each group, the rank that comes first writes its call into the store, and the others
read it before a byte moves. A program that differs between machines differs from its first step on; later calls are
not compared, because each costs a message to the store.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch.distributed as dist

from lib.runtime.call_table import CallTable, mismatch

COMPARED = 5  # calls of each group, and of each direction of a pair


class ComparedTable(CallTable):
    """The call table of one rank."""

    def __init__(self, store: dist.Store, size: int, rank: int) -> None:
        super().__init__(None, size, rank)
        self._store = store

    def call(self, channel: str, members: Sequence[int], what: str, where: str, due_s: float = 0.0) -> int:
        """As `CallTable.call`."""
        number = super().call(channel, members, what, where, due_s)
        if number < COMPARED:
            mine = json.dumps([self.rank, what, where])
            first, its, there = json.loads(self._store.compare_set(f"{channel} call {number}", "", mine))
            if its != what:
                raise mismatch(number, {first: (its, there), self.rank: (what, where)})
        return number
