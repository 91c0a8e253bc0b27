"""Hangs: the decision that ranks wait forever, and the report: which rank waits in which call, and for whom.

The problem: a rank that waits briefly looks like a rank that waits forever. The idea: ranks hang when all wait,
the system counts no bytes written and no processor time for `STILL_S`, and no rank has a thread that could still send.
Where the system counts nothing (macOS), a transfer longer than `STILL_S` looks like a hang.

The report shows a `View` of all ranks at one time, made from a `Row` of each: of the memory that the ranks of one
machine share (`call_table.py`), or of the store that the ranks of several machines share (`lib.torchrun.watchdog`).
"""

from __future__ import annotations

import glob
import os
import re
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from lib.runtime.errors import RunError

STILL_S = 2.0  # if all ranks wait and nothing moves for this long, it is a hang

STARTING, RUNNING, WAITING, FINISHED, FAILED = range(5)
SAYS = {STARTING: "is starting", RUNNING: "computes", FINISHED: "has finished", FAILED: "has failed"}


class AwaitedCall(NamedTuple):
    """The call that a rank waits in."""

    what: str = ""  # as the report shows it; its first word is its kind
    where: str = ""  # the source line that made it
    peers: tuple[int, ...] = ()  # the ranks that must make their call
    late: tuple[int, ...] = ()  # the peers that have not
    for_s: float = 0.0  # seconds since the wait began

    @property
    def kind(self) -> str:
        """The kind of call, such as `send` or `all_reduce`."""
        return re.split(r"\W", self.what, maxsplit=1)[0]


class Row(NamedTuple):
    """What a rank writes of itself."""

    state: int  # one of the five above
    moves: int  # how often it wrote a state
    call: Sequence | None  # (what, where, peers, channel, number) of its wait; None if it cannot be read
    for_s: float  # seconds since it wrote its state
    calls: Mapping[int, int]  # how many it made on each channel, by `key_of`


@dataclass
class View:
    """All ranks at one time; each mapping is by rank."""

    states: Mapping[int, int]
    waits: Mapping[int, AwaitedCall]  # of each rank that waits
    caught: Mapping[int, str] = field(default_factory=dict)  # the text of a refused call, whose error code caught
    hosts: Mapping[int, str] = field(default_factory=dict)  # the name of its machine, if there are several
    said: Mapping[int, str] = field(default_factory=dict)  # the words for it instead of its state

    @classmethod
    def of(cls, rows: Mapping[int, Row], **more: Mapping) -> View:
        """The view that the rows of the ranks give."""
        waits = {}
        for rank, row in rows.items():
            if row.state == WAITING:
                what, where, peers, channel, number = row.call or ("", "", (), "", 0)
                key = key_of(channel)
                late = tuple(p for p in peers if p != rank and (p not in rows or rows[p].calls.get(key, 0) <= number))
                waits[rank] = AwaitedCall(what, where, peers, late, row.for_s)
        return cls({rank: row.state for rank, row in rows.items()}, waits, **more)

    @property
    def finished(self) -> tuple[int, ...]:
        """The ranks whose function returned."""
        return tuple(rank for rank, state in self.states.items() if state == FINISHED)

    @property
    def circle(self) -> tuple[int, ...]:
        return circle_of(self.waits)

    @property
    def awaited(self) -> tuple[int, ...]:
        """Whom the others wait for: ranks that do not wait; if all wait, the cycle, or those who did not call."""
        late = sorted({peer for wait in self.waits.values() for peer in wait.late})
        return tuple(rank for rank in late if rank not in self.waits) or self.circle or tuple(late)

    @property
    def is_lost(self) -> bool:
        """Whether each rank that waits needs a call that a rank has not made: then no message in flight helps it."""
        return all(wait.late for wait in self.waits.values())

    def summary(self) -> str:
        """One line: which ranks wait and which are done; it is a deadlock only if there is a cycle of waits."""
        circle = self.circle
        others = [rank for rank in sorted(self.waits) if rank not in circle]
        if circle:
            parts = [f"deadlock: {named_ranks(sorted(circle))} wait for each other"]
            if others:
                parts.append(_they(others, "also wait", "also waits"))
        else:
            parts = ["hang: " + _they(others, "wait", "waits")]
        if self.finished:
            parts.append(_they(self.finished, "have finished", "has finished"))
        return "; ".join(parts)

    def report(self) -> str:
        """One line per rank: the call it waits in, for how long, and where; then the cycle of waits, if any."""
        lines = []
        for rank, state in self.states.items():
            name = f"rank {rank} on {self.hosts[rank]}" if self.hosts else f"rank {rank}"
            if rank not in self.waits or rank in self.said:
                lines.append((name, self.said.get(rank) or SAYS.get(state, "computes"), ""))
                continue
            what, where, peers, late, for_s = self.waits[rank]
            text = f"waits in {what}" if what else "waits"
            if late and len(peers) > 1:
                text += f": {named_ranks(late)} did not call it"
            lines.append((name, text, f"for {for_s:.1f} s  {where}"))
        widths = [max(len(line[i]) for line in lines) for i in (0, 1)]
        out = [f"  {a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in lines]
        if circle := self.circle:
            pairs = zip(circle, circle[1:] + circle[:1], strict=True)
            out.append("  the cycle: " + ", ".join(f"{a} waits for {b}" for a, b in pairs))
        for rank, note in self.caught.items():
            note = note.replace("\n", "\n    ")
            out.append(f"  rank {rank} caught this error earlier and continued:\n    {note}")
        return "\n".join(out)

    def cause(self) -> str:
        """One sentence: why these ranks wait forever, and the remedy."""
        circle, waits = self.circle, self.waits
        if circle and all(waits[rank].kind == "send" for rank in circle):
            who = "Every rank" if len(circle) == len(waits) else "Every rank of the cycle"
            remedy = "one must receive first, or start both and then wait"
            return f"{who} sends first, and a send ends only when it is received: {remedy}."
        if nowhere := sorted({peer for wait in waits.values() for peer in wait.late} - self.states.keys()):
            return f"There is no rank {nowhere[0]}: the ranks are 0 to {len(self.states) - 1}."
        if any(wait.late and len(wait.peers) > 1 for wait in waits.values()):
            return "Every rank of a group must make the same collective calls, in the same order."
        needs = "Each send needs a receive on its peer, and the reverse"
        if any(", tag " in wait.what for wait in waits.values()):
            needs += ", with the same tag"
        return f"{needs}: find the call that is missing or comes too late."

    def explain(self, still_s: float) -> str:
        """The report of a hang: who waits, since when, in which calls, and the remedy."""
        return f"{self.summary()}. Nothing has moved for {still_s:.0f} s.\n{self.report()}\n{self.cause()}"


class HangError(RunError):
    """Ranks wait for calls that never come: for others in a cycle, or for a rank that finished.

    Attributes:
        waits: rank → the call it waits in.
        finished: ranks whose function returned.
        ranks: for whom the others wait.
        circle: the cycle of waits: each rank waits for the next, and the last for the first; () if there is no cycle.
    """

    def __init__(self, message: str, view: View | None = None) -> None:
        super().__init__(message)
        view = view or View({}, {})
        self.waits, self.finished, self.circle = dict(view.waits), view.finished, view.circle
        self.ranks = view.awaited


class Stillness:
    """Watches whether anything moves: calls, bytes, or the processor of these processes.

    `may_send` says whether a rank has a thread that could still send: while one lives, only a time limit ends a run.
    """

    def __init__(self, pids: Iterable[int], may_send: Callable[[], bool]) -> None:
        self.pids, self.may_send = list(pids), may_send
        self._since_s, self._heads, self._written, self._busy_s = 0.0, None, -1, None

    def look(self, heads: list[tuple[int, int]]) -> float:
        """Seconds since anything moved, once it is a hang; 0 before. `heads`: state and moves of each rank."""
        now = time.monotonic()
        if heads != self._heads or not all_wait({state for state, _ in heads}):
            self._heads, self._since_s, self._written = heads, now, -1
        elif (written := sum(map(written_bytes, self.pids))) != self._written:
            self._since_s, self._written, self._busy_s = now, written, None
        elif self._busy_s is None:
            self._busy_s = self._processor_s()
        elif (still_s := now - self._since_s) > STILL_S:
            # Between two bytes gloo may compute or copy for a long time.
            if self._processor_s() - self._busy_s < 0.1 * still_s and not self.may_send():
                return still_s
            self._written = -1
        return 0.0

    def since_before(self, time_s: float) -> bool:
        """Whether all ranks wait, and nothing moved since before this time."""
        return self._written >= 0 and self._since_s < time_s

    def _processor_s(self) -> float:
        """Processor seconds of the ranks, where the system counts them, without those in which gloo only polls."""
        ticks = 0
        for path in (path for pid in self.pids for path in glob.glob(f"/proc/{pid}/task/*/stat")):
            with suppress(OSError), open(path) as file:
                name, rest = file.read().rsplit(")", 1)
                if not name.endswith("(gloo_tcp_loop"):  # it polls while a message waits for its receiver
                    ticks += sum(map(int, rest.split()[11:13]))
        return ticks / os.sysconf("SC_CLK_TCK") if ticks else 0.0


def written_bytes(pid: int | str = "self") -> int:
    """Bytes that a process wrote, to files and sockets, where the system counts them."""
    with suppress(OSError), open(f"/proc/{pid}/io") as file:
        return int(file.read().split("wchar: ")[1].split()[0])
    return 0


def all_wait(states: set[int]) -> bool:
    """Whether every rank waits or has finished, and at least one waits."""
    return WAITING in states and states <= {WAITING, FINISHED}


def key_of(channel: str) -> int:
    """The number of a channel in tables; 0 is no channel."""
    return 1 + zlib.crc32(channel.encode())


def named_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0, 1 and 2`."""
    listed = ", ".join(map(str, ranks[:-1])) + " and " * (len(ranks) > 1) + str(ranks[-1])
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {listed}"


def _they(ranks: Sequence[int], plural: str, singular: str) -> str:
    return f"{named_ranks(ranks)} {plural if len(ranks) > 1 else singular}"


def circle_of(waits: Mapping[int, AwaitedCall]) -> tuple[int, ...]:
    """The first cycle of waits: each rank waits for the next, and the last for the first; () if there is none."""
    dead_ends: set[int] = set()

    def walk(path: list[int]) -> list[int]:
        for peer in waits.get(path[-1], AwaitedCall()).late:
            if peer in path:
                return path[path.index(peer) :]
            if peer not in dead_ends and (circle := walk([*path, peer])):
                return circle
        dead_ends.add(path[-1])
        return []

    return tuple(next(filter(None, (walk([rank]) for rank in waits)), []))
