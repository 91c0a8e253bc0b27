"""10.2: weights that several ranks hold, and one norm for all stages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import distributed as dist

from lib import comm
from lib.check.exercise import AS_NEEDED, MORE, Data, Exercise, Mistake, random
from lib.check.listen import listen
from lib.mesh import Group

MAX_NORM = 1.5
CASES = LARGE, SMALL = ("a large gradient", "a small one")
SENT = "bytes that this rank sent"
TIED = f"{SMALL}: shared"  # where nothing is clipped
NUMBER_BYTES = 8
SHAPES = {"embedding": (7, 4), "projection": (7, 4), "adapter": (2, 2)}  # of the weights that several ranks hold


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    """Far above MAX_NORM, then far below it; the last rank has its names in a different order."""
    holders = {"embedding": [0, n - 1], "projection": [0, n - 1], "adapter": [*range(n)]}
    own_shapes = {"weight": (4, 3), "bias": (5,)}
    found: list[Data] = []
    for rank in range(n):
        own = {f"{rank}.{name}": (1 + rank / 2) * random(generator, *shape) for name, shape in own_shapes.items()}
        shared = {name: random(generator, *SHAPES[name]) for name, ranks in holders.items() if rank in ranks}
        if rank == n - 1:
            shared = {"projection": shared.pop("projection")} | shared
        mine = own | shared
        cases = {
            case: {k: factor * x for k, x in mine.items()} for case, factor in zip(CASES, (1, 0.01), strict=True)
        }
        found.append({"cases": cases, "holders": holders})
    return found


def body(answer: Callable, group: Group, given: Data) -> Data:
    found, heard = {}, listen()
    for case, gradients in given["cases"].items():
        mine = {name: x.clone() for name, x in gradients.items()}
        norm = answer({**mine}, given["holders"], MAX_NORM, group)  # its own dict: the tensors are to be changed
        found |= entries(case, norm, mine, given["holders"])
    held = [(len(ranks) - 1) * mine[name].nbytes for name, ranks in given["holders"].items() if name in mine]
    few = len(CASES) * (sum(held) + 8 * group.size * NUMBER_BYTES)
    return found | {SENT: AS_NEEDED if heard.sent_bytes(group.size) <= few else MORE}


def entries(case: str, norm: Any, mine: Data, holders: dict[str, list[int]]) -> Data:
    kinds = {name: "shared" if name in holders else "own" for name in mine}
    return {f"{case}: the norm": norm} | {f"{case}: {kinds[name]} {name}": x for name, x in mine.items()}


def reference(given: list[Data]) -> list[Data]:
    found: list[Data] = [{SENT: AS_NEEDED} for _ in given]
    holders = given[0]["holders"]
    for case in CASES:
        ranks = [g["cases"][case] for g in given]
        model = {name: x for mine in ranks for name, x in mine.items()}
        model |= {name: torch.stack([ranks[r][name] for r in who]).sum(0) for name, who in holders.items()}
        norm = torch.cat([x.flatten() for x in model.values()]).norm()
        factor = (MAX_NORM / norm).clamp(max=1)
        for facts, mine in zip(found, ranks, strict=True):
            facts |= entries(case, norm.item(), {name: factor * model[name] for name in mine}, holders)
    return found


# ---- programs -------------------------------------------------------------------------------------------------------


def exchange(g, ranks, group, of=lambda terms, me: sum(terms)):
    """All that hold it exchange it; g becomes `of` their tensors, this rank's being number `me`."""
    peers = [r for r in ranks if r != group.rank]
    terms = comm.exchange({p: g for p in peers}, {p: g for p in peers}, group).wait() | {group.rank: g.clone()}
    g.copy_(of([terms[r] for r in ranks], ranks.index(group.rank)))


def only(place):
    """Only one of the holders gets the sum."""
    return partial(exchange, of=lambda terms, me: sum(terms) if me == place % len(terms) else terms[me])


def first_and_last(g, ranks, group):
    if group.rank in (ends := [ranks[0], ranks[-1]]):
        exchange(g, ends, group)


def square(tensors):
    return sum((x * x).sum() for x in tensors)


def sum_and_clip(
    gradients,
    holders,
    max_norm,
    group,
    together=exchange,
    names=lambda gradients, holders: holders,
    norm_first=False,
    counts=lambda ranks, rank: ranks[0] == rank,
    total=lambda mine, group: comm.all_reduce(mine, group).sqrt(),
    factor_of=lambda norm, max_norm: (max_norm / norm).clamp(max=1),
    scaled=lambda ranks, rank: True,
):
    """The answer, with a place for each mistake."""

    def add_up():
        for name in names(gradients, holders):
            if group.rank in holders.get(name, ()):
                together(gradients[name], holders[name], group)

    if not norm_first:
        add_up()
    mine = square(g for name, g in gradients.items() if counts(holders.get(name, [group.rank]), group.rank))
    norm = total(mine, group)
    if norm_first:
        add_up()
    for name, g in gradients.items():
        if scaled(holders.get(name, [group.rank]), group.rank):
            g *= factor_of(norm, max_norm)
    return norm


def by_torch_distributed(gradients, holders, max_norm, group):
    """The first holder adds up, and sends the sum to the others; each counts its fraction of the square."""
    rank, mine = dist.get_rank(), 0
    for name, ranks in holders.items():
        if rank == ranks[0]:
            for r in ranks[1:]:
                dist.recv(other := torch.empty_like(gradients[name]), r)
                gradients[name] += other
            for r in ranks[1:]:
                dist.send(gradients[name], r)
        elif rank in ranks:
            dist.send(gradients[name], ranks[0])
            dist.recv(gradients[name], ranks[0])
    for name, g in gradients.items():
        mine += square([g]) / len(holders.get(name, "1"))
    dist.all_reduce(mine)
    norm = mine.item() ** 0.5
    for g in gradients.values():
        g.mul_(min(1.0, max_norm / norm))
    return norm


def rebinds(gradients, holders, max_norm, group):
    """The dict gets new tensors; the tensors of the optimizer do not change."""
    copies = {name: g.clone() for name, g in gradients.items()}
    return sum_and_clip(copies, holders, max_norm, group)


def over_all_ranks(gradients, holders, max_norm, group):
    """Ranks that do not hold a tensor add zeros of its shape."""
    for name, shape in SHAPES.items():
        total = comm.all_reduce(gradients.get(name, torch.zeros(shape, dtype=torch.float64)), group)
        if name in gradients:
            gradients[name].copy_(total)
    return sum_and_clip(gradients, holders, max_norm, group, together=lambda *given: None)


def gathers_own(gradients, holders, max_norm, group):
    """To compute the norm of all gradients in one place."""
    comm.all_gather(torch.cat([x.flatten() for name, x in gradients.items() if name not in holders]), group)
    return sum_and_clip(gradients, holders, max_norm, group)


def mistake(hint, about="", **wrong):
    return Mistake(hint, partial(sum_and_clip, **wrong), about=(about,))


MORE_THAN_IT_HOLDS = (
    "All numbers are right, but a rank sends more than needed. A shared gradient concerns its holders alone; of "
    "everything else one number is enough, the sum of the squares."
)
ONE_HOLDER = "Only one of the holders has the sum. The copies of the weight on the other ranks would drift apart."

EXERCISE = Exercise(
    id="10.2",
    title="sum_and_clip",
    points=3,
    body=body,
    inputs=inputs,
    reference=reference,
    right=(sum_and_clip, by_torch_distributed),
    mistakes=(
        Mistake(
            "All tensors are as they were. gradients[name] = … puts a new tensor into the dict, which the optimizer "
            "never reads: change the tensor in place, with copy_, add_ or mul_.",
            rebinds,
        ),
        mistake(
            "The shared gradients are not summed: each holder has its own, and the copies drift apart from the first "
            "step on. One weight is used on several ranks, so its gradient is the sum of theirs.",
            about=TIED,
            together=lambda *given: None,
        ),
        mistake(
            "You took the mean of the shared gradients. They are not gradients of the same loss term, as on replicas: "
            "each is one use of the weight, and autograd would add them.",
            about=TIED,
            together=partial(exchange, of=lambda terms, me: sum(terms) / len(terms)),
        ),
        mistake(ONE_HOLDER, about=TIED, together=only(0)),
        mistake(ONE_HOLDER, about=TIED, together=only(-1)),
        mistake(
            "Each holder has the gradients of its peers without its own. Add the gradients that you received to your "
            "own.",
            about=TIED,
            together=partial(exchange, of=lambda terms, me: sum(terms) - terms[me]),
        ),
        mistake(
            "Two shared gradients are mixed up. Messages carry no names, and each rank sent in the order of its dict: "
            "go through holders, which has the same order on all ranks.",
            about=TIED,
            names=lambda gradients, holders: gradients,
        ),
        mistake(
            "The adapter is summed on the first and the last of its holders alone. All ranks in the list hold it.",
            about=TIED,
            together=first_and_last,
        ),
        mistake(
            "A shared weight is in your norm once for each rank that holds it. It is one weight: count it on one of "
            "them.",
            counts=lambda ranks, rank: True,
        ),
        mistake(
            "You took the norm before the shared gradients were summed. The optimizer reads the sums: take the norm of "
            "the sums.",
            norm_first=True,
            counts=lambda ranks, rank: True,
        ),
        mistake(
            "Shared weights are not in your norm. Each is a part of the gradient, counted on one of its ranks.",
            counts=lambda ranks, rank: ranks == [rank],
        ),
        mistake(
            "Each rank has its own norm: the norm of its stage. Each then scales by a different factor, and the step "
            "changes its direction. Add the squares over all ranks, one all-reduce of one number.",
            total=lambda mine, group: mine.sqrt(),
            counts=lambda ranks, rank: True,
        ),
        mistake(
            "You added the norms of the ranks. Norms do not add up, their squares do: all-reduce the sum of the "
            "squares, then take the root.",
            total=lambda mine, group: comm.all_reduce(mine.sqrt(), group),
        ),
        mistake(
            "That is the square of the norm. Take the root.", total=lambda mine, group: comm.all_reduce(mine, group)
        ),
        mistake(
            "Shared gradients are not scaled. One factor scales the full gradient.",
            scaled=lambda ranks, rank: len(ranks) == 1,
        ),
        mistake(
            "Shared gradients are scaled on their first rank alone. Each is counted once, and scaled on every rank "
            "that holds it: otherwise the copies drift apart.",
            scaled=lambda ranks, rank: ranks[0] == rank,
        ),
        mistake(
            "Small gradients got larger. Clipping makes a norm smaller if it is above max_norm, and never scales up: "
            "the factor is at most 1.",
            factor_of=lambda norm, max_norm: max_norm / norm,
        ),
        mistake(
            "The norm is right, but nothing is scaled. `x = x * factor` makes a new tensor: use x.mul_(factor).",
            factor_of=lambda norm, max_norm: 1,
        ),
        Mistake(MORE_THAN_IT_HOLDS, over_all_ranks),
        Mistake(MORE_THAN_IT_HOLDS, gathers_own),
    ),
)
