"""Record communication: which calls, how many bytes, and when.

The problem: "data parallelism moves 2(n-1)/n times the gradients" is a claim that must be measured.
The idea: every communication of a rank is one `CommEvent`, every interesting computation one `Span`, both plain data.
Claims count them, pages draw them, and simulations are compared with them. Nothing here knows torch.

Times are seconds of `time.perf_counter`, shared by all processes of one machine, counted from the start of the run. On
a GPU, calls return before their work is done: record with `lib.launch.done_s` as clock, or spans show launches.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from os import PathLike


@dataclass(frozen=True)
class CommEvent:
    """One communication call of one rank.

    Args:
        rank: global rank that made the call.
        kind: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `all_to_all_rows`, `broadcast`, `shift`,
            `send`, `recv` or `barrier`; for direct calls of `torch.distributed` also `gather` and `scatter`.
        axis: mesh axis of the group (`"dp"`, `"pp"`, `"cp"`, `"tp"` or `"world"`); for a group of `new_group`, its
            description or its ranks.
        peers: global ranks of the group, or the one peer of a send or recv.
        payload_bytes: bytes of the full tensor of the call; of `all_to_all_rows`, of the rows that leave this rank.
        wire_bytes: bytes that this rank sends with an ideal ring (`lib.cost.wire_bytes`).
        label: its purpose, from `comm.label(...)`.
        start_s, end_s: times of its start and of its result.
    """

    rank: int
    kind: str
    axis: str
    peers: tuple[int, ...]
    payload_bytes: int
    wire_bytes: float
    label: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Span:
    """One computation of a rank, measured or predicted.

    Args:
        rank: global rank.
        kind: `forward`, `backward`, `weight`, `optimizer` or `compute`.
        label: description for readers.
        start_s, end_s: times of start and end.
        lane: the row of the rank in which Perfetto shows it: `compute`, or `predicted`.
    """

    rank: int
    kind: str
    label: str
    start_s: float
    end_s: float
    lane: str = "compute"


@dataclass
class Trace:
    """The events and spans of one rank, or of all ranks of a run (`Trace.merge`)."""

    events: list[CommEvent] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    @classmethod
    def merge(cls, traces: Iterable[Trace], start_s: float = 0.0) -> Trace:
        """Merge traces, sorted by time, with `start_s` as the new zero."""

        def moved(items: Iterable) -> list:
            shifted = (replace(x, start_s=x.start_s - start_s, end_s=x.end_s - start_s) for x in items)
            return sorted(shifted, key=lambda x: (x.start_s, x.rank))

        traces = list(traces)
        return cls(moved(e for t in traces for e in t.events), moved(s for t in traces for s in t.spans))

    def select(self, **wanted: object) -> Trace:
        """Select events and spans by their fields: `trace.select(rank=0, kind="all_reduce")`.

        A field that only events have (`axis`) leaves no spans.
        """

        def kept(items: list) -> list:
            return [x for x in items if all(getattr(x, name, None) == value for name, value in wanted.items())]

        return Trace(kept(self.events), kept(self.spans))

    @property
    def wire_bytes(self) -> float:
        """Bytes sent by all events together, with ideal rings."""
        return sum(e.wire_bytes for e in self.events)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the full tensors of all events."""
        return sum(e.payload_bytes for e in self.events)

    def traffic(self) -> dict[tuple[str, str], tuple[int, float]]:
        """(kind, axis) → calls and wire bytes, the table that layouts are compared with."""
        table: dict[tuple[str, str], tuple[int, float]] = {}
        for event in self.events:
            calls, sent = table.get((event.kind, event.axis), (0, 0.0))
            table[event.kind, event.axis] = (calls + 1, sent + event.wire_bytes)
        return table

    def save(self, path: str | PathLike[str]) -> None:
        """Write a file for ui.perfetto.dev or chrome://tracing: one process per rank, with its lanes as threads."""
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": self.chrome(), "displayTimeUnit": "ms"}, file)

    def chrome(self) -> list[dict]:
        """The content of `save` in Chrome's trace event format: times in µs; an arrow from each send to its receive."""
        lanes: dict[tuple[int, str], list[Span | CommEvent]] = defaultdict(list)
        for item in [*self.spans, *self.events]:
            lanes[item.rank, f"network {item.axis}" if isinstance(item, CommEvent) else item.lane].append(item)
        ranks = sorted({rank for rank, _ in lanes})
        out = [_meta(rank, "process_name", name=f"rank {rank}") for rank in ranks]
        out += [_meta(rank, "process_sort_index", sort_index=rank) for rank in ranks]
        threads: dict[tuple[int, str], int] = {}
        place: dict[int, int] = {}  # id of an item -> its thread
        for (rank, lane), items in sorted(lanes.items()):
            # Slices of a thread may be nested but not overlap: overlapping calls are put on separate threads.
            nested = isinstance(items[0], Span)
            rows = [0] * len(items) if nested else stack([(x.start_s, x.end_s) for x in items])
            for item, row in zip(items, rows, strict=True):
                name = f"{lane} {row + 1}" if row else lane
                place[id(item)] = threads.setdefault((rank, name), len(threads))
                out.append(_slice(item, place[id(item)]))
        out += [_meta(rank, "thread_name", tid, name=name) for (rank, name), tid in threads.items()]
        out += [_meta(rank, "thread_sort_index", tid, sort_index=tid) for (rank, _), tid in threads.items()]
        return out + self._arrows(place)

    def _arrows(self, place: dict[int, int]) -> list[dict]:
        """Arrows from each send to its receive: messages between two ranks keep their order."""
        ends: dict[str, dict[tuple, list[CommEvent]]] = {"send": defaultdict(list), "recv": defaultdict(list)}
        for e in sorted(self.events, key=lambda e: e.start_s):
            if e.kind in ends and e.peers:  # a receive from any rank has none
                src, dst = (e.rank, *e.peers) if e.kind == "send" else (*e.peers, e.rank)
                ends[e.kind][src, dst, e.axis].append(e)
        out = []
        for channel, sends in ends["send"].items():
            for send, recv in zip(sends, ends["recv"][channel], strict=False):
                common = {"name": "message", "cat": "message", "id": len(out)}
                begin = {"ph": "s", "pid": send.rank, "tid": place[id(send)], "ts": 1e6 * send.start_s}
                end = {"ph": "f", "bp": "e", "pid": recv.rank, "tid": place[id(recv)], "ts": 1e6 * recv.end_s - 1e-3}
                out += [common | begin, common | end]
        return out


def _meta(rank: int, what: str, tid: int = 0, **args: object) -> dict:
    return {"ph": "M", "pid": rank, "tid": tid, "name": what, "args": args}


def _slice(item: Span | CommEvent, tid: int) -> dict:
    args: dict[str, object] = {"kind": item.kind}
    if isinstance(item, CommEvent):
        args |= {name: getattr(item, name) for name in ("axis", "peers", "payload_bytes", "wire_bytes")}
    what = {"name": item.label or item.kind, "cat": item.kind, "args": args}
    when = {"ts": 1e6 * item.start_s, "dur": 1e6 * (item.end_s - item.start_s)}
    return {"ph": "X", "pid": item.rank, "tid": tid} | what | when


_active: list[tuple[Trace, int]] = []
_under_way: dict[object, CommEvent] = {}  # messages before their wait
clock: Callable[[], float] = time.perf_counter  # of the recording


@contextmanager
def record(rank: int = 0, by: Callable[[], float] = time.perf_counter) -> Iterator[Trace]:
    """Collect the events and spans of this process, as `rank`, while the body runs, with times `by` this clock."""
    global clock
    trace, before, (clock, earlier) = Trace(), set(_under_way), (by, clock)
    _active.append((trace, rank))
    try:
        yield trace
    finally:
        clock = earlier
        _active[:] = [one for one in _active if one[0] is not trace]  # an equal one may be around it
        now_s = time.perf_counter()
        trace.events += [replace(event, end_s=now_s) for key, event in _under_way.items() if key not in before]
        if not _active:
            _under_way.clear()


def recording() -> bool:
    """Whether a recording is active."""
    return bool(_active)


def begin(key: object, event: CommEvent) -> None:
    """Note that a message was started; without a wait it also counts, and ends with the recording."""
    _under_way[key] = event


def add(event: CommEvent, key: object = None) -> None:
    """Add an event to all recordings; `key` is that of its `begin`."""
    _under_way.pop(key, None)
    for trace, _ in _active:
        trace.events.append(event)


class span:  # noqa: N801 used as a function; a generator would take three times as long
    """Record the duration of the body, if a recording is active: `with span("forward"): ...`."""

    __slots__ = ("_kind", "_label", "_start_s")

    def __init__(self, kind: str, label: str = "") -> None:
        self._kind, self._label = kind, label

    def __enter__(self) -> None:
        self._start_s = clock()

    def __exit__(self, *error: object) -> None:
        end_s = clock()
        for trace, rank in _active:
            trace.spans.append(Span(rank, self._kind, self._label, self._start_s, end_s))


def stack(spans: Sequence[tuple[float, float]]) -> list[int]:
    """For each (start, end), the lowest row in which it overlaps no other span."""
    ends: list[float] = []
    rows = [0] * len(spans)
    for i in sorted(range(len(spans)), key=lambda i: spans[i]):
        start, end = spans[i]
        rows[i] = next((k for k, busy in enumerate(ends) if busy <= start + 1e-9), len(ends))
        ends[rows[i] : rows[i] + 1] = [end]
    return rows
