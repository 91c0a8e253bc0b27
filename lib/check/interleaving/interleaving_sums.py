"""Chapter 11, what several stages on a rank win and cost: exercise 11.2."""

from __future__ import annotations

from functools import partial

import torch

from lib.check.exercise import Data, Exercise, Mistake, each_result, result, results, whole
from lib.cost.bubble import kept_by, pipeline_s

_NAME = "interleaving"
_STEP, _SENT, _KEPT = "the step's time", "bytes that are sent", "microbatches that rank 0 keeps"

Case = tuple[int, int, int, int, int, int]  # P, M, V, t_F and t_B of a rank's whole share, bytes of a message


def _cases_inputs(generator: torch.Generator, n: int) -> list[Data]:
    def case(ranks: int, stages_per_rank: int) -> Case:
        t_F, n_bytes = whole(generator, 50, 200), 1024 * whole(generator, 8, 100)
        t_B = t_F + 2 * whole(generator, 10, 125) + 1  # together they are odd
        return ranks, ranks * whole(generator, 2, 6), stages_per_rank, t_F, t_B, n_bytes

    # With two stages on each of an even number of ranks, neither the wait nor what is kept is a whole number.
    return [{"cases": [case(2 * whole(generator, 2, 5), 2), case(whole(generator, 3, 9), whole(generator, 3, 6))]}]


_RIGHT = {
    _STEP: lambda P, M, V, t_F, t_B, n_bytes: pipeline_s(P, M, t_F, t_B, V),
    _SENT: lambda P, M, V, t_F, t_B, n_bytes: 2 * M * (P * V - 1) * n_bytes,
    _KEPT: lambda P, M, V, t_F, t_B, n_bytes: kept_by(0, P, M, V),
}


_by = partial(result, _NAME)  # one of the three numbers, computed so

SUMS = Exercise(
    id="11.2",
    title=_NAME,
    points=1,
    body=each_result(_NAME, *_RIGHT),
    inputs=_cases_inputs,
    reference=results(_NAME, _RIGHT),
    ranks=(1,),
    mistakes=(
        Mistake(
            "Your step waits as long as that of 1F1B. The wait is P-1 times what a *stage* takes, a V-th "
            "of what a rank has.",
            _by(_STEP, lambda P, M, V, t_F, t_B, n_bytes: (M + P - 1) * (t_F + t_B)),
        ),
        Mistake(
            "You divide the whole step by V. A rank has as much work as before; only the wait gets shorter.",
            _by(_STEP, lambda P, M, V, t_F, t_B, n_bytes: (M + P - 1) * (t_F + t_B) / V),
        ),
        Mistake(
            "You took the times for those of a stage. They are of all that a rank has.",
            _by(_STEP, lambda P, M, V, t_F, t_B, n_bytes: (M * V + P - 1) * (t_F + t_B)),
        ),
        Mistake(
            "Your step has a rank's work and no waiting. A V-th of the wait is left.",
            _by(_STEP, lambda P, M, V, t_F, t_B, n_bytes: M * (t_F + t_B)),
        ),
        Mistake(
            "Your step waits as long as a pipeline of P times V ranks would. There are P of them: each stands in the "
            "way of a microbatch only for the time until it reaches the last rank.",
            _by(_STEP, lambda P, M, V, t_F, t_B, n_bytes: (M + (P * V - 1) / V) * (t_F + t_B)),
        ),
        Mistake(
            "V times the messages of 1F1B, but there is a new way, too: from the last rank back to the first. Count "
            "the borders between all stages.",
            _by(_SENT, lambda P, M, V, t_F, t_B, n_bytes: 2 * M * V * (P - 1) * n_bytes),
        ),
        Mistake(
            "These are the bytes of 1F1B. With more stages there are more borders.",
            _by(_SENT, lambda P, M, V, t_F, t_B, n_bytes: 2 * M * (P - 1) * n_bytes),
        ),
        Mistake(
            "That is one direction. Each border is crossed forward by activations, and back by their gradients.",
            _by(_SENT, lambda P, M, V, t_F, t_B, n_bytes: M * (P * V - 1) * n_bytes),
        ),
        Mistake(
            "One border too many. The last stage sends nothing forward, and the first one nothing back.",
            _by(_SENT, lambda P, M, V, t_F, t_B, n_bytes: 2 * M * P * V * n_bytes),
        ),
        Mistake(
            "That is one microbatch. Each of them crosses every border.",
            _by(_SENT, lambda P, M, V, t_F, t_B, n_bytes: 2 * (P * V - 1) * n_bytes),
        ),
        Mistake(
            "That is what a rank in the middle sends. Asked for is what all send together.",
            _by(_SENT, lambda P, M, V, t_F, t_B, n_bytes: 2 * M * V * n_bytes),
        ),
        Mistake(
            "Rank 0 keeps P microbatches in 1F1B, or with a warmup of half the way. Megatron's is longer.",
            _by(_KEPT, lambda P, M, V, t_F, t_B, n_bytes: P),
        ),
        Mistake(
            "That is how many short stages are kept. A microbatch in the whole share of a rank is V of them.",
            _by(_KEPT, lambda P, M, V, t_F, t_B, n_bytes: 2 * (P - 1) + (V - 1) * P + 1),
        ),
        Mistake(
            "Those are the forwards of the warmup. With the one of the first turn it is one short stage more.",
            _by(_KEPT, lambda P, M, V, t_F, t_B, n_bytes: (2 * (P - 1) + (V - 1) * P) / V),
        ),
        Mistake(
            "That is the factor beside 1F1B, whose rank 0 keeps P. Asked for are microbatches.",
            _by(_KEPT, lambda P, M, V, t_F, t_B, n_bytes: 1 + (P - 1) / (P * V)),
        ),
    ),
)

EXERCISES = (SUMS,)
