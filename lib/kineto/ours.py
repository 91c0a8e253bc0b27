"""A file of `lib.trace`, such as `lib.train --profile` writes: all ranks in one, with everything they said."""

from __future__ import annotations

from collections.abc import Mapping

from lib.kineto.calls import RecordedCall
from lib.trace import Span

LANES_OF_RUNS = ("compute",)  # not what was predicted


def is_ours(data: Mapping) -> bool:
    """Whether a file was written by `Trace.save`: its messages say their bytes on the wire."""
    return any(isinstance(e, dict) and "wire_bytes" in (e.get("args") or {}) for e in data["traceEvents"])


def read_ours(data: Mapping) -> tuple[dict[int, list[RecordedCall]], dict[int, list[Span]]]:
    """The calls and the spans of each rank."""
    entries = data["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    calls: dict[int, list[RecordedCall]] = {e["pid"]: [] for e in entries if e["name"] == "process_name"}
    spans: dict[int, list[Span]] = {rank: [] for rank in calls}
    for e in (e for e in entries if e["ph"] == "X"):
        rank, args, times = e["pid"], e["args"], (e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6)
        if "wire_bytes" in args:
            peers = tuple(args["peers"])
            facts = args["kind"], args["axis"], peers, args["payload_bytes"], args["wire_bytes"], e["name"]
            calls[rank].append(RecordedCall(rank, *facts, *times, group=f"{args['axis']}: {peers}"))
        elif lanes.get(e["tid"]) in LANES_OF_RUNS:
            spans[rank].append(Span(rank, args["kind"], e["name"], *times))
    return calls, spans
