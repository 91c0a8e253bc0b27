"""Chapter 08, the gradient of a batch out of microbatches of unequal size: exercise 08.4."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import grad

from lib.check.exercise import DTYPE, Data, Exercise, Mistake, but, random, whole
from lib.mesh import Group
from lib.model import loss_sum_and_count

_TOKENS, _D, _WORDS = 6, 4, 7  # tokens of a row, width of x, words
_IGNORED = -100
ONE, SEVERAL = "one at a time", "several at once"

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
        found[_name(pieces, "microbatches kept for backward")] = SEVERAL if several else ONE
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
