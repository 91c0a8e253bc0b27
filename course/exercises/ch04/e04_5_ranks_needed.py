"""04.5: the smallest number of ranks that can hold a model."""

import math

from course.check.edits import exercise
from course.check.exercise import whole
from lib.cost import state_bytes
from lib.cost.sizes import RECIPES

PRECISIONS = {"mixed": RECIPES["mixed Adam"], "float32": RECIPES["fp32 Adam"]}


def held_bytes(num_parameters, stage, precision, n):
    return round(sum(state_bytes(num_parameters, PRECISIONS[precision], zero=stage, dp=n).values()))


def inputs(generator, n):
    cases = []
    for precision in PRECISIONS:
        for stage in range(4):
            ranks = whole(generator, 5, 40)
            model = ranks * whole(generator, 10**6, 10**8), stage, precision
            full, half, needed = (held_bytes(*model, n) for n in (1, 2, ranks))
            kept = 2 * half - full  # on every rank, by any number of them
            # Not to the last byte: a formula in floats may be one off.
            cases += [(*model, needed + spare) for spare in (1000, -1000)]
            cases += [(*model, kept * 9 // 10)] if 0 < kept < full else []
    return [{"cases": cases}]


def ranks_needed(num_parameters, stage, precision, memory_bytes):
    parameter, gradient = (2, 2) if precision == "mixed" else (4, 4)
    optimizer = 12 if precision == "mixed" else 8
    parts = [(optimizer, 1), (gradient, 2), (parameter, 3)]
    shared = sum(size for size, first in parts if stage >= first)
    kept = sum(size for size, first in parts if stage < first)
    shared, kept = shared * num_parameters, kept * num_parameters
    if kept + shared <= memory_bytes:
        return 1
    if kept >= memory_bytes or shared == 0:
        return None
    return math.ceil(shared / (memory_bytes - kept))


def by_trying(num_parameters, stage, precision, memory_bytes):
    sizes = (held_bytes(num_parameters, stage, precision, n) for n in range(1, 1000))
    return next((n for n, size in enumerate(sizes, 1) if size <= memory_bytes), None)


MISTAKES = """
optimizer = 12 if precision == "mixed" else 8 => optimizer = 8
    You count 12 bytes per parameter for "mixed".
        The optimizer steps a float32 copy of it, 4 bytes more: 2 + 2 + 12.
(gradient, 2), (parameter, 3) => (gradient, 1), (parameter, 1)
    You shard everything at stages 1 to 3.
        Stage 1 shards the optimizer state, 2 also gradients; the rest is replicated.
(gradient, 2) => (gradient, 1)
    Your stage 1 also shards the gradients.
        That is stage 2: stage 1 shards the optimizer state alone.
(parameter, 3) => (parameter, 2)
    Your stage 2 shards the parameters.
        It replicates them: 2 bytes each, or 4 in float32.
(optimizer, 1) => (8, 1), (optimizer - 8, 3)
    You replicate the master weights.
        Only the optimizer reads them: they are sharded with its state, from stage 1 on.
math.ceil(shared / (memory_bytes - kept)) => math.floor(shared / (memory_bytes - kept))
    You rounded down. With that many ranks each holds a little too much.
        Round up.
=> 2 ** math.ceil(math.log2(shared / (memory_bytes - kept)))
    You try powers of two alone.
        A flat tensor can be sharded over any number of ranks.
return None => return 1
    Where the replicated bytes alone do not fit, you return a number. No number of ranks helps there.
        Return None.
"""

EXERCISE = exercise(globals(), points=2, right=(ranks_needed, by_trying), same_as=by_trying)
