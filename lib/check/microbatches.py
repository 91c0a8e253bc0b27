"""Chapter 08, the gradient of a batch out of microbatches of unequal size: exercise 08.4."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import grad

from lib.check.exercise import DTYPE, Data, Exercise, Mistake, random, whole
from lib.mesh import Group
from lib.model import mean_loss

_TOKENS, _D, _WORDS = 6, 4, 7  # tokens of a row, width of x, words
_IGNORED = -100
_KEPT, ONE, SEVERAL = "microbatches that wait for backward", "one at a time", "several at once"

Piece = tuple[Tensor, Tensor]  # x[b, T, D] and targets[b, T] of a microbatch


def _batches_inputs(generator: torch.Generator, n: int) -> list[Data]:
    def piece() -> Piece:
        rows = whole(generator, 1, 6)
        targets = torch.randint(_WORDS, (rows * _TOKENS,), generator=generator)
        counted = whole(generator, 1, len(targets))
        targets[torch.randperm(len(targets), generator=generator)[counted:]] = _IGNORED
        return random(generator, rows, _TOKENS, _D), targets.view(rows, _TOKENS)

    weight, bias = random(generator, _WORDS, _D), random(generator, _WORDS)
    return [{"weight": weight, "bias": bias, "batches": [[piece() for _ in range(count)] for count in (3, 5)]}]


def _model(given: Data) -> nn.Linear:
    model = nn.Linear(_D, _WORDS, dtype=DTYPE)
    model.load_state_dict({name: given[name] for name in ("weight", "bias")})
    return model


def _accumulate(answer: Callable, group: Group, given: Data) -> Data:
    found: Data = {}
    for pieces in given["batches"]:
        model = _model(given)
        kept = _Kept(model)
        loss = answer(model, [(x.clone(), targets.clone()) for x, targets in pieces])
        several = kept.most > max(len(x) for x, _ in pieces)
        found |= _named(pieces, loss, [p.grad for p in model.parameters()])
        found[_name(pieces, _KEPT)] = SEVERAL if several else ONE
    return found


def _name(pieces: Sequence[Piece], what: str) -> str:
    return f"{len(pieces)} microbatches: {what}"


def _named(pieces: Sequence[Piece], loss: Any, gradients: Sequence[Tensor | None]) -> Data:
    of_each = zip(("gradient of the weight", "gradient of the bias"), gradients, strict=True)
    return {_name(pieces, what): g for what, g in of_each} | {_name(pieces, "the loss"): loss}


class _Kept:
    """The most rows that have gone forward and not yet back."""

    def __init__(self, model: nn.Module) -> None:
        self.now = self.most = 0
        model.register_forward_hook(self._forward)

    def _forward(self, model: nn.Module, given: tuple[Tensor], y: Tensor) -> None:
        rows = given[0].shape[:-1].numel() / _TOKENS
        self.now += rows
        self.most = max(self.most, self.now)
        if y.requires_grad:
            y.register_hook(lambda gradient: self._backward(rows))

    def _backward(self, rows: float) -> None:
        self.now -= rows


# ---- weighed means of the microbatches ------------------------------------------------------------------------------

Weigh = Callable[[list[int], list[int]], list[float]]  # from each one's tokens that count, and rows, to its weight


def _by_tokens(tokens: list[int], rows: list[int]) -> list[float]:
    return [count / sum(tokens) for count in tokens]


def _last(weigh: Weigh) -> Weigh:
    """Nothing but the last one."""
    return lambda tokens, rows: [0] * (len(tokens) - 1) + weigh(tokens, rows)[-1:]


def _as_they_come(tokens: list[int], rows: list[int]) -> list[float]:
    return [1] * len(tokens)


def _alike(tokens: list[int], rows: list[int]) -> list[float]:
    return [1 / len(tokens)] * len(tokens)


def _weighed(weigh: Weigh = _by_tokens, weigh_loss: Weigh | None = None, kept: str | None = None) -> Callable:
    """Gradients of the mean losses, added up so; a loss only if it is said how, and what is kept."""

    def answers(given: list[Data], want: Any = None) -> list[Data]:
        found: Data = {}
        for pieces in given[0]["batches"]:
            tokens = [int((targets != _IGNORED).sum()) for _, targets in pieces]
            rows = [len(x) for x, _ in pieces]
            total, loss, model = 0.0, 0.0, _model(given[0])
            for i, (x, targets) in enumerate(pieces):
                of_piece = mean_loss(model(x), targets)
                total = total + weigh(tokens, rows)[i] * of_piece
                loss += (weigh_loss or weigh)(tokens, rows)[i] * of_piece.item()
            named = _named(pieces, loss, grad(total, [*model.parameters()]))
            if weigh_loss is None:
                del named[_name(pieces, "the loss")]
            found |= named | ({} if kept is None else {_name(pieces, _KEPT): kept})
        return [found]

    return answers


_EMPTIED = (
    "Only the last microbatch is in the gradient: it is emptied between them. Backward adds to .grad, and that is what "
    "you want here; the optimizer empties it after the step."
)

ACCUMULATE = Exercise(
    id="08.4",
    title="accumulate",
    points=2,
    body=_accumulate,
    inputs=_batches_inputs,
    reference=_weighed(weigh_loss=_by_tokens, kept=ONE),
    ranks=(1,),
    mistakes=(
        Mistake(
            "You add the gradients up as they come: the sum of M means, about M times too large. Each microbatch has "
            "to count with its share.",
            _weighed(_as_they_come),
        ),
        Mistake(
            "You divide by M. That is the mean of the means, right only if each microbatch has as many tokens that "
            "count as any other. Here a token of a small one weighs more.",
            _weighed(_alike),
        ),
        Mistake(
            "You weigh by rows. The mean is over tokens that count, and a row may have few of them: count the targets "
            "that are not -100.",
            _weighed(lambda tokens, rows: [count / sum(rows) for count in rows]),
        ),
        Mistake(
            "You divide twice. The shares add up to 1 already: what is the 1/M for?",
            _weighed(lambda tokens, rows: [share / len(rows) for share in _by_tokens(tokens, rows)]),
        ),
        Mistake(
            "That is the gradient of the sum over all tokens, not of their mean. Divide by how many count in the whole "
            "batch.",
            _weighed(lambda tokens, rows: [float(count) for count in tokens]),
        ),
        Mistake(_EMPTIED, _weighed(_last(_by_tokens))),
        Mistake(_EMPTIED, _weighed(_last(_as_they_come))),
        Mistake(_EMPTIED, _weighed(_last(_alike))),
        Mistake(
            "The gradient is right, and the loss is that of the last microbatch. Add the losses up with the same "
            "shares.",
            _weighed(weigh_loss=_last(_as_they_come)),
        ),
        Mistake(
            "The gradient is right, and the loss is the mean of the microbatches' losses. Add them up with the same "
            "shares as the gradients.",
            _weighed(weigh_loss=_alike),
        ),
        Mistake(
            "All numbers are right, but several microbatches wait at once for their backward. Then memory is that of "
            "the whole batch: go back with each before the next one goes forward.",
            _weighed(weigh_loss=_by_tokens, kept=SEVERAL),
        ),
    ),
)

EXERCISES = (ACCUMULATE,)
