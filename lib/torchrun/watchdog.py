"""A hang of ranks on several machines ends with a report instead of silence.

The problem: a rank is stopped, or makes a different call, and all further ranks wait. After half an hour gloo gives up
and names a socket. The call table that finds hangs under `run` is in the memory of one machine.
The idea: every two seconds a thread of each rank writes a row into torchrun's store: the call in which the rank waits,
and its number of calls on each channel. The thread of a rank that waits for a long time reads the rows of all ranks. It
has the report of `run` then, with the machine of each rank, and ends the run if

    a row is older than SILENT_S              the process is stopped, or its machine or network is gone
    all wait, and nothing moves for STILL_S   they wait forever
    its wait is longer than the limit         a rank computes, or does something that is no call

One rank per machine prints the report, and all end, so torchrun may start them again.
"""

from __future__ import annotations

import atexit
import marshal
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from lib.runtime.call_table import Waiting
from lib.runtime.hang import FINISHED, STARTING, WAITING, AwaitedCall, View, key_of, named_ranks, written_bytes
from lib.torchrun.meeting import START_S, Member, interfaces

BEAT_S = 2.0
SILENT_S = 30.0
STILL_S = 30.0


class Row:
    """The state and the calls of one rank; for `calls.Record` a call table without comparison."""

    def __init__(self) -> None:
        self.now, self.body, self.moves, self.since_s = STARTING, b"", 0, time.monotonic()
        self.calls: Counter[int] = Counter()  # key of a channel -> calls so far
        self._waits: list[Waiting] = []

    def state(self, state: int, body: bytes = b"") -> None:
        self.now, self.body, self.since_s = state, body, time.monotonic()
        self.moves += 1

    def call(self, channel: str, members: Sequence[int], what: str, where: str, due_s: float = 0.0) -> int:
        """Count a call; return its number."""
        key = key_of(channel)
        self.calls[key] += 1
        return self.calls[key] - 1

    def due_s(self, channel: str, number: int, members: Sequence[int]) -> float:
        return 0.0

    def waiting(self, *call: object) -> Waiting:
        """As `CallTable.waiting`."""
        return Waiting(self, call)

    def packed(self) -> bytes:
        """The row as bytes."""
        for_s = time.monotonic() - self.since_s
        return marshal.dumps((self.now, self.moves, written_bytes(), self.body, for_s, dict(self.calls)))


class Watchdog:
    """A thread that writes the row of this rank, and ends a run that hangs.

    Args:
        store: the store of this run; the thread has a separate connection, because a call of the rank may block its.
        members: the roster, in rank order.
        limit_s: the longest wait in one call.
        over: the network that gloo uses.
    """

    def __init__(self, store: dist.Store, rank: int, members: Sequence[Member], limit_s: float, over: str) -> None:
        self.row, self.rank, self.members, self.limit_s, self.over = Row(), rank, members, limit_s, over
        self._store = store.clone()
        self._store.set_timeout(timedelta(seconds=SILENT_S))
        self._beats = 0
        self._seen: dict[int, tuple[object, float]] = {}  # rank -> its latest beat, and the time of it
        self._moved: tuple[object, float] = (None, 0.0)  # moves and bytes of all ranks, and the time of them
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._write()
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join(2 * BEAT_S)

    def _run(self) -> None:
        while not self._end.wait(BEAT_S):
            try:
                self._write()
                if self._store.check(["over"]):
                    self._leave(self._store.get("over").decode())
                waits = self.row.now in (STARTING, WAITING) and time.monotonic() - self.row.since_s
                if waits > min(STILL_S, SILENT_S, self.limit_s, START_S) / 2 and (text := self._judge(waits)):
                    self.give_up(text)
                    self._leave(text)
            except dist.DistError as error:  # the store is on one of the machines
                if self.row.now == WAITING and not self._end.is_set():
                    self._leave(
                        f"rank {self.rank} waits, and the machine of torchrun's store does not answer: {error}"
                    )

    def _write(self) -> None:
        self._beats += 1
        self._store.set(f"row {self.rank}", marshal.dumps((self._beats, self.row.packed())))

    def _judge(self, waits_s: float) -> str:
        """Why the run must end, with the report; "" if it need not."""
        now, rows = time.monotonic(), {}
        for rank, said in enumerate(self._store.multi_get([f"row {rank}" for rank in range(len(self.members))])):
            beats, row = marshal.loads(said)
            if self._seen.get(rank, (None, 0))[0] != beats:
                self._seen[rank] = beats, now
            rows[rank] = marshal.loads(row)
        moves = [(moves, sent) for _, moves, sent, *_ in rows.values()]
        if self._moved[0] != moves:
            self._moved = moves, now
        view = self._view(rows)
        silent = {rank: now - since for rank, (_, since) in self._seen.items() if now - since > SILENT_S}
        if silent:
            view.said = {rank: f"has said nothing for {for_s:.0f} s" for rank, for_s in silent.items()}
            who = named_ranks(sorted(silent))
            gone = "its process is stopped, or its machine or network is gone"
            return f"hang: {who} gave no sign of life for {SILENT_S:.0f} s: {gone}.\n{view.report()}"
        if self.row.now == STARTING and waits_s > START_S:
            return self.cannot_connect(f"no connection for {START_S:.0f} s")
        states, still_s = {row[0] for row in rows.values()}, now - self._moved[1]
        if states <= {WAITING, FINISHED} and still_s > STILL_S:
            return view.explain(still_s)
        if self.row.now == WAITING and waits_s > self.limit_s:
            return f"rank {self.rank} has waited for {waits_s:.0f} s, the limit.\n{view.report()}"
        return ""

    def _view(self, rows: dict[int, tuple]) -> View:
        states, waits = {rank: row[0] for rank, row in rows.items()}, {}
        for rank, (state, _, _, body, for_s, _) in rows.items():
            if state == WAITING:
                call = marshal.loads(body) if body else None
                waits[rank] = AwaitedCall.of(rank, call, lambda peer, key: rows[peer][-1].get(key, 0), for_s)
        return View(states, waits, hosts={rank: one.host for rank, one in enumerate(self.members)})

    def cannot_connect(self, why: str) -> str:
        """The sentence for this rank, if it cannot connect."""
        here = ", ".join(f"{name} ({address})" for name, address in interfaces().items())
        return (
            f"rank {self.rank} on {self.members[self.rank].host} cannot connect to the other ranks over {self.over}: "
            f"{why}; set GLOO_SOCKET_IFNAME to the interface of the network that all machines share, one of {here}"
        )

    def give_up(self, text: str) -> str:
        """Pass the reason to all ranks, whose threads print it and exit; return it."""
        with suppress(dist.DistError):
            self._store.set("over", text)
        return text

    def _leave(self, text: str) -> None:
        """End this process; the first rank of a machine prints why. The pause is for the threads of the other ranks."""
        first = True
        with suppress(dist.DistError):
            first = self._store.add(f"told on {self.members[self.rank].machine}", 1) == 1
        if first:
            print(f"\n{text}", file=sys.stderr, flush=True)
        time.sleep(2 * BEAT_S)
        os._exit(1)
