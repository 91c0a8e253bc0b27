"""What the traces of a run say: which communication nothing hides, what is sent, and who waits for whom."""

from collections.abc import Iterator

from lib.doctor.page import aligned, found_text
from lib.doctor.settings import Finding
from lib.kineto import exposed_s, matched, waits_s
from lib.trace import Trace

MUCH = 0.1  # of the time of a trace that a rank waits for one other


def judge_trace(trace: Trace) -> list[Finding]:
    """Ranks that the others wait for, and the first collective whose ranks do not agree."""
    findings, waits, whole_s = [], waits_s(trace), length_s(trace)
    for rank in sorted({last for _, last in waits}):
        worst_s = max(s for (_, last), s in waits.items() if last == rank)
        if worst_s > MUCH * whole_s:
            text = f"others wait up to {worst_s * 1e3:.3g} ms for rank {rank}, {worst_s / whole_s:.0%} of the trace"
            findings.append(Finding("slow", (rank,), f"{text}: it starts their collectives last"))
    for events in matched(trace):
        said = {f"{event.payload_bytes} bytes, {event.label}": event.rank for event in events}
        if len(said) > 1:
            text = "; ".join(f"rank {rank} {what}" for what, rank in said.items())
            return [*findings, Finding("mismatch", tuple(said.values()), f"the ranks of a collective differ: {text}")]
    return findings


def page_of(trace: Trace) -> str:
    """The page, for a terminal."""
    lines = [f"a trace of {length_s(trace) * 1e3:.1f} ms; ms of each rank", *aligned(_ranks(trace)), ""]
    return "\n".join([*lines, *aligned(_calls(trace)), "", *found_text(judge_trace(trace))])


def length_s(trace: Trace) -> float:
    """Seconds from the first start, at zero, to the last end."""
    return max((x.end_s for x in [*trace.events, *trace.spans]), default=0.0)


def _ranks(trace: Trace) -> Iterator[tuple]:
    """A row for each rank, in ms; the last two are how long it waits for others, and others for it."""
    waits = waits_s(trace)
    yield "rank", "compute", "comm", "exposed", "waits", "awaited"
    for rank, seconds in exposed_s(trace).items():
        its, for_it = (sum(s for pair, s in waits.items() if pair[i] == rank) for i in (0, 1))
        yield str(rank), *(f"{s * 1e3:.1f}" for s in (*seconds, its, for_it))


def _calls(trace: Trace) -> Iterator[tuple]:
    """A row for each kind of communication of the first rank, beside what an ideal ring of `lib.cost` sends."""
    rank = min((event.rank for event in trace.events), default=0)
    yield f"calls of rank {rank}", "along", "times", "ms", "kB", "kB on a ring", "MB/s"
    for what in dict.fromkeys((event.label, event.axis) for event in trace.select(rank=rank).events):
        some = trace.select(rank=rank, label=what[0], axis=what[1])
        seconds = sum(event.end_s - event.start_s for event in some.events)
        sent = (f"{n / 1e3:.1f}" for n in (some.payload_bytes, some.wire_bytes))
        yield *what, str(len(some.events)), f"{seconds * 1e3:.2f}", *sent, f"{some.wire_bytes / seconds / 1e6:.0f}"
