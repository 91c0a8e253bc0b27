"""One microbatch at a time, and GPipe: all forwards, then all backwards.

Naive: a batch runs forward and backward through the stages, and one rank works while all others wait. GPipe splits the
batch into microbatches, so that the next stage begins as soon as the first microbatch arrives. Both ends of the step
are still a staircase: the bubble. Before the first backward each rank holds the activations of *all* microbatches.

Read before: `lib/pipeline/schedules/action.py`. Chapter 8 · Huang et al. 2019.
"""

from lib.pipeline.schedules.action import Action, Op, Schedule, check_sizes, one_stage_each


def naive(num_ranks: int, num_microbatches: int = 1) -> Schedule:
    """A microbatch runs forward and backward through all stages before the next microbatch starts.

    Bubble: (p-1)/p of the step.
    """
    check_sizes(num_ranks, num_microbatches)
    ops = [(op, m) for m in range(num_microbatches) for op in (Op.F, Op.B)]
    rows = [[Action(s, op, m) for op, m in ops] for s in range(num_ranks)]
    return one_stage_each("naive", num_microbatches, rows)


def gpipe(num_ranks: int, num_microbatches: int, last_first: bool = False) -> Schedule:
    """All forwards, then all backwards.

    Bubble: (p-1)/(m+p-1) of the step; kept on each rank: m microbatches.

    Args:
        last_first: begin backward with the last microbatch, as GPipe does; the step takes the same time.
    """
    check_sizes(num_ranks, num_microbatches)
    forth = range(num_microbatches)
    back = reversed(forth) if last_first else forth
    ops = [(Op.F, m) for m in forth] + [(Op.B, m) for m in back]
    rows = [[Action(s, op, m) for op, m in ops] for s in range(num_ranks)]
    return one_stage_each("GPipe", num_microbatches, rows)
