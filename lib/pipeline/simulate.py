"""Simulate when each action of a schedule runs, from the time of each.

A rank runs its actions in order, one at a time, each as early as possible. A forward needs the output of the previous
stage, a backward the gradient from the next stage and its own forward, a weight gradient its own I. Messages between
ranks take time. O(number of actions): 64 ranks with 1024 microbatches, 131,072 actions, take less than 1 s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from lib.pipeline.schedules.action import COMPUTE, SENDS, Action, Fault, Op, Schedule, ScheduleError

FREED_BY = (Op.B, Op.W)  # activations are kept until the full backward is done


@dataclass(frozen=True)
class Costs:
    """Times of actions, in any unit: one number for all stages, or one per stage. Fractions stay exact.

    Args:
        F, I, W: time per stage and microbatch; a full backward takes I + W.
        latency: time until a message arrives.
        transfer: time for which a message occupies the link between two ranks; the next message waits.
        reduce: time for which the sum of gradients of a stage occupies the link to its replicas.

    Raises:
        ValueError: a compute time that is not above 0, or a message time below 0.
    """

    F: float | Sequence[float] = 1.0
    I: float | Sequence[float] = 1.0  # noqa: E741
    W: float | Sequence[float] = 1.0
    latency: float = 0
    transfer: float = 0
    reduce: float | Sequence[float] = 0

    @classmethod
    def of(cls, forward: float | Sequence[float], backward: float | Sequence[float], latency: float = 0) -> Costs:
        """Of schedules whose backward is one piece, so that only the sum I + W matters: both halves take equally long.

        Args:
            forward, backward: time per stage and microbatch; one number, or one per stage.
            latency: time until a message arrives.
        """
        half = [each / 2 for each in backward] if isinstance(backward, Sequence) else backward / 2
        return cls(forward, half, half, latency)

    def __post_init__(self) -> None:
        for name in ("F", "I", "W", "latency", "transfer", "reduce"):
            value = getattr(self, name)
            least = min(value) if isinstance(value, Sequence) else value
            if name in COMPUTE and least <= 0:
                raise ValueError(f"{name}={value} must be above 0: the order of messages follows from the times")
            if least < 0:
                raise ValueError(f"{name}={value} must not be below 0")

    def of_stages(self, num_stages: int) -> dict[Op, list[float]]:
        """Times of each op, per stage. Raises ValueError if there are more or fewer than stages."""
        each = {}
        for op, name in ((Op.F, "F"), (Op.I, "I"), (Op.W, "W"), (Op.REDUCE, "reduce")):
            value = getattr(self, name)
            if isinstance(value, Sequence) and len(value) != num_stages:
                raise ValueError(f"{name} has {len(value)} numbers for {num_stages} stages")
            each[op] = list(value) if isinstance(value, Sequence) else [value] * num_stages
        return each | {Op.B: [i + w for i, w in zip(each[Op.I], each[Op.W], strict=True)]}


class Slot(NamedTuple):
    """An action with its start and end."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The times of a schedule, simulated or measured."""

    schedule: Schedule
    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, schedule: Schedule, slots: Iterable[Slot]) -> Timeline:
        """From slots in any order."""
        return cls(schedule, tuple(sorted(slots, key=lambda slot: (slot.start, slot.rank))))

    @cached_property
    def compute(self) -> tuple[Slot, ...]:
        """The compute actions, without messages."""
        return tuple(slot for slot in self.slots if slot.action.op in COMPUTE)

    @cached_property
    def makespan(self) -> float:
        """Time from the start of the first action to the end of the last."""
        return max(slot.end for slot in self.slots) - min(slot.start for slot in self.slots)

    def idle(self, rank: int) -> float:
        return self.makespan - sum(slot.end - slot.start for slot in self.compute if slot.rank == rank)

    def pauses(self, rank: int) -> list[tuple[float, Slot]]:
        """Each wait of a rank between two of its actions: its start, and the slot of the action that ends it."""
        mine = [slot for slot in self.compute if slot.rank == rank]
        return [(one.end, then) for one, then in pairwise(mine) if then.start > one.end]

    @property
    def bubble(self) -> float:
        """The idle fraction of the time of all ranks."""
        ranks = self.schedule.num_ranks
        return sum(map(self.idle, range(ranks))) / (ranks * self.makespan)

    def alive(
        self, rank: int, freed_by: Iterable[Op] = FREED_BY, kept: Sequence[float] | None = None
    ) -> list[tuple[float, float]]:
        """(time, amount that the rank keeps from then on): per microbatch and stage, from F until one of `freed_by`.

        Args:
            kept: amount that a microbatch keeps in each stage, such as bytes. Default: 1, which counts microbatches.
        """
        freed_by, steps = tuple(freed_by), []
        kept = kept or [1] * self.schedule.num_stages
        for slot in self.compute:
            if slot.rank == rank and slot.action.op == Op.F:
                steps.append((slot.start, kept[slot.action.stage]))
            elif slot.rank == rank and slot.action.op in freed_by:
                steps.append((slot.end, -kept[slot.action.stage]))
        steps.sort()  # at equal times, ends before starts
        counts = accumulate(step for _, step in steps)
        return [(time, count) for (time, _), count in zip(steps, counts, strict=True)]

    def peak(self, rank: int, freed_by: Iterable[Op] = FREED_BY, kept: Sequence[float] | None = None) -> float:
        """The maximum that the rank keeps; arguments as for `alive`."""
        return max((count for _, count in self.alive(rank, freed_by, kept)), default=0)


# What actions need and make, each per stage and microbatch.
IN, BACK, FORWARD, BACKWARD = range(4)  # input; output gradient; forward of this stage is done; backward is done
NEEDS = {Op.F: [IN], Op.B: [FORWARD, BACK], Op.I: [FORWARD, BACK], Op.W: [BACKWARD]}
NEEDS |= {Op.SEND_F: [FORWARD], Op.SEND_B: [BACKWARD], Op.RECV_F: [], Op.RECV_B: []}  # the compute action waits
MAKES = {Op.F: [(0, FORWARD), (1, IN)], Op.SEND_F: [(1, IN)]}  # stage offset, result
MAKES |= {Op.B: [(0, BACKWARD), (-1, BACK)], Op.I: [(0, BACKWARD), (-1, BACK)], Op.SEND_B: [(-1, BACK)]}


class Wait(NamedTuple):
    """The position of a rank in its row, and the action that it waits for: one of `ops` of a stage and microbatch."""

    place: int
    stage: int
    ops: tuple[Op, ...]
    microbatch: int


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Simulate a schedule. Messages start at their action, or after the action that makes them if it has no messages.

    Raises:
        ScheduleError: ranks wait for each other, or for an action that is missing.
    """
    costs = costs or Costs()
    takes, rank_of = costs.of_stages(schedule.num_stages), schedule.rank_of
    sends_itself = not schedule.is_lowered
    batch, stages = range(schedule.num_microbatches), range(schedule.num_stages)
    # Time since which each input exists: by kind, stage and microbatch. Lists, because a dict of 400,000 tuples takes
    # twice the time.
    there: list[list[list[float | None]]] = [[[None for _ in batch] for _ in stages] for _ in range(4)]
    there[IN][0], there[BACK][-1] = [0 for _ in batch], [0 for _ in batch]
    link_free: dict[tuple[int, int], float] = defaultdict(int)
    clock, place = [0] * schedule.num_ranks, [0] * schedule.num_ranks
    reduced = [0] * schedule.num_ranks  # when the link to the replicas is free
    waiting: dict[tuple[int, int, int], int] = {}  # (stage, kind, microbatch) → the rank that waits for it
    slots: list[Slot] = []
    awake = list(range(schedule.num_ranks))

    def hand_on(to: int, what: int, m: int, src: int, time: float) -> None:
        dst = rank_of[to]
        if src != dst:
            time = link_free[src, dst] = max(time, link_free[src, dst]) + costs.transfer
            time += costs.latency
        there[what][to][m] = time
        if (to, what, m) in waiting:
            awake.append(waiting.pop((to, what, m)))

    def runs(rank: int, action: Action) -> bool:
        """Run the action if all its inputs exist; return whether it ran."""
        stage, op, m = action
        start = clock[rank]
        if op == Op.REDUCE:  # runs in parallel to the next actions of the rank
            begin = max(start, reduced[rank])
            reduced[rank] = begin + takes[op][stage]
            slots.append(Slot(rank, action, begin, reduced[rank]))
            return True
        for what in NEEDS[op]:
            since = there[what][stage][m]
            if since is None:
                waiting[stage, what, m] = rank
                return False
            if since > start:
                start = since
        clock[rank] = end = start + (takes[op][stage] if op in takes else 0)
        slots.append(Slot(rank, action, start, end))
        for step, what in MAKES.get(op, ()):
            to = stage + step
            if to in stages and (sends_itself or op in SENDS or rank_of[to] == rank):
                hand_on(to, what, m, rank, end)
        return True

    while awake:
        rank = awake.pop()
        row = schedule.actions[rank]
        while place[rank] < len(row) and runs(rank, row[place[rank]]):
            place[rank] += 1
    if waiting:
        waits = {}
        for (stage, result, m), rank in waiting.items():
            makers = [(op, step) for op, made in MAKES.items() for step, what in made if what == result]
            waits[rank] = Wait(place[rank], stage - makers[0][1], tuple(op for op, _ in makers), m)
        raise stuck(schedule, waits)
    return Timeline.of(schedule, slots)


def stuck(schedule: Schedule, waits: dict[int, Wait]) -> ScheduleError:
    """The error: which rank waits for which action, along the cycle if there is one, and the grid."""
    rank, path = next(iter(waits)), []
    while rank in waits and rank not in path:
        path.append(rank)
        rank = schedule.rank_of[waits[rank].stage]
    cycle = path[path.index(rank) :] if rank in path else path[-1:]
    lines = []
    for rank in cycle:
        place, stage, ops, microbatch = waits[rank]
        row = schedule.actions[schedule.rank_of[stage]]
        made_by = [a for a in row if a.stage == stage and a.op in ops and a.microbatch == microbatch]
        what = f"{made_by[-1] if made_by else f'{stage}{ops[0]}{microbatch}'}, which "
        what += f"rank {schedule.rank_of[stage]} does later" if made_by else "no rank does"
        lines.append(f"  rank {rank} at {schedule.actions[rank][place]} waits for {what}")
    at = tuple(schedule.actions[rank][waits[rank].place] for rank in cycle)
    several = len(cycle) > 1
    first = "ranks wait for each other" if several else f"rank {cycle[0]} waits forever"
    said = "\n".join([f"{schedule.name}: {first}", *lines, schedule.grid(at[0])])
    whom = {rank: schedule.rank_of[waits[rank].stage] for rank in cycle}
    return ScheduleError(said, Fault.CIRCLE if several else Fault.ENDLESS, at, whom)
