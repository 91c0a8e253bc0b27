"""One record of each communication call, shared by all code that observes it.

The problem: the call table compares the calls of a rank, a hang report prints them, a trace counts them, and a grader
judges them. With four definitions of a call, they would disagree.
The idea: `Call` holds the facts known before a call is made, by `lib.comm` or by a reader's own call of
`torch.distributed` (`record_torch_calls.py`). `Record` is the call in flight. Nothing here knows torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, NamedTuple

from lib import cost, trace
from lib.runtime import call_table, places

if TYPE_CHECKING:
    from lib.runtime.group import Group

table: call_table.CallTable | None = None  # shared by the ranks of one machine; set by worker, None under torchrun


class Call(NamedTuple):
    """The facts known about a call before it is made."""

    kind: str  # as in `trace.CommEvent`; or `new_group`, which is compared and moves nothing
    payload_bytes: int | None  # as in `trace.CommEvent`; None if there is no array (a barrier)
    axis: str  # of the mesh
    rank: int  # this one's global number
    size: int  # of the group
    channel: str  # where it is entered in the call table; empty if nothing can be compared
    members: tuple[int, ...]  # the ranks that must make the same call
    what: str  # the text that they compare
    peers: tuple[int, ...]  # the ranks that this one waits for
    shown: str  # the text in a hang report
    received_bytes: int = 0  # from other ranks, where they need not be as many as this one sends
    moves: bool = True  # whether any rank of the group sends a byte

    @classmethod
    def collective(cls, kind: str, what: str, payload_bytes: int | None, group: Group) -> Call:
        """A call that all ranks of the group make alike."""
        axis, me, n, ranks = group.axis, group.global_rank, group.size, group.ranks
        moves = payload_bytes != 0
        return cls(kind, payload_bytes, axis, me, n, group.channel, ranks, what, ranks, what, moves=moves)

    @classmethod
    def message(cls, kind: str, what: str, n_bytes: int, group: Group, peer: int | None, tag: int = 0) -> Call:
        """A send to a global rank, or a receive; from any rank (None), it has no order that could be compared."""
        me, sends, whom = group.global_rank, kind == "send", "any rank" if peer is None else peer
        channel, pair, peers = "", (me,), ()
        if peer is not None:
            pair, peers = (me, peer) if sends else (peer, me), (peer,)
            channel = f"{group.channel} {pair[0]}>{pair[1]}" + f" tag {tag}" * bool(tag)
        shown = f"{'send to' if sends else 'recv from'} {whom}, {what}" + f", tag {tag}" * bool(tag)
        facts = kind, n_bytes, group.axis, me, group.size, channel, pair, f"message {what}", peers, shown
        return cls(*facts, moves=n_bytes != 0)

    @property
    def wire_bytes(self) -> float:
        """Bytes that this rank sends, with an ideal ring for collectives."""
        return cost.wire_bytes(self.kind, self.payload_bytes or 0, self.size)


class Listener(NamedTuple):
    """Functions called for each call that moves data: when it starts, and when this rank waits for it."""

    starts: Callable[[Call], None]
    waits: Callable[[Call], None]


listeners: list[Listener] = []
_label = ""


class label:  # noqa: N801 used as a function; a generator would take three times as long
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
    """A call in flight: compared with the calls of other ranks, passed to listeners, counted when it is `done`.

    Inside the context `waiting` this rank waits for it; `works` are its Work objects while in flight; `ended_s` is 0
    before it is `done`; `due_s` is that of `CallTable.call`.

    Raises:
        MismatchError: a different rank made a different call.
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
        """Note the Work objects that are in flight."""
        self.works = works
        if trace.recording():
            self.follow()
            if self.call.kind == "send":
                trace.begin(self, self._event(self._start_s))

    def follow(self) -> None:
        """Note when the works end, if they have a future: messages in gloo do not, and on a GPU it is too early."""
        if self.call.kind not in ("send", "recv") and trace.clock is time.perf_counter:
            for work in self.works:
                with suppress(RuntimeError):  # nor do works of a backend's own methods
                    work.get_future().add_done_callback(self._saw_end)

    def _saw_end(self, _: object) -> None:
        self._seen_s = time.perf_counter()

    def waits(self) -> None:
        """Note that this rank begins to wait for it."""
        if self.call.payload_bytes is not None:
            for listener in listeners:
                listener.waits(self.call)

    def done(self, late_s: float = 0.0) -> None:
        """Count it as ended, at `late_s` on an emulated link."""
        self.ended_s = max(self._seen_s or trace.clock(), late_s)
        if trace.recording() and self.call.kind != "new_group":
            trace.add(self._event(self.ended_s), self)

    def _event(self, end_s: float) -> trace.CommEvent:
        call = self.call
        sizes = call.payload_bytes or 0, call.wire_bytes
        who = call.rank, call.kind, call.axis, call.peers
        return trace.CommEvent(*who, *sizes, self._label, self._start_s, end_s)
