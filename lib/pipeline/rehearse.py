"""A schedule on real processes, with stages that sleep: what the simulator says, put to the test.

Two cores cannot compute in eight processes at once, but eight processes can sleep at once. A sleeping stage takes as
long as its costs say; messages, queues and waiting are the real ones.

Read before: `lib/pipeline/execute.py`, `lib/sleep.py`. Chapter 8.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from lib import comm
from lib.launch import run
from lib.mesh import Group
from lib.pipeline.execute import StepResult, execute, timeline
from lib.pipeline.schedules.action import Op, Schedule
from lib.pipeline.simulate import Costs, Timeline
from lib.pipeline.stage import Stage
from lib.sleep import SleepLayer

OPENING_S = 0.001  # the longest action of the step before, which opens the connections
FAST_BPS = 1e15  # a link that only has latency


def rehearse(schedule: Schedule, costs: Costs | None = None, unit_s: float = 0.03) -> Timeline:
    """Run it, a process for each rank; return what was measured, in the unit of `costs`.

    Args:
        costs: as for `simulate`; with a latency or transfer, links are emulated that are so slow.
        unit_s: seconds of a unit. The shortest action should sleep some ten milliseconds, so that waking up counts for
            little.
    """
    costs = costs or Costs()
    seen = timeline(schedule, run(_step, schedule.num_ranks, schedule, costs, unit_s))
    slots = (slot._replace(start=slot.start / unit_s, end=slot.end / unit_s) for slot in seen.slots)
    return Timeline.of(schedule, slots)


def _step(world: Group, schedule: Schedule, costs: Costs, unit_s: float) -> StepResult:
    takes = costs.of_stages(schedule.num_stages)
    x = torch.zeros(schedule.num_microbatches, 64)
    message_s = unit_s * (costs.latency + costs.transfer)
    link = comm.link(alpha_s=message_s, bandwidth_Bps=FAST_BPS) if message_s and world.size > 1 else nullcontext()
    for one_s, slow in ((OPENING_S / max(map(max, takes.values())), nullcontext()), (unit_s, link)):
        stages = {
            s: Stage(SleepLayer(1, *(one_s * takes[op][s] for op in (Op.F, Op.I, Op.W))))
            for s, rank in enumerate(schedule.rank_of)
            if rank == world.rank
        }
        comm.barrier(world)
        with slow:
            result = execute(schedule, stages, world, x, x, lambda y, _: y.sum())
    return result
