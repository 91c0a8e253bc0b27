"""The verdict on the traces of a run: exposed communication, messages, waits of ranks for ranks, idle GPUs.

A verdict names the calls that were compared. Where a file is missing, or a call has no certain partner on the other
ranks, the page names that; if it is much, there is no verdict.
"""

from collections.abc import Iterator, Sequence
from statistics import median

from lib.doctor.settings import Finding
from lib.kineto import Recording, exposed_s, length_s, matched, waits_s
from lib.kineto.calls import RecordedCall
from lib.kineto.idle import CAUSES
from lib.kineto.times import length
from lib.runtime.hang import named_ranks
from lib.runtime.words import aligned, counted

MUCH = 0.1  # of the time of a trace that a rank waits for one rank
IDLE = 0.5  # of the time of a GPU
ENOUGH = 0.5  # of the calls of each rank that must have a partner
MOVED_S = 1e-4  # a clock that differs by more is named

CAUSE = {
    "data": "for data",
    "sync": "after a sync of the CPU with the GPU",
    "launch": "because the CPU launched late",
    "stream": "for a different stream",
    "unknown": "for reasons that the file does not show",
}


def judge_trace(trace: Recording) -> list[Finding]:
    """Ranks that the others wait for, GPUs without work, and the first collective whose ranks do not agree."""
    findings, whole_s = [], length_s(trace)
    for rank, (worst_s, longer_s) in _slow(trace).items():
        text = f"others wait up to {worst_s * 1e3:.3g} ms for rank {rank}, {worst_s / whole_s:.0%} of the trace: "
        if longer_s > 0:
            text += f"outside of communication it takes {longer_s * 1e3:.3g} ms longer than the others"
        else:
            text += "it starts their collectives last"
        findings.append(Finding("slow", (rank,), text))
    for rank, causes in trace.idle_s.items():
        whole_s, idle_s = trace.gpu_s[rank], sum(causes.values())
        if idle_s > IDLE * whole_s and not trace.not_recorded.get(rank):
            parts = sorted(causes.items(), key=lambda one: -one[1])
            why = ", ".join(f"{s * 1e3:.3g} ms {CAUSE[cause]}" for cause, s in parts)
            text = f"the GPU of rank {rank} has nothing to do in {idle_s / whole_s:.0%} of the trace: {why}"
            findings.append(Finding("idle", (rank,), text))
    return findings + [finding for calls in matched(trace) if (finding := _mismatch(calls))][:1]


def _slow(trace: Recording) -> dict[int, tuple[float, float]]:
    """Rank that others wait for → seconds of the longest such wait of one rank, and how much longer the rank takes.

    A rank that waits is late for its next call: of the awaited ranks, the slow ones take longer between their calls.
    Where none does, ranks take turns, or are the stages of a pipeline, where waits are normal.
    """
    waits, least_s = waits_s(trace), MUCH * length_s(trace)
    awaited = {rank: max(s for (_, last), s in waits.items() if last == rank) for _, rank in waits}
    awaited = {rank: awaited[rank] for rank in sorted(awaited) if awaited[rank] > least_s}
    longer_s = _longer_s(trace)
    longer = {rank: s for rank, s in awaited.items() if longer_s[rank] > least_s}
    slow = longer or ({} if trace.pairs.messages else awaited)
    return {rank: (s, longer_s[rank]) for rank, s in slow.items()}


def _longer_s(trace: Recording) -> dict[int, float]:
    """Rank → how much longer than the median of the others it is outside of communication."""
    exposed = exposed_s(trace)
    own_s = {rank: length(trace.windows[rank]) - exposed[rank][2] for rank in exposed}
    return {rank: s - median([own_s[other] for other in own_s if other != rank] or [s]) for rank, s in own_s.items()}


def _mismatch(calls: list[RecordedCall]) -> Finding | None:
    """Whether the ranks of a collective differ where they must not, according to their files."""
    dtypes = {call.label.partition(" ")[2] for call in calls} - {""}
    sizes = {call.payload_bytes for call in calls if call.payload_bytes}
    if len({call.kind for call in calls}) == 1 and len(dtypes) <= 1:
        if len(sizes) <= 1 or not all(call.of_one_size for call in calls):
            return None
    said = {f"{call.payload_bytes} bytes, {call.label}": call.rank for call in calls}
    text = "; ".join(f"rank {rank} {what}" for what, rank in said.items())
    return Finding("mismatch", tuple(said.values()), f"the ranks of a collective differ: {text}")


def not_seen(trace: Recording) -> list[str]:
    """Why there is no verdict on some ranks, a sentence each; [] if everything that matters was compared."""
    hidden = [rank for rank in trace.ranks if trace.not_recorded.get(rank)]
    empty = [rank for rank in trace.ranks if rank not in hidden and not trace.windows[rank]]
    silent = [rank for rank in trace.ranks if trace.windows[rank] and not trace.of_rank[rank].events]
    reasons = []
    if trace.missing:
        files = "the files of" if len(trace.missing) > 1 else "the file of"
        text = f"{files} {_named(trace.missing)} of {trace.world}: give the files of all ranks"
        reasons.append(f"{text}, or nobody sees who is late there")
    elif len(trace.ranks) == 1 and not trace.is_world_told and trace.events:
        reasons.append("the other ranks: the only file does not say how many there are")
    if hidden:
        n = sum(trace.not_recorded[rank] for rank in hidden)
        text = f"the GPU of {_named(hidden)}: {n} kernels or graphs were launched that the file has not"
        reasons.append(f"{text}; profile with ProfilerActivity.CUDA, outside of the capture of a graph")
    if empty:
        reasons.append(f"{_named(empty)}: no operator, kernel or message in the file; profile a whole step")
    if silent and max(trace.world, len(trace.ranks)) > 1:
        reasons.append(f"the communication of {_named(silent)}: none in the file")
    elif silent and not trace.idle_s and not hidden:
        reasons.append("anything to compare: one rank without communication, and no GPU")
    return reasons + (_without_partner(trace) if _rank_without_enough(trace) else [])


def _named(ranks: Sequence[int]) -> str:
    """Ranks in words; of many in a row, the first and the last."""
    if len(ranks) > 3 and [*ranks] == [*range(ranks[0], ranks[-1] + 1)]:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return named_ranks(ranks)


def _rank_without_enough(trace: Recording) -> bool:
    compared = _compared(trace)
    return any(n < ENOUGH * len(trace.of_rank[rank].events) for rank, n in compared.items())


def _compared(trace: Recording) -> dict[int, int]:
    """Rank → how many of its calls have a partner."""
    compared = dict.fromkeys(trace.ranks, 0)
    for calls in [*trace.pairs.together, *trace.pairs.messages]:
        for call in calls:
            compared[call.rank] += 1
    return compared


def _without_partner(trace: Recording) -> list[str]:
    """A sentence for each reason why calls were not compared."""
    lines = []
    for why, of in trace.pairs.without.items():
        ranks = sorted(rank for rank, n in of.items() if n)
        if ranks:
            lines.append(f"{counted(sum(of.values()), 'call')} of {_named(ranks)}: they {why}")
    return lines


def looked_at(trace: Recording) -> str:
    """What the verdict is about, in a sentence."""
    parts = []
    if n := len(trace.pairs.together):
        parts.append(counted(n, "collective"))
    if n := len(trace.pairs.messages):
        parts.append(counted(n, "message"))
    text = " and ".join(parts) or "no call"
    ranks = [rank for rank, n in _compared(trace).items() if n]
    text = f"compared: {text}" + (f" of {_named(ranks)}" if ranks else "")
    if trace.idle_s:
        text += f"; gaps of the GPU of {_named([*trace.idle_s])}"
    if trace.without_groups and parts:
        text += "; no file names a group, so each call was taken for one of all ranks"
    if not trace.is_world_told and len(trace.ranks) > 1:
        text += "; no file says how many ranks there were"
    moved = {rank: s for rank, s in trace.pairs.ahead_s.items() if abs(s) > MOVED_S}
    if moved:
        clocks = ", ".join(f"rank {rank} {s * 1e3:+.1f} ms" for rank, s in sorted(moved.items()))
        text += f"; clocks that are ahead, by the ends of collectives: {clocks}"
    if not _rank_without_enough(trace):
        text += "".join(f"; not: {line}" for line in _without_partner(trace))
    return text


def verdict_of(trace: Recording) -> tuple[list[str], int]:
    """The last lines of the page, and the exit code: 1 something looks wrong, 2 too little could be seen, else 0."""
    found, unseen = judge_trace(trace), not_seen(trace)
    lines = [looked_at(trace)]
    if found:
        lines += ["looks wrong:", *(f"  {i}. {finding.text}" for i, finding in enumerate(found, 1))]
    if unseen:
        lines += ["could not see:", *(f"  {i}. {reason}" for i, reason in enumerate(unseen, 1))]
    if not found and unseen:
        compared = trace.pairs.compared()
        lines.append("nothing looks wrong in what was compared: no verdict" if compared else "no verdict")
    elif not found:
        lines.append("nothing looks wrong")
    return lines, 1 if found else 2 if unseen else 0


def page_of(trace: Recording) -> str:
    """The page, for a terminal."""
    lines = [f"a trace of {length_s(trace) * 1e3:.1f} ms; ms of each rank", *aligned(_ranks(trace)), ""]
    return "\n".join([*lines, *aligned(_calls(trace)), "", *verdict_of(trace)[0]])


def _ranks(trace: Recording) -> Iterator[tuple]:
    """A row for each rank, in ms: its work, its waits for others, theirs for it, and the gaps of its GPU."""
    waits = waits_s(trace)
    causes = [cause for cause in CAUSES if any(cause in its for its in trace.idle_s.values())]
    yield "rank", "compute", "comm", "exposed", "waits", "awaited", *(["idle", *causes] if trace.idle_s else [])
    for rank, seconds in exposed_s(trace).items():
        row = [*seconds, *(sum(s for pair, s in waits.items() if pair[i] == rank) for i in (0, 1))]
        its = trace.idle_s.get(rank)
        if its is not None:
            row += [sum(its.values()), *(its.get(cause, 0.0) for cause in causes)]
        cells = [f"{s * 1e3:.1f}" for s in row]
        yield str(rank), *cells, *(["·"] * (1 + len(causes)) if trace.idle_s and its is None else [])


def _calls(trace: Recording) -> Iterator[tuple]:
    """A row for each kind of communication of the first rank, beside what an ideal ring of `lib.cost` sends."""
    rank = min((event.rank for event in trace.events), default=0)
    yield f"calls of rank {rank}", "along", "times", "ms", "kB", "kB on a ring", "MB/s"
    for what in dict.fromkeys((event.label, event.axis) for event in trace.of_rank[rank].events):
        some = trace.select(rank=rank, label=what[0], axis=what[1])
        seconds = sum(event.end_s - event.start_s for event in some.events)
        sent = (f"{n / 1e3:.1f}" for n in (some.payload_bytes, some.wire_bytes))
        speed = f"{some.wire_bytes / seconds / 1e6:.0f}" if seconds and some.wire_bytes else "·"
        yield what[0] or "?", what[1], str(len(some.events)), f"{seconds * 1e3:.2f}", *sent, speed
