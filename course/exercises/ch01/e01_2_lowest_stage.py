"""01.2: the lowest stage of ZeRO whose model states fit into one rank."""

from course.check.compare import ANYTHING
from course.check.edits import exercise
from course.check.exercise import whole


def inputs(generator, n):
    ranks = 2 ** whole(generator, 3, 7)  # so that a division in floating point is also exact
    p = ranks * whole(generator, 10**6, 10**8)
    plain, one, two, three = (16 * p - sharded * (p - p // ranks) for sharded in (0, 12, 14, 16))
    between = ((plain + one) // 2, (one + two) // 2, (two + three) // 2, three // 2)
    at_limits = [n_bytes for limit in (plain, one, two, three) for n_bytes in (limit, limit - 1, limit + limit // 32)]
    return [{"cases": [(p, ranks, memory_bytes) for memory_bytes in (*at_limits, *between)]}]


def lowest_stage(num_parameters, ranks, memory_bytes):
    for stage in (0, 1, 2, 3):
        optimizer = 12 * num_parameters // (ranks if stage >= 1 else 1)
        gradients = 2 * num_parameters // (ranks if stage >= 2 else 1)
        parameters = 2 * num_parameters // (ranks if stage >= 3 else 1)
        if parameters + gradients + optimizer <= memory_bytes:
            return stage
    return None


def from_above(num_parameters, ranks, memory_bytes):
    best = None
    for stage, sharded in ((3, 16), (2, 14), (1, 12), (0, 0)):
        if num_parameters * (16 - sharded) + num_parameters // ranks * sharded <= memory_bytes:
            best = stage
    return best


MISTAKES = """
(ranks if stage >= 1 else 1) => ranks
(ranks if stage >= 2 else 1) => ranks
(ranks if stage >= 3 else 1) => ranks
    You divided all 16 bytes at every stage.
        Stage 0 divides nothing, stage 1 the 12 of the optimizer, 2 gradients too.
<= memory_bytes => <= memory_bytes * ranks
    You compare one rank's states with the memory of all ranks together.
        `memory_bytes` is the memory of each rank.
12 * num_parameters => 14 * num_parameters
or stage >= 2 else 1) => stage >= 2 else 1) + 2 * num_parameters
or stage >= 2 else 1) => stage >= 2 else 1) * 2
    You count 18 bytes per parameter, with gradients in float32.
        Here they have 2 bytes: 2 + 2 + 12.
12 * num_parameters => 8 * num_parameters
    You count 12 bytes per parameter.
        With the master weights it is 16: 2 + 2 + 12.
(ranks if stage >= 1 else 1) => (ranks if stage > 1 else 1)
(ranks if stage >= 2 else 1) => (ranks if stage > 0 else 1)
or (ranks if stage >= 2 else 1) => (ranks if stage >= 1 else 1)
    Your stage 1 shards the gradients.
        It begins with the optimizer state, six times the bytes; gradients follow in 2.
(ranks if stage >= 1 else 1) => (ranks if stage == 1 else 1)
(ranks if stage >= 2 else 1) => (ranks if stage == 2 else 1)
    Each of your stages shards one kind alone.
        Stage 2 shards the gradients as well as the optimizer state, stage 3 everything.
parameters + gradients + optimizer <= => optimizer <=
    You count the optimizer state alone.
        Each rank holds parameters and gradients too, whole or its shard.
(0, 1, 2, 3) => (3, 2, 1, 0)
    That is the highest stage that fits. A higher stage never holds more, but stage 3 sends more.
        Take the lowest.
<= memory_bytes => < memory_bytes
    Nearly: states that fill the memory to the last byte fit.
        Compare with <=.
2 * num_parameters // (ranks if stage >= 3 else 1) => 2 * num_parameters
    Your stage 3 does not shard the parameters: it is stage 2 again.
        Stage 3 shards all 16 bytes.
(0, 1, 2, 3) => (1, 2, 3)
    You leave out stage 0, plain data parallelism: it shards nothing, and where it fits it is the lowest.
        Begin with stage 0.
return stage => return stage or None
    You return None where stage 0 fits: 0 is false in `or` and in `if`.
        Compare with None: `is None`.
returns None
    Each of your results is None.
        Is a `return` missing?
returns ANYTHING if result is None else result
    All is right where a stage fits. Where none fits, you return something else than None.
        Return None after the loop over the stages.
"""

EXERCISE = exercise(globals(), points=2, right=(lowest_stage, from_above))
