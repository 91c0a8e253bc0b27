"""Zero bubble: weight gradients, for which no rank waits, fill the bubble.

Backward has two halves. The previous stage waits for the input gradient, I. The weight gradients, W, are needed only by
the optimizer, so they may be computed at any time before its step. ZB-H1 is 1F1B with W deferred, on rank r by r
microbatches: weight gradients fill the gaps of the cooldown, and two thirds of the bubble disappear. ZB-H2 starts so
many microbatches that the warmup has no gaps either. Then a rank never waits between its first and its last action, for
up to twice the memory. ZB-V does that in the memory of 1F1B, with two stages on each rank. (Papers write B for I, and
some BW for B.)

Read before: `lib/pipeline/schedules/one_f_one_b.py`. Chapter 12 · Qi et al. 2024.
"""

from lib.pipeline.schedules.action import Action, Op, Schedule, check_sizes, one_stage_each
from lib.pipeline.schedules.one_f_one_b import in_turns
from lib.pipeline.schedules.v_shape import in_a_v


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B, but W of microbatch k comes after I of microbatch k + r.

    Bubble: (p-1)(T_F+T_I-T_W), for m ≥ p and T_W ≤ min(T_F, T_I).
    """
    return _deferred("ZB-H1", num_ranks, num_microbatches, times=1)


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """2(p - r) - 1 forwards before the first I; W is deferred by 2r.

    If F = I = W, and with 2p - 1 microbatches or more, no rank waits between its first action and its last.
    """
    return _deferred("ZB-H2", num_ranks, num_microbatches, times=2)


def _deferred(name: str, n: int, m: int, times: int) -> Schedule:
    """1F1B with `times` its warmup; a backward is I, and W comes `times` r microbatches later."""
    check_sizes(n, m)
    rows = []
    for r in range(n):
        row, put_off = [], min(times * r, m)
        for op, k in in_turns(m, warmup=times * (n - r - 1)):
            row.append(Action(r, Op.I if op == Op.B else op, k))
            if op == Op.B and k >= put_off:
                row.append(Action(r, Op.W, k - put_off))
        rows.append(row + [Action(r, Op.W, k) for k in range(m - put_off, m)])
    return one_stage_each(name, m, rows)


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Two stages per rank, r and 2p - 1 - r: there and back, like a V.

    If F = I = W, and with 2p - 1 microbatches or more, no rank waits between its first action and its last, and none
    keeps more than p microbatches. Rank 0 has both ends, so it computes the losses, and a tied weight is on one rank.
    """
    n = num_ranks
    full = max(num_microbatches, 2 * n - 1)  # so many fill the middle; some are dropped

    def letters(rank: int) -> str:
        back = n - rank  # this rank and all that follow
        plan = "F" * (2 * back - 1) + "fF" * rank + "fiw" * back
        plan += "FIWfiw" * (full - n - back + 1) + "IWfiw" * (back - 1)
        return plan + "Ii" * rank + "IW" * back + "w" * rank + "W" * rank

    return in_a_v("ZB-V", [letters(rank) for rank in range(n)], num_microbatches)
