"""When the sum of the weight gradients of a stage over its replicas starts.

The problem: after the last action of a step every rank sends all its gradients, and computes nothing. But the last
stages end long before the first stages: gradients of the last stages could be sent while the first still run backward.
The idea: a `REDUCE` after the last backward of each stage, an action like F and B. It starts a sum and does not wait.

Source: Narayanan et al., SC 2021, arXiv 2104.04473, section 3.3.1, on pipelines combined with data parallelism.
"""

from dataclasses import replace

from lib.pipeline.schedules.action import ALL, Action, Op, Schedule


def with_reduce(schedule: Schedule, each: bool = False) -> Schedule:
    """Insert a REDUCE for each stage, as early as possible.

    Args:
        schedule: a schedule without a REDUCE.
        each: one for each microbatch, as in ZeRO-2: then no rank keeps all gradients, and num_microbatches times as
            many bytes are sent.
    """
    rows = []
    for row in schedule.actions:
        ends = {}  # (stage, microbatch) → its last backward
        for action in row:
            if action.op in (Op.B, Op.W):
                ends[action.stage, action.microbatch if each else ALL] = action
        behind = {action: Action(stage, Op.REDUCE, m) for (stage, m), action in ends.items()}
        rows.append(tuple(placed for action in row for placed in (action, behind.get(action)) if placed is not None))
    return replace(schedule, actions=tuple(rows))
