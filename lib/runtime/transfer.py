"""One transfer: compared, started, awaited, late if a link is emulated, and counted.

The problem: every communication of the library needs the same five things around it, and none of them is about what it
communicates.
The idea: `collective` and `message` take what differs (what to launch, whom it waits for, how to finish) and give back
a `Pending`. All else happens here, once. `lib.comm` is the vocabulary on top.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from lib.mesh import Group
from lib.runtime import calls, link
from lib.runtime.calls import Call, Record
from lib.runtime.shapes import spec

# Taken now, as lib.runtime.spy puts watched versions in their place for those who call torch.distributed themselves.
_work_wait = dist.Work.wait

_works: set[tuple[dist.Work, ...]] = set()  # under way; gloo forgets a message whose Work is gone


class Pending:
    """A communication under way; `wait()` returns its result, at once when it is called again.

    Args:
        finish: waits, and gives the result.
        record: of the call, if it moves anything.
    """

    def __init__(self, finish: Callable[[], Tensor | dict | None], record: Record | None = None) -> None:
        self._finish: Callable | None = finish
        self._result: Tensor | dict | None = None
        self.record = record

    def follow(self) -> None:
        """Note when it is through even if nothing is traced, so that `ended_s` is no later."""
        if self.record:
            self.record.follow()

    @property
    def ended_s(self) -> float:
        """When it was through, by `time.perf_counter`; 0 before `wait()`, and where nothing moved."""
        return self.record.ended_s if self.record else 0.0

    def wait(self) -> Tensor | dict | None:
        if self._finish is not None:
            self._result, self._finish = self._finish(), None
        return self._result


def collective(
    what: str, x: Tensor | None, group: Group, finish: Callable, function: Callable, *args: object, times: int = 1
) -> Pending:
    """`function(*args)` does `what` for an array of `times` x on all ranks, `finish` gives the result."""
    if group.size == 1:
        return Pending(finish)
    kind, what = what.split()[0], what if x is None else f"{what} {spec(x)}"
    payload_bytes = None if x is None else x.nbytes * times
    axis, rank, ranks = group.axis, group.global_rank, group.ranks
    call = Call(kind, payload_bytes, axis, rank, group.size, group.channel, ranks, what, ranks, what)
    return _start(call, partial(function, *args, group=group.pg, async_op=True), finish)


def message(kind: str, body: Tensor, group: Group, peer: int, function: Callable) -> Pending:
    """`function` sends or receives `body`."""
    me, other, what = group.global_rank, group.ranks[peer], spec(body)
    src, dst, shown = (me, other, f"send to {other}") if kind == "send" else (other, me, f"recv from {other}")
    channel, what, shown = f"{group.channel} {src}>{dst}", f"message {what}", f"{shown}, {what}"
    call = Call(kind, body.nbytes, group.axis, me, group.size, channel, (src, dst), what, (other,), shown)
    result = body if kind == "recv" else None
    return _start(call, partial(function, body, other, group=group.pg), lambda: result)


def _start(call: Call, launch: Callable[[], dist.Work | tuple[dist.Work, ...] | None], finish: Callable) -> Pending:
    """Make the call; `launch` gives its Work, or several, or None if it has waited itself."""
    start_s = time.perf_counter()
    due_s = _book(call, start_s)
    record = Record(call, start_s, due_s)
    if call.payload_bytes == 0:
        return Pending(finish)  # the call was compared, and there is nothing to move
    # Under a TorchFunctionMode, such as `lib.deferred`'s, torch would never free what a collective has moved.
    with record.waiting, torch._C.DisableTorchFunction():
        launched = launch() or ()
    works = launched if isinstance(launched, tuple) else (launched,)
    _works.add(works)
    record.launched(works)

    def wait() -> Tensor | None:
        record.waits()
        with record.waiting:
            for work in works:
                _work_wait(work)
        _works.discard(works)
        record.works = ()
        record.done(_arrive(record, due_s))
        return finish()

    return Pending(wait, record)


def _book(call: Call, start_s: float) -> float:
    """When this rank's emulated link would be through with the call; 0 where none is used."""
    emulated = link.along(call.axis)
    if emulated is None or call.kind == "recv":  # a message takes the link of its sender
        return 0.0
    return emulated.book(call.kind, call.payload_bytes or 0, call.size, start_s)


def _arrive(record: Record, due_s: float) -> float:
    """Sleep until the slowest rank's emulated link is through with the call; give that moment, or 0."""
    call = record.call
    if link.along(call.axis) is None:
        return 0.0
    if calls.table is not None:
        due_s = max(due_s, calls.table.due_s(call.channel, record.number, call.members))
    link.sleep_until(due_s)
    return due_s
