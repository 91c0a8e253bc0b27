"""Two stages on each rank, in the order of a V: schedules with little memory, or with a short wait.

Under 1F1B rank 0 keeps p microbatches, because its activations live longest. In a V each rank has one early stage and
one late stage, so all ranks keep a similar number. This number follows from the *block*: the times at which a
microbatch passes the stages of each rank, forward and back. A block is repeated every 6 half units, the work of a rank
for one microbatch if F = I = W, and a rank keeps the microbatches that are between F and W. A shorter block keeps
fewer: V-Min a third of the activations of 1F1B, V-Half a half. DualPipe-V keeps as many as 1F1B; it pairs the forward
of a microbatch with the backward of a different one, so that each can hide the messages of its partner.

Read before: `lib/pipeline/schedules/action.py`. Chapter 12 · Qi et al. 2024, arXiv 2405.15362; DeepSeek-V3.
"""

from collections import Counter

from lib.pipeline.schedules.action import Action, Op, Schedule, check_sizes

COUNTS_AS = {Op.B: "BIW", Op.I: "BI"}  # for numbering: a full backward is both halves


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """The least memory: a rank keeps at most (p + 4) // 3 microbatches.

    If F = I = W, it waits for 2p - 5/2 units, or 2p - 3/2 if 3 divides p.
    """
    n, gap = num_ranks, 0 if num_ranks % 3 else 2
    block = [(r, 2 * n - r - 1, 2 * n + gap + r, 4 * n + gap - r - 1) for r in range(n)]
    return _repeated("V-Min", block, num_microbatches, room=2 * ((n + 4) // 3))


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """Half the memory of 1F1B and half its wait: a rank keeps at most (p + 2) // 2 microbatches.

    If F = I = W, it waits for 3(p-1)/2 units, or half a unit less if p is odd.
    """
    n, gap = num_ranks, 0 if num_ranks % 2 else 3
    block = [(2 * r, 3 * n - r - 2, 3 * n + gap + 2 * r - 1, 6 * n + gap - r - 2) for r in range(n)]
    return _repeated("V-Half", block, num_microbatches, room=2 * ((n + 2) // 2))


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Pairs of a forward in one stage of a rank and a full backward in its second stage, and the reverse.

    If F = I = W, and with 2p microbatches or more, it waits as ZB-V does; a rank keeps p + 1/2 microbatches.
    """
    n = num_ranks
    full = max(num_microbatches, 2 * n)  # so many fill the middle; some are dropped

    def letters(rank: int) -> str:
        back = n - rank - 1  # ranks that follow
        plan = "F" * (2 * back) + "Ff" * (n - back) + "iwf" * back + "FbfB" * (full - n - back) + "bfB" * back
        plan += ("bB" * (n - back))[: n - back] + ("iI" * (n - back))[n - back :]
        for _ in range(back):
            plan += _late(plan)[:1] + "I"
        return plan + _late(plan)

    return in_a_v("DualPipe-V", [letters(rank) for rank in range(n)], num_microbatches)


def in_a_v(name: str, plans: list[str], m: int) -> Schedule:
    """Make a schedule from the letters of each rank: capitals for its first stage, small letters for its second."""
    n = len(plans)
    check_sizes(n, m)
    rows = []
    for rank, plan in enumerate(plans):
        row, counted = [], Counter()
        for letter in plan:
            stage, op = rank if letter.isupper() else 2 * n - 1 - rank, Op(letter.upper())
            row.append(Action(stage, op, counted[stage, op]))
            counted.update((stage, as_op) for as_op in COUNTS_AS.get(op, op))
        rows.append(tuple(action for action in row if action.microbatch < m))
    return Schedule(name, 2 * n, m, (*range(n), *reversed(range(n))), tuple(rows))


def _repeated(name: str, block: list[tuple[int, ...]], m: int, room: int) -> Schedule:
    """F and I in the order of the repeated block; W where a rank would wait, or has no memory for an F.

    Args:
        block: of each rank, the half units in which F, f, i and I of a microbatch begin there.
        room: the most microbatches of a stage that a rank keeps, from F to W.
    """
    plans = []
    for starts in block:
        timed = sorted((at + 6 * k, letter) for at, letter in zip(starts, "FfiI", strict=True) for k in range(m))
        plans.append([letter for _, letter in timed])
    rows = ["" for _ in block]

    def can_run(letter: str, rank: int) -> bool:
        source = rank - 1 if letter in "Fi" else rank + 1  # at both ends of the V it is the rank itself
        is_there = source not in range(len(block)) or before[source].count(letter) > rows[rank].count(letter)
        kept = rows[rank].upper().count("F") - rows[rank].upper().count("W")
        return is_there and (letter in "iI" or kept < room)

    while any(plans):
        before = rows.copy()  # at the start of this half unit
        for rank, plan in enumerate(plans):
            rows[rank] += plan.pop(0) if plan and can_run(plan[0], rank) else _late(rows[rank])[:1]
    return in_a_v(name, [row + _late(row) for row in rows], m)


def _late(row: str) -> str:
    """Deferred weight gradients of a rank, the oldest first."""
    weights = [{"i": "w", "I": "W"}[letter] for letter in row if letter in "iI"]
    return "".join(weights[row.upper().count("W") :])
