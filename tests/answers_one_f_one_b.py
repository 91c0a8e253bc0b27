"""Answers to the exercises of chapter 09: right ones, and one for each mistake that has a name."""

import torch
from answers_pipelines import MISREAD, miswritten

from lib.pipeline.schedules import gpipe as gpipes
from lib.pipeline.schedules import one_f_one_b
from lib.pipeline.schedules.action import Action, Op
from lib.pipeline.simulate import simulate

# ---- 09.1


def turns(n, M, warmup=lambda n, rank: n - rank - 1, limit=min, pair="FB", cooldown=True, first=0):
    """The answer to 09.1, with a place for each mistake."""
    lines = []
    for rank in range(n):
        warm = limit(warmup(n, rank), M)
        line = [f"{rank}F{first + m}" for m in range(warm)]
        for k in range(warm, M):
            numbers = {"F": first + k, "B": first + k - warm}
            line += [f"{rank}{op}{numbers[op]}" for op in pair]
        if cooldown:
            line += [f"{rank}B{first + m}" for m in range(M - warm, M)]
        lines.append(" ".join(line))
    return "\n".join(lines)


def turning(**wrong):
    return lambda *case: turns(*case, **wrong)


def right_turns_by_counting(n, M):
    """Forward as long as fewer than P - r are under way, else back."""
    rows = []
    for rank in range(n):
        row, started, back = [], 0, 0
        while back < M:
            if started < M and started - back < n - rank:
                row.append(Action(rank, Op.F, started))
                started += 1
            else:
                row.append(Action(rank, Op.B, back))
                back += 1
        rows.append(row)
    return rows


def not_limited(n, M):
    """A warmup of P - r - 1 microbatches, whether there are so many or not."""
    rows = []
    for rank in range(n):
        row, back = [f"{rank}F{m}" for m in range(n - rank - 1)], 0
        for m in range(n - rank - 1, M):
            row += [f"{rank}F{m}", f"{rank}B{back}"]
            back += 1
        rows.append(row + [f"{rank}B{m}" for m in range(back, M)])
    return rows


# ---- 09.2


def kept(schedule, rank, n, M, layers, saved, boundary, recompute, gpipe=None, count=None, again=None, plain=None):
    """The answer to 09.2, with a place for each mistake."""
    if schedule == "GPipe":
        alive = gpipe(rank, n, M) if gpipe else M
    else:
        alive = count(rank, n, M) if count else min(M, n - rank)
    if recompute:
        n_bytes = again(alive, layers, saved, boundary) if again else (alive - 1) * boundary + layers * saved
    else:
        n_bytes = plain(alive, layers, saved) if plain else alive * layers * saved
    return alive, n_bytes


def keeping(**wrong):
    return lambda *given: kept(*given, **wrong)


def right_kept_by_simulating(schedule, rank, n, M, layers, saved, boundary, recompute):
    make = {"GPipe": gpipes.gpipe, "1F1B": one_f_one_b.one_f_one_b}[schedule]
    alive = simulate(make(n, M)).peak(rank)
    per_stage = layers * saved
    return [alive, torch.tensor(alive * boundary - boundary + per_stage if recompute else alive * per_stage)]


RIGHT = {
    "09.1": [turns, right_turns_by_counting, one_f_one_b.one_f_one_b],
    "09.2": [kept, right_kept_by_simulating],
}
WRONG = {  # in the order of the exercise's mistakes
    "09.1": [
        turning(warmup=lambda n, rank: n - rank),
        turning(warmup=lambda n, rank: n - rank if rank < n - 1 else 0),
        turning(warmup=lambda n, rank: max(n - rank - 2, 0)),
        turning(warmup=lambda n, rank: 0),
        turning(warmup=lambda n, rank: n - 1),
        turning(warmup=lambda n, rank: 2 * (n - rank - 1)),
        gpipes.gpipe,
        turning(warmup=lambda n, rank: rank),
        not_limited,
        turning(limit=lambda warm, M: warm),
        turning(cooldown=False),
        turning(pair="BF"),
        *map(miswritten(turns), MISREAD),
    ],
    "09.2": [
        keeping(count=lambda rank, n, M: min(M, n)),
        keeping(count=lambda rank, n, M: M),
        keeping(gpipe=lambda rank, n, M: min(M, n - rank)),
        keeping(count=lambda rank, n, M: n - rank),
        keeping(count=lambda rank, n, M: M if M < n else n - rank),
        keeping(count=lambda rank, n, M: min(n, M) - rank),
        keeping(count=lambda rank, n, M: max(1, min(n, M) - rank)),
        keeping(count=lambda rank, n, M: min(M, n - rank - 1)),
        keeping(count=lambda rank, n, M: n - rank - 1),
        keeping(count=lambda rank, n, M: min(M, n - rank + 1)),
        keeping(count=lambda rank, n, M: min(M, rank + 1)),
        keeping(again=lambda alive, layers, saved, boundary: alive * layers * saved),
        keeping(again=lambda alive, layers, saved, boundary: alive * boundary),
        keeping(again=lambda alive, layers, saved, boundary: (alive - 1) * boundary + saved),
        keeping(again=lambda alive, layers, saved, boundary: layers * (alive - 1) * boundary + layers * saved),
        keeping(again=lambda alive, layers, saved, boundary: alive * boundary + layers * saved),
        keeping(plain=lambda alive, layers, saved: alive * saved),
    ],
}
