"""Chapter 03, what gradients become: exercises 03.1, 03.2, 03.5 and 03.6."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lib.check.exercise import DTYPE, Data, Exercise, Mistake, everywhere, means_of, random, scaled, whole
from lib.cost import wire_bytes
from lib.mesh import Group

# ---- 03.1 average_gradients -----------------------------------------------------------------------------------------

_SHAPES = ((3, 4), (4,), (2, 3))


def _gradients_inputs(generator: torch.Generator, n: int) -> list[Data]:
    # Real ranks have equal weights; other ones on each rank show who touches them.
    return [{name: [random(generator, *s) for s in _SHAPES] for name in ("weights", "gradients")} for _ in range(n)]


def _average_gradients(answer: Callable, group: Group, given: Data) -> Data:
    params = [nn.Parameter(w.clone()) for w in given["weights"]]
    frozen = nn.Parameter(torch.ones(2, dtype=DTYPE))
    for p, g in zip(params, given["gradients"], strict=True):
        p.grad = g.clone()
    answer([params[0], frozen, *params[1:]], group)
    return {
        "gradients": [p.grad for p in params],
        "weights": [p.detach() for p in params],
        "the grad of a frozen parameter": "None" if frozen.grad is None else "a tensor",
    }


def _gradients_reference(given: list[Data]) -> list[Data]:
    means = means_of("gradients", given)
    return [{"gradients": means, "weights": g["weights"], "the grad of a frozen parameter": "None"} for g in given]


AVERAGE = Exercise(
    id="03.1",
    title="average_gradients",
    points=2,
    body=_average_gradients,
    inputs=_gradients_inputs,
    reference=_gradients_reference,
    mistakes=(
        Mistake(
            "Your gradients are exactly as many times too large as there are ranks: you summed and did not divide. "
            'Use op="mean", or divide by group.size.',
            scaled(lambda n: n),
        ),
        Mistake(
            'Your gradients are too small, by the number of ranks: you divided twice. op="mean" divides already.',
            scaled(lambda n: 1 / n),
        ),
        Mistake(
            "Each rank still has its own gradient. all_reduce returns a new tensor and leaves its argument alone: "
            "assign the result to p.grad.",
            lambda given, want: [{"gradients": g["gradients"], "weights": g["weights"]} for g in given],
        ),
        Mistake(
            "All ranks have the gradient of rank 0. A broadcast copies one rank's tensor; the mean needs all of them: "
            "use all_reduce.",
            lambda given, want: everywhere({"gradients": given[0]["gradients"]}, given),
        ),
        Mistake(
            "You wrote the averaged gradients into the weights. Only p.grad may change here; the optimizer moves the "
            "weights.",
            lambda given, want: [{"weights": w["gradients"]} for w in want],
        ),
        Mistake(
            "You averaged the weights. Here it is their gradients: p.grad, not p.data.",
            lambda given, want: everywhere({"weights": means_of("weights", given)}, given),
        ),
        Mistake(
            "A parameter that took no part has now got a gradient. Leave p.grad alone where it is None: AdamW would "
            "decay a weight that nobody trained.",
            lambda given, want: everywhere({"the grad of a frozen parameter": "a tensor"}, given),
        ),
    ),
)

# ---- 03.2 global_gradient -------------------------------------------------------------------------------------------


def _uneven_inputs(generator: torch.Generator, n: int) -> list[Data]:
    counts = [2 + 3 * r for r in range(n)]
    if n == 4:
        counts[1] = 0  # a rank whose rows ran out
    return [{"sum": random(generator, 4, 3) * count, "count": count} for count in counts]


def _global_gradient(answer: Callable, group: Group, given: Data) -> Data:
    return {"gradient": answer(given["sum"].clone(), given["count"], group)}


def _over_all(given: list[Data]) -> tuple[Tensor, int]:
    return torch.stack([g["sum"] for g in given]).sum(0), sum(g["count"] for g in given)


def _uneven_reference(given: list[Data]) -> list[Data]:
    total, count = _over_all(given)
    return everywhere({"gradient": total / count}, given)


def _means(given: list[Data]) -> Tensor:
    return torch.stack([g["sum"] / max(g["count"], 1) for g in given])


def _by_own_count(factor: Callable[[int], int]) -> Callable:
    """The sum over all ranks, divided by this rank's count; whoever has none may have anything."""
    return lambda given, want: [
        {"gradient": _over_all(given)[0] / (factor(len(given)) * g["count"])} if g["count"] else {} for g in given
    ]


GLOBAL = Exercise(
    id="03.2",
    title="global_gradient",
    points=2,
    body=_global_gradient,
    inputs=_uneven_inputs,
    reference=_uneven_reference,
    mistakes=(
        Mistake(
            "That is the mean of the ranks' means: a sample of a rank with few of them counts too much. Add up the "
            "sums and the counts, then divide once.",
            lambda given, want: everywhere({"gradient": _means(given).mean(0)}, given),
        ),
        Mistake(
            "Everything is nan: the rank without samples divided zero by zero, and the all-reduce gave its nan to "
            "everybody. Divide once, by the count of all ranks.",
            lambda given, want: [{"gradient": torch.full_like(w["gradient"], float("nan"))} for w in want],
        ),
        Mistake(
            "You divided each rank's sum by its own count and added the results. Divide by the count of all ranks, "
            "after adding up.",
            lambda given, want: everywhere({"gradient": _means(given).sum(0)}, given),
        ),
        Mistake(
            "Exactly as many times too large as there are ranks: you divided by the mean of the counts. It takes "
            "their sum.",
            lambda given, want: [{"gradient": w["gradient"] * len(given)} for w in want],
        ),
        Mistake(
            "Exactly as many times too small as there are ranks: you averaged the sums, and a sum must be added up.",
            lambda given, want: [{"gradient": w["gradient"] / len(given)} for w in want],
        ),
        Mistake(
            "You divided the sum over all ranks by this rank's own count, so each rank has another gradient. The "
            "count needs an all-reduce of its own.",
            _by_own_count(lambda n: 1),
        ),
        Mistake(
            "You divided by the number of ranks times this rank's own count. That is the count of all ranks only if "
            "they have equally many: add the counts up with an all-reduce of their own.",
            _by_own_count(lambda n: n),
        ),
        Mistake(
            "That is the mean over this rank's own samples. Nothing was sent.",
            lambda given, want: [{"gradient": g["sum"] / g["count"]} if g["count"] else {} for g in given],
        ),
        Mistake(
            "That is the sum over all samples, not yet divided by how many there are.",
            lambda given, want: everywhere({"gradient": _over_all(given)[0]}, given),
        ),
    ),
)

# ---- 03.5 bytes_sent ------------------------------------------------------------------------------------------------


def _sizes_inputs(generator: torch.Generator, n: int) -> list[Data]:
    ranks = [1, 2, whole(generator, 3, 9), 64]
    return [{"sizes": [(whole(generator, 10**6, 10**9), (2, 4)[i % 2], n) for i, n in enumerate(ranks)]}] * n


def _bytes_sent(answer: Callable, group: Group, given: Data) -> Data:
    return {_call(size): answer(*size) for size in given["sizes"]}


def _call(size: tuple[int, int, int]) -> str:
    return f"bytes_sent{size}"


def _formula(of: Callable[[int, int], float]) -> Callable:
    """Answers of a formula of (bytes of all gradients, ranks)."""
    return lambda given, want: [{_call((p, b, n)): float(of(p * b, n)) for p, b, n in g["sizes"]} for g in given]


BYTES = Exercise(
    id="03.5",
    title="bytes_sent",
    points=1,
    body=_bytes_sent,
    inputs=_sizes_inputs,
    reference=lambda given: _formula(lambda s, n: wire_bytes("all_reduce", s, n))(given, None),
    ranks=(1,),
    mistakes=(
        Mistake(
            "That is one half of an all-reduce. After the reduce-scatter each rank has one n-th of the result, and "
            "the all-gather costs the same again.",
            _formula(lambda s, n: (n - 1) / n * s),
        ),
        Mistake(
            "That is what all ranks send together. The question is about one of them.",
            _formula(lambda s, n: 2 * (n - 1) * s),
        ),
        Mistake(
            "That is what a rank sends and receives together. It receives over the other direction of its link; count "
            "what it sends.",
            _formula(lambda s, n: 4 * (n - 1) / n * s),
        ),
        Mistake("That is in bits. A byte has eight.", _formula(lambda s, n: 16 * (n - 1) / n * s)),
        Mistake(
            "Nearly: a rank does not send itself the part that it keeps. Look at n = 1, where nothing is sent.",
            _formula(lambda s, n: 2 * s),
        ),
        Mistake(
            "That is sending the whole gradient to each of the others. It works, and for many ranks it is n/2 times "
            "too much.",
            _formula(lambda s, n: (n - 1) * s),
        ),
    ),
)

# ---- 03.6 start_equal -----------------------------------------------------------------------------------------------


def _start_inputs(generator: torch.Generator, n: int) -> list[Data]:
    shapes = ((3, 2), (3,), (3,), (3,))
    return [
        {
            "parameters": [random(generator, *s) for s in shapes],
            "buffers": [random(generator, 3), random(generator, 3).abs(), torch.tensor(5 + 2 * rank)],
        }
        for rank in range(n)
    ]


def _start_equal(answer: Callable, group: Group, given: Data) -> Data:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).to(DTYPE)
    model[0].bias.requires_grad_(False)
    with torch.no_grad():
        for x, value in zip(
            (*model.parameters(), *model.buffers()), given["parameters"] + given["buffers"], strict=True
        ):
            x.copy_(value)
    answer(model, group)
    return {"parameters": [p.detach() for p in model.parameters()], "buffers": list(model.buffers())}


def _of_rank(which: int) -> Callable:
    return lambda given, want=None: everywhere(given[which], given)


START = Exercise(
    id="03.6",
    title="start_equal",
    points=2,
    body=_start_equal,
    inputs=_start_inputs,
    reference=_of_rank(0),
    mistakes=(
        Mistake(
            "Nothing has changed. broadcast returns a new tensor and leaves its argument alone: copy the result into "
            "the parameter (x.copy_(...), under torch.no_grad()).",
            lambda given, want: given,
        ),
        Mistake(
            "The parameters are equal, the buffers are not. A batch norm's running means belong to the model too: "
            "model.buffers().",
            lambda given, want: [{"parameters": given[0]["parameters"], "buffers": g["buffers"]} for g in given],
        ),
        Mistake(
            "You averaged the ranks' weights. They are equal now, and much smaller than any initialisation means "
            "them to be: take those of rank 0.",
            lambda given, want: everywhere({"parameters": means_of("parameters", given)}, given),
        ),
        Mistake("All ranks have the weights of the last rank. Broadcast from src=0.", _of_rank(-1)),
        Mistake(
            "The frozen parameter was left out. It is not trained, but the model uses it: take all parameters.",
            lambda given, want: [
                {"parameters": [given[0]["parameters"][0], g["parameters"][1], *given[0]["parameters"][2:]]}
                for g in given
            ],
        ),
    ),
)

EXERCISES = (AVERAGE, GLOBAL, BYTES, START)
