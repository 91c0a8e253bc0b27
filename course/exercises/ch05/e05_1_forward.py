"""05.1: the output of a stack of layers, each gathered when its turn comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.functional import linear

from course.check.exercise import AS_NEEDED, MORE, Data, Exercise, Mistake, random, shards_of
from course.check.listen import listen
from lib import comm
from lib.memory import MemoryTracker
from lib.mesh import Group

SIZES = ((17, 11), *((13, 17), (17, 13)) * 5, (7, 17))  # (out, in); there is padding on 3 ranks and on 4
FEW, MANY = "one or two layers at a time", "four layers or more at the same time"
MOST = 5  # largest layers: of two layers, each may be there as parts, joined, and in a buffer of gloo
TRIES = 3  # gloo's thread may free a buffer some time after wait(): of peaks near the limit, the least counts


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    layers = [shards_of(random(generator, out * into + out), n) for out, into in SIZES]
    return [{"x": random(generator, 2, SIZES[0][1]), "shards": [shards[r] for shards in layers]} for r in range(n)]


def body(answer: Callable, group: Group, given: Data) -> Data:
    heard, layers = listen(), float("inf")
    most = sum((group.size - 1) * shard.nbytes for shard in given["shards"])
    for _ in range(TRIES):
        heard.forget()
        y, peak = at_its_peak(answer, group, given)
        sent, layers = heard.sent_bytes(group.size), min(layers, peak)
        if not comm.all_reduce(torch.tensor(MOST < layers < 2 * MOST, dtype=torch.int32), group, "max"):
            break
    return {
        "y": y,
        "what was gathered": MANY if layers > MOST else FEW,
        "what was sent": MORE if sent > 1.1 * most else AS_NEEDED,
    }


def at_its_peak(answer: Callable, group: Group, given: Data) -> tuple[Any, float]:
    """What the answer returns, and what it allocates, in largest layers."""
    x, shards, memory = given["x"].clone(), [shard.clone() for shard in given["shards"]], MemoryTracker()
    memory.count_as("parameter", *shards)
    with memory:
        y = answer(x, shards, list(SIZES), group)
    largest = max(out * into + out for out, into in SIZES) * x.element_size()
    return y, memory.peak_by_kind["activation"] / largest


def reference(given: list[Data]) -> list[Data]:
    found = []
    for g in given:
        y = g["x"]
        for i, (out, into) in enumerate(SIZES):
            weight, bias = cut(torch.cat([other["shards"][i] for other in given]), out, into)
            y = linear(torch.relu(y) if i else y, weight, bias)
        found.append({"y": y, "what was gathered": FEW, "what was sent": AS_NEEDED})
    return found


# ---- right programs -------------------------------------------------------------------------------------------------


def cut(whole: Tensor, out: int, into: int) -> tuple[Tensor, Tensor]:
    """Weight [out, in] and bias [out]."""
    return whole[: out * into].view(out, into), whole[out * into :][:out]


def forward(
    x, shards, sizes, group, cut=cut, between=torch.relu, last=lambda y: y, gather=comm.all_gather, first=False
):
    wholes = (gather(shard, group) for shard in shards)
    for i, (out, into) in enumerate(sizes):
        wholes = list(wholes) if first else wholes
        weight, bias = cut(wholes[i] if first else next(wholes), out, into)
        x = linear(x, weight, bias)
        x = between(x) if i < len(sizes) - 1 else last(x)
    return x


def forward_by_torch_distributed(x, shards, sizes, group):
    for i, (shard, (out, into)) in enumerate(zip(shards, sizes, strict=True)):
        parts = [torch.empty_like(shard) for _ in range(group.size)]
        dist.all_gather(parts, shard)
        x = linear(torch.relu(x) if i else x, *cut(torch.cat(parts), out, into))
    return x


def forward_with_the_next_layer_coming(x, shards, sizes, group, ahead=1):
    coming = deque(comm.all_gather_start(shard, group) for shard in shards[:ahead])
    for i, size in enumerate(sizes):
        if i + ahead < len(sizes):
            coming.append(comm.all_gather_start(shards[i + ahead], group))
        x = linear(x, *cut(coming.popleft().wait(), *size))
        x = x.relu() if i < len(sizes) - 1 else x
    return x


# ---- wrong programs -------------------------------------------------------------------------------------------------


def cuts(wrong: Callable) -> Callable:
    return partial(forward, cut=wrong)


def twice(shard, group):
    comm.all_gather(shard, group)
    return comm.all_gather(shard, group)


EXERCISE = Exercise(
    id="05.1",
    title="forward",
    points=2,
    body=body,
    inputs=inputs,
    reference=reference,
    right=(forward, forward_by_torch_distributed, forward_with_the_next_layer_coming),
    timeout_s=20,
    mistakes=(
        Mistake(
            "The output is right, but four layers or more are in memory at the same time. With many layers, that may "
            "be the model that does not fit. Gather a layer just before it computes, or one layer earlier, and keep "
            "no reference to it afterwards.",
            partial(forward, first=True),
            about=("y", "gathered"),
        ),
        Mistake(
            "You took the bias from the end of the gathered tensor, and there is padding. The bias begins where the "
            "weight ends, at out · in, and has `out` elements.",
            cuts(lambda whole, out, into: (cut(whole, out, into)[0], whole[-out:])),
            about=("y",),
        ),
        Mistake(
            "You read the bias first. The flat tensor of a layer holds its weight, then its bias, then padding.",
            cuts(lambda whole, out, into: (whole[out:][: out * into].view(out, into), whole[:out])),
            about=("y",),
        ),
        Mistake(
            "You read the weight as [in, out]. It is stored row by row as [out, in]: view it so, then transpose.",
            cuts(lambda whole, out, into: (whole[: out * into].view(into, out).T, cut(whole, out, into)[1])),
            about=("y",),
        ),
        Mistake(
            "The biases are missing: y = x·Wᵀ + b.",
            cuts(lambda whole, out, into: (cut(whole, out, into)[0], None)),
            about=("y",),
        ),
        Mistake(
            "There is a relu after the last layer. It belongs between layers.",
            partial(forward, last=torch.relu),
            about=("y",),
        ),
        Mistake("There is no relu between the layers.", partial(forward, between=lambda y: y), about=("y",)),
        Mistake(
            "The output is right, but you send more than each layer once. A gather sends (n-1)/n of a layer, weight "
            "and bias together.",
            partial(forward, gather=twice),
        ),
    ),
)
