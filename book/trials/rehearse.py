"""Run a schedule on real processes with stages that sleep, to test the simulator.

Two cores cannot compute for eight processes at the same time, but eight processes can sleep. A sleeping stage takes the
time of its costs; messages, queues and waits are real.

Read before: `lib/pipeline/execute.py`, `book/trials/sleep.py`. Chapter 8.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from book.trials.sleep import SleepLayer
from lib import comm
from lib.launch import run
from lib.mesh import Group
from lib.pipeline.execute import StepResult, execute, timeline
from lib.pipeline.schedules.action import Op, Schedule
from lib.pipeline.simulate import Costs, Timeline
from lib.pipeline.stage import Stage

OPENING_S = 0.001  # the longest action of the first step, which opens the connections
FAST_BPS = 1e15  # a link with latency only
LONGER = 1, 2, 4  # units of the first try, the second and the others


def rehearse(schedule: Schedule, costs: Costs | None = None, unit_s: float = 0.03) -> Timeline:
    """Run a schedule with one process per rank; return the measured timeline, in the unit of `costs`.

    A rank sleeps for longer than it is told, on some machines by a tenth. So a unit is as long as the sleeps of one
    unit took in this run, in the mean: who waits for whom, and for how long, is measured beside the work itself.

    Args:
        costs: as for `simulate()`; with a latency or transfer, slow links are emulated.
        unit_s: seconds per unit; the shortest action should sleep ten milliseconds, much longer than it takes to wake.
    """
    costs = costs or Costs()
    seen = timeline(schedule, run(_step, schedule.num_ranks, schedule, costs, unit_s))
    takes = costs.of_stages(schedule.num_stages)
    slept_s = sum(slot.end - slot.start for slot in seen.compute)
    unit_s = slept_s / sum(takes[slot.action.op][slot.action.stage] for slot in seen.compute)
    slots = (slot._replace(start=slot.start / unit_s, end=slot.end / unit_s) for slot in seen.slots)
    return Timeline.of(schedule, slots)


class Rehearsals:
    """Measurements for `claim`, which tries again where the first is not as predicted: each try takes longer units.

    A rank wakes up as late from a long sleep as from a short one, so in longer units it counts less: on a machine that
    is slow or busy a later try agrees, and only what is wrong in every unit fails. Parameters are those of `rehearse`.
    """

    def __init__(self, schedule: Schedule, costs: Costs | None = None, unit_s: float = 0.03) -> None:
        self.schedule, self.costs, self.unit_s = schedule, costs, unit_s
        self.seen: list[Timeline] = []

    def makespan(self) -> float:
        """Of one more rehearsal, in units."""
        return self._one_more().makespan

    def bubble(self) -> float:
        """Of one more rehearsal."""
        return self._one_more().bubble

    def _one_more(self) -> Timeline:
        longer = LONGER[min(len(self.seen), len(LONGER) - 1)]
        self.seen.append(rehearse(self.schedule, self.costs, longer * self.unit_s))
        return self.seen[-1]


def _step(world: Group, schedule: Schedule, costs: Costs, unit_s: float) -> StepResult:
    takes = costs.of_stages(schedule.num_stages)
    x = torch.zeros(schedule.num_microbatches, 64)
    message_s = unit_s * (costs.latency + costs.transfer)
    link = comm.link(alpha_s=message_s, bandwidth_Bps=FAST_BPS) if message_s and world.size > 1 else nullcontext()
    for one_s, slow in ((OPENING_S / max(map(max, takes.values())), nullcontext()), (unit_s, link)):
        stages = {
            s: Stage(SleepLayer(1, *(one_s * takes[op][s] for op in (Op.F, Op.I, Op.W))))
            for s in schedule.stages_on(world.rank)
        }
        comm.barrier(world)
        with slow:
            result = execute(schedule, stages, world, x, x, lambda y, _: y.sum())
    return result
