"""Which process group each call is of, in the same words on all ranks.

The problem: a file names the groups of its own rank, with names that may differ between ranks, and gloo does not say of
which group a call is. The idea: a group is its ranks, and the place among the groups with the same ranks. Where a call
does not name its group and its rank has several, ends tell: a thread of gloo serves one group, and a collective ends on
all its ranks at nearly the same time. So a thread is of that group in which its calls end together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

from lib.kineto.calls import RecordedCall
from lib.kineto.files import File
from lib.kineto.names import ONE_SIDED, PEER_TO_PEER

Ranks = tuple[int, ...]


def with_groups(files: Sequence[File], calls: Mapping[int, list[RecordedCall]]) -> dict[int, list[RecordedCall]]:
    """The calls of each rank with their group, in words that are equal on all ranks; "" if it cannot be known.

    Files of all ranks without any list of groups are taken to have one: `pair_calls` sees whether that fits.
    """
    groups = {file.rank: [each for each in file.groups.values() if len(each[1]) > 1] for file in files}
    ours = {file.rank: dict(_names(file)) for file in files}
    everyone = tuple(sorted(groups))
    is_all = everyone == tuple(range(max(file.least_world for file in files)))
    if is_all and len(everyone) > 1 and not any(file.groups for file in files):
        groups = dict.fromkeys(everyone, [("world", everyone)])
    axes = {rank: _axes(its) for rank, its in groups.items()}
    votes = _votes(calls, axes) if len({file.host for file in files}) == 1 else {}
    out = {}
    for rank, its in calls.items():
        out[rank] = []
        for call in its:
            ranks = next(iter(axes[rank])) if len(axes[rank]) == 1 else votes.get(_thread(call))
            if call.group:
                out[rank].append(replace(call, group=ours[rank][call.group]))
            elif ranks and rank in ranks:
                out[rank].append(replace(call.placed(axes[rank][ranks], ranks), group=_word(ranks, 0)))
            else:
                out[rank].append(call)
    return out


def _axes(groups: Sequence[tuple[str, Ranks]]) -> dict[Ranks, str]:
    """Ranks → the axis of the group that has them; "?" if two axes have the same ranks."""
    found: dict[Ranks, str] = {}
    for axis, ranks in groups:
        found[ranks] = axis if found.get(ranks, axis) == axis else "?"
    return found


def _names(file: File) -> Iterator[tuple[str, str]]:
    """(name in the file, the word for the group on all ranks)."""
    seen: dict[Ranks, int] = defaultdict(int)
    for name, (_, ranks) in file.groups.items():
        yield name, _word(ranks, seen[ranks])
        seen[ranks] += 1


def _word(ranks: Ranks, place: int) -> str:
    return f"{place}: {','.join(map(str, ranks))}"


def _thread(call: RecordedCall) -> tuple:
    """What serves one group: a thread of gloo; for sends and receives, which are on the thread of Python, the peer."""
    if call.kind in PEER_TO_PEER:
        return call.rank, call.kind, call.peer_in_group
    return call.rank, call.thread


def _votes(calls: Mapping[int, list[RecordedCall]], axes: Mapping[int, Mapping[Ranks, str]]) -> dict[tuple, Ranks]:
    """Thread → the ranks of its group, for the threads of ranks with several groups."""
    alike: dict[tuple, list[RecordedCall]] = defaultdict(list)  # calls that may be of one collective
    threads: dict[tuple, list[RecordedCall]] = defaultdict(list)
    for call in (call for its in calls.values() for call in its if not call.group):
        if call.kind in ONE_SIDED:
            continue  # its ends are apart
        alike[_key(call, call.rank)].append(call)
        if len(axes[call.rank]) > 1:
            threads[_thread(call)].append(call)
    found = {}
    for thread, its in threads.items():
        apart_s = {ranks: median(_apart_s(call, ranks, alike) for call in its) for ranks in axes[thread[0]]}
        best = min(apart_s, key=lambda ranks: (apart_s[ranks], len(ranks)))
        if apart_s[best] < float("inf"):
            found[thread] = best
    return found


def _key(call: RecordedCall, rank: int) -> tuple:
    """Under which a call on this rank is kept that may be the same as `call`."""
    kind = "message" if call.kind in PEER_TO_PEER else call.kind
    return rank, kind, 0 if kind == "all_to_all" else call.payload_bytes  # its ranks may send unequal numbers of rows


def _apart_s(call: RecordedCall, ranks: Ranks, alike: Mapping[tuple, list[RecordedCall]]) -> float:
    """How far the ends of a call's partners are from its own end, were it of this group; infinite without a partner."""
    if call.kind in PEER_TO_PEER:
        if call.peer_in_group is None or call.peer_in_group >= len(ranks) or call.rank not in ranks:
            return float("inf")
        others = alike.get(_key(call, ranks[call.peer_in_group]), [])
        me = ranks.index(call.rank)
        ends = [abs(x.end_s - call.end_s) for x in others if x.kind != call.kind and x.peer_in_group == me]
        return min(ends, default=float("inf"))
    worst_s = 0.0
    for rank in ranks:
        if rank != call.rank:
            its = alike.get(_key(call, rank), [])
            met = [x for x in its if x.start_s <= call.end_s and call.start_s <= x.end_s]
            worst_s = max(worst_s, min((abs(x.end_s - call.end_s) for x in met), default=float("inf")))
    return worst_s
