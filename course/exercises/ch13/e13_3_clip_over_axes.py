"""13.3: clip by one norm for a model on three axes."""

from functools import cache

import torch
from torch import distributed as dist

from course.check.edits import exercise
from course.check.exercise import random, without_eps
from course.check.listen import listen, raw
from lib.mesh import Mesh, MeshShape

MAX_NORM = 1.5
SHAPE = MeshShape(dp=2, pp=2, tp=2)
CASES = LARGE, SMALL = ("a large gradient", "a small one")
SENT = "what was sent"
ONE, SEVERAL, MORE = "one number, once", "more than one message", "more than one number of each rank"


def inputs(generator, n):
    """Summed already: equal wherever ranks hold the same. Stage 1 has one more; far above MAX_NORM, then below it."""

    @cache
    def shared(name, size, *coordinates):
        """One tensor for all ranks that hold the same."""
        return size * random(generator, 4, 3)

    def held(dp, pp, tp):
        cut = [(shared(name, 1 + tp, pp, tp), 2) for name in ("out", "up")[: 1 + pp]]
        return [*cut, (shared("norm", 2, pp), 4), (shared("embedding", 1.5, tp), 4)]

    given = []
    for rank in range(n):
        gradients, copies = zip(*held(**SHAPE.coordinates(rank)), strict=True)
        given.append({"copies": [*copies], LARGE: [*gradients], SMALL: [0.01 * x for x in gradients]})
    return given


@raw
def body(answer, group, given):
    mesh, found = Mesh(SHAPE, group), {}
    groups = {axis: mesh.group(axis).pg for axis in SHAPE.axes}
    heard = listen()
    for case in CASES:
        gradients = [x.clone() for x in given[case]]
        # Separate lists: the tensors are to be changed, not the list of them.
        norm = answer([*gradients], [*given["copies"]], MAX_NORM, dict(groups))
        factor = without_eps(gradients, given[case], norm, MAX_NORM)
        found |= named(case, norm, [factor * x for x in gradients])
    if heard.sent or any(n_bytes > 8 * group.size for _, n_bytes in heard.calls):
        return found | {SENT: MORE}
    return found | {SENT: SEVERAL if heard.collectives > len(CASES) else ONE}


def named(case, norm, gradients):
    return {f"{case}: the norm": norm, f"{case}: the gradients": gradients}


def reference(given):
    found = [{SENT: ONE} for _ in given]
    for case in CASES:
        squares = [x.square().sum() / c for g in given for x, c in zip(g[case], g["copies"], strict=True)]
        norm = sum(squares).sqrt().item()
        for mine, g in zip(found, given, strict=True):
            mine |= named(case, norm, [min(1, MAX_NORM / norm) * x for x in g[case]])
    return found


def clip_over_axes(gradients, copies, max_norm, groups):
    pairs = zip(gradients, copies)
    square = sum(x.square().sum() / count for x, count in pairs)
    dist.all_reduce(square)
    norm = square.sqrt()
    for x in gradients:
        x.mul_((max_norm / norm).clamp(max=1))
    return norm


def by_gathering(gradients, copies, max_norm, groups):
    """One number of each rank, and every rank adds them up; a float."""
    mine = sum(x.pow(2).sum().div(c) for x, c in zip(gradients, copies, strict=True)).reshape(1)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    norm = torch.cat(everyones).sum().sqrt().item()
    if norm > max_norm:
        torch._foreach_mul_(gradients, max_norm / norm)
    return norm


MISTAKES = """
x.square().sum() / count => x.square().sum()
    Your norm counts every copy: a matrix d times, the weight of a norm d·t times. Then the gradient seems longer than
    it is, and the step gets shorter the more replicas there are.
        Divide each square by its copies.
=> x.square().sum() / 2
    You divided the whole sum by d.
        Cut matrices have d copies, but a norm has copies along tp as well, and a tied embedding on two stages. Each
        gradient has its own number of copies.
=> (x / count).square().sum()
    You divided the gradient by its copies before you squared it. The square adds up once for each copy.
        Divide that.
=> x.square().sum()
dist.all_reduce(square) =>
or
dist.all_reduce(square) =>
    Each rank has its own norm, of the tensors it holds. Each then scales by a different factor, and the copies of one
    weight drift apart.
        Add the squares up over all ranks first.
for x, count in pairs) => for x, count in pairs).sqrt()
norm = square.sqrt() => norm = square
    You added the ranks' norms.
        Only squares add up: all-reduce the sum of the squares, then take the root.
norm = square.sqrt() => norm = square
    You returned the square of the norm.
        Take the root, after the sum.
returns result.clamp(max=max_norm)
    You return the norm after scaling.
        Return the norm that the gradients had before.
dist.all_reduce(square) => dist.all_reduce(square, group=groups["dp"])
or
=> dist.all_reduce(square, group=groups["pp"])
or
=> dist.all_reduce(square, group=groups["tp"])
    Your sum goes over only one axis. The ranks along it do not hold the whole model, so each group has a different norm
    and factor, and copies of one weight are scaled apart.
        Sum over all ranks: the default group.
=> for axis in ("pp", "tp"): dist.all_reduce(square, group=groups[axis])
    You sum over pp and tp, one replica of the model. But `copies` counts the ranks of all replicas, so each square is
    divided d times too often.
        Sum over all ranks, as you divide by all copies.
(max_norm / norm).clamp(max=1) => max_norm / norm
    You scale small gradients up.
        Clipping changes only those longer than max_norm: the factor is at most 1.
x.mul_((max_norm / norm).clamp(max=1)) => x = x * (max_norm / norm).clamp(max=1)
    The norm is right, and nothing is scaled: x = x * factor makes a new tensor.
        Change it in place, x.mul_(factor).
dist.all_reduce(square) => for x in (gradients[0].square(), square): dist.all_reduce(x)
    The norm is right, but gradients are sent.
        Each rank squares those it holds: the others need only one number.
=> for axis in groups: dist.all_reduce(square, group=groups[axis])
    The norm is right, in more than one message. Every message costs its latency, on the slowest link of the mesh.
        Add up this rank's squares first, then all-reduce one number.
"""

ALSO_RIGHT = """
x.mul_((max_norm / norm).clamp(max=1)) => x.copy_(x * (max_norm / (norm + 1e-6)).clamp(max=1))
return norm => return norm[None]
    With the small number of clip_grad_norm_.
"""

EXERCISE = exercise(globals(), points=3, right=(clip_over_axes, by_gathering), ranks=(8,))
