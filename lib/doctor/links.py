"""The links between ranks and the speed of each, measured.

The problem: where other programs run, any message may take ten times as long as usual.
The idea: measure every pair alone, in rounds, so that a disturbance spreads over all. What looks wrong is said by
`measurement.py` (beside its likes), `ranks.py` (products of some seconds) and `plausible.py` (beside what it should
be). A finding counts if a second measurement has it, too.

    one round:  each axis      an all-reduce of 1 MiB
                all ranks      the same matmuls at the same time
                for each pair  a ⇄ b  8 bytes (what its clock shows), then 1 MiB each way
"""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import torch
from torch import Tensor

from lib import comm
from lib.doctor.expected import Expected
from lib.doctor.judgement import Judgement
from lib.doctor.measurement import Measurement, outliers  # noqa: F401 callers find both here
from lib.doctor.plausible import judge_collectives, judge_links
from lib.doctor.products import multiply_in_turns
from lib.doctor.ranks import judge_ranks
from lib.doctor.transport import Transport, transport_of_gloo, transport_of_nccl
from lib.launch import device, done_s
from lib.mesh import Group, Mesh, MeshShape
from lib.torchrun.meeting import Member

ROUNDS, LEAST_ROUNDS, BUDGET_S = 12, 4, 6.0  # of a measurement; no further round begins after the budget
MOST_PAIRS = 120  # of more, those are measured that are neighbours on an axis
MATMULS = 5  # of a round


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
    every = comm.all_gather_object(mine, world)
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


def examine(
    world: Group, shape: MeshShape, members: Sequence[Member], expected: Expected, nccl_log: Path | None
) -> tuple[Measurement, dict[int, Transport], Judgement]:
    """Measure, and again if something looks wrong; all ranks call this, and return the same."""
    first = replace(measure(world, shape), ran=multiply_in_turns(world))
    mine = transport_of_nccl(nccl_log) if device().type == "cuda" else transport_of_gloo()
    transports = dict(enumerate(comm.all_gather_object(mine, world)))
    judgement = _judged(first, members, transports, expected)
    if not judgement.findings:
        return first, transports, judgement
    again = replace(measure(world, shape), ran=multiply_in_turns(world))
    return again, transports, judgement.confirmed_by(_judged(again, members, transports, expected))


def _judged(
    measured: Measurement, members: Sequence[Member], transports: Mapping[int, Transport], expected: Expected
) -> Judgement:
    """All judgements of one measurement."""
    judgement = judge_ranks(measured.ran, members, expected)
    judgement.add(Judgement(measured.judge(members)))
    judgement.add(judge_links(measured, members, transports, expected))
    judgement.add(judge_collectives(measured))
    return judgement


def _pairs(shape: MeshShape) -> list[tuple[int, int]]:
    """The pairs of ranks to measure: all; of too many, the neighbours along each axis, between which rings send."""
    if len(every := [*combinations(range(shape.size), 2)]) <= MOST_PAIRS:
        return every
    rings = [ranks for axis in shape.axes for ranks in shape.groups(axis) if len(ranks) > 1]
    return sorted({(min(pair), max(pair)) for ranks in rings for pair in pairwise((*ranks, ranks[0]))})
