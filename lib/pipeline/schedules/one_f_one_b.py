"""1F1B: a microbatch runs backward as soon as its forward through all stages ends.

GPipe keeps every microbatch until all forwards are done. The last stage could run the first backward immediately. After
a warmup each rank therefore alternates, one forward, one backward, and holds no more microbatches than the other ranks
need to stay busy: p - r on rank r, for any number of microbatches. The bubble is the same as in GPipe.

This is the synchronous form, PipeDream-Flush: all microbatches of a step use the same weights.
Read before: `lib/pipeline/schedules/gpipe.py`. Chapter 9 · Narayanan et al. 2021, section 2.2.
"""

from lib.pipeline.schedules.action import Action, Op, Schedule, check_sizes, one_stage_each


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """p - r - 1 forwards, then alternately one forward and one backward.

    Kept on rank r: min(m, p - r) microbatches.
    """
    check_sizes(num_ranks, num_microbatches)
    rows = []
    for s in range(num_ranks):
        turns = in_turns(num_microbatches, warmup=num_ranks - s - 1)
        rows.append([Action(s, op, m) for op, m in turns])
    return one_stage_each("1F1B", num_microbatches, rows)


def in_turns(count: int, warmup: int) -> list[tuple[Op, int]]:
    """Forwards, then pairs of forward and backward, then backwards.

    Args:
        count: of forwards, and of backwards; they are numbered.
        warmup: forwards before the first pair.
    """
    warmup = min(warmup, count)
    out = [(Op.F, k) for k in range(warmup)]
    for k in range(warmup, count):
        out += [(Op.F, k), (Op.B, k - warmup)]
    return out + [(Op.B, k) for k in range(count - warmup, count)]
