"""Traces of `torch.profiler`, of any PyTorch program, as a `Trace`.

The problem: the file of one rank has a hundred thousand events. A message is a call of c10d, an event of a thread of
gloo, or a kernel of NCCL, and each names the same facts differently. And each host has its own clock.
The idea: keep the events of the link and those that compute, in the terms of `lib.trace`:

                the link                                            computation                  its facts
    gloo        `gloo:all_reduce`                                   `aten::…` operators          its own input
    NCCL        kernels `ncclDevKernel_AllReduce_Sum_bf16_RING_LL`  all other kernels            `record_param_comms`

A collective ends at the same time on all its ranks, or nearly: this aligns the clocks of hosts.

Sources: traces of torch 2.13 on gloo, made by `tests/lib/test_kineto.py`; for NCCL pytorch/pytorch#111843 (2023-10) and
#131462 (2024-07, a kernel without facts), pytorch/kineto#1294 (2026-03, `Seq`).
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from os import PathLike
from statistics import median

from lib import cost
from lib.trace import CommEvent, Span, Trace

KINDS = {  # letters of a name → the kind; the first that the name contains
    "allreduce": "all_reduce",
    "reducescatter": "reduce_scatter",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    **{name: name for name in ("broadcast", "barrier", "scatter", "gather", "reduce")},
    **{"sendrecv": "send", "send": "send", "recv": "recv"},
}
DTYPES = {  # as gloo's inputs, NCCL's facts and NCCL's kernels name them → name, bytes
    **dict.fromkeys(("float", "f32"), ("float32", 4)),
    **dict.fromkeys(("double", "f64"), ("float64", 8)),
    **dict.fromkeys(("half", "f16"), ("float16", 2)),
    **dict.fromkeys(("bfloat16", "bf16"), ("bfloat16", 2)),
    **dict.fromkeys(("long", "long int", "i64"), ("int64", 8)),
    **dict.fromkeys(("int", "i32"), ("int32", 4)),
    **dict.fromkeys(("byte", "unsigned char", "u8"), ("uint8", 1)),
    **dict.fromkeys(("char", "signed char", "i8"), ("int8", 1)),
    "bool": ("bool", 1),
    "float8_e4m3fn": ("float8_e4m3fn", 1),
    "float8_e5m2": ("float8_e5m2", 1),
}


class TraceError(ValueError):
    """A file is no trace of torch.profiler, or two files are of one rank."""


@dataclass
class _File:
    """What a file says: its rank, its host, the ranks of each process group by name, all its events."""

    rank: int
    host: str
    groups: dict[str, tuple[str, tuple[int, ...]]]
    base_ns: int  # of its times
    events: list[dict]


def read_traces(paths: Iterable[str | PathLike[str]]) -> Trace:
    """One trace from the files of several ranks, `.json` or `.json.gz`; its zero is the first event.

    The label of a communication is its kind and dtype; of a computation, the name of its operator or kernel.
    `wire_bytes` are for an ideal ring. Bytes are 0 where a trace does not have them.

    Raises:
        TraceError: a file is no trace, or a rank has two.
    """
    files = [_open(path, place) for place, path in enumerate(paths)]
    ranks = [file.rank for file in files]
    if len({*ranks}) < len(ranks):
        raise TraceError(f"two files are of one rank: they are of ranks {', '.join(map(str, ranks))}")
    zero_ns = min((file.base_ns for file in files), default=0)
    traces = {file.rank: _read(file, (file.base_ns - zero_ns) / 1e9) for file in files}
    ahead_s = _ahead_s(traces, {file.rank: file.host for file in files})
    moved = [Trace.merge([trace], ahead_s[rank]) for rank, trace in traces.items()]
    return Trace.merge(moved, min((x.start_s for trace in moved for x in [*trace.events, *trace.spans]), default=0.0))


def matched(trace: Trace) -> list[list[CommEvent]]:
    """The events of each collective that all its ranks have: the k-th of a kind in a group is the same on all."""
    calls: dict[tuple, list[CommEvent]] = defaultdict(list)
    counts: dict[tuple, int] = defaultdict(int)
    for event in sorted(trace.events, key=lambda event: event.start_s):
        what = event.kind, event.axis, event.peers
        if event.kind not in ("send", "recv"):
            calls[*what, counts[event.rank, *what]].append(event)
            counts[event.rank, *what] += 1
    return [events for key, events in calls.items() if len(events) == len(key[2]) > 1]


def waits_s(trace: Trace) -> dict[tuple[int, int], float]:
    """(rank, last) → seconds that the rank waits in collectives for the rank that starts them last.

    A collective lasts on each rank until the last rank starts it: until then it is a wait, then a transfer.
    """
    waits: dict[tuple[int, int], float] = defaultdict(float)
    for events in matched(trace):
        last = max(events, key=lambda event: event.start_s)
        for event in events:
            if event is not last:
                waits[event.rank, last.rank] += last.start_s - event.start_s
    return dict(waits)


def exposed_s(trace: Trace) -> dict[int, tuple[float, float, float]]:
    """Rank → seconds of computation, of communication, and of communication while nothing computes."""
    seconds = {}
    for rank in sorted({x.rank for x in [*trace.events, *trace.spans]}):
        of_rank = trace.select(rank=rank)
        compute, comm = ([(x.start_s, x.end_s) for x in items] for items in (of_rank.spans, of_rank.events))
        compute_s, comm_s, any_s = (_covered_s(times) for times in (compute, comm, compute + comm))
        seconds[rank] = compute_s, comm_s, any_s - compute_s
    return seconds


def _covered_s(times: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one (start, end) lies."""
    total_s, until_s = 0.0, float("-inf")
    for start_s, end_s in sorted(times):
        total_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    return total_s


def kind_meant(name: str) -> str:
    """The kind of communication that a name means; "" if none."""
    letters = re.sub("[^a-z]", "", name.lower())
    return next((kind for word, kind in KINDS.items() if word in letters), "")


def _open(path: str | PathLike[str], place: int) -> _File:
    try:
        with gzip.open(path, "rt") if str(path).endswith(".gz") else open(path, encoding="utf-8") as file:
            data = json.load(file)
        events = [event for event in data["traceEvents"] if event.get("ph") == "X"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise TraceError(f"{path} is no trace of torch.profiler: {error}") from None
    told = data.get("distributedInfo", {})
    world, groups = tuple(range(told.get("world_size", 1))), {}
    for group in told.get("pg_config", []):
        axis = "world" if group["pg_desc"] == "default_pg" else group["pg_desc"]
        groups[str(group["pg_name"])] = axis, tuple(group.get("ranks") or world)
    if len(groups) <= 1:
        groups[""] = "world", world  # gloo does not say of which group a call is
    base_ns = data.get("baseTimeNanoseconds", 0)
    return _File(told.get("rank", place), data.get("host_name", ""), groups, base_ns, events)


def _read(file: _File, base_s: float) -> Trace:
    """The communication and the computation of one rank, by its own clock, whose times count from `base_s`."""
    facts = {e["args"].get("External id"): e["args"] for e in file.events if "Collective name" in e.get("args", {})}
    on_gpu, out = any(e.get("cat") == "kernel" for e in file.events), Trace()
    for e in file.events:
        name, args = e["name"], e.get("args", {})
        start_s = base_s + e["ts"] / 1e6
        when = start_s, start_s + e.get("dur", 0) / 1e6
        if e.get("cat") == "kernel" and "ccl" in name.lower() or name.startswith("gloo:"):
            args = facts.get(args.get("External id"), {}) | args
            out.events.append(_event(file, name, args, *when))
        elif e.get("cat") == "kernel" if on_gpu else name.startswith("aten::"):
            out.spans.append(Span(file.rank, "compute", name, *when))
    return out


def _event(file: _File, name: str, args: Mapping, start_s: float, end_s: float) -> CommEvent:
    kind = kind_meant(args.get("Collective name", "")) or kind_meant(name)
    axis, ranks = file.groups.get(str(args.get("Process Group Name", "")), ("?", ()))
    said = args.get("dtype") or next(iter(args.get("Input type", [])), "") or next(iter(name.split("_")[3:4]), "")
    dtype, itemsize = DTYPES.get(said.lower().removeprefix("c10::"), (said, 0))
    n = args.get("Group size") or len(ranks) or 1
    count = max(args.get("In msg nelems", 0), args.get("Out msg nelems", 0))
    if name.startswith("gloo:"):
        count = sum(map(prod, args.get("Input Dims", []))) * (n if kind in ("all_gather", "gather", "scatter") else 1)
    payload_bytes = 0 if kind == "barrier" else count * itemsize
    wire_bytes = cost.wire_bytes(kind, payload_bytes, n) if kind else 0.0
    if kind in ("send", "recv"):
        ranks = tuple(args[name] for name in (f"{'Dst' if kind == 'send' else 'Src'} Rank",) if name in args)
    return CommEvent(
        file.rank, kind, axis, ranks, payload_bytes, wire_bytes, f"{kind} {dtype}".strip(), start_s, end_s
    )


def _ahead_s(traces: Mapping[int, Trace], hosts: Mapping[int, str]) -> dict[int, float]:
    """By how much the clock of each rank's host is ahead of that of the first: collectives end together."""
    ends: dict[tuple[str, str], list[float]] = defaultdict(list)
    first = next(iter(hosts.values()), "")
    for events in matched(Trace.merge(traces.values())):
        of_first = [event.end_s for event in events if hosts[event.rank] == first]
        for event in events if of_first else ():
            ends[hosts[event.rank]].append(event.end_s - max(of_first))
    return {rank: median(ends[host]) if host != first and ends.get(host) else 0.0 for rank, host in hosts.items()}
