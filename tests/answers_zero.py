"""Answers to the exercises of chapter 04: right ones, and one for each mistake that has a name."""

from math import ceil

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from lib import comm

# ---- 04.1


def shard(x, group, pads=lambda size, n: -size % n, front=False, cut="piece", fill=0.0, back="x"):
    """The answer to 04.1, with a place for each mistake."""
    n, flat = group.size, x.flatten()
    padding = (pads(len(flat), n), 0) if front else (0, pads(len(flat), n))
    flat = pad(flat, padding, value=fill)
    part = flat[group.rank :: n] if cut == "strided" else flat.tensor_split(n)[group.rank]

    def unshard(part):
        whole = comm.all_gather(part, group)
        return {"x": whole[: x.numel()].view_as(x), "padded": whole, "flat": whole[: x.numel()], "old": x}[back]

    return part.clone(), unshard


def right_shard_by_torch_distributed(x, group):
    size = ceil(x.numel() / dist.get_world_size())
    part = torch.zeros(size, dtype=x.dtype)
    mine = x.reshape(-1)[dist.get_rank() * size : (dist.get_rank() + 1) * size]
    part[: len(mine)] = mine

    def unshard(part):
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part)
        return torch.cat(parts)[: x.numel()].reshape(x.shape)

    return [part, unshard]


def shards(**wrong):
    return lambda x, group: shard(x, group, **wrong)


def truncates(x, group):
    size = x.numel() // group.size
    return shard(x.flatten()[: size * group.size], group)


# ---- 04.2


def step(w, g, m, lr, beta, group, op="mean", own=False, first=False, keep=1.0, take=1.0, when="after", gives="new"):
    n, r = group.size, group.rank
    size = len(w) // n
    mine = slice(0, size) if first else slice(r * size, (r + 1) * size)
    part = g.chunk(n)[r] if own else comm.reduce_scatter(g, group, op=op)
    new = keep * beta * m + take * part
    if when == "before":
        gathered = comm.all_gather(w[mine], group)
        gathered[mine] -= lr * new
    else:
        gathered = comm.all_gather(w[mine] - (0 if when == "never" else lr) * new, group)
    return gathered, {"new": new, "old": m}.get(gives, comm.all_gather(new, group) if gives == "whole" else None)


def right_step_in_place(w, g, m, lr, beta, group):
    part = comm.reduce_scatter(g, group) / group.size
    m.mul_(beta).add_(part)
    mine = w.view(group.size, -1)[group.rank]
    mine.sub_(lr * m)
    return comm.all_gather(mine, group, out=w), m


def right_step_by_torch_distributed(w, g, m, lr, beta, group):
    got = torch.empty_like(g)
    dist.all_to_all_single(got, g)
    m = beta * m + got.view(group.size, -1).mean(0)
    parts = [torch.empty_like(m) for _ in range(group.size)]
    dist.all_gather(parts, w.chunk(group.size)[group.rank] - lr * m)
    return torch.cat(parts), m


def steps(**wrong):
    return lambda *given: step(*given, **wrong)


def right_step_by_torch_optim(w, g, m, lr, beta, group):
    p = torch.nn.Parameter(w.chunk(group.size)[group.rank].clone())
    optimizer = torch.optim.SGD([p], lr=lr, momentum=beta)
    optimizer.state[p]["momentum_buffer"] = m.clone()
    p.grad = comm.reduce_scatter(g, group, op="mean")
    optimizer.step()
    return comm.all_gather(p.detach(), group), optimizer.state[p]["momentum_buffer"]


def all_reduces(w, g, m, lr, beta, group):
    m = beta * m + comm.all_reduce(g, group, op="mean").chunk(group.size)[group.rank]
    return comm.all_gather(w.chunk(group.size)[group.rank] - lr * m, group), m


def gathers_gradients_and_weights(w, g, m, lr, beta, group):
    every = comm.all_gather(g[None], group).mean(0)
    m = beta * m + every.chunk(group.size)[group.rank]
    return comm.all_gather(w.chunk(group.size)[group.rank] - lr * m, group), m


def whole_momentum(w, g, m, lr, beta, group):
    every = comm.all_gather(m, group)
    every = beta * every + comm.all_reduce(g, group, op="mean")
    return w - lr * every, every


# ---- 04.3


def clip(shards, replicated, max_norm, group, squares=None, scale=None, also=True):
    own = sum((x**2).sum() for x in shards)
    alike = sum((x**2).sum() for x in replicated)
    norm = (squares or (lambda own, alike, group: (comm.all_reduce(own, group) + alike).sqrt()))(own, alike, group)
    factor = min(1.0, max_norm / norm.item()) if scale is None else scale(max_norm, norm)
    for x in [*shards, *(replicated if also else [])]:
        x *= factor
    return norm


def clips(squares=None, scale=None, also=True):
    return lambda *given: clip(*given, squares, scale, also)


def right_clip_by_one_long_tensor(shards, replicated, max_norm, group):
    own = torch.cat([x.flatten() for x in shards])
    if group.rank == 0:  # what all have alike is counted by one of them
        own = torch.cat([own, *(x.flatten() for x in replicated)])
    square = own @ own
    dist.all_reduce(square)
    norm = square.sqrt().item()
    if norm > max_norm:
        for x in (*shards, *replicated):
            x.mul_(max_norm / (norm + 1e-6))
    return norm


# ---- 04.4


def accumulate(microbatches, group, divide=lambda g, count, group: g, add=True, op="sum", late=False, count="all"):
    shard, tokens, waiting, seen = None, 0, None, 0
    for gradient, n_tokens in microbatches:
        now, gradient = (waiting, gradient) if late else (gradient, None)
        waiting = gradient
        tokens, seen = tokens + n_tokens, seen + 1
        if now is not None:
            part = comm.reduce_scatter(divide(now, n_tokens, group), group, op=op)
            shard = part if shard is None or not add else shard + part
    if late:
        shard = shard + comm.reduce_scatter(waiting, group)
    if count == "all":
        return shard / comm.all_reduce(torch.tensor(tokens), group)
    return shard / {"own": tokens, "none": 1, "microbatches": seen}[count]


def accumulates(**wrong):
    return lambda *given: accumulate(*given, **wrong)


def right_accumulate_in_the_background(microbatches, group):
    under_way, counts = [], []
    for gradient, count in microbatches:
        under_way.append(comm.reduce_scatter_start(gradient, group))
        counts.append(count)
    total = comm.all_reduce(torch.tensor(float(sum(counts)), dtype=torch.float64), group)
    return torch.stack([pending.wait() for pending in under_way]).sum(0) / total


def right_accumulate_by_torch_distributed(microbatches, group):
    shard, total = 0, torch.zeros((), dtype=torch.int64)
    for gradient, count in microbatches:
        got, count = torch.empty_like(gradient), torch.tensor(count)
        dist.all_to_all_single(got, gradient)
        dist.all_reduce(count)
        shard, total = shard + got.view(group.size, -1).sum(0), total + count
    return shard / total


def right_accumulate_by_messages(microbatches, group):
    n, r, shard, tokens = group.size, group.rank, 0, 0
    for gradient, count in microbatches:
        parts = dict(enumerate(gradient.chunk(n)))
        shard, tokens = shard + parts.pop(r), tokens + count
        shard = shard + sum(comm.exchange(parts, parts, group).wait().values())
    return shard / comm.all_reduce(torch.tensor(tokens), group)


def averages_ranks_means(microbatches, group):
    """Each rank divides by its own tokens, which it must know first; so it keeps the list."""
    pairs = list(microbatches)
    own = sum(count for _, count in pairs)
    return sum(comm.reduce_scatter(g / own, group, op="mean") for g, _ in pairs)


def own_count(g, count, group):
    return g / count / group.size


def count_on_all_ranks(g, count, group):
    return g / comm.all_reduce(torch.tensor(count), group)


def reduces_at_the_end(microbatches, group):
    gradients, counts = zip(*microbatches, strict=True)
    total = comm.all_reduce(torch.tensor(sum(counts)), group)
    return comm.reduce_scatter(torch.stack(gradients).sum(0), group) / total


def reduces_by_all_reduce(microbatches, group):
    shard, tokens = 0, 0
    for gradient, count in microbatches:
        shard = shard + comm.all_reduce(gradient, group).chunk(group.size)[group.rank]
        tokens += count
    return shard / comm.all_reduce(torch.tensor(tokens), group)


# ---- 04.5

KEPT = {"mixed": [(16, 0), (4, 12), (2, 14), (0, 16)], "float32": [(16, 0), (8, 8), (4, 12), (0, 16)]}


def needed(psi, stage, precision, memory_bytes, split=None, whole=lambda n: ceil(n), never=None):
    kept, shared = (split or (lambda stage, precision: KEPT[precision][stage]))(stage, precision)
    if (kept + shared) * psi <= memory_bytes:
        return 1
    if shared == 0 or memory_bytes <= kept * psi:
        return never
    return whole(shared * psi / (memory_bytes - kept * psi))


def right_needed_by_trying(psi, stage, precision, memory_bytes):
    weight, state = (2, 12) if precision == "mixed" else (4, 8)
    for n in range(1, 1000):
        held = weight * psi / (n if stage == 3 else 1) + weight * psi / (n if stage >= 2 else 1)
        if held + state * psi / (n if stage >= 1 else 1) <= memory_bytes:
            return n
    return None


def needs(**wrong):
    return lambda *given: needed(*given, **wrong)


def no_master(stage, precision):
    return KEPT["float32"][stage] if precision == "float32" else [(12, 0), (4, 8), (2, 10), (0, 12)][stage]


def whole_master(stage, precision):
    kept, shared = KEPT[precision][stage]
    return (kept + 4, shared - 4) if precision == "mixed" and stage in (1, 2) else (kept, shared)


RIGHT = {
    "04.1": [shard, right_shard_by_torch_distributed],
    "04.2": [step, right_step_in_place, right_step_by_torch_distributed, right_step_by_torch_optim],
    "04.3": [clip, right_clip_by_one_long_tensor],
    "04.4": [
        *(accumulate, right_accumulate_in_the_background, right_accumulate_by_messages),
        right_accumulate_by_torch_distributed,
    ],
    "04.5": [needed, right_needed_by_trying],
}
WRONG = {  # in the order of the exercise's mistakes
    "04.1": [
        truncates,
        shards(pads=lambda size, n: 0),
        shards(cut="strided"),
        shards(front=True),
        shards(pads=lambda size, n: n - size % n),
        shards(fill=7.0),
        shards(back="padded"),
        shards(back="flat"),
        shards(back="old"),
    ],
    "04.2": [
        steps(when="before"),
        steps(when="never"),
        steps(op="sum"),
        steps(own=True),
        steps(first=True),
        whole_momentum,
        steps(gives="old"),
        steps(keep=0.0),
        steps(take=0.25),
        all_reduces,
        gathers_gradients_and_weights,
    ],
    "04.3": [
        clips(lambda own, alike, group: (own + alike).sqrt()),
        clips(lambda own, alike, group: comm.all_reduce((own + alike).sqrt(), group)),
        clips(lambda own, alike, group: comm.all_reduce(own + alike, group).sqrt()),
        clips(lambda own, alike, group: comm.all_reduce(own, group).sqrt()),
        clips(lambda own, alike, group: (comm.all_reduce(own, group, op="mean") + alike).sqrt()),
        clips(lambda own, alike, group: comm.all_reduce(own, group) + alike),
        clips(scale=lambda max_norm, norm: max_norm / norm),
        clips(scale=lambda max_norm, norm: 1),
        clips(also=False),
    ],
    "04.4": [
        accumulates(count="own"),
        averages_ranks_means,
        accumulates(divide=own_count, count="microbatches"),
        accumulates(divide=count_on_all_ranks, count="microbatches"),
        accumulates(add=False),
        accumulates(count="none"),
        accumulates(op="mean"),
        reduces_at_the_end,
        reduces_by_all_reduce,
        accumulates(late=True),
    ],
    "04.5": [
        needs(split=no_master),
        needs(split=lambda stage, precision: KEPT[precision][3 if stage else 0]),
        needs(split=lambda stage, precision: KEPT[precision][2 if stage == 1 else stage]),
        needs(split=lambda stage, precision: KEPT[precision][3 if stage == 2 else stage]),
        needs(split=whole_master),
        needs(whole=int),
        needs(whole=lambda n: 2 ** (ceil(n) - 1).bit_length()),
        needs(never=1),
    ],
}
