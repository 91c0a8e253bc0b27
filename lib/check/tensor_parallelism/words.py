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
    "Each rank adds a logit for every target, also for those that are other ranks' words. Only the rank that has the "
    "word knows the logit: all others must give 0 to the sum."
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
            "The losses are right, but you collect the logits: the largest tensor of the model, whole on each rank. "
            "Three numbers for each token are enough.",
            but(**{"what was sent": LOGITS}),
        ),
        Mistake(
            "The sum of the exponentials and the target's logit are those of this rank's words: nothing was summed "
            "over the ranks. One all-reduce for the two, stacked, does it.",
            _losses(powers=_not_summed, picked=_not_summed),
        ),
        Mistake(
            "The sum of the exponentials is of this rank's words only. The softmax is over all words: sum it over the "
            "ranks before the logarithm.",
            _losses(powers=_not_summed),
        ),
        Mistake(
            "The target's logit is right on the rank that has the word, and 0 on the others. Sum it over the ranks.",
            _losses(picked=_not_summed),
        ),
        Mistake(
            "Each rank has subtracted the largest of its own logits, and exponentials with different factors do not "
            'add up. Subtract a common one: an all-reduce with op="max".',
            _losses(largest=_own),
        ),
        Mistake(
            "Right for small logits; exp(10,000) is infinite. Subtract each token's largest logit, over all ranks, "
            "before you take exponentials.",
            _losses(largest=lambda z: torch.zeros(())),
        ),
        Mistake(
            "Right for small logits; but you subtract one maximum for all tokens, and the exponentials of the others "
            "vanish. Each token has its own.",
            _losses(largest=torch.amax),
        ),
        Mistake(
            "Your maximum is never below 0. Where all logits of a token are far below, every exponential vanishes: let "
            "the maximum be one of the logits.",
            _losses(largest=lambda z: _common(z).clamp(min=0)),
        ),
        Mistake(
            "You subtract the maximum in the exponentials, and not from the target's logit. It must go from both, or "
            "be added again at the end.",
            _losses(pick_from=lambda z, shifted: z),
        ),
        Mistake(
            "You looked the target up by its number in the whole vocabulary. Rank r's first word is number r · V/n: "
            "subtract that.",
            _losses(look=_without_offset),
        ),
        Mistake(_UNMASKED, _losses(look=_unmasked(lambda targets, r: _masked(targets, r)[0]))),
        Mistake(_UNMASKED, _losses(look=_unmasked(lambda targets, r: targets % _WORDS))),
        Mistake(_UNMASKED, _losses(look=_unmasked(lambda targets, r: (targets - r * _WORDS).clamp(0, _WORDS - 1)))),
        Mistake(
            "The sign is wrong: that is the logarithm of the probability. The loss is its negative, and never below "
            "0.",
            _losses(after=torch.neg),
        ),
        Mistake(
            "That is the mean over the tokens. The loss of each was asked for.",
            _losses(after=lambda loss: loss.mean(-1)),
        ),
    ),
)

EXERCISES = (CROSS_ENTROPY,)
