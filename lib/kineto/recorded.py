"""The traces of a run as one: what each rank did and when, who waited for whom, and what these files cannot show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from typing import NamedTuple

from lib.kineto.calls import RecordedCall, calls_of, spans_of
from lib.kineto.files import File, read_file, read_json, with_ranks
from lib.kineto.groups import with_groups
from lib.kineto.idle import idle_s, not_recorded
from lib.kineto.ours import is_ours, read_ours
from lib.kineto.pairing import Pairs, moved, pair_calls
from lib.kineto.times import Times, length, union, within
from lib.trace import CommEvent, Span, Trace

LEAST_S = 1e-9  # the unit in which files count


class RankWait(NamedTuple):
    """A rank is in a collective or a message, and the last rank of it has not begun."""

    rank: int
    last: int
    start_s: float
    end_s: float


@dataclass
class Recording(Trace):
    """The events and spans of all ranks on one clock, and what belongs together.

    Args:
        ranks: of which a file is here.
        world: how many ranks the run had; if no file says it, as many as are mentioned.
        pairs: which calls are one collective or message.
        windows: when each rank was recorded; a profiler that repeats has several.
        gpu_s: rank → seconds from the first work of its GPU to the last; ranks without a GPU miss.
        idle_s: rank → what stands before the gaps between → seconds.
        not_recorded: rank → how many kernels it launched that its file has not, if these are most.
        without_groups: whether no file names a process group.
        is_world_told: whether a file says how many ranks there were.
    """

    ranks: tuple[int, ...] = ()
    world: int = 0
    pairs: Pairs = field(default_factory=Pairs)
    windows: Mapping[int, Times] = field(default_factory=dict)
    gpu_s: dict[int, float] = field(default_factory=dict)
    idle_s: dict[int, dict[str, float]] = field(default_factory=dict)
    not_recorded: dict[int, int] = field(default_factory=dict)
    without_groups: bool = False
    is_world_told: bool = True

    @cached_property
    def of_rank(self) -> Mapping[int, Trace]:
        """Rank → its events and spans."""
        found = {rank: Trace() for rank in self.ranks}
        for event in self.events:
            found[event.rank].events.append(event)
        for span in self.spans:
            found[span.rank].spans.append(span)
        return found

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks of the run of which no file is here."""
        return tuple(rank for rank in range(self.world) if rank not in self.ranks)


def read_traces(paths: Iterable[str | PathLike[str]]) -> Recording:
    """One recording from the files of several ranks, `.json` or `.json.gz`; its zero is the first event.

    Files of torch.profiler have one rank each, in any order; several of a rank are its cycles. The file of
    `lib.train --profile`, or of `Trace.save`, has all ranks. The label of a communication is its kind and dtype; of a
    computation, the name of its operator or kernel. `wire_bytes` are for an ideal ring. Bytes are 0 where a trace does
    not have them.

    Raises:
        TraceError: a file is no trace, or does not say its rank, or two are of one rank and the same time.
    """
    contents = [(path, read_json(path)) for path in paths]
    if len(contents) == 1 and is_ours(contents[0][1]):
        calls, spans = read_ours(contents[0][1])
        windows = {rank: _window([*calls[rank], *spans[rank]]) for rank in calls}
        return _recording(calls, spans, windows, pair_calls(calls, dict.fromkeys(calls, "one machine")))
    return _of_profiler(with_ranks([read_file(path, data) for path, data in contents]))


def _of_profiler(files: Sequence[File]) -> Recording:
    files = sorted(files, key=lambda file: (file.rank, file.window))
    zero_ns = min((file.window[0] for file in files if file.events), default=0)
    calls: dict[int, list[RecordedCall]] = {file.rank: [] for file in files}
    spans: dict[int, list[Span]] = {file.rank: [] for file in files}
    windows: dict[int, Times] = {file.rank: [] for file in files}
    for file in files:
        its_calls, its_spans = list(calls_of(file, zero_ns)), list(spans_of(file, zero_ns))
        windows[file.rank] += _window([*its_calls, *its_spans])
        calls[file.rank] += its_calls
        spans[file.rank] += its_spans
    firsts = {file.rank: file for file in reversed(files)}  # of several of a rank, any names its groups
    calls = with_groups([*firsts.values()], calls)
    pairs = pair_calls(calls, {rank: file.host for rank, file in sorted(firsts.items())})
    found = _recording(calls, spans, windows, pairs)
    found.world = max(file.least_world for file in files)
    found.is_world_told = any(file.world for file in files)
    found.without_groups = not any(file.groups for file in files)
    for file in files:
        found.not_recorded[file.rank] = found.not_recorded.get(file.rank, 0) + not_recorded(file)
        whole_s, gaps_s = idle_s(file)
        if whole_s:
            found.gpu_s[file.rank] = found.gpu_s.get(file.rank, 0.0) + whole_s
            of_rank = found.idle_s.setdefault(file.rank, {})
            for cause, s in gaps_s.items():
                of_rank[cause] = of_rank.get(cause, 0.0) + s
    return found


def _recording(
    calls: Mapping[int, Sequence[RecordedCall]],
    spans: Mapping[int, Sequence[Span]],
    windows: Mapping[int, Times],
    pairs: Pairs,
) -> Recording:
    """All ranks on the clock of the first, with the first event at zero."""
    ahead_s = {rank: pairs.ahead_s.get(rank, 0.0) for rank in calls}
    zero_s = min((times[0][0] - ahead_s[rank] for rank, times in windows.items() if times), default=0.0)
    later_s = {rank: zero_s + s for rank, s in ahead_s.items()}
    return Recording(
        sorted((moved(x, later_s[rank]) for rank, its in calls.items() for x in its), key=_by_time),
        sorted((_moved_span(x, later_s[rank]) for rank, its in spans.items() for x in its), key=_by_time),
        tuple(sorted(calls)),
        len(calls),
        Pairs(
            [[moved(call, zero_s) for call in some] for some in pairs.together],
            [(moved(send, zero_s), moved(receive, zero_s)) for send, receive in pairs.messages],
            pairs.ahead_s,
            pairs.without,
        ),
        {
            rank: [(start_s - later_s[rank], end_s - later_s[rank]) for start_s, end_s in times]
            for rank, times in windows.items()
        },
    )


def _window(items: Sequence[CommEvent | Span]) -> Times:
    return [(min(x.start_s for x in items), max(x.end_s for x in items))] if items else []


def _by_time(item: CommEvent | Span) -> tuple[float, int]:
    return item.start_s, item.rank


def _moved_span(span: Span, later_s: float) -> Span:
    return Span(span.rank, span.kind, span.label, span.start_s - later_s, span.end_s - later_s)


# ---- what follows from it --------------------------------------------------------------------------------------------


def matched(trace: Recording) -> list[list[CommEvent]]:
    """The calls of each collective, one of each rank of its group that is there."""
    return trace.pairs.together


def waits(trace: Recording) -> list[RankWait]:
    """From the start of a call to its start on the last rank, while both are in it.

    A collective lasts on each rank until the last rank starts it: until then it is a wait, then a transfer. A receive
    waits for its send, and a large send for its receive.
    """
    found = []
    for calls in [*trace.pairs.together, *trace.pairs.messages]:
        last = max(calls, key=lambda call: call.start_s)
        for call in calls:
            if call.start_s + LEAST_S < last.start_s < call.end_s:
                found.append(RankWait(call.rank, last.rank, call.start_s, last.start_s))
    return found


def waits_s(trace: Recording) -> dict[tuple[int, int], float]:
    """(rank, last) → seconds in which a rank waits for the one that starts last, and computes nothing meanwhile."""
    computes = {rank: union((x.start_s, x.end_s) for x in of.spans) for rank, of in trace.of_rank.items()}
    of_pairs: dict[tuple[int, int], Times] = {}
    for wait in waits(trace):
        of_pairs.setdefault((wait.rank, wait.last), []).append((wait.start_s, wait.end_s))
    seconds = {}
    for (rank, last), times in of_pairs.items():
        some = union(times)
        hidden_s = sum(length(within(computes[rank], start_s, end_s)) for start_s, end_s in some)
        seconds[rank, last] = length(some) - hidden_s
    return seconds


def exposed_s(trace: Recording) -> dict[int, tuple[float, float, float]]:
    """Rank → seconds of computation, of communication, and of communication while nothing computes."""
    seconds = {}
    for rank, of in trace.of_rank.items():
        compute, comm = ([(x.start_s, x.end_s) for x in items] for items in (of.spans, of.events))
        compute_s, comm_s, any_s = (length(union(times)) for times in (compute, comm, compute + comm))
        if compute or comm:
            seconds[rank] = compute_s, comm_s, any_s - compute_s
    return seconds


def length_s(trace: Recording) -> float:
    """Seconds in which some rank was recorded: between the cycles of a profiler there is nothing."""
    return length(union(one for times in trace.windows.values() for one in times))
