"""13.3: clip by one norm for a model on three axes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor
from torch import distributed as dist

from course.check.exercise import Data, Exercise, Mistake, random
from course.check.listen import Heard, listen, raw
from lib.mesh import Group, Mesh, MeshShape

MAX_NORM = 1.5
SHAPE = MeshShape(dp=2, pp=2, tp=2)
CASES = LARGE, SMALL = ("a large gradient", "a small one")
SENT = "what was sent"
ONE, SEVERAL, MORE = "one number, once", "more than one message", "more than one number of each rank"


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    """Summed already: equal wherever ranks hold the same. Stage 1 has one more; far above MAX_NORM, then below it."""

    @cache
    def shared(name: str, size: float, *coordinates: int) -> Tensor:
        """One tensor for all ranks that hold the same."""
        return size * random(generator, 4, 3)

    def held(dp: int, pp: int, tp: int) -> list[tuple[Tensor, int]]:
        cut = [(shared(name, 1 + tp, pp, tp), 2) for name in ("out", "up")[: 1 + pp]]
        return [*cut, (shared("norm", 2, pp), 4), (shared("embedding", 1.5, tp), 4)]

    given = []
    for rank in range(n):
        gradients, copies = zip(*held(**SHAPE.coordinates(rank)), strict=True)
        given.append({"copies": [*copies], LARGE: [*gradients], SMALL: [0.01 * x for x in gradients]})
    return given


@raw
def body(answer: Callable, group: Group, given: Data) -> Data:
    mesh, found = Mesh(SHAPE, group), {}
    groups = {axis: mesh.group(axis).pg for axis in SHAPE.axes}
    heard = listen()
    for case in CASES:
        gradients = [x.clone() for x in given[case]]
        # Separate lists: the tensors are to be changed, not the list of them.
        norm = answer([*gradients], [*given["copies"]], MAX_NORM, dict(groups))
        found |= named(case, norm, gradients)
    return found | {SENT: what_was_sent(heard, group.size)}


def what_was_sent(heard: Heard, n: int) -> str:
    if heard.sent or any(n_bytes > 8 * n for _, n_bytes in heard.calls):
        return MORE
    return SEVERAL if heard.collectives > len(CASES) else ONE


def named(case: str, norm: object, gradients: list[Tensor]) -> Data:
    return {f"{case}: the norm": norm, f"{case}: the gradients": gradients}


def reference(given: list[Data]) -> list[Data]:
    found: list[Data] = [{SENT: ONE} for _ in given]
    for case in CASES:
        squares = [x.square().sum() / c for g in given for x, c in zip(g[case], g["copies"], strict=True)]
        norm = sum(squares).sqrt().item()
        for mine, g in zip(found, given, strict=True):
            mine |= named(case, norm, [min(1, MAX_NORM / norm) * x for x in g[case]])
    return found


# ---- right programs -------------------------------------------------------------------------------------------------


def clip(
    gradients,
    copies,
    max_norm,
    groups,
    square=lambda x, c: x.square().sum() / c,
    total=lambda mine, groups: dist.all_reduce(mine),
    before=lambda mine: mine,
    after=torch.sqrt,
    factor=lambda norm, max_norm: min(1, max_norm / norm),
):
    """With a place for each mistake."""
    mine = before(sum(square(x, c) for x, c in zip(gradients, copies, strict=True)))
    total(mine, groups)
    norm = after(mine).item()
    for x in gradients:
        x.mul_(factor(norm, max_norm))
    return norm


def as_torch_does(gradients, copies, max_norm, groups):
    """With the small number of clip_grad_norm_, by copy_; the norm as a tensor."""
    parts = torch.stack([torch.linalg.vector_norm(x) / c**0.5 for x, c in zip(gradients, copies, strict=True)])
    square = parts.square().sum()[None]
    dist.all_reduce(square, op=dist.ReduceOp.SUM)
    for x in gradients:
        x.copy_(x * (max_norm / (square.sqrt() + 1e-6)).clamp(max=1))
    return square.sqrt()


def by_gathering(gradients, copies, max_norm, groups):
    """One number of each rank, and every rank adds them up."""
    mine = sum(x.pow(2).sum().div(c) for x, c in zip(gradients, copies, strict=True)).reshape(1)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    norm = torch.cat(everyones).sum().sqrt()
    if norm > max_norm:
        torch._foreach_mul_(gradients, max_norm / norm.item())
    return norm


# ---- wrong programs -------------------------------------------------------------------------------------------------


def over(*axes):
    def total(mine, groups):
        for axis in axes:
            dist.all_reduce(mine, group=groups[axis])

    return total


def every_copy(x, count):
    return x.square().sum()


def nowhere(mine, groups):
    pass


def sends_gradients(gradients, *rest):
    dist.all_gather([torch.empty_like(gradients[0]) for _ in range(dist.get_world_size())], gradients[0])
    return clip(gradients, *rest)


ALONE = (
    "Each rank has its own norm, of the tensors it holds. Each then scales by a different factor, and the copies of "
    "one weight drift apart. Add the squares up over all ranks first."
)
ONE_AXIS = (
    "Your sum goes over only one axis. The ranks along it do not hold the whole model, so each group has a different "
    "norm and factor, and copies of one weight are scaled apart. Sum over all ranks: the default group."
)

EXERCISE = Exercise(
    id="13.3",
    title="clip_over_axes",
    points=3,
    body=body,
    inputs=inputs,
    reference=reference,
    ranks=(8,),
    right=(clip, as_torch_does, by_gathering),
    mistakes=(
        Mistake(
            "Your norm counts every copy: a matrix d times, the weight of a norm d·t times. Then the gradient seems "
            "longer than it is, and the step gets shorter the more replicas there are. Divide each square by its "
            "copies.",
            partial(clip, square=every_copy),
        ),
        Mistake(
            "You divided the whole sum by d. Cut matrices have d copies, but a norm has copies along tp as well, and a "
            "tied embedding on two stages. Each gradient has its own number of copies.",
            partial(clip, square=lambda x, c: x.square().sum() / 2),
        ),
        Mistake(
            "You divided the gradient by its copies before you squared it, so its square is divided by copies². It is "
            "the square that adds up once for each copy.",
            partial(clip, square=lambda x, c: (x / c).square().sum()),
        ),
        Mistake(ALONE, partial(clip, square=every_copy, total=nowhere)),
        Mistake(ALONE, partial(clip, total=nowhere)),
        Mistake(
            "You added the ranks' norms. Lengths of pieces do not add up, their squares do: all-reduce the sum of the "
            "squares, then take the root.",
            partial(clip, before=torch.sqrt, after=lambda norm: norm),
        ),
        Mistake(
            "You returned the square of the norm. Take the root, after the sum.",
            partial(clip, after=lambda square: square),
        ),
        *(Mistake(ONE_AXIS, partial(clip, total=over(axis))) for axis in SHAPE.axes),
        Mistake(
            "You sum over pp and tp, one replica of the model. But `copies` counts the ranks of all replicas, so each "
            "square is divided d times too often. Sum over all ranks, as you divide by all copies.",
            partial(clip, total=over("pp", "tp")),
        ),
        Mistake(
            "You scale small gradients up. Clipping shortens gradients longer than max_norm and does not change the "
            "rest: the factor is at most 1.",
            partial(clip, factor=lambda norm, max_norm: max_norm / norm),
        ),
        Mistake(
            "The norm is right, and nothing is scaled. Change the tensors in place, as with x.mul_(factor); x = x * "
            "factor makes a new tensor and leaves the old.",
            lambda gradients, *rest: clip([x.clone() for x in gradients], *rest),
        ),
        Mistake(
            "The norm is right, but gradients are sent. Each rank can square the gradients it holds: the other ranks "
            "need only one number.",
            sends_gradients,
        ),
        Mistake(
            "The norm is right, in more than one message. Every message costs its latency, on the slowest link of the "
            "mesh: add up this rank's squares first, then all-reduce one number.",
            partial(clip, total=over("dp", "pp", "tp")),
        ),
    ),
)
