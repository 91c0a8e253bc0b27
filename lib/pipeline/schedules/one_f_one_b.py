"""1F1B: as soon as a microbatch has gone forward through all stages, it goes back.

GPipe keeps every microbatch until all have gone forward. But the last stage could send the first of them back at once.
So after a warm-up each rank alternates, one forward, one backward, and never holds more than it must to keep the others
busy: P - r on rank r, however many microbatches there are. The bubble is that of GPipe.

This is the synchronous form, PipeDream-Flush: all of a step's microbatches use the same weights.
Read before: `lib/pipeline/schedules/gpipe.py`. Chapter 9 · Narayanan et al. 2021, section 2.2.
"""

from __future__ import annotations

from lib.pipeline.schedules.action import Action, Op, Schedule, check_sizes, one_stage_each


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """P - r - 1 forwards, then one forward and one backward in turns.

    Alive on rank r: min(M, P - r).
    """
    check_sizes(num_ranks, num_microbatches)
    rows = []
    for s in range(num_ranks):
        turns = in_turns(num_microbatches, warm_up=num_ranks - s - 1)
        rows.append([Action(s, op, m) for op, m in turns])
    return one_stage_each("1F1B", num_microbatches, rows)


def in_turns(count: int, warm_up: int) -> list[tuple[Op, int]]:
    """Some forwards, then one of each in turns, then the backwards left.

    Args:
        count: of forwards, and of backwards; they are numbered.
        warm_up: forwards before the first pair.
    """
    warm_up = min(warm_up, count)
    out = [(Op.F, k) for k in range(warm_up)]
    for k in range(warm_up, count):
        out += [(Op.F, k), (Op.B, k - warm_up)]
    return out + [(Op.B, k) for k in range(count - warm_up, count)]
