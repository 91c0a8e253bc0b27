"""Chapter 06, what a transformer on several ranks sends: exercise 06.5."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lib.check.exercise import Data, Exercise, Mistake, each_call, formula, whole
from lib.cost import block_wire_bytes

_NAME = "bytes_per_step"


def _sizes_inputs(generator: torch.Generator, n: int) -> list[Data]:
    def case(ranks: int, microbatches: int, recompute: bool) -> tuple:
        layers, tokens = whole(generator, 2, 120), 512 * whole(generator, 1, 32)
        return layers, tokens, 128 * whole(generator, 8, 128), microbatches, ranks, recompute

    sizes = ((1, 3), (2, 1), (whole(generator, 3, 8), whole(generator, 2, 6)), (8, 16))
    return [{"cases": [case(*size, recompute) for recompute in (False, True) for size in sizes]}]


def _right(layers: int, tokens: int, width: int, microbatches: int, n: int, recompute: bool) -> float:
    block = block_wire_bytes(2 * tokens * width, n, "full" if recompute else "none")
    return layers * microbatches * block


def _sent(
    plain: float = 4,
    recomputed: float = 6,
    numbers: Callable[[int, int, int], float] = lambda tokens, width, n: tokens * width,
    ring: Callable[[int], float] = lambda n: 2 * (n - 1) / n,
    times: Callable[[int], int] = lambda microbatches: microbatches,
) -> Callable:
    """With so many all-reduces for a layer and microbatch, of `numbers`, of which a rank sends `ring` times as much."""

    def of(layers: int, tokens: int, width: int, microbatches: int, n: int, recompute: bool) -> float:
        all_reduces = layers * times(microbatches) * (recomputed if recompute else plain)
        return float(all_reduces * 2 * numbers(tokens, width, n) * ring(n))

    return formula(_NAME, of)


BYTES_PER_STEP = Exercise(
    id="06.5",
    title=_NAME,
    points=1,
    body=each_call(_NAME),
    inputs=_sizes_inputs,
    reference=formula(_NAME, _right),
    ranks=(1,),
    mistakes=(
        Mistake(
            "Not the matrix is sent but the activation: tokens · width elements, not width². It grows with the width, "
            "and not with its square.",
            _sent(numbers=lambda tokens, width, n: width**2),
        ),
        Mistake(
            "Exactly twice too much. A column–row pair has one all-reduce in each direction, so a layer has two "
            "forward and two backward. (Or an element has more than 2 bytes, or you also count received bytes.)",
            _sent(8, 12),
        ),
        Mistake(
            "Exactly half. A ring all-reduce is a reduce-scatter and an all-gather, each (n-1)/n of the tensor; and an "
            "element in 16 bits has 2 bytes.",
            _sent(ring=lambda n: (n - 1) / n),
        ),
        Mistake(
            "You count only forward. In backward the gradient of x is summed before each column-parallel layer: two "
            "more all-reduces per layer.",
            _sent(2, 4),
        ),
        Mistake(
            "Recomputing is not free on the wire: it repeats the two all-reduces of forward.",
            _sent(recomputed=4),
        ),
        Mistake(
            "Recomputing does not double the bytes. It repeats forward, two all-reduces of the four.",
            _sent(recomputed=8),
        ),
        Mistake(
            "PyTorch's checkpoint needs five, because it leaves out the last all-reduce. Here all of forward is "
            "recomputed: six.",
            _sent(recomputed=5),
        ),
        Mistake(
            "You count one microbatch. Activations travel for each microbatch: nothing can be accumulated first.",
            _sent(times=lambda microbatches: 1),
        ),
        Mistake(
            "Nearly: a rank sends 2(n-1)/n of the tensor, and 2 is only the limit for many ranks. Look at n = 1, where "
            "nothing is sent.",
            _sent(ring=lambda n: 2),
        ),
        Mistake(
            "You divided the tensor by the number of ranks. The summed tensor has full size on each rank: only weights "
            "and hidden features are sharded.",
            _sent(numbers=lambda tokens, width, n: tokens * width / n),
        ),
        Mistake(
            "You return the bytes of all ranks together. The question is about one rank.",
            _sent(ring=lambda n: 2 * (n - 1)),
        ),
    ),
)

EXERCISES = (BYTES_PER_STEP,)
