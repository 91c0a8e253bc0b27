"""The links between ranks and the speed of each, measured, and those that are slower than their likes.

The problem: one bad cable, or one throttled processor, slows all ranks, and no rank sees which. And where other
programs run, any message may take ten times as long as usual.
The idea: measure every pair alone, in rounds, so that a disturbance spreads over all. A link is slow if even its good
rounds are slow beside the middle of its likes, those within a host or those between hosts. If most links of a rank are
slow, it is the rank. A finding counts if a second measurement has it, too.

    one round:  each axis      an all-reduce of 1 MiB
                all ranks      the same matmuls at the same time
                for each pair  a ⇄ b  8 bytes (what its clock shows), then 1 MiB each way
"""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median, median_low, quantiles

import torch
import torch.distributed as dist
from torch import Tensor

from lib import comm
from lib.doctor.settings import Finding
from lib.launch import device, done_s
from lib.mesh import Group, Mesh, MeshShape
from lib.torchrun.meeting import Member

ROUNDS, LEAST_ROUNDS, BUDGET_S = 12, 4, 6.0  # of a measurement; no further round begins after the budget
MOST_PAIRS = 120  # of more, those are measured that are neighbours on an axis
SLOW = {"latency": 4.0, "transfer": 2.0, "compute": 1.5}  # times as slow as their likes
MOST_OF_ITS_LINKS = 0.7  # of so many: the rank is slow
MATMULS = 5  # of a round
LEAST_CLOCK_S = 0.1  # NTP keeps clocks within milliseconds


@dataclass
class Measurement:
    """The seconds of each round, of all ranks.

    Args:
        seconds: by what was measured: ("latency", a, b), a < b: one way of 8 bytes; ("transfer", a, b): of `size` bytes
            from a to b; ("compute", rank): of its matmuls; ("all_reduce", axis, ranks): of `size` bytes.
        ahead_s: rank → by how much its clock is ahead of that of rank 0.
        size: bytes of a large message.
    """

    seconds: dict[tuple, list[float]]
    ahead_s: dict[int, float]
    size: int

    def of(self, kind: str) -> dict[tuple, list[float]]:
        """The seconds of one kind; the keys are what follows the kind."""
        return {key[1:]: values for key, values in self.seconds.items() if key[0] == kind}

    def good(self, kind: str) -> dict[tuple, float]:
        """The lower quartile of each: the seconds of a round that nothing disturbs."""
        return {key: quantiles(values, n=4)[0] for key, values in self.of(kind).items()}

    def judge(self, members: Sequence[Member]) -> list[Finding]:
        """Links, ranks and clocks that look wrong."""
        bad, on = {}, [member.machine for member in members]  # `bad`: set of two ranks → why
        for kind, what in (("transfer", f"{self.size >> 20} MiB"), ("latency", "8 bytes")):
            for within, where in ((True, "within a host"), (False, "between hosts")):
                likes = {(a, b): s for (a, b), s in self.of(kind).items() if (on[a] == on[b]) is within}
                for (a, b), why in outliers(likes, SLOW[kind]).items():
                    bad.setdefault(frozenset((a, b)), f"a message of {what} from {a} to {b} takes {why} {where}")
        slow = {r: f"its matmuls take {why}" for (r,), why in outliers(self.of("compute"), SLOW["compute"]).items()}
        for rank in range(len(members)):
            its, ill = (sum(rank in pair for pair in some) for some in (self.of("latency"), bad))
            if its > 1 and ill >= MOST_OF_ITS_LINKS * its:
                slow.setdefault(rank, f"{ill} of its {its} links are; {next(bad[p] for p in bad if rank in p)}")
        findings = [Finding("slow", (r,), f"rank {r} on {members[r].host} is slow: {why}") for r, why in slow.items()]
        for (a, b), why in ((sorted(pair), why) for pair, why in bad.items() if not slow.keys() & pair):
            findings.append(Finding("link", (a, b), f"the link of ranks {a} and {b} is slow: {why}"))
        text = "the clock of rank {} differs by {:+.2f} s from the clock of rank 0: start NTP on its host"
        far = {rank: by_s for rank, by_s in self.ahead_s.items() if abs(by_s) > LEAST_CLOCK_S}
        return findings + [Finding("clock", (rank,), text.format(rank, by_s)) for rank, by_s in far.items()]


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
    dist.all_gather_object(every := [mine] * world.size, mine)
    seconds: dict[tuple, list[float]] = {}
    for key, values in (item for of_rank, _ in every for item in of_rank.items()):
        seconds[key] = [*map(max, seconds.get(key, values), values)]  # a group is done when its last rank is
    return Measurement(seconds, every[0][1], bench.large.nbytes)


class _Bench:
    """What a rank measures; `clocks`: on rank 0, (seconds there and back, how far it is ahead) of each other rank."""

    def __init__(self, world: Group, shape: MeshShape) -> None:
        mesh, cuda = Mesh(shape, world), device().type == "cuda"
        self.world, self.pairs = world, _pairs(shape)
        self.groups = [mesh.group(axis) for axis, n in shape.sizes.items() if n > 1]
        self.large = torch.zeros((64 if cuda else 1) * 2**18, device=device())
        self.matrix = torch.ones(*[4096 if cuda else 256] * 2, device=device())
        self.seconds, self.clocks = defaultdict(list), defaultdict(list)

    def round(self) -> dict[tuple, float]:
        """Measure each link, rank and axis once: the seconds that this rank saw."""
        seen, me = {}, self.world.rank
        for group in self.groups:
            comm.barrier(self.world)
            began_s = done_s()
            comm.all_reduce(self.large, group)
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
        me, peer = self.world.rank, b if self.world.rank == a else a
        there_and_back = [self._ask(peer, me == a, _clock()) for _ in range(3)]
        if me == a:
            seen["latency", a, b] = min(there_and_back)[0] / 2
        if me == 0:
            self.clocks[b] += there_and_back
        for sender in (a, b):
            seconds, _ = self._ask(peer, me == sender, self.large)
            if me == sender:
                seen["transfer", me, peer] = seconds

    def _ask(self, peer: int, asks: bool, x: Tensor) -> tuple[float, float]:
        """Send `x`, receive the time on the peer's clock: seconds, and how far it is ahead. Or answer the peer."""
        began_s, mine_s = done_s(), time.time()
        if not asks:
            comm.recv(x, self.world, peer).wait()
            comm.send(_clock(), self.world, peer).wait()
            return 0.0, 0.0
        comm.send(x, self.world, peer).wait()
        theirs_s = comm.recv(_clock(), self.world, peer).wait().item()
        seconds = done_s() - began_s
        return seconds, theirs_s - mine_s - seconds / 2


def _clock() -> Tensor:
    """What the clock of this host shows, as a message of 8 bytes."""
    return torch.tensor([time.time()], dtype=torch.float64, device=device())


def examine(world: Group, shape: MeshShape, members: Sequence[Member]) -> tuple[Measurement, list[Finding]]:
    """Measure, and again if something looks wrong; all ranks call this, and return the same findings."""
    first = measure(world, shape)
    if not (findings := first.judge(members)):
        return first, []
    again, seen = measure(world, shape), {(finding.kind, finding.ranks) for finding in findings}
    return again, [finding for finding in again.judge(members) if (finding.kind, finding.ranks) in seen]


def _pairs(shape: MeshShape) -> list[tuple[int, int]]:
    """The pairs of ranks to measure: all; of too many, the neighbours along each axis, between which rings send."""
    if len(every := [*combinations(range(shape.size), 2)]) <= MOST_PAIRS:
        return every
    rings = [ranks for axis in shape.axes for ranks in shape.groups(axis) if len(ranks) > 1]
    return sorted({(min(pair), max(pair)) for ranks in rings for pair in pairwise((*ranks, ranks[0]))})


def outliers(seconds: Mapping[tuple, Sequence[float]], factor: float) -> dict[tuple, str]:
    """Those whose lower quartile is above `factor` times the middle of the others; how slow they are, in words."""
    middles, slow = {key: median(values) for key, values in seconds.items()}, {}
    for key, values in seconds.items():
        others = [middle for other, middle in middles.items() if other != key]
        if len(others) > 1 and quantiles(values, n=4)[0] > factor * median_low(others):
            slow[key] = f"{middles[key] * 1e3:.3g} ms, and {median_low(others) * 1e3:.3g} ms elsewhere"
    return slow
