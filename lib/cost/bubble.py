"""Costs of pipeline schedules in closed form: for equal stages, and messages that take no time.

`lib.pipeline.simulate` computes them for any schedule, and the tests compare the two. The formulas are for a planner,
which compares thousands of layouts, and for a reader with a pencil.

Letters: p ranks, m microbatches, v stages per rank; times are for one microbatch in all layers of a rank: T_F forward,
T_B = T_I + T_W backward. Chapters 8 to 12.
"""

from __future__ import annotations

import math


def bubble(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> float:
    """(p-1)/v / (m + (p-1)/v): the fraction of a step in which a rank waits, under GPipe, 1F1B or interleaved 1F1B.

    Source: Narayanan et al. 2021, section 2.2, where it is a fraction of the ideal time: (p-1)/(v·m).
    """
    waits = (num_ranks - 1) / stages_per_rank
    return waits / (num_microbatches + waits)


def pipeline_s(
    num_ranks: int, num_microbatches: int, forward_s: float, backward_s: float, stages_per_rank: int = 1
) -> float:
    """(m + (p-1)/v) · (T_F + T_B): seconds of a step without the optimizer, under the same schedules."""
    return (num_microbatches + (num_ranks - 1) / stages_per_rank) * (forward_s + backward_s)


def microbatches_for(num_ranks: int, most: float) -> int:
    """(p-1)·(1/most - 1), rounded up: the fewest microbatches with a bubble of at most `most`, one stage per rank.

    Args:
        most: fraction of the step, above 0 and up to 1.
    """
    return max(1, math.ceil((num_ranks - 1) * (1 / most - 1) - 1e-9))


def kept_by(rank: int, num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> float:
    """Microbatches whose activations a rank keeps at the peak under 1F1B, counted over all layers of the rank.

    min(m, p-r) with one stage per rank. With v the warmup has 2(p-r-1) + (v-1)p stages, and one more is in flight.
    Under GPipe it is m on each rank.

    Source: Korthikanti et al. 2022, section 4.2.3, for rank 0: 1 + (p-1)/(pv) times p.
    """
    if stages_per_rank == 1:
        return min(num_microbatches, num_ranks - rank)
    warmup = 2 * (num_ranks - rank - 1) + (stages_per_rank - 1) * num_ranks
    return min(warmup + 1, num_microbatches * stages_per_rank) / stages_per_rank


def zero_bubble_wait_s(num_ranks: int, forward_s: float, input_s: float, weight_s: float) -> float:
    """(p-1)·(T_F + T_I - T_W): how long a rank waits in a step under ZB-H1, if m ≥ p and T_W ≤ T_F, T_I.

    Args:
        input_s, weight_s: the two halves of backward, for the gradients of the input and of the weights.

    Source: Qi et al. 2024, table 1, where the first half is called B.
    """
    return (num_ranks - 1) * (forward_s + input_s - weight_s)


def v_wait_s(num_ranks: int, input_s: float, weight_s: float) -> float:
    """(p-1)/2 · max(T_I, 2(T_I - T_W)): how long a rank waits in a step under ZB-V, if m ≥ 2p - 1 and T_F ≤ T_I.

    If T_F = T_I = T_W, half of T_F for each previous rank: the step begins that much later on the next rank, and no
    rank waits in between.

    Args:
        input_s, weight_s: as in `zero_bubble_wait_s`, for both stages of a rank.

    Source: read off the simulator; Qi et al. 2024, section 6, have the schedule.
    """
    return (num_ranks - 1) / 2 * max(input_s, 2 * (input_s - weight_s))
