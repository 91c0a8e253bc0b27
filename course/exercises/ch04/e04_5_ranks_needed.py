"""04.5: the smallest number of ranks that can hold a model."""

import math
import operator

from course.check.edits import exercise
from course.check.exercise import call, whole
from lib.cost import state_bytes
from lib.cost.sizes import RECIPES

KINDS, RIGHT_KINDS = "kinds of the results", "whole numbers or None"
PRECISIONS = {"mixed": RECIPES["mixed Adam"], "float32": RECIPES["fp32 Adam"]}


def held_bytes(num_parameters, stage, precision, n):
    return round(sum(state_bytes(num_parameters, PRECISIONS[precision], zero=stage, dp=n).values()))


def inputs(generator, n):
    cases = []
    for precision in PRECISIONS:
        for stage in range(4):
            # Of these ranks, none a power of two, with a few bytes more or less: a formula in floats may be one off.
            sizes = [3 * whole(generator, 2, 14), 7 * whole(generator, 600, 1000)]
            for ranks in sizes + [7 * whole(generator, 3000, 12000)] * (stage == 3):
                model = ranks * whole(generator, 10**6, 10**8), stage, precision
                needed = held_bytes(*model, ranks)
                cases += [(*model, needed + spare) for spare in (1000, -1000)]
            # To the last byte, with numbers that are exact in floats.
            ranks = 2 ** whole(generator, 1, 8)
            model = ranks * whole(generator, 10**6, 10**8), stage, precision
            full, half, needed = (held_bytes(*model, n) for n in (1, 2, ranks))
            kept = 2 * half - full  # on every rank, by any number of them
            cases += [(*model, n_bytes) for n_bytes in dict.fromkeys((full, needed))]
            cases += [(*model, kept), (*model, kept * 9 // 10)] if 0 < kept < full else []
    return [{"cases": cases}]


def body(answer, group, given):
    found, kinds = {}, []
    for case in given["cases"]:
        found[call("ranks_needed", case)] = n = answer(*case)
        kinds.append(n is None or is_whole(n))
    return found | {KINDS: RIGHT_KINDS if all(kinds) else "others"}


def is_whole(n):
    try:
        return not isinstance(n, bool) and operator.index(n) == n
    except TypeError:
        return False


def reference(given):
    of_cases = [{call("ranks_needed", case): fewest(*case) for case in g["cases"]} for g in given]
    return [found | {KINDS: RIGHT_KINDS} for found in of_cases]


def fewest(*case):
    """In integers, from what one rank holds and what each of two does."""
    *model, memory_bytes = case
    full, half = (held_bytes(*model, n) for n in (1, 2))
    shared, spare = 2 * (full - half), memory_bytes - (2 * half - full)
    if not shared:
        return 1 if spare >= 0 else None
    return max(1, -(-shared // spare)) if spare > 0 else None


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
    parts = {"mixed": (12, 2, 2), "float32": (8, 4, 4)}[precision]
    on_all = sum(num_parameters * size for at, size in enumerate(parts) if stage <= at)
    for n in range(1, 10**5 if on_all < memory_bytes else 2):  # no case needs more
        held = sum(num_parameters * size / (n if stage > at else 1) for at, size in enumerate(parts))
        if held <= memory_bytes:
            return n
    return None


def by_halving(num_parameters, stage, precision, memory_bytes):
    """A search between two numbers of ranks, in multiples of the number of parameters."""
    parameter, optimizer = (2, 12) if precision == "mixed" else (4, 8)
    fits_in = memory_bytes / num_parameters

    def fits(n):
        of_optimizer, of_gradient, of_parameter = (n if stage > first else 1 for first in range(3))
        return optimizer / of_optimizer + parameter / of_gradient + parameter / of_parameter <= fits_in

    low, high = 0, 2**40
    if not fits(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def up_to(most):
    return lambda *given: n if (n := ranks_needed(*given)) and n <= most else None


MISTAKES = """
in ranks_needed:
optimizer = 12 if precision == "mixed" else 8 => optimizer = 8
    For "mixed" you count 8 bytes per parameter of optimizer state: the two moments, without the master weights.
        The optimizer steps a float32 copy of each parameter, 4 bytes more: 2 + 2 + 12.
optimizer = 12 if precision == "mixed" else 8 => optimizer = 12
    For "float32" you count 12 bytes per parameter of optimizer state, with master weights.
        There the parameters are in float32 already, and no copy is needed: 4 + 4 + 8.
(2, 2) if precision == "mixed" else (4, 4) => (2, 2)
12 if precision == "mixed" else 8 => 12
    For "float32" you count the bytes of "mixed": 2 + 2 + 12 per parameter.
        In float32 a parameter and its gradient have 4 bytes each, and there is no master copy: 4 + 4 + 8.
(2, 2) if precision == "mixed" else (4, 4) => (2, 4) if precision == "mixed" else (4, 4)
    For "mixed" you count gradients in float32.
        Here they are in bfloat16, 2 bytes.
(gradient, 2), (parameter, 3) => (gradient, 1), (parameter, 1)
    You shard everything at stages 1 to 3, also where a stage replicates a part.
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
=> 1 + math.floor(shared / (memory_bytes - kept))
kept + shared <= memory_bytes => kept + shared < memory_bytes
or
math.ceil(shared / (memory_bytes - kept)) => 1 + math.floor(shared / (memory_bytes - kept))
or
kept + shared <= memory_bytes => kept + shared < memory_bytes
    Where a number of ranks fits to the last byte, you ask for one more, or for more than there can be.
        "At most" includes the limit: compare with <=, and round up.
up_to(64)
or up_to(100)
or up_to(128)
or up_to(256)
or up_to(1000)
or up_to(1024)
or up_to(4096)
or up_to(10_000)
    You look at a limited number of ranks, and say None where more are needed.
        Solve for n, or stop only where no number of ranks can be enough: where the replicated bytes do not fit.
in all:
returns result and float(result)
    The numbers are right, and they are floats.
        A number of ranks is an int: math.ceil returns one, -(-a // b) of two integers as well.
in ranks_needed:
return None => return 1
or return None => return 0
or return None => return -1
    Where the replicated bytes alone do not fit, you return a number. No number of ranks helps there.
        Return None.
"""

EXERCISE = exercise(globals(), points=2, right=(ranks_needed, by_trying, by_halving), ranks=(1,))
