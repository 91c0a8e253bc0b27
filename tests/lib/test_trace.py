"""What a trace holds, adds up and merges: plain data, no process."""

import dataclasses
import json
import time

import pytest
import torch

from lib import trace
from lib.launch import done_s
from lib.trace import CommEvent, Span, Trace


def event(rank=0, kind="all_reduce", axis="dp", payload=100, wire=150.0, label="", start=1.0, end=2.0):
    return CommEvent(rank, kind, axis, (0, 1), payload, wire, label, start, end)


def test_only_while_somebody_records():
    assert not trace.recording()
    trace.add(event())
    with trace.record(3) as outer:
        trace.add(event(payload=1))
        with trace.record(4) as inner:
            trace.add(event(payload=2))
        with trace.span("forward", "one"):
            pass
        with trace.span("backward"):
            pass
        assert trace.recording()
    trace.add(event())
    assert not trace.recording()
    assert [e.payload_bytes for e in outer.events] == [1, 2] and [e.payload_bytes for e in inner.events] == [2]
    assert [(s.rank, s.kind, s.label) for s in outer.spans] == [(3, "forward", "one"), (3, "backward", "")]
    assert inner.spans == []


def test_recordings_inside_each_other_may_be_equal():
    with trace.record(3) as outer:
        with trace.record(3) as inner:
            trace.add(event(payload=1))
        trace.add(event(payload=2))
    assert not trace.recording()
    assert [e.payload_bytes for e in outer.events] == [1, 2] and [e.payload_bytes for e in inner.events] == [1]


class GPU:
    """Calls return at once and their work takes seconds; a clock that only this work and the processor move."""

    def __init__(self, monkeypatch):
        self.s, self.queued_s, self.waits = 0.0, 0.0, 0
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(time, "perf_counter", lambda: self.s)

    def launch(self, for_s):
        self.s += 1e-3
        self.queued_s += for_s

    def synchronize(self):
        self.s, self.queued_s, self.waits = self.s + self.queued_s, 0.0, self.waits + 1


def test_spans_on_a_gpu_hold_the_work_and_not_its_launch(monkeypatch):
    gpu = GPU(monkeypatch)
    with trace.record(0, done_s) as seen:
        gpu.launch(2.0)  # before the first span
        for kind, takes_s in (("forward", 3.0), ("backward", 6.0), ("optimizer", 1.0)):
            with trace.span(kind):
                gpu.launch(takes_s)
    assert [span.end_s - span.start_s for span in seen.spans] == pytest.approx([3.001, 6.001, 1.001])
    assert sum(span.end_s - span.start_s for span in seen.spans) == pytest.approx(gpu.s - 2.001), "no second is lost"
    waits = gpu.waits
    with trace.record(), trace.span("forward"):
        gpu.launch(3.0)
    assert gpu.waits == waits, "only a recording that asks for it waits"


def test_recording_ends_with_an_error():
    with pytest.raises(KeyError), trace.record() as seen, trace.span("compute"):
        raise KeyError
    assert not trace.recording() and len(seen.spans) == 1


def test_sums_and_choices():
    whole = Trace(
        [event(0), event(1, label="late", start=3), event(0, "send", "pp", 10, 10.0)],
        [Span(0, "forward", "", 0, 1), Span(1, "forward", "late", 0, 2)],
    )
    assert whole.payload_bytes == 210 and whole.wire_bytes == 310
    assert whole.traffic() == {("all_reduce", "dp"): (2, 300.0), ("send", "pp"): (1, 10.0)}
    assert whole.select(rank=0).traffic() == {("all_reduce", "dp"): (1, 150.0), ("send", "pp"): (1, 10.0)}
    assert len(whole.select(label="late").events) == len(whole.select(label="late").spans) == 1
    assert whole.select(axis="dp").spans == []
    assert whole.select(kind="none") == Trace()
    assert Trace().wire_bytes == 0 and Trace().traffic() == {}


def test_merge_sorts_by_time_and_moves_the_zero():
    a = Trace([event(0, start=12, end=13), event(0, start=15, end=16)], [Span(0, "forward", "", 11, 12)])
    b = Trace([event(1, start=12, end=14), event(1, start=11, end=12)], [])
    merged = Trace.merge([a, b], start_s=10)
    assert [(e.rank, e.start_s, e.end_s) for e in merged.events] == [(1, 1, 2), (0, 2, 3), (1, 2, 4), (0, 5, 6)]
    assert merged.spans == [Span(0, "forward", "", 1, 2)]
    assert a.events[0].start_s == 12, "the parts are as they were"
    with pytest.raises(dataclasses.FrozenInstanceError):
        merged.events[0].rank = 5


def message(rank, kind, peer, start, end):
    return CommEvent(rank, kind, "pp", (peer,), 8, 8.0 * (kind == "send"), "", start, end)


def ring_of_two():
    """Two ranks: compute with a part inside it, two all-reduces that overlap, and messages both ways."""
    spans = [Span(r, *rest) for r in (0, 1) for rest in (("backward", "", 0, 4), ("weight", "layer 1", 1, 2))]
    events = [event(r, label=f"bucket {k}", start=k, end=k + 1.5) for r in (0, 1) for k in (0, 1)]
    events += [message(0, "send", 1, 5, 6), message(1, "recv", 0, 3, 6), message(0, "send", 1, 6, 7)]
    events += [message(1, "recv", 0, 6, 8), message(1, "send", 0, 8, 9)]  # the last one is never received
    events.append(CommEvent(1, "recv", "world", (), 8, 0.0, "", 9, 10))  # from any rank
    return Trace(events, spans)


def test_saved_for_perfetto(tmp_path):
    """As the viewer needs it: a process a rank, threads whose slices hold each other or are apart, arrows on slices."""
    ring_of_two().save(tmp_path / "run.json")
    saved = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    named = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in saved if e["name"].endswith("_name")}
    processes = {pid: name for (what, pid, _), name in named.items() if what == "process_name"}
    threads = {(pid, tid): name for (what, pid, tid), name in named.items() if what == "thread_name"}
    assert processes == {0: "rank 0", 1: "rank 1"}
    slices = [e for e in saved if e["ph"] == "X"]
    assert {(e["pid"], threads[e["pid"], e["tid"]], e["name"]) for e in slices if e["pid"] == 0} == {
        (0, "compute", "backward"),
        (0, "compute", "layer 1"),
        (0, "network dp", "bucket 0"),
        (0, "network dp 2", "bucket 1"),
        (0, "network pp", "send"),
    }
    for a in slices:
        for b in slices:
            if a is not b and (a["pid"], a["tid"]) == (b["pid"], b["tid"]):
                (a0, a1), (b0, b1) = ((e["ts"], e["ts"] + e["dur"]) for e in (a, b))
                apart, inside = a1 <= b0 or b1 <= a0, a0 <= b0 <= b1 <= a1 or b0 <= a0 <= a1 <= b1
                assert apart or inside, (a, b)
    bucket = next(e for e in slices if e["name"] == "bucket 1")
    assert (bucket["ts"], bucket["dur"]) == (1e6, 1.5e6)
    sizes = {"payload_bytes": 100, "wire_bytes": 150.0}
    assert bucket["args"] == {"kind": "all_reduce", "axis": "dp", "peers": [0, 1]} | sizes


def test_arrows_from_each_send_to_its_receive():
    made = ring_of_two().chrome()
    slices = [e for e in made if e["ph"] == "X"]
    begins, ends = ({e["id"]: e for e in made if e["ph"] == phase} for phase in "sf")
    assert begins.keys() == ends.keys() and len(begins) == 2
    for key, begin in begins.items():
        for arrow, kind in ((begin, "send"), (ends[key], "recv")):
            on = [
                x for x in slices
                if (x["pid"], x["tid"], x["cat"]) == (arrow["pid"], arrow["tid"], kind)
                and x["ts"] <= arrow["ts"] < x["ts"] + x["dur"]
            ]  # fmt: skip
            assert len(on) == 1
        assert begin["ts"] < ends[key]["ts"]
    assert [round(e["ts"] / 1e6) for e in ends.values()] == [6, 8], "the first send belongs to the first receive"


def test_nothing_to_save(tmp_path):
    Trace().save(tmp_path / "run.json")
    assert json.loads((tmp_path / "run.json").read_text())["traceEvents"] == []
