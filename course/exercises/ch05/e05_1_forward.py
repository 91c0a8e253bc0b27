"""05.1: the output of a stack of layers, each gathered when its turn comes."""

import weakref
from collections import deque
from ctypes import string_at
from functools import partial

import torch
from torch import distributed as dist
from torch.nn.functional import linear, pad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from course.check.edits import exercise
from course.check.exercise import AS_NEEDED, random, shards_of
from course.check.listen import listen
from course.exercises.ch05.e05_2_recomputed_unit import soon
from lib import comm
from lib.memory import MemoryTracker

SIZES = ((17, 11), *((13, 17), (17, 13)) * 5, (7, 17))  # (out, in); there is padding on 3 ranks and on 4
FEW, MANY = "one or two layers at a time", "three layers or more at the same time"
FACTS = {"what was gathered": FEW, "what was sent": AS_NEEDED}
MOST = 5  # largest layers: of two layers, each may be there as parts, joined, and in a buffer of gloo
TRIES = 3  # gloo's thread may free a buffer some time after wait(): of peaks near the limit, the least counts


def inputs(generator, n):
    layers = [shards_of(random(generator, out * into + out), n) for out, into in SIZES]
    return [{"x": random(generator, 2, SIZES[0][1]), "shards": [shards[r] for shards in layers]} for r in range(n)]


def body(answer, group, given):
    n, peak, layers, flying = group.size, float("inf"), Layers(group.rank), 0
    largest = max(out * into + out for out, into in SIZES) * given["x"].element_size()

    def starts(call):
        nonlocal flying
        flying += 1
        if layers.shards and not layers.are_more:
            layers.are_more = flying > 2 or not soon(lambda: layers.present() <= 2)

    def waits(call):
        nonlocal flying
        flying -= 1

    heard = listen(starts, waits)
    for _ in range(TRIES):
        heard.forget()
        x, shards, memory = given["x"].clone(), [shard.clone() for shard in given["shards"]], MemoryTracker()
        memory.count_as("parameter", *shards)
        layers.shards = shards
        with memory, layers:
            y = answer(x, shards, list(SIZES), group)
        layers.shards = []  # the messages of this body are heard, too
        sent = heard.calls_if_more(n, 1.1 * (n - 1) * sum(shard.nbytes for shard in given["shards"]))
        peak = min(peak, memory.peak_by_kind["activation"] / largest)
        if not comm.all_reduce(torch.tensor(MOST < peak < 2 * MOST, dtype=torch.int32), group, "max"):
            break
    return {"y": y, "what was gathered": MANY if layers.are_more or peak > MOST else FEW, "what was sent": sent}


class Layers(TorchDispatchMode):
    """Which layers are in memory: those whose shard of this rank is in a tensor's memory, in its place or alone."""

    def __init__(self, rank):
        super().__init__()
        self.rank, self.shards, self.storages, self.are_more = rank, [], weakref.WeakSet(), False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves(result) if torch.is_tensor(x)]
        for x in tensors if "empty" in func.__name__ else []:
            x.zero_()  # it may have the memory of a layer that was freed, with its numbers
        self.storages.update(x.untyped_storage() for x in tensors)
        return result

    def present(self):
        """How many layers are in memory. Bytes are compared: operations of torch would be seen here and be counted."""
        other = {0, *(shard.untyped_storage().data_ptr() for shard in self.shards)}  # 0: a tensor without memory
        held = [string_at(x.data_ptr(), x.nbytes()) for x in self.storages if x.data_ptr() not in other]
        shards = [string_at(shard.data_ptr(), shard.nbytes) for shard in self.shards]
        return sum(
            any(x.startswith(shard) or x.startswith(shard, self.rank * len(shard)) for x in held) for shard in shards
        )


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


def keeps_the_last_three(x, shards, sizes, group):
    kept = deque(maxlen=3)
    for i, (shard, size) in enumerate(zip(shards, sizes, strict=True)):
        kept.append(comm.all_gather(shard, group))
        x = linear(torch.relu(x) if i else x, *cut(kept[-1], *size))
    return x


def among_zeros(shard, group):
    """The full layer, of which this rank has its part."""
    return pad(shard, [len(shard) * ranks for ranks in (group.rank, group.size - group.rank - 1)])


MISTAKES = """
in y, gathered:
zip(shards, sizes) => zip([comm.all_gather(shard, group) for shard in shards], sizes)
whole = comm.all_gather(shard, group) => whole = shard
or
partial(forward_with_the_next_layer_coming, ahead=2)
or
keeps_the_last_three
    The output is right, but three layers or more are in memory at the same time. With many layers, the model may not
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
in all:
weight = whole[:end] => weight = comm.all_gather(shard, group)[:end]
    The output is right, but you gather each layer twice.
        One all-gather brings weight and bias together: cut both from its result.
comm.all_gather(shard, group) => comm.all_reduce(among_zeros(shard, group), group)
    The output is right, but you send twice the bytes of an all-gather: an all-reduce of tensors that are mostly zero.
        An all-gather sends (n-1)/n of a layer.
in y:
comm.all_gather(shard, group) => comm.all_gather(shard.float(), group)
x = x @ weight.T + bias => x = x.float() @ weight.T + bias
or
comm.all_gather(shard, group) => comm.all_gather(shard.float(), group).double()
    The layers are float32 on the way, and what was given is float64: half of the digits are lost.
        Gather and compute in the dtype of the shards.
"""

EXERCISE = exercise(
    globals(), points=2, right=(forward, by_torch_distributed, forward_with_the_next_layer_coming), timeout_s=20
)
