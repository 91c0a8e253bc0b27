"""Interleaved 1F1B: each rank has several short stages instead of one long one.

With stages of half the length the staircase at both ends has steps of half the height, so V stages a rank divide the
bubble by V. The price: V times as many messages, and more microbatches under way. A microbatch goes around all ranks V
times; microbatches travel in groups of P, so that a group's first is back at rank 0 when its last has left.

Read before: `lib/pipeline/one_f_one_b.py`. Chapter 10 · Narayanan et al. 2021, section 2.2.
"""

from __future__ import annotations

from lib.pipeline.action import Action, Op, Schedule, check_sizes
from lib.pipeline.one_f_one_b import in_turns


def interleaved(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """Rank r has the stages r, r + P, r + 2P …; forwards of a warm-up, then one forward and one backward in turns.

    Bubble: (P-1)(F+B)/V, where F and B are times of all that a rank has.

    Args:
        stages_per_rank: V, at least 2; with one it would be 1F1B.

    Raises:
        ValueError: microbatches that are no multiple of the ranks, which this order, Megatron's, cannot fill.
    """
    check_sizes(num_ranks, num_microbatches)
    n, v = num_ranks, stages_per_rank
    if v < 2:
        raise ValueError(f"stages_per_rank={v} must be at least 2; with one stage on each rank take one_f_one_b")
    if num_microbatches % n:
        raise ValueError(
            f"num_microbatches={num_microbatches} must be a multiple of the {n} ranks, such as "
            f"{-(-num_microbatches // n) * n}: they go around in groups of {n}"
        )

    def action(rank: int, op: Op, k: int) -> Action:
        """The k-th forward or backward of a rank: a group of P goes through all its stages before the next comes."""
        group, k = divmod(k, n * v)
        turn, place = divmod(k, n)
        return Action(rank + n * (turn if op == Op.F else v - 1 - turn), op, n * group + place)

    rows = (
        tuple(action(rank, op, k) for op, k in in_turns(v * num_microbatches, warm_up(rank, n, v)))
        for rank in range(n)
    )
    return Schedule(f"interleaved, {v} stages each", n * v, num_microbatches, tuple(range(n)) * v, tuple(rows))


def warm_up(rank: int, num_ranks: int, stages_per_rank: int) -> int:
    """Forwards before the first backward: a whole round through all stages but the last, and the way there and back."""
    return 2 * (num_ranks - rank - 1) + (stages_per_rank - 1) * num_ranks
