"""What comes between the last backward and the optimizer: what several stages have in common.

Two things concern the whole model. A tied weight is the embedding on the first stage and the head on the last, and its
gradient is the sum of both. And a gradient's norm is that of all stages together.

Read before: `lib/pipeline/stage.py`. Chapter 9.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from lib import comm
from lib.clip import scale_to_norm
from lib.mesh import Group
from lib.model import Embed, Head
from lib.pipeline.action import Schedule
from lib.pipeline.stage import Stage


def sum_tied_gradients(
    stages: Mapping[int, Stage],
    schedule: Schedule,
    group: Group,
) -> None:
    """Give first and last rank the sum of a tied weight's gradients.

    One message each way between the two. Both add the same two numbers, so their weights stay equal bit by bit. Where
    one rank has both stages, autograd has added them already.
    """
    if (ends := _ends(schedule, group)) and group.rank in ends:
        peer = ends[1 - ends.index(group.rank)]
        gradient = _tied(stages).grad
        with comm.label("tied weight"):
            both = comm.exchange({peer: gradient}, {peer: gradient}, group)
            other = both.wait()[peer]
        gradient.add_(other)


@torch.no_grad()
def clip_gradients(
    stages: Mapping[int, Stage],
    schedule: Schedule,
    group: Group,
    max_norm: float,
    tied: bool = False,
) -> Tensor:
    """Scale gradients so that the model's norm is at most `max_norm`.

    Returns the norm it was. One all-reduce of a number.

    Args:
        tied: the model's head is its embedding, and after `sum_tied_gradients` two ranks have the gradient: it counts
            once.
    """
    ends = _ends(schedule, group) if tied else None
    again = _tied(stages) if ends and group.rank == ends[1] else None
    own = [p for p in _parameters(stages) if p.grad is not None]
    gradients = {id(p): p.grad for p in own}
    counted = [g for key, g in gradients.items() if key != id(again)]
    squares = [g.square().sum() for g in counted]
    total = torch.stack(squares).sum() if squares else torch.zeros(())
    return scale_to_norm(gradients.values(), total, group, max_norm)


def _ends(schedule: Schedule, group: Group) -> tuple[int, int] | None:
    """The ranks of the first and the last stage, if they are two."""
    first, last = schedule.rank_of[0], schedule.rank_of[-1]
    return (first, last) if first != last else None


def _parameters(stages: Mapping[int, Stage]) -> Iterator[Parameter]:
    for stage in stages.values():
        yield from stage.module.parameters()


def _tied(stages: Mapping[int, Stage]) -> Parameter:
    """This rank's copy of a tied weight."""
    for stage in stages.values():
        for module in stage.module:
            if isinstance(module, Embed):
                return module.token.weight
            if isinstance(module, Head):
                return module.linear.weight
    raise ValueError("no stage of this rank begins with an embedding or ends with a head")
