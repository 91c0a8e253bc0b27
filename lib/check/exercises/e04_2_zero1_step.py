"""04.2: ZeRO-1 in bfloat16 with float32 master weights, in torch.distributed itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from lib.check.exercise import AS_NEEDED, MORE, Data, Exercise, Mistake, everywhere
from lib.check.exercises.zero1 import (
    a_step_behind,
    adamw,
    all_reduced,
    by_hand,
    cut,
    cut_at_floors,
    gather,
    gather_into_one,
    mean,
    moments_anew,
    old_shards_of_others,
    reduce_scatter,
    returns_old,
    view_of_all,
    without_padding,
    zero1_by_all_to_all,
    zero1_by_owners,
    zero1_step,
)
from lib.check.kept import kept_bytes
from lib.check.listen import Heard, listen, raw
from lib.mesh import Group

SETTINGS = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 0.1, "weight_decay": 0.1}  # with this eps a factor n shows
STEPS = 4
STATE, CALLS = "kept", "calls"  # not judged: they identify mistakes


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    """Numbers with which all right programs agree to the last bit.

    Sums and means of these gradients are exact in bfloat16, in any order. No master weight comes near the middle
    between two numbers of bfloat16, where the last bit of a float32 would determine the rounding. Moments that are
    rounded to bfloat16 change a weight.
    """
    size = 10 * n + 2
    while True:
        weights = torch.randn(size, generator=generator).bfloat16()
        gradients = torch.randint(-15, 16, (n, STEPS, size), generator=generator) * n / 16
        given = [{"weights": weights, "gradients": list(mine)} for mine in gradients.bfloat16()]
        right, rounded = (list(masters(given, step)) for step in (adamw, partial(by_hand, dtype=torch.bfloat16)))
        shows = any((a.bfloat16() != b.bfloat16()).any() for a, b in zip(right, rounded, strict=True))
        if shows and all(distance_to_a_tie(w) > 1e-3 for w in right):
            return given


def distance_to_a_tie(x: Tensor) -> float:
    """Of the nearest element, in distances between two numbers of bfloat16."""
    spacing = torch.exp2(x.abs().log2().floor() - 7)
    return ((x.abs() / spacing) % 1 - 0.5).abs().min().item()


def masters(given: list[Data], step: Callable) -> Iterator[Tensor]:
    """The float32 weights after each step of one process."""
    kept, weights = {}, given[0]["weights"].float()
    for gradients in zip(*(g["gradients"] for g in given), strict=True):
        weights = step(kept, weights, torch.stack(gradients).float().mean(0), SETTINGS)
        yield weights.clone()


@raw
def body(answer: Callable, group: Group, given: Data) -> Data:
    heard, weights, kept, found = listen(), given["weights"].clone(), {}, {}
    size = ceil(len(weights) / group.size)
    for k, gradient in enumerate(given["gradients"], 1):
        weights = answer(weights, gradient.clone(), kept, dict(SETTINGS))
        fits = torch.is_tensor(weights) and (weights.shape, weights.dtype) == (gradient.shape, gradient.dtype)
        found |= {f"dtype after step {k}": str(getattr(weights, "dtype", None)), f"weights after step {k}": weights}
        if not fits:  # the next step could not begin
            return found
        found[f"weights after step {k}"] = weights.detach().clone()
    return found | state(kept, size) | sent(heard, given, group)


def state(kept: dict, size: int) -> Data:
    shards = {dtype: round(n_bytes / dtype.itemsize / size) for dtype, n_bytes in kept_bytes(kept).items()}
    float32 = sum(count * dtype.itemsize / 4 for dtype, count in shards.items() if dtype.itemsize >= 4)
    most = 4  # master weights, two moments, and perhaps the gradient
    return {"memory": MORE if float32 > most else AS_NEEDED, STATE: str(sorted(shards.items(), key=str))}


def sent(heard: Heard, given: Data, group: Group) -> Data:
    """In halves of an all-reduce of the padded gradient."""
    n = group.size
    half = 2 * STEPS * (n - 1) * ceil(len(given["weights"]) / n)
    kinds = {kind: Heard(calls=[call for call in heard.calls if call[0] == kind]) for kind, _ in heard.calls}
    calls = [f"{kind} {of.sent_bytes(n) / half:.1f}" for kind, of in kinds.items()]
    return {"what was sent": MORE if heard.sent_bytes(n) > 2.1 * half else AS_NEEDED, CALLS: ", ".join(calls)}


def reference(given: list[Data]) -> list[Data]:
    right = {}
    for k, weights in enumerate(masters(given, adamw), 1):
        right |= {f"weights after step {k}": weights.bfloat16(), f"dtype after step {k}": "torch.bfloat16"}
    return everywhere(right | {"memory": AS_NEEDED, "what was sent": AS_NEEDED}, given)


# ---- wrong programs --------------------------------------------------------------------------------------------------


WEIGHTS = ("dtype", "weights")


def named(hint: str, program: Callable = zero1_step, about: tuple[str, ...] = WEIGHTS, **wrong: Any) -> Mistake:
    return Mistake(hint, partial(program, **wrong), about=about)


EXERCISE = Exercise(
    id="04.2",
    title="zero1_step",
    points=4,
    body=body,
    inputs=inputs,
    reference=reference,
    right=(zero1_step, zero1_by_all_to_all, zero1_by_owners),
    mistakes=(
        named(
            "Each rank stepped its own shard and has the old shards of the others: no rank got their new weights. "
            "All-gather the stepped shards.",
            old_shards_of_others,
        ),
        named(
            "Each rank has the other ranks' shards of the previous step. Gather after the step, so that the all-gather "
            "sends its result.",
            old_shards_of_others,
            gathers=True,
        ),
        named("You return the old weights. Gather the new tensors that the step made.", returns_old),
        named(
            "The weights are one step behind: you gather the master weights before the step, not after it.",
            a_step_behind,
        ),
        named(
            "You return this rank's shard alone. All-gather the shards, and join them.",
            whole=lambda new: new.bfloat16(),
        ),
        named(
            "All shards are the last rank's. `[t] * n` is n times the same tensor, and each shard overwrites the one "
            "before: make n tensors, as with [torch.empty_like(t) for _ in range(n)].",
            whole=gather_into_one,
        ),
        named(
            "You return the weights in float32. The model computes in bfloat16: convert the master weights to "
            "bfloat16, then gather them.",
            whole=gather,
            about=("dtype",),
        ),
        named("You return the padding with the weights: only the first k elements are weights.", end=10**6),
        named(
            "The last weights never change: you cut k // n elements for each rank, and k % n of them have no owner. "
            "Pad weights and gradient with zeros until n divides their length.",
            without_padding,
        ),
        named(
            "The last weights are missing: you cut k // n elements for each rank, and k % n of them have no owner. "
            "Pad weights and gradient with zeros until n divides their length, and return the first k elements.",
            without_padding,
            keeps_rest=False,
        ),
        named(
            "The shard of the weights and the shard of the gradient are different elements: the weights are cut at "
            "multiples of k // n, the gradient at multiples of ceil(k / n). Pad both, then cut both in the same way.",
            start=cut_at_floors,
        ),
        named(
            "Every rank stepped the first shard of the weights. Rank r owns shard r.",
            start=lambda weights: cut(weights, 0).float(),
        ),
        named(
            "You stepped with the sum of the gradients over the n ranks. AdamW nearly hides that, but not where eps "
            "is large, and a clip or a log of the norm does not. Divide by n.",
            reduce=lambda gradient: reduce_scatter(gradient).float(),
        ),
        named(
            "You divided by n twice. ReduceOp.AVG divides already.",
            reduce=lambda gradient: mean(gradient) / dist.get_world_size(),
        ),
        named(
            "Each rank stepped its shard with its own gradient alone. A reduce-scatter gives it the sum over ranks.",
            reduce=lambda gradient: cut(gradient).float(),
        ),
        *(
            named(
                "You step in bfloat16, without master weights: an update much smaller than a weight is rounded off. "
                "In the first step convert this rank's shard to float32; keep that copy and step it.",
                start=cut,
                **step,
                about=(STATE,),
            )
            for step in ({}, {"step": partial(by_hand, dtype=torch.bfloat16, keeps="mvt")})
        ),
        named(
            "The moments are in bfloat16, where a small change in a step is rounded off: keep them in float32.",
            step=partial(by_hand, dtype=torch.bfloat16),
            about=(STATE,),
        ),
        named(
            "Each step begins at weights that are rounded to bfloat16, and loses the rounding error. Convert them to "
            "float32 only in the first step; keep that copy in `kept` and step it.",
            step=partial(by_hand, keeps="mvt"),
        ),
        named(
            "Every step is a first step: it begins at the rounded weights, with moments at zero. Fill `kept` in the "
            "first step alone (`if not kept:`), and use what is in it. `kept = {...}` makes a different dict, which "
            "the next step does not get.",
            step=lambda kept, *given: adamw({}, *given),
        ),
        named(
            "This is Adam, which adds the weight decay to the gradient. AdamW takes it from the weights.",
            step=partial(adamw, optimizer=torch.optim.Adam),
        ),
        named(
            "You take `lr` from `settings` alone. Pass all of it: torch.optim.AdamW([master], **settings).",
            step=lambda kept, weights, gradient, settings: adamw(kept, weights, gradient, {"lr": settings["lr"]}),
        ),
        named(
            "The moments begin at zero in each step. Make the optimizer in the first step, and keep it in `kept`.",
            step=moments_anew,
        ),
        named(
            "Every step corrects the moments as if it were the first: keep the number of steps in `kept`.",
            step=partial(by_hand, counts=False),
        ),
        named(
            "The weights are right, but each rank steps all of them and keeps the full optimizer state: ZeRO-1 then "
            "saves nothing. Keep master weights and moments of this rank's shard alone.",
            start=lambda weights: weights.float(),
            reduce=all_reduced,
            whole=lambda new: new.bfloat16(),
            about=("memory", *WEIGHTS, STATE),
        ),
        named(
            "The weights are right, but your float32 shard is a view of all weights in float32, and keeps all of "
            "them in memory. Cut first and convert then, or clone the shard.",
            start=view_of_all,
            about=("memory", STATE, *WEIGHTS),
        ),
        named(
            "The weights are right, but you keep more than float32 master weights and moments of this shard.",
            start=lambda weights: cut(weights).double(),
            about=("memory", *WEIGHTS),
        ),
        named(
            "The step is right, and you send 50% more than you need: an all-reduce gathers gradients that no rank "
            "uses. A reduce-scatter gives each rank the gradient of its shard.",
            reduce=lambda gradient: cut(all_reduced(gradient)),
            about=("what was sent", *WEIGHTS, CALLS),
        ),
        named(
            "The step is right, but you gather weights in float32, twice the bytes. Convert to bfloat16 first.",
            whole=lambda new: gather(new).bfloat16(),
            about=("what was sent", *WEIGHTS, CALLS),
        ),
        named(
            "The step is right, but you send gradients in float32, twice the bytes. Convert the shard that you get.",
            reduce=lambda gradient: mean(gradient.float()),
            about=("what was sent", *WEIGHTS, CALLS),
        ),
        named(
            "The step is right, but you send more than a reduce-scatter and an all-gather, both in bfloat16.",
            reduce=lambda gradient: cut(gather(gradient[None]).float().mean(0)),
            about=("what was sent", *WEIGHTS),
        ),
    ),
)
