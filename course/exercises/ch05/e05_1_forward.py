"""05.1: the output of a stack of layers, each gathered when its turn comes."""

from collections import deque

import torch
from torch import distributed as dist
from torch.nn.functional import linear

from course.check.edits import exercise
from course.check.exercise import AS_NEEDED, random, shards_of
from course.check.listen import listen
from lib import comm
from lib.memory import MemoryTracker

SIZES = ((17, 11), *((13, 17), (17, 13)) * 5, (7, 17))  # (out, in); there is padding on 3 ranks and on 4
FEW, MANY = "one or two layers at a time", "four layers or more at the same time"
FACTS = {"what was gathered": FEW, "what was sent": AS_NEEDED}
MOST = 5  # largest layers: of two layers, each may be there as parts, joined, and in a buffer of gloo
TRIES = 3  # gloo's thread may free a buffer some time after wait(): of peaks near the limit, the least counts


def inputs(generator, n):
    layers = [shards_of(random(generator, out * into + out), n) for out, into in SIZES]
    return [{"x": random(generator, 2, SIZES[0][1]), "shards": [shards[r] for shards in layers]} for r in range(n)]


def body(answer, group, given):
    heard, n, layers = listen(), group.size, float("inf")
    largest = max(out * into + out for out, into in SIZES) * given["x"].element_size()
    for _ in range(TRIES):
        heard.forget()
        x, shards, memory = given["x"].clone(), [shard.clone() for shard in given["shards"]], MemoryTracker()
        memory.count_as("parameter", *shards)
        with memory:
            y = answer(x, shards, list(SIZES), group)
        sent = heard.amount(n, 1.1 * (n - 1) * sum(shard.nbytes for shard in given["shards"]))
        layers = min(layers, memory.peak_by_kind["activation"] / largest)
        if not comm.all_reduce(torch.tensor(MOST < layers < 2 * MOST, dtype=torch.int32), group, "max"):
            break
    return {"y": y, "what was gathered": MANY if layers > MOST else FEW, "what was sent": sent}


def reference(given):
    ys = [g["x"] for g in given]
    for i, (size, *shards) in enumerate(zip(SIZES, *(g["shards"] for g in given), strict=True)):
        weight, bias = cut(torch.cat(shards), *size)
        ys = [linear(y.relu() if i else y, weight, bias) for y in ys]
    return [{"y": y} for y in ys]


def cut(whole, out, into):
    """Weight [out, in] and bias [out]."""
    return whole[: out * into].view(out, into), whole[out * into :][:out]


def forward(x, shards, sizes, group):
    for i, (shard, (out_size, in_size)) in enumerate(zip(shards, sizes)):
        whole = comm.all_gather(shard, group)
        end = out_size * in_size
        weight = whole[:end].view(out_size, in_size)
        bias = whole[end : end + out_size]
        x = x @ weight.T + bias
        if i < len(shards) - 1:
            x = torch.relu(x)
    return x


def by_torch_distributed(x, shards, sizes, group):
    for i, (shard, size) in enumerate(zip(shards, sizes, strict=True)):
        parts = [torch.empty_like(shard) for _ in range(group.size)]
        dist.all_gather(parts, shard)
        x = linear(torch.relu(x) if i else x, *cut(torch.cat(parts), *size))
    return x


def forward_with_the_next_layer_coming(x, shards, sizes, group, ahead=1):
    coming = deque(comm.all_gather_start(shard, group) for shard in shards[:ahead])
    for i, size in enumerate(sizes):
        if i + ahead < len(sizes):
            coming.append(comm.all_gather_start(shards[i + ahead], group))
        x = linear(torch.relu(x) if i else x, *cut(coming.popleft().wait(), *size))
    return x


MISTAKES = """
in y, gathered: zip(shards, sizes) => zip([comm.all_gather(shard, group) for shard in shards], sizes)
whole = comm.all_gather(shard, group) => whole = shard
    The output is right, but four layers or more are in memory at the same time. With many layers, the model may not
    fit.
        Gather a layer just before it computes, or one earlier, and keep no reference to it afterwards.
in y:
whole[end : end + out_size] => whole[-out_size:]
    You took the bias from the end, where padding is.
        It begins where the weight ends, at out · in, with `out` elements.
whole[:end].view(out_size, in_size) => whole[out_size : out_size + end].view(out_size, in_size)
whole[end : end + out_size] => whole[:out_size]
    You read the bias first.
        The flat tensor of a layer holds its weight, then its bias, then padding.
whole[:end].view(out_size, in_size) => whole[:end].view(in_size, out_size).T
    You read the weight as [in, out].
        It is stored row by row as [out, in]: view it so, then transpose.
x @ weight.T + bias => x @ weight.T
    The biases are missing.
        y = x·Wᵀ + b.
if i < len(shards) - 1: => if True:
    There is a relu after the last layer.
        It belongs between layers.
x = torch.relu(x) => pass
    There is no relu between the layers.
        Apply it after each layer but the last.
in all: weight = whole[:end] => weight = comm.all_gather(shard, group)[:end]
    The output is right, but you send more than each layer once.
        A gather sends (n-1)/n of a layer, weight and bias together.
"""

EXERCISE = exercise(
    globals(), points=2, right=(forward, by_torch_distributed, forward_with_the_next_layer_coming), timeout_s=20
)
