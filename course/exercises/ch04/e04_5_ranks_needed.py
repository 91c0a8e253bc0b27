"""04.5: the smallest number of ranks that can hold a model."""

from __future__ import annotations

from functools import partial
from math import ceil

import torch

from course.check.exercise import Data, Exercise, Mistake, each_call, formula, whole
from lib.cost import state_bytes
from lib.cost.sizes import RECIPES

PRECISIONS = {"mixed": RECIPES["mixed Adam"], "float32": RECIPES["fp32 Adam"]}


def bytes_per_parameter(stage: int, precision: str) -> tuple[int, int]:
    """Replicated on every rank, and sharded."""
    one, two = (sum(state_bytes(1, PRECISIONS[precision], zero=stage, dp=n).values()) for n in (1, 2))
    return round(2 * two - one), round(2 * (one - two))


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    cases = []
    for precision in PRECISIONS:
        for stage in range(4):
            ranks = whole(generator, 5, 40)
            num_parameters = ranks * whole(generator, 10**6, 10**8)
            kept, shared = (each * num_parameters for each in bytes_per_parameter(stage, precision))
            needed_bytes = kept + shared // ranks
            # Not to the last byte: a formula in floats may be one off.
            cases += [(num_parameters, stage, precision, needed_bytes + spare) for spare in (1000, -1000)]
            cases += [(num_parameters, stage, precision, kept * 9 // 10)] if kept and shared else []
    return [{"cases": cases}]


# ---- programs -------------------------------------------------------------------------------------------------------


def needed(num_parameters, stage, precision, memory_bytes, split=bytes_per_parameter, rounded=ceil, never=None):
    kept, shared = (each * num_parameters for each in split(stage, precision))
    if kept + shared <= memory_bytes:
        return 1
    return rounded(shared / (memory_bytes - kept)) if shared and kept < memory_bytes else never


def needed_by_trying(num_parameters, stage, precision, memory_bytes):
    weight, state = (2, 12) if precision == "mixed" else (4, 8)
    for n in range(1, 1000):
        held = weight / (n if stage == 3 else 1) + weight / (n if stage >= 2 else 1) + state / (n if stage else 1)
        if held * num_parameters <= memory_bytes:
            return n
    return None


def no_master(stage, precision):
    kept, shared = bytes_per_parameter(stage, precision)
    fewer = 4 if precision == "mixed" else 0
    return (kept, shared - fewer) if stage else (kept - fewer, 0)


def replicated_master(stage, precision):
    kept, shared = bytes_per_parameter(stage, precision)
    moved = 4 if precision == "mixed" and stage in (1, 2) else 0
    return kept + moved, shared - moved


def counted_as(stages):
    """Each stage with the bytes of a different one."""
    return partial(needed, split=lambda stage, precision: bytes_per_parameter(stages.get(stage, stage), precision))


EXERCISE = Exercise(
    id="04.5",
    title="ranks_needed",
    points=2,
    body=each_call("ranks_needed"),
    inputs=inputs,
    reference=formula("ranks_needed", needed),
    ranks=(1,),
    right=(needed, needed_by_trying),
    mistakes=(
        Mistake(
            'You count 12 bytes per parameter for "mixed". The optimizer steps a float32 copy of it, 4 bytes more: '
            "2 + 2 + 12.",
            partial(needed, split=no_master),
        ),
        Mistake(
            "You shard everything at stages 1 to 3. Stage 1 shards the optimizer state, stage 2 also the gradients; "
            "the rest is replicated on every rank.",
            counted_as({1: 3, 2: 3}),
        ),
        Mistake("Your stage 1 also shards the gradients, as stage 2 does.", counted_as({1: 2})),
        Mistake(
            "Your stage 2 shards the parameters. It replicates them: 2 bytes each, or 4 in float32.",
            counted_as({2: 3}),
        ),
        Mistake(
            "You replicate the master weights. Only the optimizer reads them: they are sharded with its state, from "
            "stage 1 on.",
            partial(needed, split=replicated_master),
        ),
        Mistake(
            "You rounded down. With that many ranks each holds a little too much: round up.",
            partial(needed, rounded=int),
        ),
        Mistake(
            "You try powers of two alone. A flat tensor can be sharded over any number of ranks.",
            partial(needed, rounded=lambda ranks: 1 << (ceil(ranks) - 1).bit_length()),
        ),
        Mistake(
            "Where the replicated bytes alone do not fit, you return a number. No number of ranks helps there: return "
            "None.",
            partial(needed, never=1),
        ),
    ),
)
