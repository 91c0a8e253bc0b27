"""One communication in flight: compared, started, awaited, and counted.

The problem: every communication of the library needs these steps, which do not depend on its data.
The idea: `collective` and `message` take the parts that differ (the function to launch, the ranks it waits for, the
result) and return a `Pending`. Inside `with link(...)` its `wait` returns when the emulated link would have delivered
it (`emulated_link.py`). Each rank enters that time into the call table, and the latest counts (under torchrun, only its
own).
"""

import time
from collections.abc import Callable
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from lib.runtime import calls
from lib.runtime.calls import Call, Record
from lib.runtime.emulated_link import along
from lib.runtime.group import Group, check_group
from lib.runtime.rows import RowTable
from lib.runtime.shapes import as_bytes, copy_over, spec, spec_of_row

# Stored now, because `record_torch_calls` replaces them by recorded versions for direct calls of torch.distributed.
_work_wait = dist.Work.wait

_works: set[tuple[dist.Work, ...]] = set()  # in flight; gloo drops a message whose Work is deleted


class Pending:
    """A communication in flight; `wait()` returns its result, and a second call returns it immediately.

    `finish` waits and returns the result; `record` is of the call, if it moves data.
    """

    def __init__(self, finish: Callable[[], Tensor | dict | None], record: Record | None = None) -> None:
        self._finish: Callable | None = finish
        self._result: Tensor | dict | None = None
        self.record = record

    def follow(self) -> None:
        """Note its end even if nothing is traced, so that `ended_s` is exact."""
        if self.record:
            self.record.follow()

    @property
    def ended_s(self) -> float:
        """Time of its end by `time.perf_counter`; 0 before `wait()`, and if nothing moved."""
        return self.record.ended_s if self.record else 0.0

    def wait(self) -> Tensor | dict | None:
        """Return the result when it is there: a tensor, of `exchange` tensors by rank, of `send` the tensor sent."""
        if self._finish is not None:
            self._result, self._finish = self._finish(), None
        return self._result


def collective(
    what: str, x: Tensor | None, group: Group, finish: Callable, function: Callable, *args: object, times: int = 1
) -> Pending:
    """Start `what` by `function(*args)`, on an array `times` as large as x; `finish` returns the result."""
    check_group(group)
    if group.size == 1:
        return Pending(finish)
    kind, what = what.split()[0], what if x is None else f"{what} {spec(x)}"
    call = Call.collective(kind, what, None if x is None else x.nbytes * times, group)
    return _start(call, partial(function, *args, group=group.pg, async_op=True), finish)


def collective_of_rows(
    kind: str, out: Tensor, x: Tensor, table: RowTable, group: Group, function: Callable
) -> Pending:
    """Start to send rows of x, and to fill `out`, as the table says, by `function` of torch's `all_to_all_single`."""
    if not table.moved:  # a rank's rows for itself
        copy_over(out, x)
    if group.size == 1:
        return Pending(lambda: out)
    row, row_bytes = spec_of_row(x), prod(x.shape[1:]) * x.itemsize
    call = Call.collective(kind, table.compared(kind, row), table.sent * row_bytes, group)
    received_bytes, moves = table.received * row_bytes, table.moved * row_bytes > 0  # a rank without rows takes part
    call = call._replace(shown=table.shown(kind, row), received_bytes=received_bytes, moves=moves)
    args = as_bytes(out), as_bytes(x), list(table.coming), list(table.going)
    return _start(call, partial(function, *args, group=group.pg, async_op=True), lambda: out)


def message(kind: str, body: Tensor, group: Group, peer: int, function: Callable) -> Pending:
    """Start to send or receive `body` by `function`."""
    other, result = group.ranks[peer], body if kind == "recv" else None
    call = Call.message(kind, spec(body), body.nbytes, group, other)
    return _start(call, partial(function, body, other, group=group.pg), lambda: result)


def _start(call: Call, launch: Callable[[], dist.Work | tuple[dist.Work, ...] | None], finish: Callable) -> Pending:
    """Make the call; `launch` returns one Work, several, or None if it has already waited."""
    start_s, emulated = time.perf_counter(), along(call.axis)
    # A message takes the link of its sender.
    due_s = emulated.book(call, start_s) if emulated and call.kind != "recv" else 0.0
    record = Record(call, start_s, due_s)
    if not call.moves:
        return Pending(finish)  # the call is compared, and there is nothing to move
    # Under a TorchFunctionMode, such as that in `lib.deferred`, torch would never free the tensors of a collective.
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
        record.done(_arrive(record, due_s) if along(call.axis) else 0.0)
        return finish()

    return Pending(wait, record)


def _arrive(record: Record, due_s: float) -> float:
    """Sleep until the slowest rank's emulated link has finished the call; return that time."""
    call = record.call
    if calls.table is not None:
        due_s = max(due_s, calls.table.due_s(call.channel, record.number, call.members))
    time.sleep(max(0.0, due_s - time.perf_counter()))
    return due_s
