"""Steps under ZeRO-1 in `torch.distributed` itself, with a place for each mistake: for exercise 04.2."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.functional import pad

# ---- parts of a step ------------------------------------------------------------------------------------------------


def padded(x: Tensor) -> Tensor:
    return pad(x, (0, -len(x) % dist.get_world_size()))


def cut(x: Tensor, rank: int | None = None) -> Tensor:
    return padded(x).chunk(dist.get_world_size())[dist.get_rank() if rank is None else rank].clone()


def in_float32(weights: Tensor) -> Tensor:
    return cut(weights).float()


def reduce_scatter(gradient: Tensor) -> Tensor:
    shards = list(padded(gradient).chunk(dist.get_world_size()))
    mine = torch.empty_like(shards[0])
    dist.reduce_scatter(mine, shards)
    return mine


def mean(gradient: Tensor) -> Tensor:
    return reduce_scatter(gradient).float() / dist.get_world_size()


def all_reduced(gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    dist.all_reduce(gradient)
    return gradient.float() / dist.get_world_size()


def gather(mine: Tensor) -> Tensor:
    shards = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, mine)
    return torch.cat(shards)


def gather_bfloat16(new: Tensor) -> Tensor:
    return gather(new.bfloat16())


def gather_into_one(new: Tensor) -> Tensor:
    shards = [new.bfloat16()] * dist.get_world_size()
    dist.all_gather(shards, new.bfloat16())
    return torch.cat(shards)


def adamw(kept: dict, weights: Tensor, gradient: Tensor, settings: dict, optimizer=torch.optim.AdamW) -> Tensor:
    if not kept:
        kept["master"] = torch.nn.Parameter(weights)
        kept["optimizer"] = optimizer([kept["master"]], **settings)
    kept["master"].grad = gradient.to(kept["master"].dtype)
    kept["optimizer"].step()
    return kept["master"].detach()


def by_hand(kept, weights, gradient, settings, dtype=torch.float32, keeps="wmvt", counts=True):
    """AdamW without torch.optim; `dtype` of the moments, and the letters of the values to keep."""
    lr, (beta1, beta2), eps, decay = settings.values()
    zeros = torch.zeros_like(weights, dtype=dtype)
    w, m, v, t = (kept.get(name, start) for name, start in zip("wmvt", (weights, zeros, zeros, 0), strict=True))
    t = t + 1 if counts else 1
    m, v = beta1 * m + (1 - beta1) * gradient, beta2 * v + (1 - beta2) * gradient**2
    w = w.float() * (1 - lr * decay)
    w = w - lr * m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + eps)
    kept |= {name: x for name, x in zip("wmvt", (w, m.to(dtype), v.to(dtype), t), strict=True) if name in keeps}
    return w


# ---- programs -------------------------------------------------------------------------------------------------------


def zero1_step(
    weights, gradient, kept, settings, start=in_float32, reduce=mean, step=adamw, whole=gather_bfloat16, end=None
):
    new = step(kept, start(weights), reduce(gradient), settings)
    return whole(new)[: end or len(weights)]


def zero1_by_all_to_all(weights, gradient, kept, settings):
    """Each rank gets the gradients of its shard from all ranks, and adds them in float32."""
    got, n = torch.empty_like(padded(gradient)), dist.get_world_size()
    dist.all_to_all_single(got, padded(gradient))
    new = by_hand(kept, in_float32(weights), got.view(n, -1).float().mean(0), settings)
    return weights.copy_(gather_bfloat16(new)[: len(weights)])


def zero1_by_owners(weights, gradient, kept, settings):
    """A reduce to each owner, and a broadcast from it."""
    shards = [shard.clone() for shard in padded(gradient).chunk(dist.get_world_size())]
    for owner, shard in enumerate(shards):
        dist.reduce(shard, dst=owner)
    mine = shards[dist.get_rank()].float() / dist.get_world_size()
    new = adamw(kept, in_float32(weights), mine, settings).bfloat16()
    parts = [new.clone() for _ in shards]
    for owner, part in enumerate(parts):
        dist.broadcast(part, src=owner)
    return torch.cat(parts)[: len(weights)]


def old_shards_of_others(weights, gradient, kept, settings, gathers=False):
    """Without an all-gather, or with one before the step."""
    new = adamw(kept, in_float32(weights), mean(gradient), settings).bfloat16()
    full = gather(cut(weights)) if gathers else padded(weights).clone()
    full.chunk(dist.get_world_size())[dist.get_rank()].copy_(new)
    return full[: len(weights)]


def without_padding(weights, gradient, kept, settings, keeps_rest=True):
    owned = len(weights) // dist.get_world_size() * dist.get_world_size()
    new = zero1_step(weights[:owned], gradient[:owned], kept, settings)
    return torch.cat([new, weights[owned:]]) if keeps_rest else new


def cut_at_floors(weights):
    """From rank * (k // n) on, where gradients are cut at multiples of ceil(k / n)."""
    n, size = dist.get_world_size(), len(cut(weights))
    return weights[dist.get_rank() * (len(weights) // n) :][:size].float()


def returns_old(weights, gradient, kept, settings):
    zero1_step(weights, gradient, kept, settings)
    return weights


def a_step_behind(weights, gradient, kept, settings):
    """The master weights are gathered, and then stepped."""
    old = gather_bfloat16(kept["master"].detach()) if kept else padded(weights)
    adamw(kept, in_float32(weights), mean(gradient), settings)
    return old[: len(weights)]


def moments_anew(kept, weights, gradient, settings):
    state = {}
    kept["master"] = adamw(state, kept.get("master", weights), gradient, settings).clone()
    return kept["master"]


def view_of_all(weights):
    return padded(weights).float().chunk(dist.get_world_size())[dist.get_rank()]
