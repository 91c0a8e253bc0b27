"""One transfer: compared, started, awaited, late if a link is emulated, and counted.

The problem: every communication of the library needs the same five things around it, and none of them is about what it
communicates.
The idea: `collective` and `message` take what differs (what to launch, whom it waits for, how to finish) and give back
a `Pending`. All else happens here, once. `lib.comm` is the vocabulary on top.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import Tensor

from lib import cost, link, trace, watch
from lib.mesh import Group

# Taken now, as lib.rank puts watched versions in their place for those who call torch.distributed themselves.
_work_wait = dist.Work.wait

table: watch.CallTable | None = None  # shared by the ranks of one machine; set by lib.rank, absent under torchrun

_label = ""
_works: set[tuple[dist.Work, ...]] = set()  # under way; gloo forgets a message whose Work is gone


class Pending:
    """A communication under way; `wait()` returns its result, at once when it is called again."""

    def __init__(self, finish: Callable[[], Tensor | dict | None]) -> None:
        self._finish: Callable | None = finish
        self._result: Tensor | dict | None = None

    def wait(self) -> Tensor | dict | None:
        if self._finish is not None:
            self._result, self._finish = self._finish(), None
        return self._result


@contextmanager
def label(text: str) -> Iterator[None]:
    """Name the communication that the body starts, for traces and figures."""
    global _label
    before, _label = _label, text
    try:
        yield
    finally:
        _label = before


def spec(x: Tensor) -> str:
    """Type and shape as a call table and an error show them: `float32[4, 2]`."""
    return f"{str(x.dtype)[6:]}{list(x.shape)}"


@dataclass(frozen=True, slots=True)
class _Call:
    """What is known of a call before it is made.

    Args:
        payload_bytes: of the whole array that it speaks about; None if of none (a barrier).
        channel, members, what: where it is entered in the call table, who must make the same, and what they compare.
        peers, shown: whom this rank then waits for, and how a report of a hang says it.
    """

    kind: str
    payload_bytes: int | None
    group: Group
    channel: str
    members: tuple[int, ...]
    what: str
    peers: tuple[int, ...]
    shown: str


def collective(
    what: str, x: Tensor | None, group: Group, finish: Callable, function: Callable, *args: object, times: int = 1
) -> Pending:
    """`function(*args)` does `what` for an array of `times` x on all ranks, `finish` gives the result."""
    if group.size == 1:
        return Pending(finish)
    kind, what = what.split()[0], what if x is None else f"{what} {spec(x)}"
    payload_bytes = None if x is None else x.numel() * x.element_size() * times
    call = _Call(kind, payload_bytes, group, f"{group.ranks}", group.ranks, what, group.ranks, what)
    return _start(call, partial(function, *args, group=group.pg, async_op=True), finish)


def message(kind: str, body: Tensor, group: Group, peer: int, function: Callable) -> Pending:
    """`function` sends or receives `body`."""
    me, other, what = group.global_rank, group.ranks[peer], spec(body)
    src, dst, shown = (me, other, f"send to {other}") if kind == "send" else (other, me, f"recv from {other}")
    payload_bytes = body.numel() * body.element_size()
    call = _Call(
        kind, payload_bytes, group, f"{src}>{dst}", (src, dst), f"message {what}", (other,), f"{shown}, {what}"
    )
    result = body if kind == "recv" else None
    return _start(call, partial(function, body, other, group=group.pg), lambda: result)


def _start(call: _Call, launch: Callable[[], dist.Work | tuple[dist.Work, ...] | None], finish: Callable) -> Pending:
    """Make the call; `launch` gives its Work, or several, or None if it has waited itself."""
    start_s, ended_s, text = time.perf_counter(), [], _label
    due_s, number, waiting = _book(call, start_s), 0, nullcontext
    if table is not None:
        line = watch.where()
        number = table.call(call.channel, call.members, call.what, line, due_s)
        waiting = partial(table.waiting, call.shown, line, call.peers, call.channel, number)
    if call.payload_bytes == 0:
        return Pending(finish)  # the call was compared, and there is nothing to move
    with waiting():
        launched = launch() or ()
    works = launched if isinstance(launched, tuple) else (launched,)
    _works.add(works)
    if trace.recording() and call.kind not in ("send", "recv"):  # gloo has no future for those
        for work in works:
            work.get_future().add_done_callback(lambda _: ended_s.append(time.perf_counter()))

    def wait() -> Tensor | None:
        with waiting():
            for work in works:
                _work_wait(work)
        _works.discard(works)
        late_s = _arrive(call, number, due_s)
        if trace.recording():
            _count(call, text, start_s, max(ended_s[-1] if ended_s else time.perf_counter(), late_s))
        return finish()

    return Pending(wait)


def _book(call: _Call, start_s: float) -> float:
    """When this rank's emulated link would be through with the call; 0 where none is used."""
    emulated = link.along(call.group.axis)
    if emulated is None or call.kind == "recv":  # a message takes the link of its sender
        return 0.0
    return emulated.book(call.kind, call.payload_bytes or 0, call.group.size, start_s)


def _arrive(call: _Call, number: int, due_s: float) -> float:
    """Sleep until the slowest rank's emulated link is through with the call; give that moment, or 0."""
    if link.along(call.group.axis) is None:
        return 0.0
    if table is not None:
        due_s = max(due_s, table.due_s(call.channel, number, call.members))
    link.sleep_until(due_s)
    return due_s


def _count(call: _Call, text: str, start_s: float, end_s: float) -> None:
    payload_bytes, group = call.payload_bytes or 0, call.group
    sent = cost.wire_bytes(call.kind, payload_bytes, group.size)
    trace.add(
        trace.CommEvent(
            group.global_rank, call.kind, group.axis, call.peers, payload_bytes, sent, text, start_s, end_s
        )
    )
