"""Which calls of different ranks are one collective or one message, on clocks that agree.

The problem: the k-th calls of two files are one collective only if both files begin at the same step and no event was
lost; and each host has its own clock. A wrong pair invents a wait of a whole step.
The idea: three facts decide, in this order. A call has a number (`Seq`). A collective cannot begin on a rank after its
end on a different rank. Its ends on all ranks are at nearly the same time: this aligns the clocks of hosts. What fits
nothing has no partner, and is counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from statistics import median

from lib.kineto.calls import RecordedCall
from lib.kineto.names import ONE_SIDED, PEER_TO_PEER

SLACK_S = 5e-6  # by which two stamps of one clock may differ
SLACK_OF_CLOCKS_S = 50e-6  # of two clocks that were aligned
FAR_S = 1.0  # no two clocks of one host

Calls = Mapping[int, Sequence[RecordedCall]]


@dataclass
class Pairs:
    """What belongs together.

    Args:
        together: the calls of each collective, one of each rank that is there.
        messages: (send, receive).
        ahead_s: rank → by how much its clock is ahead of that of the first rank; ranks whose clock is unknown miss.
        without: why calls were not compared → how many of each rank.
    """

    together: list[list[RecordedCall]] = field(default_factory=list)
    messages: list[tuple[RecordedCall, RecordedCall]] = field(default_factory=list)
    ahead_s: dict[int, float] = field(default_factory=dict)
    without: dict[str, dict[int, int]] = field(default_factory=dict)

    def leave(self, why: str, calls: Sequence[RecordedCall]) -> None:
        """Count calls that cannot be compared."""
        of = self.without.setdefault(why, {})
        for call in calls:
            of[call.rank] = of.get(call.rank, 0) + 1

    def compared(self) -> int:
        """How many calls have a partner."""
        return sum(map(len, self.together)) + 2 * len(self.messages)


def pair_calls(calls: Calls, hosts: Mapping[int, str]) -> Pairs:
    """Pair the calls of all ranks. Ranks of one host share a clock, unless separate clocks fit better."""
    own = {rank: f"rank {rank}" for rank in hosts}
    shared = {rank: host or own[rank] for rank, host in hosts.items()}
    found = _pair(calls, shared)
    if shared != own and found.compared() < sum(len(its) for its in calls.values()) / 2:
        found = max(found, _pair(calls, own), key=Pairs.compared)
        if far := _of_another_time(found.ahead_s, hosts):
            found = _pair({rank: its for rank, its in calls.items() if rank not in far}, own)
            found.leave("were recorded at a different time than their host", [x for rank in far for x in calls[rank]])
    return found


def _of_another_time(ahead_s: Mapping[int, float], hosts: Mapping[int, str]) -> list[int]:
    """The ranks whose clock is far from that of the first rank of their host: their file is of a different run."""
    first: dict[str, float] = {}
    for rank, host in hosts.items():
        if host and rank in ahead_s:
            first.setdefault(host, ahead_s[rank])
    return [rank for rank, s in ahead_s.items() if abs(s - first.get(hosts[rank], s)) > FAR_S]


def _pair(calls: Calls, clocks: Mapping[int, str]) -> Pairs:
    found, groups = Pairs(), _by_group(calls)
    found.ahead_s = ahead_s = _ahead_s(groups, clocks)
    for group, its in groups.items():
        its = {rank: [moved(call, ahead_s.get(rank, 0.0)) for call in some] for rank, some in its.items()}
        everything = [call for some in its.values() for call in some]
        if not group:
            found.leave("do not name their group", everything)
        elif len(its) < 2:
            found.leave("are in groups without a second file", everything)
        elif any(rank not in ahead_s for rank in its):
            found.leave("are on clocks that nothing aligns", everything)
        else:
            slack_s = SLACK_S if len({clocks[rank] for rank in its}) == 1 else SLACK_OF_CLOCKS_S
            pairs = _by_number(its) if _numbered(its) else _by_time(its, slack_s)
            pairs = [one for one in pairs if _can_be(one, slack_s)]
            found.together += pairs
            paired = {id(call) for one in pairs for call in one}
            found.leave("have no partner", [x for x in everything if id(x) not in paired])
    _messages(calls, found)
    return found


def _by_group(calls: Calls) -> dict[str, dict[int, list[RecordedCall]]]:
    """Group → rank → its collectives."""
    groups: dict[str, dict[int, list[RecordedCall]]] = defaultdict(dict)
    for rank, its in calls.items():
        for call in its:
            if call.kind not in PEER_TO_PEER:
                groups[call.group if call.kind else ""].setdefault(rank, []).append(call)
    return groups


def moved(call: RecordedCall, ahead_s: float) -> RecordedCall:
    """The call on a clock that is so much behind."""
    return replace(call, start_s=call.start_s - ahead_s, end_s=call.end_s - ahead_s)


def _numbered(its: Calls) -> bool:
    return all(call.number is not None for some in its.values() for call in some)


def _by_number(its: Calls) -> list[list[RecordedCall]]:
    """Those with the same number; of several with one number, as a coalesced call has, in their order."""
    found: dict[tuple, list[RecordedCall]] = defaultdict(list)
    for some in its.values():
        seen: dict[int, int] = defaultdict(int)
        for call in some:
            found[call.number, seen[call.number]].append(call)
            seen[call.number] += 1
    return [one for one in found.values() if len(one) == len(its)]


def _by_time(its: Calls, slack_s: float) -> Iterator[list[RecordedCall]]:
    """Those that can be one collective, in the order of each rank; a call that meets no call is passed over."""
    at, rest = dict.fromkeys(its, 0), {rank: list(some) for rank, some in its.items()}
    while all(at[rank] < len(some) for rank, some in rest.items()):
        heads = [some[at[rank]] for rank, some in rest.items()]
        alike = len({call.kind for call in heads}) == 1
        if _can_be(heads, slack_s) and (alike or _meet(heads, slack_s)):
            yield heads
            passed = heads
        else:
            passed = [min(heads, key=lambda call: call.end_s)]
        for call in passed:
            at[call.rank] += 1


def _can_be(calls: Sequence[RecordedCall], slack_s: float) -> bool:
    """Whether calls may be one collective: none begins after the end of a different one, unless only one side waits."""
    return all(call.kind in ONE_SIDED for call in calls) or _meet(calls, slack_s)


def _meet(calls: Sequence[RecordedCall], slack_s: float) -> bool:
    return max(call.start_s for call in calls) <= min(call.end_s for call in calls) + slack_s


def _ahead_s(groups: Mapping[str, Calls], clocks: Mapping[int, str]) -> dict[int, float]:
    """By how much the clock of each rank is ahead of the first's, as far as collectives of both show it."""
    apart: dict[tuple[str, str], list[float]] = defaultdict(list)
    for group, its in groups.items():
        for calls in _surely(its) if group else ():
            ends: dict[str, float] = {}
            for call in calls:
                ends[clocks[call.rank]] = max(ends.get(clocks[call.rank], call.end_s), call.end_s)
            for a, b in combinations(ends, 2):
                apart[a, b].append(ends[b] - ends[a])
                apart[b, a].append(ends[a] - ends[b])
    first = next(iter(clocks.values()), "")
    known, new = {first: 0.0}, [first]
    while new:  # from clock to clock
        here = new.pop()
        for (a, b), some in apart.items():
            if a == here and b not in known:
                known[b] = known[a] + median(some)
                new.append(b)
    return {rank: known[clock] for rank, clock in clocks.items() if clock in known}


def _surely(its: Calls) -> list[list[RecordedCall]]:
    """Pairs that no clock is needed for: by number, or in order if all ranks have the same kinds in the same order."""
    if _numbered(its):
        pairs = _by_number(its)
    elif len({tuple(call.kind for call in some) for some in its.values()}) == 1:
        pairs = [list(one) for one in zip(*its.values(), strict=True)]
    else:
        pairs = []
    return [one for one in pairs if not any(call.kind in ONE_SIDED for call in one)]


def _messages(calls: Calls, found: Pairs) -> None:
    """Pair each send with its receive: messages between two ranks keep their order."""
    channels: dict[tuple[int, int], dict[str, list[RecordedCall]]] = defaultdict(lambda: {"send": [], "recv": []})
    for rank, its in calls.items():
        for call in (moved(x, found.ahead_s.get(rank, 0.0)) for x in its if x.kind in PEER_TO_PEER):
            if len(call.peers) != 1:
                found.leave("are sends or receives that do not say their peer", [call])
            elif call.peers[0] not in calls:
                found.leave("are in groups without a second file", [call])
            elif not {rank, call.peers[0]} <= found.ahead_s.keys():
                found.leave("are on clocks that nothing aligns", [call])
            else:
                ends = (rank, call.peers[0]) if call.kind == "send" else (call.peers[0], rank)
                channels[ends][call.kind].append(call)
    for both in channels.values():
        sends, receives = both["send"], both["recv"]
        lost = abs(len(sends) - len(receives))  # on one side, before or after those that both have
        longer, shorter = (sends, receives) if len(sends) > len(receives) else (receives, sends)
        shifts = [longer[i : i + len(shorter)] for i in range(lost + 1)]
        fitting = min(shifts, key=lambda some: _apart_s(some, shorter))
        first, second = (fitting, shorter) if longer is sends else (shorter, fitting)
        pairs = [(a, b) for a, b in zip(first, second, strict=True) if _may_arrive(a, b)]
        found.messages += pairs
        paired = {id(call) for one in pairs for call in one}
        found.leave("have no partner", [x for x in sends + receives if id(x) not in paired])


def _may_arrive(send: RecordedCall, receive: RecordedCall) -> bool:
    """Whether a receive ends after its send begins; the time of gloo's send is from after it was handed over."""
    return send.of_gloo or send.start_s <= receive.end_s + SLACK_OF_CLOCKS_S


def _apart_s(some: Sequence[RecordedCall], others: Sequence[RecordedCall]) -> float:
    return sum(abs(a.end_s - b.end_s) for a, b in zip(some, others, strict=True))
