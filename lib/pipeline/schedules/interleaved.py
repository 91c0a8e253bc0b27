"""Interleaved 1F1B: each rank has several short stages instead of one long one.

With stages of half the length the staircase at both ends has steps of half the height, so v stages per rank divide the
bubble by v. The price: v times the messages, and more microbatches in flight. A microbatch passes all ranks v times.
Microbatches travel in groups of p, so that the first of a group is back at rank 0 when the last has left.

Read before: `lib/pipeline/schedules/one_f_one_b.py`. Chapter 11 · Narayanan et al. 2021, section 2.2.
"""

from lib.pipeline.schedules.action import Action, Op, Schedule, check_sizes
from lib.pipeline.schedules.one_f_one_b import in_turns


def interleaved(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """Rank r has stages r, r + p, r + 2p …, and alternates as in 1F1B.

    Bubble: (p-1)(T_F+T_B)/v, where the times are of all stages of a rank.

    Args:
        stages_per_rank: v, at least 2; with one it would be 1F1B.

    Raises:
        ValueError: microbatches that are no multiple of the ranks: the order of Megatron needs full groups.
    """
    check_sizes(num_ranks, num_microbatches)
    n, m, v = num_ranks, num_microbatches, stages_per_rank
    if v < 2:
        way_out = "with one stage on each rank take one_f_one_b"
        raise ValueError(f"stages_per_rank={v} must be at least 2; {way_out}")
    if m % n:
        raise ValueError(
            f"num_microbatches={m} must be a multiple of the {n} ranks, such "
            f"as {-(-m // n) * n}: they go around in groups of {n}"
        )

    def action(rank: int, op: Op, k: int) -> Action:
        """The k-th action: p microbatches pass all stages, then the next p."""
        group, k = divmod(k, n * v)
        turn, place = divmod(k, n)
        turn = turn if op == Op.F else v - 1 - turn
        return Action(rank + n * turn, op, n * group + place)

    turns = (in_turns(v * m, warmup(rank, n, v)) for rank in range(n))
    rows = tuple(
        tuple(action(rank, op, k) for op, k in row)  # of a rank
        for rank, row in enumerate(turns)
    )
    name, rank_of = f"interleaved, {v} stages each", tuple(range(n)) * v
    return Schedule(name, n * v, m, rank_of, rows)


def warmup(rank: int, num_ranks: int, stages_per_rank: int) -> int:
    """Forwards before the first backward, as in Megatron.

    p for each stage of the rank except its last, and 2 for each rank that follows.
    """
    return 2 * (num_ranks - rank - 1) + (stages_per_rank - 1) * num_ranks
