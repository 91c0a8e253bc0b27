"""The links between ranks and the speed of each, measured, and those that are slower than their likes.

The problem: one bad cable, or one rank whose processor is throttled, slows all ranks, and no rank sees which. And a
laptop is noisy: any message may take ten times as long as usual.
The idea: every pair of ranks is measured alone, again and again, in rounds, so that a disturbance spreads over all.
A link is slow if even its good rounds are slow beside the middle of its likes: links within a host are compared with
each other, links between hosts with each other. If most links of a rank are slow, it is the rank. What is found counts
if a second measurement finds it, too.

    one round:  each axis      an all-reduce of 1 MiB
                all ranks      the same matmuls at the same time
                for each pair  a ⇄ b  16 bytes (each says what its clock shows), then 1 MiB each way
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from statistics import median, median_low, quantiles

import torch
import torch.distributed as dist
from torch import Tensor

from lib import comm
from lib.doctor.settings import Finding, judge_clocks
from lib.launch import device, done_s
from lib.mesh import Group, Mesh, MeshShape
from lib.torchrun.meeting import Member

ROUNDS, LEAST_ROUNDS, BUDGET_S = 12, 4, 6.0  # of a measurement; no further round begins after the budget
MOST_PAIRS = 120  # of more, those are measured that are neighbours on an axis
SLOW = {"latency": 4.0, "transfer": 2.0, "compute": 1.5}  # times as slow as their likes
MOST_OF_ITS_LINKS = 0.7  # of so many: the rank is slow
MATMULS = 5  # of a round

Seconds = dict[tuple, list[float]]


@dataclass
class Measurement:
    """The seconds of each round, of all ranks.

    Args:
        seconds: by what was measured: ("latency", a, b), a < b: one way of 16 bytes; ("transfer", a, b): of `size`
            bytes from a to b; ("compute", rank): of its matmuls; ("all_reduce", axis, ranks): of `size` bytes.
        ahead_s: rank → by how much its clock is ahead of that of rank 0.
        size: bytes of a large message.
    """

    seconds: Seconds
    ahead_s: dict[int, float]
    size: int

    def of(self, kind: str) -> Seconds:
        """The seconds of one kind; the keys are what follows the kind."""
        return {key[1:]: values for key, values in self.seconds.items() if key[0] == kind}

    def judge(self, members: Sequence[Member]) -> list[Finding]:
        """Links, ranks and clocks that look wrong."""
        machines, links = [one.machine for one in members], self.of("latency")
        bad: dict[tuple[int, int], str] = {}  # (sender, receiver) → why
        for kind, what in (("transfer", f"{self.size >> 20} MiB take"), ("latency", "16 bytes take")):
            for within, where in ((True, "within a host"), (False, "between hosts")):
                likes = {(a, b): s for (a, b), s in self.of(kind).items() if (machines[a] == machines[b]) is within}
                for pair, (its_s, usual_s) in outliers(likes, SLOW[kind]).items():
                    bad.setdefault(pair, f"{what} {its_s * 1e3:.3g} ms, elsewhere {where} {usual_s * 1e3:.3g} ms")
        slow = {
            rank: f"its matmuls take {its_s * 1e3:.3g} ms, those of other ranks {usual_s * 1e3:.3g} ms"
            for (rank,), (its_s, usual_s) in outliers(self.of("compute"), SLOW["compute"]).items()
        }
        for rank in range(len(members)):
            its = [{*pair} for pair in links if rank in pair]
            why = [text for pair, text in bad.items() if rank in pair]
            affected = [pair for pair in its if pair in [{*one} for one in bad]]
            if len(its) > 1 and len(affected) >= MOST_OF_ITS_LINKS * len(its):
                slow.setdefault(rank, f"{len(affected)} of its {len(its)} links are; on one, {why[0]}")
        found = [Finding("slow", (r,), f"rank {r} on {members[r].host} is slow: {why}") for r, why in slow.items()]
        for (a, b), why in bad.items():
            other_way = a > b and (b, a) in bad
            if not slow.keys() & {a, b} and not other_way:
                found.append(
                    Finding("link", (a, b), f"the link {a} {'⇄' if (b, a) in bad else '→'} {b} is slow: {why}")
                )
        return found + judge_clocks(self.ahead_s)


def measure(world: Group, shape: MeshShape) -> Measurement:
    """Measure links, ranks and axes in rounds; all ranks call it, and get the same."""
    bench, until_s = _Bench(world, shape), time.monotonic() + BUDGET_S
    for i in range(ROUNDS):
        late = torch.tensor([float(time.monotonic() > until_s)], device=device())
        if comm.broadcast(late, world).item() and i >= LEAST_ROUNDS:
            break
        for key, seconds in bench.round().items() if i else ():  # in the first, connections are made
            bench.seconds[key].append(seconds)
    mine = dict(bench.seconds), {rank: min(seen)[1] for rank, seen in bench.clocks.items()}
    every = [mine] * world.size
    if world.size > 1:
        dist.all_gather_object(every, mine)
    seconds, ahead_s = (reduce(dict.__or__, column) for column in zip(*every, strict=True))
    return Measurement(seconds, ahead_s, bench.large.nbytes)


class _Bench:
    """What a rank measures; `clocks`: on rank 0, (seconds there and back, how far it was ahead) of each other rank."""

    def __init__(self, world: Group, shape: MeshShape) -> None:
        mesh, cuda = Mesh(shape, world), device().type == "cuda"
        self.world, self.pairs = world, _pairs(shape)
        self.groups = [mesh.group(axis) for axis, n in shape.sizes.items() if n > 1]
        self.large = torch.zeros((64 if cuda else 1) * 2**18, device=device())
        self.matrix = torch.ones(*[4096 if cuda else 256] * 2, device=device())
        self.seconds, self.clocks = defaultdict(list), defaultdict(list)

    def round(self) -> dict[tuple, float]:
        """Measure everything once: what this rank has seen."""
        seen, me = {}, self.world.rank
        for group in self.groups:
            comm.barrier(self.world)
            began_s = done_s()
            comm.all_reduce(self.large, group)
            if group.rank == 0:
                seen["all_reduce", group.axis, group.ranks] = done_s() - began_s
        comm.barrier(self.world)
        began_s = done_s()
        for _ in range(MATMULS):
            self.matrix @ self.matrix
        seen["compute", me] = done_s() - began_s
        for pair in self.pairs:
            comm.barrier(self.world)
            if me in pair:
                self._measure_pair(*pair, seen)
        return seen

    def _measure_pair(self, a: int, b: int, seen: dict[tuple, float]) -> None:
        """The latency between a and b, and the links a → b and b → a, each seen by its sender."""
        me, world = self.world.rank, self.world
        peer = b if me == a else a
        there_and_back = [self._exchange(peer, me == a) for _ in range(3)]
        if me == a:
            seen["latency", a, b] = min(there_and_back)[0] / 2
        if me == 0:
            self.clocks[b] += there_and_back
        for sender in (a, b):
            began_s = done_s()
            if me == sender:
                comm.send(self.large, world, peer).wait()
                comm.recv(_stamp(), world, peer).wait()  # a send may end before its last byte arrives
                seen["transfer", me, peer] = done_s() - began_s
            else:
                comm.recv(self.large, world, peer).wait()
                comm.send(_stamp(), world, peer).wait()

    def _exchange(self, peer: int, first: bool) -> tuple[float, float]:
        """Send 16 bytes and get as many back, or the reverse: seconds, and how far the peer's clock is ahead."""
        began_s, sent = done_s(), _stamp()
        if first:
            comm.send(sent, self.world, peer).wait()
        theirs = comm.recv(sent.clone(), self.world, peer).wait()
        if not first:
            comm.send(_stamp(), self.world, peer).wait()
        seconds = done_s() - began_s
        return seconds, (theirs - sent)[0].item() - seconds / 2


def _stamp() -> Tensor:
    """What the clock of this host shows, as a message of 16 bytes."""
    return torch.tensor([time.time(), 0.0], dtype=torch.float64, device=device())


def examine(world: Group, shape: MeshShape, members: Sequence[Member]) -> tuple[Measurement, list[Finding]]:
    """Measure, and measure again what looks wrong; all ranks call it, and all return the same findings."""
    first = measure(world, shape)
    if not (found := first.judge(members)):
        return first, []
    again, seen = measure(world, shape), {(one.kind, *sorted(one.ranks)) for one in found}
    return again, [one for one in again.judge(members) if (one.kind, *sorted(one.ranks)) in seen]


def _pairs(shape: MeshShape) -> list[tuple[int, int]]:
    """The pairs of ranks to measure: all; of too many, the neighbours along each axis, between which rings send."""
    n = shape.size
    if n * (n - 1) // 2 <= MOST_PAIRS:
        return [(a, b) for a in range(n) for b in range(a + 1, n)]
    rings = [ranks for axis in shape.axes for ranks in shape.groups(axis) if len(ranks) > 1]
    return sorted({(min(pair), max(pair)) for ranks in rings for pair in pairwise((*ranks, ranks[0]))})


def outliers(seconds: Mapping[tuple, Sequence[float]], factor: float) -> dict:
    """Those whose lower quartile is above `factor` times the middle of the others → (their median, that middle)."""
    middles = {key: median(values) for key, values in seconds.items()}
    found = {}
    for key, values in seconds.items():
        others = [middle for other, middle in middles.items() if other != key]
        if len(others) > 1 and quantiles(values, n=4)[0] > factor * median_low(others):
            found[key] = middles[key], median_low(others)
    return found
