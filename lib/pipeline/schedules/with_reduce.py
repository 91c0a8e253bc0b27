"""When a stage's weight gradients leave for the sum over its replicas.

The problem: after the last action of a step every rank sends all its gradients, and computes nothing. But the last
stages are through long before the first: while the first ones still work backward, theirs could travel.
The idea: a `REDUCE` behind the last backward of each stage, an action like any other. It starts a sum and waits for
nothing.

Source: Narayanan et al., SC 2021, arXiv 2104.04473, section 3.3.1, on pipelines beside data parallelism.
"""

from __future__ import annotations

from dataclasses import replace

from lib.pipeline.schedules.action import ALL, Action, Op, Schedule


def with_reduce(schedule: Schedule, each: bool = False) -> Schedule:
    """The schedule with a REDUCE of each stage, as early as can be.

    Args:
        schedule: without one.
        each: of each microbatch, as ZeRO-2 wants it: then no rank keeps all gradients, and num_microbatches times as
            many bytes travel.
    """
    rows = []
    for row in schedule.actions:
        ends = {}  # (stage, microbatch) → its last backward
        for action in row:
            if action.op in (Op.B, Op.W):
                ends[action.stage, action.microbatch if each else ALL] = action
        behind = {action: Action(stage, Op.REDUCE, m) for (stage, m), action in ends.items()}
        rows.append(tuple(one for action in row for one in (action, behind.get(action)) if one is not None))
    return replace(schedule, actions=tuple(rows))
