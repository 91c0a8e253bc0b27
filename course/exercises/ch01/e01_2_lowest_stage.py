"""01.2: the lowest stage of ZeRO whose model states fit into one rank."""

from __future__ import annotations

from collections.abc import Callable
from operator import le, lt

import torch

from course.check.exercise import Data, Exercise, Mistake, each_call, whole


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    ranks = 2 ** whole(generator, 3, 7)  # so that a division in floating point is also exact
    num_parameters = ranks * whole(generator, 10**6, 10**8)
    plain, one, two, three = map(int, needs(num_parameters, ranks))
    memory = [plain, int(0.9 * plain), int(1.05 * one), (one + two) // 2, two, (two + three) // 2, int(0.9 * three)]
    return [{"cases": [(num_parameters, ranks, memory_bytes) for memory_bytes in memory]}]


def needs(p: int, n: int, optimizer: int = 12) -> list[float]:
    """Bytes per rank at stages 0, 1, 2, 3."""
    return [(4 + optimizer) * p, (4 + optimizer / n) * p, (2 + (2 + optimizer) / n) * p, (4 + optimizer) * p / n]


def lowest(needs: Callable = needs, fits: Callable = le, order: tuple[int, ...] = (0, 1, 2, 3)) -> Callable:
    def program(num_parameters, ranks, memory_bytes):
        held = needs(num_parameters, ranks)
        return next((stage for stage in order if fits(held[stage], memory_bytes)), None)

    return program


def from_above(num_parameters, ranks, memory_bytes):
    best = None
    for stage, sharded in ((3, 16), (2, 14), (1, 12), (0, 0)):
        if num_parameters * (16 - sharded) + num_parameters // ranks * sharded <= memory_bytes:
            best = stage
    return best


EXERCISE = Exercise(
    id="01.2",
    title="lowest_stage",
    points=2,
    body=each_call("lowest_stage"),
    inputs=inputs,
    right=(lowest(), from_above),
    ranks=(1,),
    mistakes=(
        Mistake(
            "You divided all 16 bytes by the number of ranks at every stage. Stage 0 divides nothing, stage 1 the 12 "
            "bytes of optimizer state, stage 2 gradients as well.",
            lowest(lambda p, n: [16 * p / n] * 4),
        ),
        Mistake(
            "You count 12 bytes per parameter. With the master weights it is 16: 2 + 2 + 12.",
            lowest(lambda p, n: needs(p, n, optimizer=8)),
        ),
        Mistake(
            "Your stage 1 shards the gradients. Stage 1 begins with the optimizer state, which takes six times the "
            "bytes; the gradients follow in stage 2.",
            lowest(lambda p, n: [16 * p, (14 + 2 / n) * p, *needs(p, n)[2:]]),
        ),
        Mistake(
            "That is the highest stage that fits. A higher stage never holds more, but stage 3 sends more: take the "
            "lowest.",
            lowest(order=(3, 2, 1, 0)),
        ),
        Mistake("Nearly: states that fill the memory to the last byte fit. Compare with <=.", lowest(fits=lt)),
        Mistake(
            "Your stage 3 does not shard the parameters: it is stage 2 again. Stage 3 shards all 16 bytes.",
            lowest(lambda p, n: [*needs(p, n)[:3], needs(p, n)[2]]),
        ),
    ),
)
