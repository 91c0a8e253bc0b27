"""Zero bubble: the half of backward for which nobody waits fills the holes.

Backward does two things. The gradient of the input, I, is what the stage before waits for. The gradients of the
weights, W, are wanted only by the optimizer, so they may be computed at any time before it. ZB-H1 is 1F1B with W put
off, on rank r by r microbatches: the cool-down's holes are filled with weight gradients, and two thirds of the bubble
are gone. ZB-H2 starts so many microbatches that the warm-up has no holes either. Then nothing of the bubble is left
between a rank's first action and its last, for up to twice the memory. ZB-V has that in the memory of 1F1B, with two
stages on each rank. (Papers write B for I, and some BW for B.)

Read before: `lib/pipeline/schedules/one_f_one_b.py`. Chapter 12 · Qi et al. 2024.
"""

from __future__ import annotations

from collections import Counter

from lib.pipeline.schedules.action import Action, Op, Schedule, check_sizes, one_stage_each
from lib.pipeline.schedules.one_f_one_b import in_turns


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B, but W of microbatch k comes after I of microbatch k + r.

    Bubble: (P-1)(F+I-W), for M ≥ P and W of min(F, I) at most.
    """
    check_sizes(num_ranks, num_microbatches)
    n, m = num_ranks, num_microbatches
    rows = [_split(r, m, n - r - 1, put_off=r) for r in range(n)]
    return one_stage_each("ZB-H1", num_microbatches, rows)


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """2(P - r) - 1 forwards before the first I; W is put off by 2r.

    If F = I = W, and with 2P - 1 microbatches or more, no rank waits between its first action and its last.
    """
    check_sizes(num_ranks, num_microbatches)
    n, m = num_ranks, num_microbatches
    rows = [_split(r, m, 2 * (n - r - 1), put_off=2 * r) for r in range(n)]
    return one_stage_each("ZB-H2", num_microbatches, rows)


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Two stages a rank, r and 2P - 1 - r: there and back, like a V.

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


def _split(stage: int, count: int, warm_up: int, put_off: int) -> list[Action]:
    """In turns; a backward is I, and W `put_off` later; the rest comes last."""
    row, late = [], 0
    for op, k in in_turns(count, warm_up):
        row.append(Action(stage, Op.I if op == Op.B else op, k))
        if op == Op.B and k >= put_off:
            row.append(Action(stage, Op.W, late))
            late += 1
    return row + [Action(stage, Op.W, k) for k in range(late, count)]
