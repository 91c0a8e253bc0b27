"""Chapter 13, one norm for a model on three axes: exercise 13.3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lib.check.exercise import Data, Exercise, Mistake, but, random
from lib.check.listen import Heard, listen
from lib.check.zero.shards import NOT_IN_PLACE, SCALED_UP
from lib.mesh import Group, Mesh, MeshShape

_NAME = "clip_over_axes"
_MAX_NORM = 1.5
_SHAPE = MeshShape(dp=2, pp=2, tp=2)
_CASES = _LARGE, _SMALL = ("a large gradient", "a small one")
_SENT = "what was sent"
_ONE, _SEVERAL, _MORE = "one number, once", "more than one message", "more than a number of each rank"


def _gradients_inputs(generator: torch.Generator, n: int) -> list[Data]:
    """Summed already: equal wherever ranks hold the same. Stage 1 has one more; far above _MAX_NORM, then below it."""
    drawn: dict[tuple, Tensor] = {}

    def shared(*key: object, size: float) -> Tensor:
        """One tensor for all ranks that hold the same."""
        if key not in drawn:
            drawn[key] = size * random(generator, 4, 3)
        return drawn[key].clone()

    def held(dp: int, pp: int, tp: int) -> list[tuple[Tensor, int]]:
        more = [("up", pp, tp)] * pp
        cut = [(shared(*key, size=1 + tp), 2) for key in [("out", pp, tp), *more]]
        return [*cut, (shared("norm", pp, size=2.0), 4), (shared("embedding", tp, size=1.5), 4)]

    here = [held(**_SHAPE.coordinates(rank)) for rank in range(n)]
    return [
        {
            "copies": [copies for _, copies in pairs],
            _LARGE: [x for x, _ in pairs],
            _SMALL: [0.01 * x for x, _ in pairs],
        }
        for pairs in here
    ]


def _clip_over_axes(answer: Callable, group: Group, given: Data) -> Data:
    mesh, found = Mesh(_SHAPE, group), {}
    groups = {axis: mesh.group(axis).pg for axis in _SHAPE.axes}
    heard = listen()
    for case in _CASES:
        gradients = [x.clone() for x in given[case]]
        # Lists of its own: the tensors are to be changed, not the list of them.
        norm = answer([*gradients], [*given["copies"]], _MAX_NORM, dict(groups))
        found |= _named(case, norm, gradients)
    return found | {_SENT: _describe(heard, group.size)}


def _describe(heard: Heard, n: int) -> str:
    if heard.sent or any(n_bytes > 8 * n for _, n_bytes in heard.calls):
        return _MORE
    return _SEVERAL if heard.collectives > len(_CASES) else _ONE


def _named(case: str, norm: Any, gradients: list[Tensor]) -> Data:
    return {f"{case}: the norm": norm, f"{case}: the gradients": gradients}


# ---- what comes of it -----------------------------------------------------------------------------------------------

Squares = list[list[tuple[Tensor, int]]]  # of each rank: of each gradient, the sum of its squares, and its copies


def _each(weight: Callable[[int], float]) -> Callable[[Squares], list[Tensor]]:
    """Each rank's part in the square: a gradient with so many copies counts with this weight."""
    return lambda squares: [torch.stack([s * weight(c) for s, c in mine]).sum() for mine in squares]


_SHARES = _each(lambda copies: 1 / copies)


def _everywhere(shares: list[Tensor], rank: int) -> Tensor:
    return torch.stack(shares).sum().sqrt()


def _along(*axes: str) -> Callable[[list[Tensor], int], Tensor]:
    """The norm that comes of a sum over this rank's group along these axes."""

    def norm(shares: list[Tensor], rank: int) -> Tensor:
        members = next((ranks for ranks in _SHAPE.groups(*axes) if rank in ranks), ())
        return torch.stack([shares[r] for r in members]).sum().sqrt()

    return norm


def _clipped(
    shares: Callable[[Squares], list[Tensor]] = _SHARES,
    norm_of: Callable[[list[Tensor], int], Tensor] = _everywhere,
    scale: Callable[[Tensor], Tensor | float] = lambda norm: (_MAX_NORM / norm).clamp(max=1),
) -> Callable:
    """What comes of such a norm, and of a factor made of it."""

    def answers(given: list[Data], want: Any = None) -> list[Data]:
        found: list[Data] = [{} for _ in given]
        for case in _CASES:
            squares = [
                [(x.square().sum(), copies) for x, copies in zip(g[case], g["copies"], strict=True)] for g in given
            ]
            mine = shares(squares)
            for rank, g in enumerate(given):
                norm = norm_of(mine, rank)
                found[rank] |= _named(case, norm.item(), [scale(norm) * x for x in g[case]])
        return found

    return answers


def _reference(given: list[Data]) -> list[Data]:
    return [found | {_SENT: _ONE} for found in _clipped()(given)]


_ONE_AXIS = (
    "Your sum goes over one axis only. The ranks along it do not hold the whole model, so each group has a "
    "different norm and factor, and copies of one weight are scaled apart. Sum over all ranks: the default group."
)

CLIP_OVER_AXES = Exercise(
    id="13.3",
    title=_NAME,
    points=3,
    body=_clip_over_axes,
    inputs=_gradients_inputs,
    reference=_reference,
    ranks=(8,),
    mistakes=(
        Mistake(
            "Your norm counts every copy: a matrix d times, a norm's weight d·t times. Then the gradient seems longer "
            "than it is, and the step gets shorter the more replicas there are. Divide each square by its copies.",
            _clipped(_each(lambda copies: 1)),
        ),
        Mistake(
            "You divided the whole sum by d. That is right for cut matrices, and not for the rest: a norm is held "
            "along tp as well, a tied embedding on two stages. Each gradient has its own number of copies.",
            _clipped(_each(lambda copies: 1 / 2)),
        ),
        Mistake(
            "You divided the gradient by its copies before you squared it, so its square is divided by copies². It is "
            "the square that adds up once for each copy.",
            _clipped(_each(lambda copies: 1 / copies**2)),
        ),
        *(
            Mistake(
                "Each rank has its own norm, of the tensors it holds. Each then scales by a different factor, and "
                "the copies of one weight drift apart. Add the squares up over all ranks first.",
                _clipped(_each(weight), norm_of=lambda shares, rank: shares[rank].sqrt()),
            )
            for weight in (lambda copies: 1, lambda copies: 1 / copies)
        ),
        Mistake(
            "You added the ranks' norms. Lengths of pieces do not add up, their squares do: all-reduce the sum of the "
            "squares, then take the root.",
            _clipped(norm_of=lambda shares, rank: torch.stack([s.sqrt() for s in shares]).sum()),
        ),
        Mistake(
            "You returned the square of the norm. Take the root, after the sum.",
            _clipped(norm_of=lambda shares, rank: torch.stack(shares).sum()),
        ),
        *(Mistake(_ONE_AXIS, _clipped(norm_of=_along(axis))) for axis in _SHAPE.axes),
        Mistake(
            "You sum over pp and tp, one replica of the model. But `copies` counts the ranks of all replicas, so each "
            "square is divided d times too often. Sum over all ranks, as you divide by all copies.",
            _clipped(norm_of=_along("pp", "tp")),
        ),
        Mistake(SCALED_UP, _clipped(scale=lambda norm: _MAX_NORM / norm)),
        Mistake(NOT_IN_PLACE, _clipped(scale=lambda norm: 1.0)),
        Mistake(
            "The norm is right, but gradients travel. Each rank can square its own: the other ranks need only "
            "one number.",
            but(**{_SENT: _MORE}),
        ),
        Mistake(
            "The norm is right, in more than one message. Every message costs its latency, on the slowest link of the "
            "mesh: add up this rank's squares first, then all-reduce one number.",
            but(**{_SENT: _SEVERAL}),
        ),
    ),
)

EXERCISES = (CLIP_OVER_AXES,)
