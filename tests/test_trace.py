"""What a trace holds, adds up and merges: plain data, no process."""

import dataclasses

import pytest

from lib import trace
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
