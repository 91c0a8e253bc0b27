"""04.3: clip a gradient that is sharded in part."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import distributed as dist

from course.check.exercise import AS_NEEDED, MORE, Data, Exercise, Mistake, random
from course.check.listen import listen
from lib import comm
from lib.mesh import Group

MAX_NORM = 1.5
SENT = "what was sent"
CASES = LARGE, SMALL = ("a large gradient", "a small one")


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    """Each rank's shards, and the replicated tensors; the norm is far above MAX_NORM, then far below it."""
    replicated = [random(generator, 4), random(generator, 1)]
    # Larger on each rank than on the rank before it: gradients of an embedding and of a bias differ as much.
    shards = [[(r + 1) * random(generator, *shape) for shape in ((15,), (6, 5))] for r in range(n)]

    def scaled(scale: float, rank: int) -> Data:
        return {"shards": [scale * x for x in shards[rank]], "replicated": [scale * x for x in replicated]}

    return [{LARGE: scaled(1, r), SMALL: scaled(0.01, r)} for r in range(n)]


def body(answer: Callable, group: Group, given: Data) -> Data:
    found, heard = {}, listen()
    for case, gradients in given.items():
        shards, replicated = ([x.clone() for x in gradients[name]] for name in ("shards", "replicated"))
        norm = answer(shards, replicated, MAX_NORM, group)
        found |= {f"{case}: the norm": norm, f"{case}: shards": shards, f"{case}: replicated": replicated}
    to_gather = (group.size - 1) * sum(x.nbytes for one in given.values() for x in one["shards"])
    return found | {SENT: MORE if heard.sent_bytes(group.size) > to_gather / 2 else AS_NEEDED}


def reference(given: list[Data]) -> list[Data]:
    found: list[Data] = [{SENT: AS_NEEDED} for _ in given]
    for case in CASES:
        full = [x for g in given for x in g[case]["shards"]] + given[0][case]["replicated"]
        norm = torch.cat([x.flatten() for x in full]).norm().item()
        factor = min(1, MAX_NORM / norm)
        for rank, g in enumerate(given):
            found[rank][f"{case}: the norm"] = norm
            found[rank] |= {f"{case}: {name}": [factor * x for x in xs] for name, xs in g[case].items()}
    return found


# ---- programs -------------------------------------------------------------------------------------------------------


def square(tensors):
    return sum((x * x).sum() for x in tensors)


def joint(own, alike, group):
    return (comm.all_reduce(own, group) + alike).sqrt()


def clip(shards, replicated, max_norm, group, norm_of=joint, factor_of=lambda f: min(1.0, f), both=True):
    norm = norm_of(square(shards), square(replicated), group)
    factor = factor_of(max_norm / norm.item())
    for x in [*shards, *(replicated if both else [])]:
        x *= factor
    return norm


def by_gathered_shards(shards, replicated, max_norm, group):
    own = torch.cat([x.flatten() for x in shards])
    full = comm.all_gather(own, group)
    return clip(shards, replicated, max_norm, group, lambda own, alike, group: (full @ full + alike).sqrt())


def clip_by_one_long_tensor(shards, replicated, max_norm, group):
    own = torch.cat([x.flatten() for x in shards])
    if group.rank == 0:  # replicated tensors are counted by one rank
        own = torch.cat([own, *(x.flatten() for x in replicated)])
    squares = own @ own
    dist.all_reduce(squares)
    norm = squares.sqrt().item()
    if norm > max_norm:
        for x in (*shards, *replicated):
            x.mul_(max_norm / norm)
    return norm


EXERCISE = Exercise(
    id="04.3",
    title="clip",
    points=2,
    body=body,
    inputs=inputs,
    reference=reference,
    right=(clip, clip_by_one_long_tensor),
    mistakes=(
        Mistake(
            "Each rank clips by the norm of its shards alone. The factors differ, and the gradient changes its "
            "direction. Add the squares up over the ranks: comm.all_reduce returns the sum of all, and does not change "
            "its argument.",
            partial(clip, norm_of=lambda own, alike, group: (own + alike).sqrt()),
        ),
        *(
            Mistake(
                "You added norms. Norms of parts do not add up, their squares do: all-reduce the sum of the squares of "
                "the shards, add the squares of `replicated`, then take the root.",
                partial(clip, norm_of=norm_of),
            )
            for norm_of in (
                lambda own, alike, group: comm.all_reduce((own + alike).sqrt(), group),
                lambda own, alike, group: comm.all_reduce(own.sqrt(), group),
                lambda own, alike, group: comm.all_reduce(own.sqrt(), group) + alike.sqrt(),
                lambda own, alike, group: comm.all_reduce(own, group).sqrt() + alike.sqrt(),
                lambda own, alike, group: (comm.all_reduce(own.sqrt(), group) ** 2 + alike).sqrt(),
            )
        ),
        Mistake(
            "`replicated` is in your norm n times, once for each rank. Add the squares of the shards up over the "
            "ranks, and then the squares of `replicated` once.",
            partial(clip, norm_of=lambda own, alike, group: comm.all_reduce(own + alike, group).sqrt()),
        ),
        Mistake(
            "`replicated` is not in your norm. It belongs to the same gradient.",
            partial(clip, norm_of=lambda own, alike, group: comm.all_reduce(own, group).sqrt()),
        ),
        Mistake(
            'You averaged the squares over the ranks, so the norm is too small. Squares add up: op="sum".',
            partial(clip, norm_of=lambda own, alike, group: (comm.all_reduce(own, group, "mean") + alike).sqrt()),
        ),
        Mistake(
            "You return the square of the norm. Take the root.",
            partial(clip, norm_of=lambda own, alike, group: comm.all_reduce(own, group) + alike),
            about=("the norm",),
        ),
        Mistake(
            "You scale small gradients up. Clipping shortens gradients longer than max_norm and does not change the "
            "rest: the factor is at most 1.",
            partial(clip, factor_of=lambda f: f),
        ),
        Mistake(
            "The norm is right, and nothing is scaled. Change the tensors in place, as with x.mul_(factor); x = x * "
            "factor makes a new tensor and leaves the old.",
            partial(clip, factor_of=lambda f: 1.0),
        ),
        Mistake(
            "The shards are clipped, `replicated` is not. The same factor scales the full gradient.",
            partial(clip, both=False),
        ),
        Mistake(
            "The norm is right, but you send whole shards to all ranks, as much as the model. One number of each rank "
            "is enough: the sum of its squares.",
            by_gathered_shards,
        ),
    ),
)
