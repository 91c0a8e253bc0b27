"""Chapter 09, what a rank keeps of its microbatches: exercise 09.2."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lib.check.exercise import Data, Exercise, Mistake, each_result, result, results, whole
from lib.cost.bubble import kept_by

_NAME = "kept"
_COUNT, _BYTES = "microbatches", "bytes"

# Schedule, rank, ranks, microbatches, layers of a stage, bytes that a layer saves, bytes that travel, recompute.
Case = tuple[str, int, int, int, int, int, int, bool]


def _cases_inputs(generator: torch.Generator, n: int) -> list[Data]:
    def case(schedule: str, rank: int, ranks: int, microbatches: int, recompute: bool) -> Case:
        boundary = 1024 * whole(generator, 8, 100)
        layers, saved = whole(generator, 2, 9), boundary * whole(generator, 10, 30)
        return schedule, rank, ranks, microbatches, layers, saved, boundary, recompute

    cases = []
    for recompute in (False, True):
        ranks = whole(generator, 4, 12)
        inner = whole(generator, 1, ranks - 2)
        for microbatches in (whole(generator, 2 * ranks, 5 * ranks), whole(generator, 2, ranks)):
            cases += [case("GPipe", inner, ranks, microbatches, recompute)]
            cases += [case("1F1B", rank, ranks, microbatches, recompute) for rank in (0, inner, ranks - 1)]
    return [{"cases": cases}]


def _count(schedule: str, rank: int, ranks: int, microbatches: int) -> int:
    return microbatches if schedule == "GPipe" else int(kept_by(rank, ranks, microbatches))


def _n_bytes(count: int, layers: int, saved: int, boundary: int, recompute: bool) -> int:
    """With recomputation: inputs of stages, and all of the microbatch that goes back just now, its input among it."""
    return (count - 1) * boundary + layers * saved if recompute else count * layers * saved


_RIGHT = {
    _COUNT: lambda *case: _count(*case[:4]),
    _BYTES: lambda *case: _n_bytes(_count(*case[:4]), *case[4:]),
}


def _counted(count: Callable[[str, int, int, int], int]) -> Callable:
    """The microbatches, counted so; whatever is said of bytes."""
    return result(_NAME, _COUNT, lambda *case: count(*case[:4]))


def _one_f_one_b(count: Callable[[int, int, int], int]) -> Callable:
    """Microbatches of 1F1B, by rank, ranks and microbatches; GPipe's are right."""
    return _counted(lambda schedule, *sizes: sizes[2] if schedule == "GPipe" else count(*sizes))


def _weighed(n_bytes: Callable[[int, int, int, int], int], recompute: bool = True) -> Callable:
    """Bytes of those calls with recomputation, or without; of the right number of microbatches."""
    of = lambda *case: n_bytes(_count(*case[:4]), *case[4:7])  # noqa: E731
    return result(_NAME, _BYTES, of, where=lambda *case: case[-1] is recompute)


# With few microbatches, and as the forwards of the warmup.
_LESS_THE_RANK = (
    lambda rank, ranks, microbatches: min(microbatches, ranks) - rank,
    lambda rank, ranks, microbatches: max(1, min(microbatches, ranks) - rank),
)
_WARM_UP = (
    lambda rank, ranks, microbatches: min(microbatches, ranks - rank - 1),
    lambda rank, ranks, microbatches: ranks - rank - 1,
)

_HINT_LESS = (
    "Under 1F1B with few microbatches you subtract the rank from what there is. A rank keeps the smaller of the two: "
    "P less its number, or all microbatches."
)
_HINT_WARM_UP = (
    "One too few under 1F1B: those are the forwards of the warmup. With the one of the first pair it is one more, and "
    "even the last rank keeps one."
)

KEPT = Exercise(
    id="09.2",
    title=_NAME,
    points=1,
    body=each_result(_NAME, *_RIGHT),
    inputs=_cases_inputs,
    reference=results(_NAME, _RIGHT),
    ranks=(1,),
    mistakes=(
        Mistake(
            "Under 1F1B every rank keeps P in yours. That is the first one, for which the way to the loss and back is "
            "longest. How many does the last rank keep?",
            _one_f_one_b(lambda rank, ranks, microbatches: min(microbatches, ranks)),
        ),
        Mistake(
            "Under 1F1B you keep all microbatches, as under GPipe. A rank goes back with the first one long before the "
            "last one has come.",
            _counted(lambda schedule, rank, ranks, microbatches: microbatches),
        ),
        Mistake(
            "Under GPipe each rank keeps all microbatches: it goes back only when all have gone forward, also the last "
            "rank.",
            _counted(lambda schedule, rank, ranks, microbatches: min(microbatches, ranks - rank)),
        ),
        Mistake(
            "You keep more microbatches than there are. With few of them, a rank has no more than all.",
            _one_f_one_b(lambda rank, ranks, microbatches: ranks - rank),
        ),
        Mistake(
            "Under 1F1B with fewer microbatches than ranks, every rank keeps all of them in yours. The last rank still "
            "gets each one back at once: the limit by the rank holds, too.",
            _one_f_one_b(lambda rank, ranks, microbatches: microbatches if microbatches < ranks else ranks - rank),
        ),
        *(Mistake(_HINT_LESS, _one_f_one_b(count)) for count in _LESS_THE_RANK),
        *(Mistake(_HINT_WARM_UP, _one_f_one_b(count)) for count in _WARM_UP),
        Mistake(
            "One too many under 1F1B. Ranks are counted from 0: the last one is P-1, and keeps one.",
            _one_f_one_b(lambda rank, ranks, microbatches: min(microbatches, ranks - rank + 1)),
        ),
        Mistake(
            "Under 1F1B you keep more the nearer a rank is to the loss. It is the other way round: the last one gets "
            "each microbatch back at once.",
            _one_f_one_b(lambda rank, ranks, microbatches: min(microbatches, rank + 1)),
        ),
        Mistake(
            "With recomputation you keep what every layer saves, for each microbatch. What is kept for each is the "
            "stage's input; the rest is computed again when it goes back.",
            _weighed(lambda count, layers, saved, boundary: count * layers * saved),
        ),
        Mistake(
            "With recomputation you count the inputs only. When a microbatch goes back, its forward is computed again "
            "first, and for that moment all of its layers' activations are there.",
            _weighed(lambda count, layers, saved, boundary: count * boundary),
        ),
        Mistake(
            "With recomputation you count one layer of the microbatch that goes back. The whole stage is computed "
            "again before it does, so what all of its layers save is there.",
            _weighed(lambda count, layers, saved, boundary: (count - 1) * boundary + saved),
        ),
        Mistake(
            "With recomputation you keep the input of every layer. Here the whole stage is computed again, from its "
            "own input.",
            _weighed(lambda count, layers, saved, boundary: layers * ((count - 1) * boundary + saved)),
        ),
        Mistake(
            "With recomputation you count an input twice. That of the microbatch which goes back just now is among "
            "what its first layer saves.",
            _weighed(lambda count, layers, saved, boundary: count * boundary + layers * saved),
        ),
        Mistake(
            "That is one layer. A stage has several, and each saves something of each microbatch.",
            _weighed(lambda count, layers, saved, boundary: count * saved, recompute=False),
        ),
    ),
)

EXERCISES = (KEPT,)
