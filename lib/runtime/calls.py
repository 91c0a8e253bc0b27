"""One record of a call of communication, for all who follow it.

The problem: four parties want to know what a rank sends. The call table compares it with the other ranks' calls, the
report of a hang says it, a trace counts it, and a grader judges it. If each has its own idea of a call, one of them
overlooks what another one sees.
The idea: `Call` says what is known before a call is made, whoever makes it: `lib.comm`, or a reader's own line that
calls `torch.distributed` (`spy.py`). `Record` is the call under way. Nothing here knows torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

from lib import cost, trace
from lib.runtime import call_table, places

table: call_table.CallTable | None = None  # shared by the ranks of one machine; set by worker, absent under torchrun


class Call(NamedTuple):
    """What is known of a call before it is made.

    Args:
        kind: as `trace.CommEvent` has it; or `new_group`, which is compared and moves nothing.
        payload_bytes: of the whole array that it speaks about; None if of none (a barrier).
        axis, rank, size: of the group: its mesh axis, this rank's global number, how many ranks it has.
        channel, members, what: where it is entered in the call table, who must make the same, and what they compare;
            channel is empty if nothing can be compared.
        peers, shown: whom this rank then waits for, and how a report of a hang says it.
    """

    kind: str
    payload_bytes: int | None
    axis: str
    rank: int
    size: int
    channel: str
    members: tuple[int, ...]
    what: str
    peers: tuple[int, ...]
    shown: str

    @property
    def wire_bytes(self) -> float:
        """Bytes that this rank sends, if a collective is an ideal ring."""
        return cost.wire_bytes(self.kind, self.payload_bytes or 0, self.size)


class Listener(NamedTuple):
    """Who wants to be told of each call that moves something: when it starts, and when this rank waits for it."""

    starts: Callable[[Call], None]
    waits: Callable[[Call], None]


listeners: list[Listener] = []
_label = ""


class label:  # noqa: N801 it is used as a function; a generator would take three times as long
    """Name the communication that the body starts, for traces and figures: `with label("gradients"): ...`."""

    __slots__ = ("_text", "_before")

    def __init__(self, text: str) -> None:
        self._text = text

    def __enter__(self) -> None:
        global _label
        self._before, _label = _label, self._text

    def __exit__(self, *error: object) -> None:
        global _label
        _label = self._before


class Record:
    """A call from here on: compared with the other ranks', told to those who listen, counted when it is `done`.

    Args:
        due_s: when this rank's emulated link would be through with it (`lib.runtime.link`).

    Attributes:
        waiting: a context: in it, this rank waits for it.
        works: what was launched, while it is under way.
        ended_s: when it was through; 0 before it is `done`.

    Raises:
        MismatchError: another rank has made another call.
    """

    __slots__ = ("call", "number", "waiting", "works", "ended_s", "_label", "_start_s", "_seen_s")

    def __init__(self, call: Call, start_s: float, due_s: float = 0.0) -> None:
        self.call, self.number, self.waiting = call, 0, nullcontext()
        self._label, self._start_s, self._seen_s = _label, start_s, 0.0
        self.works, self.ended_s = (), 0.0
        if call.payload_bytes is not None:
            for listener in listeners:
                listener.starts(call)
        if table is not None:
            line = places.where()
            if call.channel:
                self.number = table.call(call.channel, call.members, call.what, line, due_s)
            self.waiting = table.waiting(call.shown, line, call.peers, call.channel, self.number)

    def launched(self, works: tuple) -> None:
        """It is under way, as these works."""
        self.works = works
        if trace.recording():
            self.follow()
            if self.call.kind == "send":
                trace.begin(self, self._event(self._start_s))

    def follow(self) -> None:
        """Note when the works end, if they can tell: gloo has no future for a message."""
        if self.call.kind not in ("send", "recv"):
            for work in self.works:
                work.get_future().add_done_callback(self._saw_end)

    def _saw_end(self, _: object) -> None:
        self._seen_s = time.perf_counter()

    def waits(self) -> None:
        """This rank begins to wait for it."""
        if self.call.payload_bytes is not None:
            for listener in listeners:
                listener.waits(self.call)

    def done(self, late_s: float = 0.0) -> None:
        """It is through, at `late_s` on an emulated link."""
        self.ended_s = max(self._seen_s or time.perf_counter(), late_s)
        if trace.recording() and self.call.kind != "new_group":
            trace.add(self._event(self.ended_s), self)

    def _event(self, end_s: float) -> trace.CommEvent:
        call = self.call
        sizes = call.payload_bytes or 0, call.wire_bytes
        who = call.rank, call.kind, call.axis, call.peers
        return trace.CommEvent(*who, *sizes, self._label, self._start_s, end_s)
