"""A hang of ranks on several machines ends with a report instead of silence.

The problem: a rank is stopped, or makes a different call, and all further ranks wait. After half an hour gloo gives up
and names a socket. The call table that finds hangs under `run` is in the memory of one machine.
The idea: every two seconds a thread of each rank writes its row of the table into torchrun's store. The thread of a
rank that waits for a long time reads the rows of all ranks. It has the report of `run` then, with the machine of each
rank, and ends the run if

    a row is older than `silent_s`              the process is stopped, or its machine or network is gone
    all wait for calls that nobody made         they wait forever; seen twice in each row, `lost_s` apart
    all wait, and nothing moves for `still_s`   they wait forever, or the network stands still
    its wait is longer than the limit           a rank computes, or does something that is no call

One rank per machine prints the report, and all end, so torchrun may start them again.
"""

from __future__ import annotations

import atexit
import marshal
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from lib.runtime.hang import STARTING, WAITING, Row, View, all_wait, named_ranks, written_bytes
from lib.runtime.threads import may_send
from lib.torchrun.first_calls import ComparedTable
from lib.torchrun.meeting import START_S, Member, interfaces


class Unchanged:
    """How long a value has been the same."""

    def __init__(self) -> None:
        self._value, self._since_s = None, 0.0

    def seconds(self, value: object) -> float:
        """Seconds since it was first seen as it is now."""
        now = time.monotonic()
        if value != self._value:
            self._value, self._since_s = value, now
        return now - self._since_s


class Ending(NamedTuple):
    """Why a run must end: a sentence with the report, and the ranks that the others wait for."""

    text: str
    ranks: tuple[int, ...] = ()
    kind: str = "hang"  # or "connection"


class Watchdog:
    """A thread that writes the row of this rank into the store, and ends a run that hangs.

    `limit_s` is the longest wait in one call, `over` the network that gloo uses.
    """

    beat_s = 2.0  # between two rows
    lost_s = 6.0  # three rows of each rank: no time makes this surer
    silent_s = still_s = 30.0
    start_s = START_S

    def __init__(self, store: dist.Store, rank: int, members: Sequence[Member], limit_s: float, over: str) -> None:
        self.table, self.rank = ComparedTable(store, len(members), rank), rank
        self.table.state(STARTING)
        self.members, self.limit_s, self.over = members, limit_s, over
        self._store = store.clone()  # a connection of its own: a call of the rank may block its connection
        self._store.set_timeout(timedelta(seconds=self.silent_s))
        self._beats = 0
        self._latest = [Unchanged() for _ in members]  # beat of each rank
        self._moved = Unchanged()  # moves and bytes of all ranks
        self._moved_at: tuple[int, ...] = ()  # the beats of all ranks when they were last seen to move
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._write()
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join(2 * self.beat_s)

    def _run(self) -> None:
        while not self._end.wait(self.beat_s):
            try:
                self._write()
                if self._store.check(["over"]):
                    self._leave(Ending(*marshal.loads(self._store.get("over"))))
                row = self.table.row(self.rank)
                waits_s = row.for_s if row.state in (STARTING, WAITING) else 0.0
                if waits_s > min(self.lost_s, self.still_s, self.silent_s, self.limit_s, self.start_s) / 2:
                    if ending := self._judge():
                        self.end(ending)
            except dist.DistError as error:  # the store is on one of the machines
                if self.table.row(self.rank).state == WAITING and not self._end.is_set():
                    why = f"rank {self.rank} waits, and the machine of torchrun's store does not answer: {error}"
                    self._leave(Ending(why))

    def _write(self) -> None:
        self._beats += 1
        # A row shows one call; a second thread may wait in another, which ends.
        is_stuck = self.table.waiting_threads == 1 and not may_send()
        row = self.table.row(self.rank)._replace(calls=self.table.calls())  # on every channel
        said = self._beats, written_bytes(), is_stuck, *row
        self._store.set(f"row {self.rank}", marshal.dumps(said))

    def _judge(self) -> Ending | None:
        """Why the run must end; None if it need not."""
        said = self._store.multi_get([f"row {rank}" for rank in range(len(self.members))])
        beats, written, stuck, *columns = zip(*map(marshal.loads, said), strict=True)
        rows = dict(enumerate(map(Row, *columns)))
        mine, still_s = rows[self.rank], self._moved.seconds((written, [row.moves for row in rows.values()]))
        if still_s == 0:
            self._moved_at = beats
        view = View.of(rows, hosts={rank: member.host for rank, member in enumerate(self.members)})
        ages_s = [latest.seconds(beat) for latest, beat in zip(self._latest, beats, strict=True)]
        silent = {rank: for_s for rank, for_s in enumerate(ages_s) if for_s > self.silent_s}
        if silent:
            view.said = {rank: f"has said nothing for {for_s:.0f} s" for rank, for_s in silent.items()}
            gone = (
                f"gave no sign of life for {self.silent_s:.0f} s: its process is stopped, or its machine or network"
            )
            return Ending(f"hang: {named_ranks([*silent])} {gone} is gone.\n{view.report()}", tuple(silent))
        if mine.state == STARTING and mine.for_s > self.start_s:
            return self.cannot_connect(f"no connection for {self.start_s:.0f} s")
        # A rank that said the same before and after a moment was so at that moment: all rows are of one time.
        is_sure = (
            all(stuck) and view.is_lost and all(now > then for now, then in zip(beats, self._moved_at, strict=True))
        )
        least_s = min(self.lost_s, self.still_s) if is_sure else self.still_s
        if still_s > least_s and all_wait({row.state for row in rows.values()}):
            return Ending(view.explain(still_s), view.awaited)
        if mine.state == WAITING and mine.for_s > self.limit_s:
            whom = f"; the others wait for {named_ranks(view.awaited)}" if view.awaited else ""
            text = f"rank {self.rank} has waited for {mine.for_s:.0f} s, the limit{whom}.\n{view.report()}"
            return Ending(text, view.awaited)
        return None

    def cannot_connect(self, why: str) -> Ending:
        """The ending, if this rank cannot connect."""
        here = ", ".join(f"{name} ({address})" for name, address in interfaces().items())
        who = f"rank {self.rank} on {self.members[self.rank].host}"
        remedy = f"set GLOO_SOCKET_IFNAME to the interface of the network that all machines share, one of {here}"
        text = f"{who} cannot connect to the other ranks over {self.over}: {why}; {remedy}"
        return Ending(text, (self.rank,), "connection")

    def give_up(self, ending: Ending) -> Ending:
        """Pass the ending to all ranks, whose threads print it and exit; return it."""
        with suppress(dist.DistError):
            self._store.set("over", marshal.dumps(tuple(ending)))
        return ending

    def end(self, ending: Ending) -> None:
        """End all ranks."""
        self._leave(self.give_up(ending))

    def _leave(self, ending: Ending) -> None:
        """End this process, after a pause for the threads of the other ranks."""
        self.tell(ending)
        time.sleep(2 * self.beat_s)
        os._exit(1)

    def tell(self, ending: Ending) -> None:
        """Print why the run ends, on the first rank of a machine."""
        if self.first(f"told on {self.members[self.rank].machine}"):
            print(f"\n{ending.text}", file=sys.stderr, flush=True)

    def first(self, what: str) -> bool:
        """Whether no rank asked this before; also if the store does not answer."""
        with suppress(dist.DistError):
            return self._store.add(what, 1) == 1
        return True
