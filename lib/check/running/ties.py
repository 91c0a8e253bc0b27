"""Chapter 10, a weight on two ranks and one norm for all stages: exercise 10.2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lib.check.exercise import Data, Exercise, Mistake, random
from lib.check.fsdp.units import AS_NEEDED, MORE
from lib.check.listen import listen
from lib.check.zero.shards import NOT_IN_PLACE, SCALED_UP
from lib.mesh import Group

_NAME = "sum_and_clip"
_MAX_NORM = 1.5
_CASES = _LARGE, _SMALL = ("a large gradient", "a small one")
_SENT = "what the ranks in the middle sent"
_NUMBER_BYTES = 8


def _stages_inputs(generator: torch.Generator, n: int) -> list[Data]:
    """Each stage's gradients, and on both ends the tied weight's; far above _MAX_NORM, then far below it."""
    found: list[Data] = []
    for rank in range(n):
        # Of other sizes on each rank, as an embedding's gradient is beside a bias's.
        own = [(1 + 0.5 * rank) * random(generator, *shape) for shape in ((4, 3), (5,))]
        tied = random(generator, 7, 4) if rank in (0, n - 1) else None
        found.append({case: _scaled(own, tied, factor) for case, factor in zip(_CASES, (1, 0.01), strict=True)})
    return found


def _scaled(own: list[Tensor], tied: Tensor | None, factor: Tensor | float) -> Data:
    return {"own": [factor * x for x in own], "tied": None if tied is None else factor * tied}


def _sum_and_clip(answer: Callable, group: Group, given: Data) -> Data:
    found, heard = {}, listen()
    for case, gradients in given.items():
        own, tied = [x.clone() for x in gradients["own"]], gradients["tied"]
        tied = None if tied is None else tied.clone()
        norm = answer([*own], tied, _MAX_NORM, group)  # a list of its own: the tensors are to be changed, not that
        found |= _named(case, norm, own, tied)
    few = heard.sent_bytes(group.size) <= 8 * len(_CASES) * group.size * _NUMBER_BYTES
    is_end = group.rank in (0, group.size - 1)
    return found | {_SENT: AS_NEEDED if is_end or few else MORE}


def _named(case: str, norm: Any, own: list[Tensor], tied: Tensor | None) -> Data:
    return {f"{case}: the norm": norm, f"{case}: gradients of the stage": own} | _tied(case, tied)


def _tied(case: str, tied: Tensor | None) -> Data:
    return {} if tied is None else {f"{case}: the tied weight's gradient": tied}


# ---- what comes of it -----------------------------------------------------------------------------------------------

# The square of the norm: from those of each stage's own gradients, of the tied weight's on both ends, and of their sum.
Square = Callable[[list[Tensor], list[Tensor], Tensor, int], Tensor]


def _square(gradients: list[Tensor]) -> Tensor:
    return torch.stack([x.square().sum() for x in gradients]).sum()


def _of_all(own: list[Tensor], ends: list[Tensor], both: Tensor, rank: int) -> Tensor:
    return torch.stack(own).sum() + both


def _of_own(own: list[Tensor], ends: list[Tensor], both: Tensor, rank: int) -> Tensor:
    return own[rank] + both * (rank in (0, len(own) - 1))


def _of_sum_of_norms(own: list[Tensor], ends: list[Tensor], both: Tensor, rank: int) -> Tensor:
    return torch.stack([(square + both * (r == 0)).sqrt() for r, square in enumerate(own)]).sum().square()


def _at_most(norm: Tensor) -> Tensor:
    return (_MAX_NORM / norm).clamp(max=1)


def _clipped(
    square: Square = _of_all,
    scale: Callable[[Tensor], Tensor | float] = _at_most,
    own_too: bool = True,
    tied_too: Callable[[int], bool] = lambda rank: True,
    root: Callable[[Tensor], Tensor] = torch.sqrt,
    sent: str | None = None,
) -> Callable:
    """What comes of a norm, and of a factor made of that, if the tied weight's gradient is summed as it should be."""

    def answers(given: list[Data], want: Any = None) -> list[Data]:
        found: list[Data] = [{} for _ in given]
        for case in _CASES:
            ends = [given[end][case]["tied"] for end in (0, -1)]
            both = sum(ends)
            own, squares = [_square(g[case]["own"]) for g in given], [_square([x]) for x in ends]
            for rank, g in enumerate(given):
                norm = root(square(own, squares, _square([both]), rank))
                factor = scale(norm)
                tied = None if g[case]["tied"] is None else both * (factor if tied_too(rank) else 1)
                mine = [factor * x if own_too else x for x in g[case]["own"]]
                found[rank] |= _named(case, norm.item(), mine, tied)
                if sent is not None:
                    found[rank][_SENT] = sent if tied is None else AS_NEEDED
        return found

    return answers


def _ends(become: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable:
    """What both ends have of their gradients where nothing is clipped; whatever else there is."""

    def answers(given: list[Data], want: Any = None) -> list[Data]:
        first, last = become(*(given[end][_SMALL]["tied"] for end in (0, -1)))
        return [_tied(_SMALL, first), *({} for _ in given[2:]), _tied(_SMALL, last)]

    return answers


_ONE_END = "Only one of the two ranks has the sum. The other one's copy of the weight would go its own way."

SUM_AND_CLIP = Exercise(
    id="10.2",
    title=_NAME,
    points=3,
    body=_sum_and_clip,
    inputs=_stages_inputs,
    reference=_clipped(sent=AS_NEEDED),
    mistakes=(
        Mistake(
            "The tied weight's gradient is not summed: each end has its own, and the two copies drift apart from the "
            "first step on. One weight is used twice, so its gradient is the sum of both.",
            _ends(lambda first, last: (first, last)),
        ),
        Mistake(
            "You took the mean of the two gradients. They are not two opinions about one thing, as those of replicas: "
            "one is of the embedding, one of the head, and autograd would add them.",
            _ends(lambda first, last: ((first + last) / 2, (first + last) / 2)),
        ),
        Mistake(_ONE_END, _ends(lambda first, last: (first + last, last))),
        Mistake(_ONE_END, _ends(lambda first, last: (first, first + last))),
        Mistake(
            "Each end has the other one's gradient. Add what comes to what is there.",
            _ends(lambda first, last: (last, first)),
        ),
        Mistake(
            "The tied weight is in your norm twice, once for each rank that has it. It is one weight: count it on one "
            "of them.",
            _clipped(lambda own, ends, both, rank: torch.stack(own).sum() + 2 * both),
        ),
        Mistake(
            "You took the norm before the two gradients were added. What the optimizer will see is their sum, and that "
            "is what has a norm.",
            _clipped(lambda own, ends, both, rank: torch.stack(own).sum() + sum(ends)),
        ),
        Mistake(
            "The tied weight is not in your norm. It is a part of the gradient, on one of its two ranks.",
            _clipped(lambda own, ends, both, rank: torch.stack(own).sum()),
        ),
        Mistake(
            "Each rank has a norm of its own: that of its stage. So each scales by another factor, and the step turns. "
            "Add the squares up over all ranks, one all-reduce of one number.",
            _clipped(_of_own),
        ),
        Mistake(
            "You added the ranks' norms. Lengths of pieces do not add up, their squares do: all-reduce the sum of the "
            "squares, then take the root.",
            _clipped(_of_sum_of_norms),
        ),
        Mistake("That is the square of the norm. Take the root.", _clipped(root=lambda square: square)),
        Mistake(
            "The tied weight's gradient is not scaled. All of the gradient has the one factor.",
            _clipped(tied_too=lambda rank: False),
        ),
        Mistake(
            "The tied weight's gradient is scaled on the first rank only. It is counted once, and scaled wherever it "
            "is: else the two copies drift apart.",
            _clipped(tied_too=lambda rank: rank == 0),
        ),
        Mistake(
            "The list's own gradients are not scaled. gradients[i] = gradients[i] * factor makes a new tensor, which "
            "the optimizer never sees: use x.mul_(factor).",
            _clipped(own_too=False),
        ),
        Mistake(
            SCALED_UP,
            _clipped(scale=lambda norm: _MAX_NORM / norm),
        ),
        Mistake(
            NOT_IN_PLACE,
            _clipped(scale=lambda norm: 1.0),
        ),
        Mistake(
            "All numbers are right, but the ranks in the middle send more than a few numbers. The tied weight's "
            "gradient concerns the two ends only, and of all others one number is enough: the sum of the squares.",
            _clipped(sent=MORE),
        ),
    ),
)

EXERCISES = (SUM_AND_CLIP,)
