"""How many rows each rank of a group sends to each rank: the table of an all-to-all of unequal parts.

The problem: where ranks send unequal numbers of rows, no rank can see in its own tensor what it should get, and gloo
aborts the process of a rank that gets more or less.
The idea: all ranks have the whole table, so each checks its part before a byte moves, and the call table compares the
rest: it is the same text on all ranks. Nothing here knows torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from operator import index
from typing import NamedTuple

from lib.runtime.call_table import TEXT_BYTES


class RowTable(NamedTuple):
    """`rows[i][j]` rows go from group rank i to group rank j, and `rank` is this one."""

    rows: tuple[tuple[int, ...], ...]
    rank: int

    @classmethod
    def checked(cls, rows: Sequence[Sequence[int]], n: int, rank: int, has: int) -> RowTable:
        """The table of a group of n ranks, of which this one `has` so many rows to send.

        Raises:
            ValueError: `rows` is not n lines of n whole numbers from 0 on, or this rank's line has a different sum.
        """
        table = cls(checked_rows(rows, n), rank)
        if has != sum(table.going):
            parts = " + ".join(map(str, table.going))
            raise ValueError(
                f"x has {has} rows on rank {rank} of the group, but rows[{rank}], its line of the table, "
                f"is {parts} = {sum(table.going)}"
            )
        return table

    @property
    def going(self) -> tuple[int, ...]:
        """Rows of this rank for each rank."""
        return self.rows[self.rank]

    @property
    def coming(self) -> tuple[int, ...]:
        """Rows for this rank from each rank."""
        return tuple(line[self.rank] for line in self.rows)

    @property
    def sent(self) -> int:
        """Rows that leave this rank."""
        return sum(self.going) - self.going[self.rank]

    @property
    def received(self) -> int:
        """Rows that come from the ranks beside this one."""
        return sum(self.coming) - self.going[self.rank]

    @property
    def moved(self) -> int:
        """Rows between different ranks, of the whole group."""
        return sum(map(sum, self.rows)) - sum(line[i] for i, line in enumerate(self.rows))

    def compared(self, kind: str, row: str) -> str:
        """The call as all ranks compare it: with the whole table, or its digest where the call table has no place."""
        text = f"{kind} {[list(line) for line in self.rows]} rows of {row}"
        if len(text.encode()) <= TEXT_BYTES:
            return text
        n, digest = len(self.rows), hashlib.sha256(text.encode()).hexdigest()[:16]
        total = sum(map(sum, self.rows))
        return f"{kind} {total} rows by a table of {n}×{n} with digest {digest}, rows of {row}"

    def shown(self, kind: str, row: str) -> str:
        """The call in a hang report: this rank's part of it."""
        return f"{kind}, {self.sent} rows to the others and {self.received} from them, each {row}"


def checked_rows(rows: Sequence[Sequence[int]], n: int) -> tuple[tuple[int, ...], ...]:
    """A copy of the table. Raises ValueError if it is not n lines of n whole numbers from 0 on."""
    must = f"rows must be {n} lines of {n} whole numbers from 0 on, one for each pair of ranks, but"
    return tuple(_numbers(line, f"{must} rows[{i}]", n) for i, line in enumerate(_listed(rows, f"{must} rows", n)))


def _listed(given: Sequence, begin: str, n: int) -> Sequence:
    try:
        items = tuple(given)
    except TypeError:
        raise ValueError(f"{begin} is {given!r}") from None
    if len(items) != n:
        raise ValueError(f"{begin} has {len(items)}")
    return items


def _numbers(line: Sequence[int], begin: str, n: int) -> tuple[int, ...]:
    numbers = []
    for j, given in enumerate(_listed(line, begin, n)):
        try:
            number = index(given)
        except TypeError:
            number = -1
        if number < 0:
            raise ValueError(f"{begin}[{j}] is {given!r}")
        numbers.append(number)
    return tuple(numbers)
