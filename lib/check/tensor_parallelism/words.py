"""Chapter 06, a loss over a vocabulary that is cut: exercise 06.4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lib import cost
from lib.check.exercise import Data, Exercise, Mistake, but, random, summed, whole
from lib.check.listen import listen
from lib.mesh import Group

_WORDS = 20  # of each rank; so many that what a token needs is little beside its logits
_CASES = {  # what logits are multiplied with, and what is added
    "loss for logits of about 1": (1.0, 0.0),
    "loss for logits of about 10,000": (1e4, 0.0),
    "loss for logits of about -10,000": (1.0, -1e4),
}
FEW, LOGITS = "a few numbers for each token", "as much as all the logits"


def _logits_inputs(generator: torch.Generator, n: int) -> list[Data]:
    targets = [r * _WORDS + word for r in range(n) for word in (0, _WORDS - 1)]  # each rank's first and last word
    targets = torch.tensor(targets + [whole(generator, 0, n * _WORDS) for _ in range(4)])

    def logits() -> Data:
        cases = _CASES.items()
        return {name: scale * random(generator, len(targets), _WORDS) + shift for name, (scale, shift) in cases}

    return [{"targets": targets} | logits() for _ in range(n)]


def _cross_entropy(answer: Callable, group: Group, given: Data) -> Data:
    heard = listen()
    found = {case: answer(given[case].clone(), given["targets"].clone(), group) for case in _CASES}
    logits_bytes = group.size * sum(given[case].nbytes for case in _CASES)
    much = heard.sent_bytes(group.size) > cost.wire_bytes("all_gather", logits_bytes, group.size) / 2
    return found | {"what was sent": LOGITS if much else FEW}


# What is subtracted from all ranks' logits [n, tokens, words].


def _common(z: Tensor) -> Tensor:
    return z.amax((0, 2), keepdim=True)


def _own(z: Tensor) -> Tensor:
    return z.amax(2, keepdim=True)


# Where rank r looks for the targets, and which of the logits that it finds there count.


def _masked(targets: Tensor, r: int) -> tuple[Tensor, Tensor]:
    here = targets - r * _WORDS
    mine = (0 <= here) & (here < _WORDS)
    return here * mine, mine


def _without_offset(targets: Tensor, r: int) -> tuple[Tensor, Tensor]:
    return _masked(targets, 0)


def _unmasked(place_of: Callable[[Tensor, int], Tensor]) -> Callable:
    return lambda targets, r: (place_of(targets, r), torch.ones_like(targets))


def _not_summed(x: Tensor) -> Tensor:
    return x


def _losses(
    largest: Callable[[Tensor], Tensor] = _common,
    look: Callable[[Tensor, int], tuple[Tensor, Tensor]] = _masked,
    powers: Callable[[Tensor], Tensor] = summed,
    picked: Callable[[Tensor], Tensor] = summed,
    pick_from: Callable[[Tensor, Tensor], Tensor] = lambda z, shifted: shifted,
    after: Callable[[Tensor], Tensor] = lambda loss: loss,
) -> Callable:
    """All ranks at once: [n, tokens] sums of exponentials, and targets' logits, then what becomes of them."""

    def answers(given: list[Data], want: Any = None) -> list[Data]:
        found: list[Data] = [{} for _ in given]
        for case in _CASES:
            z = torch.stack([g[case] for g in given])
            shifted = z - largest(z)
            logits, picks = pick_from(z, shifted), []
            for r, g in enumerate(given):
                places, count = look(g["targets"], r)
                picks.append(logits[r].gather(-1, places[:, None])[:, 0] * count)
            loss = after(powers(shifted.exp().sum(-1)).log() - picked(torch.stack(picks)))
            for r, of_rank in enumerate(loss):
                found[r][case] = of_rank
        return found

    return answers


_UNMASKED = (
    "Each rank adds a logit for every target, also for targets outside its shard. Only one rank has the logit of the "
    "target: all the rest must add 0."
)

CROSS_ENTROPY = Exercise(
    id="06.4",
    title="cross_entropy",
    points=3,
    body=_cross_entropy,
    inputs=_logits_inputs,
    reference=lambda given: [found | {"what was sent": FEW} for found in _losses()(given)],
    mistakes=(
        Mistake(
            "The losses are right, but you gather the logits: the largest tensor of the model, in full on each rank. "
            "Three values per token are enough.",
            but(**{"what was sent": LOGITS}),
        ),
        Mistake(
            "The sum of the exponentials and the logit of the target cover only the shard of this rank: nothing was "
            "summed over the ranks. One all-reduce of the two, stacked, is enough.",
            _losses(powers=_not_summed, picked=_not_summed),
        ),
        Mistake(
            "The sum of the exponentials covers only the shard of this rank. The softmax is over the full vocabulary: "
            "sum it over the ranks before the logarithm.",
            _losses(powers=_not_summed),
        ),
        Mistake(
            "The logit of the target is right on the rank that holds it, and 0 elsewhere. Sum it over the ranks.",
            _losses(picked=_not_summed),
        ),
        Mistake(
            "Each rank subtracts the largest logit of its shard, and exponentials with different factors do not add "
            'up. Subtract a common maximum: an all-reduce with op="max".',
            _losses(largest=_own),
        ),
        Mistake(
            "Right for small logits; exp(10,000) is infinite. Subtract each token's largest logit, over all ranks, "
            "before you take exponentials.",
            _losses(largest=lambda z: torch.zeros(())),
        ),
        Mistake(
            "Right for small logits; but you subtract one maximum for all tokens, and for some tokens every "
            "exponential vanishes. Use a maximum per token.",
            _losses(largest=torch.amax),
        ),
        Mistake(
            "Your maximum is never below 0. Where all logits of a token are far below, every exponential vanishes: let "
            "the maximum be one of the logits.",
            _losses(largest=lambda z: _common(z).clamp(min=0)),
        ),
        Mistake(
            "You subtract the maximum in the exponentials, and not from the logit of the target. Subtract it from "
            "both, or add it again at the end.",
            _losses(pick_from=lambda z, shifted: z),
        ),
        Mistake(
            "You looked the target up by its index in the full vocabulary. The first entry of rank r is r · V/n: "
            "subtract that.",
            _losses(look=_without_offset),
        ),
        Mistake(_UNMASKED, _losses(look=_unmasked(lambda targets, r: _masked(targets, r)[0]))),
        Mistake(_UNMASKED, _losses(look=_unmasked(lambda targets, r: targets % _WORDS))),
        Mistake(_UNMASKED, _losses(look=_unmasked(lambda targets, r: (targets - r * _WORDS).clamp(0, _WORDS - 1)))),
        Mistake(
            "The sign is wrong: you return the logarithm of the probability. The loss is its negative, and never below "
            "0.",
            _losses(after=torch.neg),
        ),
        Mistake(
            "You return the mean over the tokens. Return the loss of each token.",
            _losses(after=lambda loss: loss.mean(-1)),
        ),
    ),
)

EXERCISES = (CROSS_ENTROPY,)
