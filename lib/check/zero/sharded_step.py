"""Chapter 04, steps of which each rank does one n-th: exercises 04.2 and 04.4."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lib.check.exercise import Data, Exercise, Mistake, but, random, several, whole
from lib.check.listen import listen
from lib.mesh import Group

# ---- 04.2 zero1_step ------------------------------------------------------------------------------------------------

_LR, _BETA = 0.1, 0.75
TWO_HALVES = "as much as an all-reduce"
THREE_HALVES, MORE, LESS = "50% more than an all-reduce", "more than that", "less than an all-reduce"


def _step_inputs(generator: torch.Generator, n: int) -> list[Data]:
    weights = random(generator, 5 * n)
    return [
        {"weights": weights, "gradient": random(generator, 5 * n), "momentum": random(generator, 5)} for _ in range(n)
    ]


def _zero1_step(answer: Callable, group: Group, given: Data) -> Data:
    heard, n = listen(), group.size
    tensors = (given[name].clone() for name in ("weights", "gradient", "momentum"))
    weights, momentum = several(answer(*tensors, _LR, _BETA, group), 2)
    half = (n - 1) / n * given["weights"].numel() * given["weights"].element_size()
    return {"weights": weights, "momentum": momentum, "what was sent": _amount(heard.sent_bytes(n) / half)}


def _amount(halves: float) -> str:
    if halves < 1.9:
        return LESS
    return TWO_HALVES if halves < 2.1 else THREE_HALVES if 2.9 < halves < 3.1 else MORE


def _stepped(
    gradient_of: Callable[[list[Tensor], int], Tensor] = lambda gs, r: torch.stack(gs).mean(0).chunk(len(gs))[r],
    momentum_of: Callable[[Tensor, Tensor], Tensor] = lambda m, g: _BETA * m + g,
    weights_of: Callable[[Tensor, int, int], Tensor] = lambda w, r, n: w.chunk(n)[r],
) -> list:
    """From what each rank is given to its new shards of momentum and weights."""

    def shards(given: list[Data]) -> tuple[list[Tensor], list[Tensor]]:
        n, gradients = len(given), [g["gradient"] for g in given]
        momenta = [momentum_of(g["momentum"], gradient_of(gradients, r)) for r, g in enumerate(given)]
        return momenta, [weights_of(given[0]["weights"], r, n) - _LR * momenta[r] for r in range(n)]

    return shards


def _as(shards: Callable, **also: str) -> Callable:
    """What ranks return who make these shards and then gather them."""

    def answers(given: list[Data], want: Any = None) -> list[Data]:
        momenta, weights = shards(given)
        return [{"weights": torch.cat(weights), "momentum": m, **also} for m in momenta]

    return answers


def _gathered_before(given: list[Data], want: list[Data]) -> list[Data]:
    """Old weights of the others, new ones of its own."""
    found = []
    for r, w in enumerate(want):
        parts = list(given[r]["weights"].chunk(len(given)))
        parts[r] = w["weights"].chunk(len(given))[r]
        found.append({"weights": torch.cat(parts), "momentum": w["momentum"]})
    return found


STEP = Exercise(
    id="04.2",
    title="zero1_step",
    points=3,
    body=_zero1_step,
    inputs=_step_inputs,
    reference=_as(_stepped(), **{"what was sent": TWO_HALVES}),
    mistakes=(
        Mistake(
            "Each rank stepped its own shard and has the old shards of the others: no rank got their new weights. The "
            "all-gather comes after the step, and carries its result.",
            _gathered_before,
        ),
        Mistake(
            "You return the old weights. The all-gather must gather the stepped shards: pass it the new tensor that "
            "the step made.",
            lambda given, want: [
                {"weights": g["weights"], "momentum": w["momentum"]} for g, w in zip(given, want, strict=True)
            ],
        ),
        Mistake(
            "You stepped with the sum of the gradients over the n ranks: n times too far. Use "
            'op="mean" in the reduce-scatter.',
            _as(_stepped(gradient_of=lambda gs, r: torch.stack(gs).sum(0).chunk(len(gs))[r])),
        ),
        Mistake(
            "Each rank stepped its shard with its own gradient alone. A reduce-scatter gives each rank its shard of "
            "the mean.",
            _as(_stepped(gradient_of=lambda gs, r: gs[r].chunk(len(gs))[r])),
        ),
        Mistake(
            "Every rank stepped the first shard of the weights. Rank r owns shard r: begin at r times the size of a "
            "shard.",
            _as(_stepped(weights_of=lambda w, r, n: w.chunk(n)[0])),
        ),
        Mistake(
            "The weights are right, but each rank holds the full momentum: ZeRO-1 then saves nothing. Return this "
            "rank's shard.",
            lambda given, want: [
                {"weights": w["weights"], "momentum": torch.cat([v["momentum"] for v in want])} for w in want
            ],
        ),
        Mistake(
            "The weights are right, but you return the old momentum. The next step needs the new momentum.",
            lambda given, want: [
                {"weights": w["weights"], "momentum": g["momentum"]} for g, w in zip(given, want, strict=True)
            ],
        ),
        Mistake(
            "You stepped with the gradient alone. The new momentum is beta times the old momentum, plus the gradient; "
            "step with it.",
            _as(_stepped(momentum_of=lambda m, g: g)),
        ),
        Mistake(
            "Your momentum adds (1 - beta) times the gradient, as Adam does. SGD adds the full gradient.",
            _as(_stepped(momentum_of=lambda m, g: _BETA * m + (1 - _BETA) * g)),
        ),
        Mistake(
            "The step is right, and you send 50% more than you need: an all-reduce gathers gradients that no rank "
            "uses. A reduce-scatter gives each rank the gradient of its shard.",
            but(**{"what was sent": THREE_HALVES}),
        ),
        Mistake(
            "The step is right, but you send more than a reduce-scatter of the gradient and an all-gather of the "
            "weights.",
            but(**{"what was sent": MORE}),
        ),
    ),
)

# ---- 04.4 accumulate_shard ------------------------------------------------------------------------------------------

_K = 5  # not a number of ranks, as the mistakes are told apart by their factor
_S = 40  # numbers of a shard: many beside a count that is sent along
EACH = "one reduce-scatter for each microbatch, as it comes"
AFTERWARDS, LATE = "everything after the last microbatch", "a microbatch later than it could"
ALL_REDUCED = "as much as with all-reduces"


def _microbatches_inputs(generator: torch.Generator, n: int) -> list[Data]:
    def microbatch() -> dict:
        count = whole(generator, 1, 30)
        return {"sum": random(generator, _S * n) * count, "count": count}

    return [{"microbatches": [microbatch() for _ in range(_K)]} for _ in range(n)]


def _accumulate(answer: Callable, group: Group, given: Data) -> Data:
    made = 0  # microbatches that backward has been through
    sent_at: set[int] = set()  # how many there were when a gradient, or a shard of it, was sent
    size, known_bytes = given["microbatches"][0]["sum"].nbytes, 0.0

    def backward() -> Iterator[tuple[Tensor, int]]:
        nonlocal made
        for one in given["microbatches"]:
            made += 1
            yield one["sum"].clone(), one["count"]
        made += 1  # the end

    def note() -> None:
        nonlocal known_bytes
        before, known_bytes = known_bytes, heard.sent_bytes(group.size)
        if known_bytes - before > size / group.size / 2:  # not a count
            sent_at.add(made)

    heard = listen(on_start=note)
    shard = answer(backward(), group)
    halves = heard.sent_bytes(group.size) / ((group.size - 1) / group.size * size)
    return {"shard": shard, "what was sent": _describe(sorted(sent_at), halves)}


def _describe(sent_at: list[int], halves: float) -> str:
    """From when gradients were sent, and how many halves of an all-reduce that is, with the counts."""
    if sent_at == [_K + 1]:
        return AFTERWARDS
    if halves > 1.5 * _K:
        return ALL_REDUCED
    if sent_at == list(range(1, _K + 1)):
        return EACH
    if sent_at == list(range(2, _K + 2)):
        return LATE
    return f"gradients leave after {', '.join(map(str, sent_at)) or 'none'} of {_K} microbatches"


def _sums(given: list[Data], divided: Callable[[dict, int], float], microbatches: slice = slice(None)) -> Callable:
    """The sum over ranks and microbatches, each divided by its `divided`, cut for the ranks."""
    total = sum(
        one["sum"] / divided(one, k) for g in given for k, one in list(enumerate(g["microbatches"]))[microbatches]
    )
    return total.chunk(len(given))


def _count(given: list[Data]) -> int:
    return sum(one["count"] for g in given for one in g["microbatches"])


def _at(given: list[Data], k: int) -> int:
    """Tokens of the k-th microbatch on all ranks."""
    return sum(g["microbatches"][k]["count"] for g in given)


def _own_count(g: Data) -> int:
    return sum(one["count"] for one in g["microbatches"])


def _shards(of: Callable[[list[Data]], Any]) -> Callable:
    return lambda given, want=None: [{"shard": shard} for shard in of(given)]


def _mean(given: list[Data]) -> list[Data]:
    return [{"shard": shard, "what was sent": EACH} for shard in _sums(given, lambda one, k: _count(given))]


ACCUMULATE = Exercise(
    id="04.4",
    title="accumulate_shard",
    points=3,
    body=_accumulate,
    inputs=_microbatches_inputs,
    reference=_mean,
    mistakes=(
        Mistake(
            "You divided the sum over all ranks by this rank's own tokens, so the shards differ in scale. All-reduce "
            "the count as well.",
            lambda given, want: [
                {"shard": w["shard"] * _count(given) / _own_count(g)} for g, w in zip(given, want, strict=True)
            ],
        ),
        Mistake(
            "You divided each rank's gradients by that rank's tokens and averaged over the ranks. On a rank with few "
            "tokens each counts too much: divide once, by the count of all ranks.",
            _shards(
                lambda given: (
                    sum(torch.stack([one["sum"] for one in g["microbatches"]]).sum(0) / _own_count(g) for g in given)
                    .div(len(given))
                    .chunk(len(given))
                )
            ),
        ),
        Mistake(
            "You return the mean of the means of the microbatches: a token in a short one counts too much. Add up "
            "sums and counts, and divide once, at the end.",
            _shards(lambda given: _sums(given, lambda one, k: one["count"] * _K * len(given))),
        ),
        Mistake(
            "You divided each microbatch by its own tokens on all ranks, and averaged those means: a token in a short "
            "one counts too much. Divide once, after the last, by the count of all.",
            _shards(lambda given: _sums(given, lambda one, k: _at(given, k) * _K)),
        ),
        Mistake(
            "Your shard holds the last microbatch alone: you replaced it where you should add to it.",
            _shards(lambda given: _sums(given, lambda one, k: _count(given), slice(-1, None))),
        ),
        Mistake(
            "You return the sum over all tokens. Divide it by their number.",
            _shards(lambda given: _sums(given, lambda one, k: 1)),
        ),
        Mistake(
            "Your shard is n times too small: the reduce-scatter took the mean over the n ranks. Add up sums here, "
            "and divide by the count.",
            _shards(lambda given: _sums(given, lambda one, k: _count(given) * len(given))),
        ),
        Mistake(
            "The shard is right, but you keep full gradients until the last microbatch and reduce then. That saves "
            "bytes on the wire, and takes the memory that ZeRO-2 is to save.",
            but(**{"what was sent": AFTERWARDS}),
        ),
        Mistake(
            "The shard is right, but you send twice what you need: an all-reduce gives every rank the sum of all "
            "shards. A reduce-scatter gives each its own.",
            but(**{"what was sent": ALL_REDUCED}),
        ),
        Mistake(
            "The shard is right, but each gradient is still held when the next one is made. Start its reduce-scatter "
            "before you ask the iterator for more.",
            but(**{"what was sent": LATE}),
        ),
    ),
)

EXERCISES = (STEP, ACCUMULATE)
