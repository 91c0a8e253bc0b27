"""Chapters 04 and 05, what shards save and what they cost: exercises 04.5 and 05.5."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import torch

from lib.check.exercise import Data, Exercise, Mistake, each_call, formula, whole
from lib.cost import state_bytes, zero_wire_bytes
from lib.cost.sizes import RECIPES, Recipe

# ---- 04.5 ranks_needed ----------------------------------------------------------------------------------------------

_PRECISIONS = {"mixed": RECIPES["mixed Adam"], "float32": RECIPES["fp32 Adam"]}


def _split(stage: int, recipe: Recipe) -> tuple[int, int]:
    """Bytes a parameter that every rank keeps, and those that are shared out."""
    one, two = (sum(state_bytes(1, recipe, zero=stage, dp=n).values()) for n in (1, 2))
    return round(2 * two - one), round(2 * (one - two))


def _needed_inputs(generator: torch.Generator, n: int) -> list[Data]:
    cases = []
    for precision, recipe in _PRECISIONS.items():
        for stage in range(4):
            ranks = whole(generator, 5, 40)
            num_parameters = ranks * whole(generator, 10**6, 10**8)
            kept, shared = (each * num_parameters for each in _split(stage, recipe))
            room = kept + shared // ranks  # is just filled by so many ranks
            cases += [(num_parameters, stage, precision, memory_bytes) for memory_bytes in (room, room - 1)]
            cases += [(num_parameters, stage, precision, kept * 9 // 10)] if kept and shared else []
    return [{"cases": cases}]


def _ranks(split: Callable[[int, Recipe], tuple[float, float]], rounded: Callable = ceil, never: Any = None):
    """The number of ranks for which each keeps and shares out what `split` says."""

    def of(num_parameters: int, stage: int, precision: str, memory_bytes: int) -> Any:
        kept, shared = (each * num_parameters for each in split(stage, _PRECISIONS[precision]))
        if kept + shared <= memory_bytes:
            return 1
        return rounded(shared / (memory_bytes - kept)) if shared and kept < memory_bytes else never

    return formula("ranks_needed", of)


def _no_master(stage: int, recipe: Recipe) -> tuple[int, int]:
    return _split(stage, Recipe(recipe.weight_bytes, recipe.gradient_bytes, 0, recipe.state_bytes))


def _whole_master(stage: int, recipe: Recipe) -> tuple[int, int]:
    kept, shared = _split(stage, recipe)
    whole_bytes = recipe.master_bytes if stage in (1, 2) else 0
    return kept + whole_bytes, shared - whole_bytes


def _power_of_two(ranks: float) -> int:
    return 1 << (ceil(ranks) - 1).bit_length()


NEEDED = Exercise(
    id="04.5",
    title="ranks_needed",
    points=2,
    body=each_call("ranks_needed"),
    inputs=_needed_inputs,
    reference=_ranks(_split),
    ranks=(1,),
    mistakes=(
        Mistake(
            'You count 12 bytes per parameter for "mixed". The optimizer steps a float32 copy of it, 4 bytes more: '
            "2 + 2 + 12.",
            _ranks(_no_master),
        ),
        Mistake(
            "You shard everything at stages 1 to 3. Stage 1 shards the optimizer state, stage 2 also the gradients; "
            "the rest is replicated on every rank.",
            _ranks(lambda stage, recipe: _split(3 if stage else 0, recipe)),
        ),
        Mistake(
            "Your stage 1 also shards the gradients, as stage 2 does.",
            _ranks(lambda stage, recipe: _split(2 if stage == 1 else stage, recipe)),
        ),
        Mistake(
            "Your stage 2 shards the parameters. It replicates them: 2 bytes each, or 4 in float32.",
            _ranks(lambda stage, recipe: _split(3 if stage == 2 else stage, recipe)),
        ),
        Mistake(
            "You replicate the master weights. Only the optimizer reads them: they are sharded with its state, from "
            "stage 1 on.",
            _ranks(_whole_master),
        ),
        Mistake(
            "You rounded down. With that many ranks each holds a little too much: round up.",
            _ranks(_split, int),
        ),
        Mistake(
            "You try powers of two alone. A flat tensor can be sharded over any number of ranks.",
            _ranks(_split, _power_of_two),
        ),
        Mistake(
            "Where the replicated bytes alone do not fit, you return a number. No number of ranks helps there: return "
            "None.",
            _ranks(_split, never=1),
        ),
    ),
)

# ---- 05.5 sent_bytes ------------------------------------------------------------------------------------------------


def _traffic_inputs(generator: torch.Generator, n: int) -> list[Data]:
    def case(reshard: bool, ranks: int, microbatches: int) -> tuple:
        return 4 * whole(generator, 10**6, 10**9), ranks, microbatches, reshard

    sizes = ((1, 3), (2, 1), (whole(generator, 3, 9), whole(generator, 2, 6)), (64, 4))
    return [{"cases": [case(reshard, *size) for reshard in (True, False) for size in sizes]}]


def _sent(of: Callable[[float, int, int, bool], float]) -> Callable:
    """Bytes by a formula of a half all-reduce, which is (n-1)/n of the parameters, and n, microbatches, reshard."""

    def bytes_of(payload_bytes: int, n: int, microbatches: int, reshard: bool) -> float:
        return float(of((n - 1) / n * payload_bytes, n, microbatches, reshard))

    return formula("sent_bytes", bytes_of)


TRAFFIC = Exercise(
    id="05.5",
    title="sent_bytes",
    points=1,
    body=each_call("sent_bytes"),
    inputs=_traffic_inputs,
    reference=formula(
        "sent_bytes", lambda size, n, k, reshard: zero_wire_bytes(3, size, n, microbatches=k, reshard=reshard)
    ),
    ranks=(1,),
    mistakes=(
        Mistake(
            "You multiply (n-1)/n by what one rank keeps. A collective's (n-1)/n is of the whole tensor that it puts "
            "together or adds up.",
            _sent(lambda half, n, k, reshard: half / n * k * (3 if reshard else 2)),
        ),
        Mistake(
            "You count two transfers whatever happens after forward. A unit that was let go must be gathered again "
            "for backward: with reshard there are three.",
            _sent(lambda half, n, k, reshard: half * k * 2),
        ),
        Mistake(
            "You count three transfers whatever happens after forward. A unit that stays whole is not gathered again: "
            "without reshard there are two.",
            _sent(lambda half, n, k, reshard: half * k * 3),
        ),
        Mistake(
            "That is one microbatch. Each goes through all units, forward and backward, and gathers and reduces for "
            "itself.",
            _sent(lambda half, n, k, reshard: half * (3 if reshard else 2)),
        ),
        Mistake(
            "You reduce the gradients once a step. A rank that keeps only a shard of them has nowhere to keep the "
            "rest until the last microbatch: it reduces after each.",
            _sent(lambda half, n, k, reshard: half * (k * (2 if reshard else 1) + 1)),
        ),
        Mistake(
            "You gather for the first microbatch only. Its parameters are let go before the next one begins.",
            _sent(lambda half, n, k, reshard: half * (k + (2 if reshard else 1))),
        ),
        Mistake(
            "The gradients are missing: each backward ends in a reduce-scatter.",
            _sent(lambda half, n, k, reshard: half * k * (2 if reshard else 1)),
        ),
        Mistake(
            "Nearly: a rank does not send itself the part that it keeps. Look at n = 1, where nothing is sent.",
            formula("sent_bytes", lambda size, n, k, reshard: float(size * k * (3 if reshard else 2))),
        ),
        Mistake(
            "That is what all ranks send together. The question is about one of them.",
            _sent(lambda half, n, k, reshard: n * half * k * (3 if reshard else 2)),
        ),
    ),
)

EXERCISES = (NEEDED, TRAFFIC)
