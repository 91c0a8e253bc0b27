"""Answers to the exercises of chapter 11: right ones, and one for each mistake that has a name."""

import torch
from answers_pipelines import MISREAD, miswritten

from lib.pipeline.lower import lower
from lib.pipeline.schedules import interleaved as interleaving
from lib.pipeline.schedules import one_f_one_b
from lib.pipeline.schedules.action import SENDS, Action, Op
from lib.pipeline.simulate import Costs, simulate

# ---- 11.1


def megatron(rank, n, v):
    return 2 * (n - rank - 1) + (v - 1) * n


def interleaved(
    n,
    M,
    v,
    warmup=megatron,
    group=lambda n, M: n,
    stage=lambda rank, turn, n, v: rank + n * turn,
    back=lambda turn, v: v - 1 - turn,
    limit=min,
    first=0,
    cooldown=True,
):
    """The answer to 11.1, with a place for each mistake."""

    def action(rank, op, k):
        round_, k = divmod(k, group(n, M) * v)
        turn, place = divmod(k, group(n, M))
        turn = turn if op == "F" else back(turn, v)
        return f"{stage(rank, turn, n, v)}{op}{first + group(n, M) * round_ + place}"

    lines = []
    for rank in range(n):
        warm = limit(warmup(rank, n, v), M * v)
        line = [action(rank, "F", k) for k in range(warm)]
        for k in range(warm, M * v):
            line += [action(rank, "F", k), action(rank, "B", k - warm)]
        if cooldown:
            line += [action(rank, "B", k) for k in range(max(M * v - warm, 0), M * v)]
        lines.append(" ".join(line))
    return "\n".join(lines)


def interleaving_with(**wrong):
    return lambda *case: interleaved(*case, **wrong)


def right_interleaved_by_groups(n, M, v):
    """All of a rank's forwards and backwards, group by group; then in turns."""
    rows = []
    for rank in range(n):
        groups = [range(k, k + n) for k in range(0, M, n)]
        stages = range(rank, n * v, n)
        forth = [Action(s, Op.F, m) for group in groups for s in stages for m in group]
        back = [Action(s, Op.B, m) for group in groups for s in reversed(stages) for m in group]
        row = []
        while back:
            ahead = len(back) - len(forth)
            row.append(forth.pop(0) if forth and ahead <= megatron(rank, n, v) else back.pop(0))
        rows.append(row)
    return rows


# ---- 11.2


def interleaving_sums(P, M, V, t_F, t_B, n_bytes, step=None, sent=None, kept=None):
    """The answer to 11.2, with a place for each mistake."""
    t = t_F + t_B
    return (
        step(P, M, V, t) if step else M * t + (P - 1) * t / V,
        n_bytes * (sent(P, M, V) if sent else 2 * M * (P * V - 1)),
        kept(P, M, V) if kept else P + (P - 1) / V,
    )


def summing(**wrong):
    return lambda *given: interleaving_sums(*given, **wrong)


def right_sums_by_simulating(P, M, V, t_F, t_B, n_bytes):
    schedule = interleaving.interleaved(P, M, V)
    seen = simulate(schedule, Costs(t_F / V, t_B / V / 2, t_B / V / 2))
    messages = sum(action.op in SENDS for row in lower(schedule).actions for action in row)
    return [torch.tensor(seen.makespan), messages * n_bytes, seen.peak(0) / V]


RIGHT = {
    "11.1": [interleaved, right_interleaved_by_groups, interleaving.interleaved],
    "11.2": [interleaving_sums, right_sums_by_simulating],
}
WRONG = {  # in the order of the exercise's mistakes
    "11.1": [
        interleaving_with(stage=lambda rank, turn, n, v: rank * v + turn),
        lambda n, M, v: one_f_one_b.one_f_one_b(n, M),
        interleaving_with(warmup=lambda rank, n, v: n - rank - 1),
        interleaving_with(group=lambda n, M: 1),
        interleaving_with(back=lambda turn, v: turn),
        interleaving_with(warmup=lambda rank, n, v: (n - rank - 1) + (v - 1) * n),
        interleaving_with(warmup=lambda rank, n, v: (v - 1) * n),
        interleaving_with(warmup=lambda rank, n, v: megatron(rank, n, v) + 1),
        interleaving_with(warmup=lambda rank, n, v: megatron(rank, n, v) + n),
        interleaving_with(warmup=lambda rank, n, v: megatron(0, n, v)),
        interleaving_with(warmup=lambda rank, n, v: 10**6),
        interleaving_with(warmup=lambda rank, n, v: 10**6, group=lambda n, M: M),
        interleaving_with(cooldown=False),
        *map(miswritten(interleaved), MISREAD),
    ],
    "11.2": [
        summing(step=lambda P, M, V, t: (M + P - 1) * t),
        summing(step=lambda P, M, V, t: (M + P - 1) * t / V),
        summing(step=lambda P, M, V, t: (M * V + P - 1) * t),
        summing(step=lambda P, M, V, t: M * t),
        summing(step=lambda P, M, V, t: (M + P - 1 / V) * t),
        summing(sent=lambda P, M, V: 2 * M * V * (P - 1)),
        summing(sent=lambda P, M, V: 2 * M * (P - 1)),
        summing(sent=lambda P, M, V: M * (P * V - 1)),
        summing(sent=lambda P, M, V: 2 * M * P * V),
        summing(sent=lambda P, M, V: 2 * (P * V - 1)),
        summing(sent=lambda P, M, V: 2 * M * V),
        summing(kept=lambda P, M, V: P),
        summing(kept=lambda P, M, V: 2 * (P - 1) + (V - 1) * P + 1),
        summing(kept=lambda P, M, V: (2 * (P - 1) + (V - 1) * P) / V),
        summing(kept=lambda P, M, V: 1 + (P - 1) / (P * V)),
    ],
}
