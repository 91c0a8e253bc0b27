"""When does each action run, if each takes its time? Simulated, before anything is run.

Rules: a rank does its actions in order, one at a time, each as early as it can. A forward needs the output of the stage
before, a backward the gradient from the stage behind and its own forward, a weight gradient its own I. What comes from
another rank has travelled. From that follows everything that people want to know of a schedule: how long a step takes,
who waits when, and how many microbatches a rank has to keep.

Pure Python and O(number of actions): 64 ranks with 1024 microbatches, 131,072 actions, take less than a second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lib.pipeline.schedules.action import COMPUTE, SENDS, Action, Op, Schedule
from lib.pipeline.schedules.fault import Fault, ScheduleError

FREED_BY = (Op.B, Op.W)  # activations are kept until the whole backward is done


@dataclass(frozen=True)
class Costs:
    """How long things take, in any unit: the same for all stages, or one number for each. Fractions stay exact.

    Args:
        F, I, W: of a stage and microbatch; a whole backward takes I + W.
        latency: until a message that was sent arrives.
        transfer: for so long a message has the link between two ranks for itself; the next one waits.
        reduce: for so long a sum of a stage's gradients has the link to its replicas for itself.

    Raises:
        ValueError: a time of compute that is not above 0, or one of a message below 0.
    """

    F: float | Sequence[float] = 1.0
    I: float | Sequence[float] = 1.0  # noqa: E741
    W: float | Sequence[float] = 1.0
    latency: float = 0
    transfer: float = 0
    reduce: float | Sequence[float] = 0

    def __post_init__(self) -> None:
        for name in ("F", "I", "W"):
            value = getattr(self, name)
            if min(value if isinstance(value, Sequence) else [value]) <= 0:
                raise ValueError(f"{name}={value} must be above 0: the order of messages follows from the times")
        slowest = min(self.reduce) if isinstance(self.reduce, Sequence) else self.reduce
        if self.latency < 0 or self.transfer < 0 or slowest < 0:
            raise ValueError(
                f"latency={self.latency}, transfer={self.transfer} and reduce={self.reduce} must not be below 0"
            )

    def of_stages(self, num_stages: int) -> dict[Op, list[float]]:
        """The times of each op in each stage.

        Raises:
            ValueError: as many numbers as there are no stages.
        """
        each = {}
        for op, name in ((Op.F, "F"), (Op.I, "I"), (Op.W, "W"), (Op.REDUCE, "reduce")):
            value = getattr(self, name)
            if isinstance(value, Sequence) and len(value) != num_stages:
                raise ValueError(f"{name} has {len(value)} numbers for {num_stages} stages")
            each[op] = list(value) if isinstance(value, Sequence) else [value] * num_stages
        return each | {Op.B: [i + w for i, w in zip(each[Op.I], each[Op.W], strict=True)]}


class Slot(NamedTuple):
    """An action and when it ran."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule in time, simulated or measured."""

    schedule: Schedule
    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, schedule: Schedule, slots: Iterable[Slot]) -> Timeline:
        """Of slots in any order."""
        return cls(schedule, tuple(sorted(slots, key=lambda slot: (slot.start, slot.rank))))

    @cached_property
    def compute(self) -> tuple[Slot, ...]:
        """Without messages."""
        return tuple(slot for slot in self.slots if slot.action.op in COMPUTE)

    @cached_property
    def makespan(self) -> float:
        """From the beginning of the first action to the end of the last."""
        return max(slot.end for slot in self.slots) - min(slot.start for slot in self.slots)

    def idle(self, rank: int) -> float:
        """How long the rank did not compute."""
        return self.makespan - sum(slot.end - slot.start for slot in self.compute if slot.rank == rank)

    @property
    def bubble(self) -> float:
        """The part of all ranks' time in which they did not compute."""
        ranks = self.schedule.num_ranks
        return sum(map(self.idle, range(ranks))) / (ranks * self.makespan)

    def alive(
        self, rank: int, freed_by: Iterable[Op] = FREED_BY, kept: Sequence[float] | None = None
    ) -> list[tuple[float, float]]:
        """(time, what the rank keeps from then on): of each microbatch and stage, from F until one of `freed_by`.

        Args:
            kept: what a microbatch leaves in each stage: its bytes, say. Default: 1, so that microbatches are counted.
        """
        freed_by, steps = tuple(freed_by), []
        kept = kept or [1] * self.schedule.num_stages
        for slot in self.compute:
            if slot.rank == rank and slot.action.op == Op.F:
                steps.append((slot.start, kept[slot.action.stage]))
            elif slot.rank == rank and slot.action.op in freed_by:
                steps.append((slot.end, -kept[slot.action.stage]))
        steps.sort()  # at one moment, what ends before what begins
        curve, count = [], 0
        for time, step in steps:
            count += step
            curve.append((time, count))
        return curve

    def peak(self, rank: int, freed_by: Iterable[Op] = FREED_BY, kept: Sequence[float] | None = None) -> float:
        """The most that the rank keeps at a time; arguments as for `alive`."""
        return max((count for _, count in self.alive(rank, freed_by, kept)), default=0)


# What an action needs and gives, each of a stage and a microbatch.
IN, BACK, FORWARD, BACKWARD = range(4)  # input; gradient of the output; this stage's forward is done, its backward is
NEEDS = {Op.F: [IN], Op.B: [FORWARD, BACK], Op.I: [FORWARD, BACK], Op.W: [BACKWARD]}
NEEDS |= {Op.SEND_F: [FORWARD], Op.SEND_B: [BACKWARD], Op.RECV_F: [], Op.RECV_B: []}  # who computes with it waits
NEEDS |= {Op.REDUCE: []}  # it stands behind what it needs
DONE = {Op.F: FORWARD, Op.B: BACKWARD, Op.I: BACKWARD}
GIVES = {Op.F: (1, IN), Op.SEND_F: (1, IN)} | dict.fromkeys((Op.B, Op.I, Op.SEND_B), (-1, BACK))  # to which stage
Key = tuple[int, int, int]  # stage, one of the four, microbatch


class Wait(NamedTuple):
    """Where in its row a rank stands, and what it waits for: one of `ops` of a stage and microbatch."""

    place: int
    stage: int
    ops: tuple[Op, ...]
    microbatch: int


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """The schedule in time. Messages leave where they stand in it, or behind what they carry if they are not in it yet.

    Raises:
        ScheduleError: ranks wait for each other, or for something that nobody does.
    """
    costs = costs or Costs()
    takes, rank_of = costs.of_stages(schedule.num_stages), schedule.rank_of
    sends_itself = not schedule.is_lowered
    batch, stages = range(schedule.num_microbatches), range(schedule.num_stages)
    # Since when there is what a stage needs for a microbatch: there[what][stage][microbatch]. Lists, as a dict of
    # 400,000 tuples costs twice the time.
    there: list[list[list[float | None]]] = [[[None for _ in batch] for _ in stages] for _ in range(4)]
    there[IN][0], there[BACK][-1] = [0 for _ in batch], [0 for _ in batch]
    link_free: dict[tuple[int, int], float] = defaultdict(int)
    clock, place = [0] * schedule.num_ranks, [0] * schedule.num_ranks
    reduced = [0] * schedule.num_ranks  # when the link to the replicas is free
    waiting: dict[Key, int] = {}  # the rank that waits for it
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
        """Whether all is there that the action needs; then it has run."""
        stage, op, m = action
        start = clock[rank]
        if op == Op.REDUCE:  # goes on beside what the rank does next
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
        if op in DONE:
            there[DONE[op]][stage][m] = end
        if op in GIVES:
            step, what = GIVES[op]
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
        raise stuck(schedule, {rank: _wait(place[rank], key) for key, rank in waiting.items()})
    return Timeline.of(schedule, slots)


def _wait(place: int, key: Key) -> Wait:
    """For what makes it."""
    stage, what, m = key
    if what == IN:
        return Wait(place, stage - 1, (Op.F, Op.SEND_F), m)
    if what == BACK:
        return Wait(place, stage + 1, (Op.B, Op.I, Op.SEND_B), m)
    return Wait(place, stage, (Op.F,) if what == FORWARD else (Op.B, Op.I), m)


def stuck(schedule: Schedule, waits: dict[int, Wait]) -> ScheduleError:
    """Who waits for what, around the cycle where there is one, and the grid. `waits` are the ranks that wait."""
    rank, path = next(iter(waits)), []
    while rank in waits and rank not in path:
        path.append(rank)
        rank = schedule.rank_of[waits[rank].stage]
    cycle = path[path.index(rank) :] if rank in path else path[-1:]
    lines = []
    for one in cycle:
        place, stage, ops, microbatch = waits[one]
        row = schedule.actions[schedule.rank_of[stage]]
        made_by = [a for a in row if a.stage == stage and a.op in ops and a.microbatch == microbatch]
        what = f"{made_by[-1] if made_by else f'{stage}{ops[0]}{microbatch}'}, which "
        what += f"rank {schedule.rank_of[stage]} does later" if made_by else "nobody does"
        lines.append(f"  rank {one} at {schedule.actions[one][place]} waits for {what}")
    at = tuple(schedule.actions[one][waits[one].place] for one in cycle)
    several = len(cycle) > 1
    first = "ranks wait for each other" if several else f"rank {cycle[0]} waits for ever"
    said = "\n".join([f"{schedule.name}: {first}", *lines, schedule.grid(at[0])])
    whom = {one: schedule.rank_of[waits[one].stage] for one in cycle}
    return ScheduleError(said, Fault.CIRCLE if several else Fault.ENDLESS, at, whom)
