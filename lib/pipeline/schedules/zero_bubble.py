"""Zero bubble: weight gradients, for which no rank waits, fill the bubble.

Backward has two halves. The previous stage waits for the input gradient, I. The weight gradients, W, are needed only by
the optimizer, so they may be computed at any time before its step. ZB-H1 is 1F1B with W deferred, on rank r by r
microbatches: weight gradients fill the gaps of the cooldown, and two thirds of the bubble disappear. ZB-H2 starts so
many microbatches that the warmup has no gaps either. Then a rank never waits between its first and its last action, for
up to twice the memory. ZB-V does that in the memory of 1F1B, with two stages on each rank. (Papers write B for I, and
some BW for B.)

Read before: `lib/pipeline/schedules/one_f_one_b.py`. Chapter 12 · Qi et al. 2024.
"""

from __future__ import annotations

from collections import Counter

from lib.pipeline.schedules.action import Action, Op, Schedule, check_sizes, one_stage_each
from lib.pipeline.schedules.one_f_one_b import in_turns


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B, but W of microbatch k comes after I of microbatch k + r.

    Bubble: (p-1)(T_F+T_I-T_W), for m ≥ p and T_W ≤ min(T_F, T_I).
    """
    check_sizes(num_ranks, num_microbatches)
    n, m = num_ranks, num_microbatches
    rows = [_split(r, m, n - r - 1, put_off=r) for r in range(n)]
    return one_stage_each("ZB-H1", num_microbatches, rows)


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """2(p - r) - 1 forwards before the first I; W is deferred by 2r.

    If F = I = W, and with 2P - 1 microbatches or more, no rank waits between its first action and its last.
    """
    check_sizes(num_ranks, num_microbatches)
    n, m = num_ranks, num_microbatches
    rows = [_split(r, m, 2 * (n - r - 1), put_off=2 * r) for r in range(n)]
    return one_stage_each("ZB-H2", num_microbatches, rows)


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Two stages per rank, r and 2p - 1 - r: there and back, like a V.

    If F = I = W, and with 2P - 1 microbatches or more, no rank waits between its first action and its last, and none
    keeps more than P microbatches. Rank 0 has both ends, so it knows the losses, and a tied weight is on one rank.
    """
    check_sizes(num_ranks, num_microbatches)
    n, m = num_ranks, num_microbatches
    rows = [_v(r, n, m) for r in range(n)]
    rank_of = (*range(n), *reversed(range(n)))
    return Schedule("ZB-V", 2 * n, m, rank_of, tuple(map(tuple, rows)))


def _v(rank: int, n: int, m: int) -> list[Action]:
    """Capitals are of the rank's first stage, small letters of its second."""
    back = n - rank  # this rank and those behind it
    full = max(m, 2 * n - 1)  # so many fill the middle; some are dropped below
    plan = "F" * (2 * back - 1) + "fF" * rank + "fiw" * back
    plan += "FIWfiw" * (full - n - back + 1) + "IWfiw" * (back - 1)
    plan += "Ii" * rank + "IW" * back + "w" * rank + "W" * rank
    row, count = [], Counter()
    for letter in plan:
        stage = rank if letter.isupper() else 2 * n - 1 - rank
        row.append(Action(stage, Op(letter.upper()), count[letter]))
        count[letter] += 1
    return [action for action in row if action.microbatch < m]


def _split(stage: int, count: int, warmup: int, put_off: int) -> list[Action]:
    """In turns; a backward is I, and W `put_off` later; the rest comes last."""
    row, late = [], 0
    for op, k in in_turns(count, warmup):
        row.append(Action(stage, Op.I if op == Op.B else op, k))
        if op == Op.B and k >= put_off:
            row.append(Action(stage, Op.W, late))
            late += 1
    return row + [Action(stage, Op.W, k) for k in range(late, count)]
