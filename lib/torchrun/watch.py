"""Ranks on several machines watch each other, so that a hang ends with a report instead of silence.

The problem: a rank that is stopped, or that makes a different call, leaves all others waiting. gloo gives up after half
an hour, and then names a socket. The call table that finds hangs under `run` is in the memory of one machine.
The idea: every two seconds a thread of each rank writes into torchrun's store what its rank does: the call it waits in,
and how many calls it has made on each channel. If its own rank has waited long, it reads the words of all, and makes of
them the same report as `run`, with the name of each machine. It ends the run if

    a rank has said nothing for SILENT_S       its process is stopped, or its machine or network is gone
    all wait, and nothing moves for STILL_S    they wait forever
    its own wait is longer than the limit      a rank computes, or does something that is no call

One rank per machine prints the report, and all end, so torchrun may start them again.
"""

from __future__ import annotations

import atexit
import marshal
import os
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from lib.runtime.call_table import Waiting
from lib.runtime.waits import FINISHED, STARTING, WAITING, AwaitedCall, View, ranks_text
from lib.torchrun.meeting import START_S, Member, interfaces

BEAT_S = 2.0
SILENT_S = 30.0
STILL_S = 30.0


class Row:
    """What one rank does; it takes the place of a `CallTable` where no memory is shared."""

    def __init__(self) -> None:
        self.now, self.body, self.moves, self.since_s = STARTING, b"", 0, time.monotonic()
        self.calls: Counter[int] = Counter()  # key of a channel -> calls so far
        self._waits: list[Waiting] = []

    def state(self, state: int, body: bytes = b"") -> None:
        self.now, self.body, self.since_s = state, body, time.monotonic()
        self.moves += 1

    def call(self, channel: str, members: Sequence[int], what: str, where: str, due_s: float = 0.0) -> int:
        """Count a call, which nobody here can compare; return its number."""
        key = zlib.crc32(channel.encode())
        self.calls[key] += 1
        return self.calls[key] - 1

    def due_s(self, channel: str, number: int, members: Sequence[int]) -> float:
        return 0.0

    def waiting(self, *call: object) -> Waiting:
        """As `CallTable.waiting`."""
        return Waiting(self, call)

    def packed(self) -> bytes:
        """All of it, for the store."""
        for_s = time.monotonic() - self.since_s
        return marshal.dumps((self.now, self.moves, _sent_bytes(), self.body, for_s, dict(self.calls)))


class Watch:
    """The thread of a rank that tells what its rank does, and ends a run that hangs.

    Args:
        store: shared by the ranks of this run; the thread takes a connection of its own, which nobody else blocks.
        members: who the ranks are.
        limit_s: how long this rank may wait in one call.
        over: the network that gloo uses.
    """

    def __init__(self, store: dist.Store, rank: int, members: Sequence[Member], limit_s: float, over: str) -> None:
        self.row, self.rank, self.members, self.limit_s, self.over = Row(), rank, members, limit_s, over
        self._store = store.clone()
        self._store.set_timeout(timedelta(seconds=SILENT_S))
        self._beats = 0
        self._seen: dict[int, tuple[object, float]] = {}  # rank -> what it said last, and since when
        self._moved: tuple[object, float] = (None, 0.0)  # what all said that shows progress, and since when
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._tell()
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the thread; of what this rank does then, nothing is told."""
        self._end.set()
        self._thread.join(2 * BEAT_S)

    def _run(self) -> None:
        while not self._end.wait(BEAT_S):
            try:
                self._tell()
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

    def _tell(self) -> None:
        self._beats += 1
        self._store.set(f"row {self.rank}", marshal.dumps((self._beats, self.row.packed())))

    def _judge(self, waits_s: float) -> str:
        """Why this run is over, with the report; "" if it is not."""
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
            who = ranks_text(sorted(silent))
            gone = "its process is stopped, or its machine or network is gone"
            return f"hang: {who} gave no sign of life for {SILENT_S:.0f} s: {gone}.\n{view.report()}"
        if self.row.now == STARTING and waits_s > START_S:
            return self.cannot_connect(f"{START_S:.0f} s have passed")
        states, still_s = {row[0] for row in rows.values()}, now - self._moved[1]
        if states <= {WAITING, FINISHED} and still_s > STILL_S:
            return f"{view.summary()}. Nothing has moved for {still_s:.0f} s.\n{view.report()}\n{view.cause()}"
        if self.row.now == WAITING and waits_s > self.limit_s:
            return f"rank {self.rank} has waited for {waits_s:.0f} s, the limit.\n{view.report()}"
        return ""

    def _view(self, rows: dict[int, tuple]) -> View:
        states, waits = {rank: row[0] for rank, row in rows.items()}, {}
        for rank, (state, _, _, body, for_s, _) in rows.items():
            if state == WAITING:
                what, where, peers, channel, number = marshal.loads(body) if body else ("", "", (), "", 0)
                key = zlib.crc32(channel.encode())
                late = tuple(p for p in peers if p != rank and rows[p][-1].get(key, 0) <= number)
                waits[rank] = AwaitedCall(what, where, peers, late, for_s)
        return View(states, waits, hosts={rank: one.host for rank, one in enumerate(self.members)})

    def cannot_connect(self, why: str) -> str:
        """The sentence for a rank that cannot connect to others."""
        here = ", ".join(f"{name} ({address})" for name, address in interfaces().items())
        return (
            f"rank {self.rank} on {self.members[self.rank].host} cannot connect to the other ranks over {self.over}: "
            f"{why}; set GLOO_SOCKET_IFNAME to the interface of the network that all machines share, one of {here}"
        )

    def give_up(self, text: str) -> str:
        """Tell all ranks why the run is over; they print it, and exit."""
        with suppress(dist.DistError):
            self._store.set("over", text)
        return text

    def _leave(self, text: str) -> None:
        """End this rank; the first of its machine prints why. The others have time to see that the run is over."""
        first = True
        with suppress(dist.DistError):
            first = self._store.add(f"told on {self.members[self.rank].machine}", 1) == 1
        if first:
            print(f"\n{text}", file=sys.stderr, flush=True)
        time.sleep(2 * BEAT_S)
        os._exit(1)


def _sent_bytes() -> int:
    """Bytes that this process wrote, where the system counts them."""
    with suppress(OSError), open("/proc/self/io") as file:
        return int(file.read().split("wchar: ")[1].split()[0])
    return 0
