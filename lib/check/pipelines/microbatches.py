"""Chapter 08, the gradient of a batch out of microbatches of unequal size: exercise 08.4."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.autograd.graph import saved_tensors_hooks

from lib.check.exercise import DTYPE, Data, Exercise, Mistake, random, whole
from lib.mesh import Group
from lib.model import mean_loss

_TOKENS, _D, _WORDS = 6, 4, 7  # tokens of a row, width of x, words
_IGNORED = -100
_KEPT, ONE, SEVERAL = "microbatches that wait for backward", "one at a time", "several at once"

_AGAIN = """Each backward lets go of the graph that it has been through. A sum of losses has all their graphs: go back
with each microbatch's own loss, and add up numbers."""

Piece = tuple[Tensor, Tensor]  # x[b, T, D] and targets[b, T] of a microbatch


def _batches_inputs(generator: torch.Generator, n: int) -> list[Data]:
    def piece() -> Piece:
        rows = whole(generator, 3, 8)  # the largest and any other are clearly more than the largest
        targets = torch.randint(_WORDS, (rows * _TOKENS,), generator=generator)
        counted = whole(generator, 1, len(targets))
        order = torch.randperm(len(targets), generator=generator)
        targets[order[counted:]] = _IGNORED
        targets[order[0]] = whole(generator, 1, _WORDS)  # so that whoever leaves word 0 out has one to count
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
        loss, gradients, most = _run(answer, given, pieces)
        alone = max(_run(answer, given, [piece])[-1] for piece in pieces)
        found |= _named(pieces, loss, gradients) | {_name(pieces, _KEPT): SEVERAL if most > 1.2 * alone else ONE}
    return found


def _run(answer: Callable, given: Data, pieces: Sequence[Piece]) -> tuple[Any, list[Tensor | None], int]:
    """The loss, the gradients, and the most bytes that were saved for backward at any moment."""
    model, saved = _model(given), _Saved()
    try:
        with saved_tensors_hooks(saved.pack, saved.unpack):
            loss = answer(model, [(x.clone(), targets.clone()) for x, targets in pieces])
    except RuntimeError as error:
        if "second time" in str(error):
            error.add_note(_AGAIN)
        raise
    return loss, [p.grad for p in model.parameters()], saved.most


def _name(pieces: Sequence[Piece], what: str) -> str:
    return f"{len(pieces)} microbatches: {what}"


def _named(pieces: Sequence[Piece], loss: Any, gradients: Sequence[Tensor | None]) -> Data:
    of_each = zip(("gradient of the weight", "gradient of the bias"), gradients, strict=True)
    return {_name(pieces, what): g for what, g in of_each} | {_name(pieces, "the loss"): loss}


class _Held:
    """A tensor that a graph holds, for as long as it does."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # not its history: what it is saved for holds this


class _Saved:
    """The bytes that graphs hold for backward now, and the most so far."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def pack(self, tensor: Tensor) -> _Held:
        held = _Held(tensor)
        if not isinstance(tensor, nn.Parameter):
            self._add(tensor.nbytes)
            weakref.finalize(held, self._add, -tensor.nbytes)
        return held

    def unpack(self, held: _Held) -> Tensor:
        return held.tensor

    def _add(self, n_bytes: int) -> None:
        self.now += n_bytes
        self.most = max(self.most, self.now)


# ---- weighed means of the microbatches ------------------------------------------------------------------------------

Count = Callable[[Tensor], int]  # the tokens of a microbatch that count
Weigh = Callable[[list[int], list[int]], list[float]]  # from each one's tokens that count, and rows, to its weight


def _by_tokens(tokens: list[int], rows: list[int]) -> list[float]:
    return [count / sum(tokens) for count in tokens]


def _last(weigh: Weigh) -> Weigh:
    """Nothing but the last one."""
    return lambda tokens, rows: [0] * (len(tokens) - 1) + weigh(tokens, rows)[-1:]


def _as_they_come(tokens: list[int], rows: list[int]) -> list[float]:
    return [1] * len(tokens)


def _again_and_again(tokens: list[int], rows: list[int]) -> list[float]:
    """Each also with all that come behind it."""
    return [(len(tokens) - i) * share for i, share in enumerate(_by_tokens(tokens, rows))]


def _alike(tokens: list[int], rows: list[int]) -> list[float]:
    return [1 / len(tokens)] * len(tokens)


def _targets(targets: Tensor) -> int:
    return int((targets != _IGNORED).sum())


def _weighed(
    weigh: Weigh = _by_tokens,
    weigh_loss: Weigh | None = None,
    kept: str | None = None,
    count: Count = _targets,
) -> Callable:
    """Gradients of the mean losses, added up so; a loss only if it is said how, and what is kept."""

    def answers(given: list[Data], want: Any = None) -> list[Data]:
        found: Data = {}
        for pieces in given[0]["batches"]:
            tokens = [count(targets) for _, targets in pieces]
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
            "You count the targets above 0. Word 0 is a word as any other: what does not count is -100.",
            _weighed(count=lambda targets: int((targets > 0).sum())),
        ),
        Mistake(
            "You divide the sum of the losses by all tokens. Those whose target is -100 add nothing to it, and are not "
            "to be counted either.",
            _weighed(lambda tokens, rows: [count / sum(rows) / _TOKENS for count in tokens]),
        ),
        Mistake(
            "You go back from the running total, so the first microbatch's gradient comes in each time again. Go back "
            "with each one's own loss, and add up numbers.",
            _weighed(_again_and_again),
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
            "All numbers are right, but what several microbatches save for backward is there at once. Go back with "
            "each before the next one goes forward, and retain no graph: then memory is that of one.",
            _weighed(weigh_loss=_by_tokens, kept=SEVERAL),
        ),
    ),
)

EXERCISES = (ACCUMULATE,)
