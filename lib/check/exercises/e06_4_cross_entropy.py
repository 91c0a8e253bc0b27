"""06.4: the loss over a vocabulary that is sharded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional

from lib import comm, cost
from lib.check.exercise import Data, Exercise, Mistake, everywhere, random, whole
from lib.check.listen import listen
from lib.mesh import Group

ENTRIES = 20  # of each rank; so many that what a token needs is little beside its logits
CASES = {  # what logits are multiplied with, and what is added
    "loss for logits of about 1": (1.0, 0.0),
    "loss for logits of about 10,000": (1e4, 0.0),
    "loss for logits of about -10,000": (1.0, -1e4),
}
FEW, LOGITS = "a few numbers for each token", "as much as all the logits"


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    targets = [r * ENTRIES + place for r in range(n) for place in (0, ENTRIES - 1)]  # each rank's first and last
    targets = torch.tensor(targets + [whole(generator, 0, n * ENTRIES) for _ in range(4)])

    def logits() -> Data:
        cases = CASES.items()
        return {name: scale * random(generator, len(targets), ENTRIES) + shift for name, (scale, shift) in cases}

    return [{"targets": targets} | logits() for _ in range(n)]


def body(answer: Callable, group: Group, given: Data) -> Data:
    heard = listen()
    found = {case: answer(given[case].clone(), given["targets"].clone(), group) for case in CASES}
    logits_bytes = group.size * sum(given[case].nbytes for case in CASES)
    much = heard.sent_bytes(group.size) > cost.wire_bytes("all_gather", logits_bytes, group.size) / 2
    return found | {"what was sent": LOGITS if much else FEW}


def reference(given: list[Data]) -> list[Data]:
    targets = given[0]["targets"]
    of = partial(functional.cross_entropy, target=targets, reduction="none")
    return everywhere({c: of(torch.cat([g[c] for g in given], 1)) for c in CASES} | {"what was sent": FEW}, given)


# ---- right programs -------------------------------------------------------------------------------------------------


def common(logits: Tensor, group: Group) -> Tensor:
    """The largest logit of each token, over all ranks."""
    return comm.all_reduce(logits.amax(-1, keepdim=True), group, "max")


def place(targets: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """Where rank r looks for the targets, and which of them count."""
    here = targets - r * ENTRIES
    mine = (here >= 0) & (here < ENTRIES)
    return here * mine, mine


def loss(
    logits, targets, group, largest=common, places=place, summed=("powers", "picked"), shift=True, after=Tensor.neg
):
    shifted = logits - largest(logits, group)
    here, mine = places(targets, group.rank)
    parts = {
        "powers": shifted.exp().sum(-1),
        "picked": (shifted if shift else logits).gather(-1, here[:, None])[:, 0] * mine,
    }
    sums = {name: comm.all_reduce(x, group) if name in summed else x for name, x in parts.items()}
    return after(sums["picked"] - sums["powers"].log())


def loss_by_torch_distributed(logits, targets, group):
    m = logits.max(dim=-1).values
    dist.all_reduce(m, dist.ReduceOp.MAX)
    both = torch.zeros(2, len(targets), dtype=logits.dtype)
    both[0] = (logits - m[:, None]).exp().sum(-1)
    for i, target in enumerate(targets.tolist()):
        if target // logits.shape[1] == dist.get_rank():
            both[1, i] = logits[i, target % logits.shape[1]]
    dist.all_reduce(both)
    return both[0].log() + m - both[1]


def loss_by_logsumexp(logits, targets, group):
    of_each = comm.all_gather(logits.logsumexp(-1)[None], group)
    entries = torch.arange(logits.shape[1]) + group.rank * logits.shape[1]
    picked = torch.where(entries == targets[:, None], logits, 0).sum(-1)
    return of_each.logsumexp(0) - comm.all_reduce(picked, group)


# ---- wrong programs -------------------------------------------------------------------------------------------------


def but(**wrong) -> Callable:
    return lambda *given: loss(*given, **wrong)


def unmasked(of: Callable[[Tensor, int], Tensor]) -> Callable:
    return but(places=lambda targets, r: (of(targets, r), 1))


def gathers_the_logits(logits, targets, group):
    return functional.cross_entropy(comm.all_gather(logits, group, dim=1), targets, reduction="none")


UNMASKED = (
    "Each rank adds a logit for every target, also for targets outside its shard. Only one rank has the logit of the "
    "target: all the rest must add 0."
)

EXERCISE = Exercise(
    id="06.4",
    title="cross_entropy",
    points=3,
    body=body,
    inputs=inputs,
    reference=reference,
    right=(loss, loss_by_torch_distributed, loss_by_logsumexp),
    mistakes=(
        Mistake(
            "The losses are right, but you gather the logits: the largest tensor of the model, in full on each rank. "
            "Three values per token are enough.",
            gathers_the_logits,
        ),
        Mistake(
            "The sum of the exponentials and the logit of the target cover only the shard of this rank: nothing was "
            "summed over the ranks. One all-reduce of the two, stacked, is enough.",
            but(summed=()),
            about=("loss",),
        ),
        Mistake(
            "The sum of the exponentials covers only the shard of this rank. The softmax is over the full vocabulary: "
            "sum it over the ranks before the logarithm.",
            but(summed=("picked",)),
            about=("loss",),
        ),
        Mistake(
            "The logit of the target is right on the rank that holds it, and 0 elsewhere. Sum it over the ranks.",
            but(summed=("powers",)),
            about=("loss",),
        ),
        Mistake(
            "Each rank subtracts the largest logit of its shard, and exponentials with different factors do not add "
            'up. Subtract a common maximum: an all-reduce with op="max".',
            but(largest=lambda logits, group: logits.amax(-1, keepdim=True)),
            about=("loss",),
        ),
        Mistake(
            "Right for small logits; exp(10,000) is infinite. Subtract each token's largest logit, over all ranks, "
            "before you take exponentials.",
            but(largest=lambda logits, group: 0),
            about=("loss",),
        ),
        Mistake(
            "Right for small logits; but you subtract one maximum for all tokens, and for some tokens every "
            "exponential vanishes. Use a maximum per token.",
            but(largest=lambda logits, group: comm.all_reduce(logits.max(), group, "max")),
            about=("loss",),
        ),
        Mistake(
            "Your maximum is never below 0. Where all logits of a token are far below, every exponential vanishes: let "
            "the maximum be one of the logits.",
            but(largest=lambda logits, group: common(logits, group).clamp(min=0)),
            about=("loss",),
        ),
        Mistake(
            "You subtract the maximum in the exponentials, and not from the logit of the target. Subtract it from "
            "both, or add it again at the end.",
            but(shift=False),
            about=("loss",),
        ),
        Mistake(
            "You looked the target up by its index in the full vocabulary. The first entry of rank r is r · V/n: "
            "subtract that.",
            but(places=lambda targets, r: place(targets, 0)),
            about=("loss",),
        ),
        Mistake(UNMASKED, unmasked(lambda targets, r: place(targets, r)[0]), about=("loss",)),
        Mistake(UNMASKED, unmasked(lambda targets, r: targets % ENTRIES), about=("loss",)),
        Mistake(
            UNMASKED, unmasked(lambda targets, r: (targets - r * ENTRIES).clamp(0, ENTRIES - 1)), about=("loss",)
        ),
        Mistake(
            "The sign is wrong: you return the logarithm of the probability. The loss is its negative, and never below "
            "0.",
            but(after=lambda log_p: log_p),
            about=("loss",),
        ),
        Mistake(
            "You return the mean over the tokens. Return the loss of each token.",
            but(after=lambda log_p: -log_p.mean()),
            about=("loss",),
        ),
    ),
)
