"""Answers to the exercises of chapter 05: right ones, and one for each mistake that has a name."""

from math import ceil

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from lib import comm

# ---- 05.1


def cut_layer(whole, out, into):
    return whole[: out * into].view(out, into), whole[out * into : out * into + out]


def forward(x, shards, sizes, group, cut=cut_layer, relu=True, last=False, gather=comm.all_gather, first=False):
    """The answer to 05.1, with a place for each mistake."""
    wholes = [gather(shard, group) for shard in shards] if first else None
    for i, (out, into) in enumerate(sizes):
        whole = wholes[i] if first else gather(shards[i], group)
        weight, bias = cut(whole, out, into)
        x = x @ weight.T + bias
        if relu and (last or i < len(sizes) - 1):
            x = torch.relu(x)
    return x


def forwards(**wrong):
    return lambda *given: forward(*given, **wrong)


def right_forward_by_torch_distributed(x, shards, sizes, group):
    for i, (shard, (out, into)) in enumerate(zip(shards, sizes, strict=True)):
        parts = [torch.empty_like(shard) for _ in range(group.size)]
        dist.all_gather(parts, shard)
        flat = torch.cat(parts)
        x = torch.nn.functional.linear(torch.relu(x) if i else x, *cut_layer(flat, out, into))
    return x


def right_forward_with_the_next_layer_coming(x, shards, sizes, group):
    coming = comm.all_gather_start(shards[0], group)
    for i, size in enumerate(sizes):
        weight, bias = cut_layer(coming.wait(), *size)
        coming = comm.all_gather_start(shards[i + 1], group) if i + 1 < len(sizes) else None
        x = torch.nn.functional.linear(x, weight, bias)
        x = x.relu() if coming else x
    return x


def gathers_weight_and_bias_apart(x, shards, sizes, group):
    return forward(x, shards, sizes, group, gather=lambda s, g: (comm.all_gather(s, g), comm.all_gather(s, g))[1])


# ---- 05.2


def linear(
    keep=False,
    reduce=lambda g, group: comm.reduce_scatter(g, group, op="mean"),
    of_x=lambda g, group: g,
    of_w=lambda g, x: g.T @ x,
):
    """The answer to 05.2, with a place for each mistake."""

    class ShardedLinear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, shard, shape, group):
            ctx.group, ctx.shape = group, shape
            weight = comm.all_gather(shard, group)[: shape[0] * shape[1]].view(shape)
            ctx.save_for_backward(x, weight if keep else shard)
            return x @ weight.T

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            out, into = ctx.shape
            if not keep:
                weight = comm.all_gather(weight, ctx.group)[: out * into].view(out, into)
            flat = of_w(gradient, x).flatten()
            flat = pad(flat, (0, -len(flat) % ctx.group.size))
            return of_x(gradient @ weight, ctx.group), reduce(flat, ctx.group), None, None

    return ShardedLinear


class RightLinearByTorchDistributed(torch.autograd.Function):
    @staticmethod
    def forward(x, shard, shape, group):
        return x @ RightLinearByTorchDistributed.whole(shard, shape).T

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.shard, ctx.shape, _ = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def whole(shard, shape):
        parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, shard.detach())
        return torch.cat(parts)[: shape[0] * shape[1]].view(*shape)

    @staticmethod
    def backward(ctx, gradient):
        n = dist.get_world_size()
        flat, (x,) = torch.zeros(n * len(ctx.shard), dtype=gradient.dtype), ctx.saved_tensors
        flat[: ctx.shape[0] * ctx.shape[1]] = torch.einsum("bo,bi->oi", gradient, x).reshape(-1)
        got = torch.empty_like(flat)
        dist.all_to_all_single(got, flat)
        weight = RightLinearByTorchDistributed.whole(ctx.shard, ctx.shape)
        return gradient @ weight, got.view(n, -1).sum(0) / n, None, None


def mine(flat, group):
    return flat.chunk(group.size)[group.rank]


# ---- 05.3


def prefetched(x, units, group, ahead=1, at_once=False, around=False, last=True):
    """The answer to 05.3, with a place for each mistake."""
    coming = {}

    def ask(i):
        if i not in coming and (i < len(units) or around):
            coming[i] = comm.all_gather_start(units[i % len(units)].shard, group)
            if at_once:
                coming[i].wait()

    for i, unit in enumerate(units):
        whole = None
        for j in range(i, i + ahead + 1):
            ask(j)
        whole = coming.pop(i).wait()
        if last or i < len(units) - 1:
            x = unit.compute(whole, x)
    return x


def prefetches(**wrong):
    return lambda *given: prefetched(*given, **wrong)


def right_prefetched_in_two_buffers(x, units, group):
    buffers = [torch.empty(group.size * len(units[0].shard), dtype=x.dtype) for _ in "12"]
    places = [list(buffer.chunk(group.size)) for buffer in buffers]
    works = [dist.all_gather(places[0], units[0].shard, async_op=True)]
    for i, unit in enumerate(units):
        works[i].wait()
        if i + 1 < len(units):
            works.append(dist.all_gather(places[1 - i % 2], units[i + 1].shard, async_op=True))
        x = unit.compute(buffers[i % 2], x)
    return x


def computes_too_early(x, units, group):
    buffers = [torch.zeros(group.size * len(unit.shard), dtype=x.dtype) for unit in units]
    coming = []
    for unit, buffer in zip(units, buffers, strict=True):
        coming.append(comm.all_gather_start(unit.shard, group, out=buffer))
        x = unit.compute(buffer, x)
    for pending in coming:
        pending.wait()
    return x


def forgets_the_last(x, units, group):
    coming = comm.all_gather_start(units[0].shard, group)
    for unit, following in zip(units, units[1:], strict=False):
        whole, coming = coming.wait(), comm.all_gather_start(following.shard, group)
        x = unit.compute(whole, x)
    coming.wait()
    return x


# ---- 05.4


def reshard(read, size, old_n, group, padded=True):
    new, old = ceil(size / group.size), ceil(size / old_n)
    begin, end = group.rank * new, min((group.rank + 1) * new, size)
    pieces = [torch.empty(0, dtype=torch.float64)]
    for rank in range(old_n):
        low, high = max(begin, rank * old), min(end, (rank + 1) * old)
        if low < high:
            pieces.append(read(rank, low - rank * old, high - rank * old))
    shard = torch.cat(pieces)
    return pad(shard, (0, new - len(shard))) if padded else shard


def right_reshard_number_by_number(read, size, old_n, group):
    new, old = -(-size // group.size), -(-size // old_n)
    shard = torch.zeros(new, dtype=torch.float64)
    for i in range(new):
        place = group.rank * new + i
        if place < size:
            shard[i] = read(place // old, place % old, place % old + 1)[0]
    return shard


def reads_all(of):
    def answer(read, size, old_n, group):
        return of([read(rank, 0, ceil(size / old_n)) for rank in range(old_n)], size, group)

    return answer


def cut(flat, group):
    return pad(flat, (0, -len(flat) % group.size)).chunk(group.size)[group.rank]


def cuts_in_place(shards, size, group):
    new = ceil(size / group.size)
    part = torch.cat(shards)[group.rank * new : (group.rank + 1) * new]
    return pad(part, (0, new - len(part)))


# ---- 05.5


def sent(of=lambda half, n, k, reshard: half * k * (3 if reshard else 2)):
    return lambda size, n, k, reshard: of((n - 1) / n * size, n, k, reshard)


def right_sent_by_counting(payload_bytes, n, microbatches, reshard):
    total = 0
    for _ in range(microbatches):
        for _ in ("forward", "gradients") + ("backward",) * reshard:
            total += payload_bytes - payload_bytes / n
    return total


def times(reshard):
    return 3 if reshard else 2


RIGHT = {
    "05.1": [forward, right_forward_by_torch_distributed, right_forward_with_the_next_layer_coming],
    "05.2": [linear(), RightLinearByTorchDistributed],
    "05.3": [prefetched, right_prefetched_in_two_buffers],
    "05.4": [reshard, right_reshard_number_by_number],
    "05.5": [sent(), right_sent_by_counting],
}
WRONG = {  # in the order of the exercise's mistakes
    "05.1": [
        forwards(first=True),
        forwards(cut=lambda whole, out, into: (cut_layer(whole, out, into)[0], whole[-out:])),
        forwards(cut=lambda whole, out, into: (whole[out : out + out * into].view(out, into), whole[:out])),
        forwards(cut=lambda whole, out, into: (whole[: out * into].view(into, out).T, whole[out * into :][:out])),
        forwards(cut=lambda whole, out, into: (cut_layer(whole, out, into)[0], 0)),
        forwards(last=True),
        forwards(relu=False),
        gathers_weight_and_bias_apart,
    ],
    "05.2": [
        linear(keep=True),
        linear(reduce=lambda g, group: mine(comm.all_reduce(g, group, op="mean"), group)),
        linear(reduce=lambda g, group: comm.reduce_scatter(g, group)),
        linear(reduce=mine),
        linear(of_x=lambda g, group: None),
        linear(of_x=lambda g, group: comm.all_reduce(g, group, op="mean")),
        linear(of_w=lambda g, x: x.T @ g),
    ],
    "05.3": [
        prefetches(ahead=0),
        prefetches(at_once=True),
        prefetches(ahead=4),
        prefetches(ahead=2),
        computes_too_early,
        prefetches(around=True),
        forgets_the_last,
    ],
    "05.4": [
        reads_all(lambda shards, size, group: cut(torch.cat(shards), group)),
        reads_all(cuts_in_place),
        reads_all(lambda shards, size, group: shards[group.rank % len(shards)]),
        reads_all(lambda shards, size, group: torch.cat([s.tensor_split(group.size)[group.rank] for s in shards])),
        lambda *given: reshard(*given, padded=False),
        reads_all(lambda shards, size, group: cut(torch.cat(shards)[:size], group)),
    ],
    "05.5": [
        sent(lambda half, n, k, reshard: half / n * k * times(reshard)),
        sent(lambda half, n, k, reshard: half * k * 2),
        sent(lambda half, n, k, reshard: half * k * 3),
        sent(lambda half, n, k, reshard: half * times(reshard)),
        sent(lambda half, n, k, reshard: half * (k * (times(reshard) - 1) + 1)),
        sent(lambda half, n, k, reshard: half * (k + times(reshard) - 1)),
        sent(lambda half, n, k, reshard: half * k * (times(reshard) - 1)),
        lambda size, n, k, reshard: size * k * times(reshard),
        sent(lambda half, n, k, reshard: n * half * k * times(reshard)),
    ],
}
