"""Rooms of the museum with the types of `spmd_types`: does a type checker find the bug before the run?

The problem: a forgotten sum trains. The idea of `spmd_types` (Meta, PyPI): each tensor says along each axis whether
ranks have the same values (R; I if its gradient is the same as well), shards (S), or terms of a sum (P), and each
operation is checked. One forward pass is enough, in one process whose process group only pretends to have ranks.

    checked(sum_missing, sick=True)     # the sentence of the checker
    checked(sum_missing, sick=False)    # "": the types fit

Each program gets the package, so that it can be written where the package is not installed. It returns a tensor that
differs on real ranks between the healthy and the sick program.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

try:
    import spmd_types
    from spmd_types.checker import typecheck
except ImportError:  # not installed, or not for this torch
    spmd_types = None
INSTALL = "Not checked: `pip install --no-deps spmd_types==0.3.1` first, then start the kernel again."
SIZES = {"dp": 2, "tp": 2}


def checked(program: Callable[..., Tensor], local: bool = False, **given: bool) -> str:
    """The error of the type checker about a forward pass, or "" if the types fit; where it is missing, how to get it.

    Args:
        program: `(spmd, **given)`, on the axes "dp" and "tp".
        local: only whether gradients have their sums, and not whether the result is that of one process.
    """
    if not spmd_types:
        return INSTALL
    dist.init_process_group("fake", rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", tuple(SIZES.values()), mesh_dim_names=tuple(SIZES))
        with spmd_types.set_current_mesh(mesh), typecheck(local=local), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of its calls into torch
            program(spmd_types, **given)
    except spmd_types.SpmdTypeError as error:
        return str(error).partition("\n\nSet SPMD")[0]  # without the lines about its traceback
    finally:
        dist.destroy_process_group()
    return ""


def _drawn(spmd: ModuleType, generator: torch.Generator, *shape: int, grad: bool = False, **types) -> Tensor:
    """This rank's part of a tensor of this shape, with its type on each axis."""
    with spmd.no_typecheck():
        made = torch.randn(*shape, generator=generator, dtype=torch.float64)
        for (axis, size), place in zip(SIZES.items(), divmod(dist.get_rank(), SIZES["tp"]), strict=True):
            if isinstance(types[axis], spmd.S):
                made = made.chunk(size, types[axis].dim)[place].contiguous()
    return spmd.assert_type(made.requires_grad_(grad), types)


def _source(spmd: ModuleType) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Makes data, and weights that need a gradient; shapes are those of the full tensors."""
    data = partial(_drawn, spmd, torch.Generator().manual_seed(0))
    return data, partial(data, grad=True, dp=spmd.R)


def local_count(spmd: ModuleType, sick: bool) -> Tensor:
    """15.4: a loss divided by each rank's own count."""
    data, weight = _source(spmd)
    w, x = weight(5, tp=spmd.I), data(12, 8, 5, dp=spmd.S(0), tp=spmd.I)
    counts = data(12, 8, dp=spmd.S(0), tp=spmd.I).square()
    total, tokens = ((x @ w).square() * counts).sum(), counts.sum()
    loss = total / tokens if sick else total / spmd.all_reduce(tokens, "dp", dst=spmd.R)
    return spmd.all_reduce(loss, "dp", dst=spmd.R)


def replicas_in_norm(spmd: ModuleType, sick: bool) -> Tensor:
    """15.5: a norm that counts a replica on each rank."""
    data, _ = _source(spmd)
    scale, up = data(8, dp=spmd.R, tp=spmd.R), data(8, 8, dp=spmd.R, tp=spmd.S(1))
    of_scale, of_up = scale.square().sum(), up.square().sum()
    if sick:
        return spmd.all_reduce(of_scale + of_up, "tp", dst=spmd.R).sqrt()
    return (of_scale + spmd.all_reduce(of_up, "tp", dst=spmd.R)).sqrt()


def bias_on_each_rank(spmd: ModuleType, sick: bool, invariant: bool = True) -> Tensor:
    """15.6: a bias inside the sum; as I, one says that its gradient is to be the same on all ranks."""
    data, weight = _source(spmd)
    same = spmd.I if invariant else spmd.R
    x, up = data(12, 6, dp=spmd.S(0), tp=spmd.R), weight(6, 8, tp=spmd.S(1))
    down, bias = weight(8, 6, tp=spmd.S(0)), weight(6, tp=same)
    part = (x @ up).relu() @ down
    if sick:
        return spmd.all_reduce(part + bias, "tp", dst=same)
    return spmd.all_reduce(part, "tp", dst=same) + bias


def router_gradient(spmd: ModuleType, sick: bool) -> Tensor:
    """15.7: a router whose scores enter the sharded experts without an all-reduce for backward."""
    data, weight = _source(spmd)
    h, router = data(8, 6, dp=spmd.S(0), tp=spmd.I), weight(6, 2, tp=spmd.I)
    up, down = weight(2, 6, 8, tp=spmd.S(2)), weight(2, 8, 6, tp=spmd.S(1))
    scores = (h @ router).softmax(-1)
    h, entered = spmd.convert(h, "tp", src=spmd.I, dst=spmd.R), scores
    if not sick:
        entered = spmd.convert(scores, "tp", src=spmd.I, dst=spmd.R)
    hidden = torch.einsum("tw,ewf->tef", h, up).relu()
    part = torch.einsum("te,tef,efw->tw", entered, hidden, down)
    loss = spmd.all_reduce(part, "tp", dst=spmd.I).square().sum()
    return torch.autograd.grad(loss, router)[0] if not spmd.is_type_checking() else loss


def gather_of_heads(spmd: ModuleType, sick: bool) -> Tensor:
    """15.9: keys and values [sequence, token, head, width], cut along their tokens and gathered along their heads."""
    data, _ = _source(spmd)
    queries, keys, values = (data(4, 12, heads, 6, dp=spmd.S(0), tp=spmd.S(1)) for heads in (4, 1, 1))
    gather = partial(spmd.all_gather, axis="tp", src=spmd.S(2 if sick else 1), dst=spmd.R)
    seen = torch.einsum("sqhd,skgd->sqhgk", queries, gather(keys)).softmax(-1)
    return torch.einsum("sqhgk,skgd->sqhd", seen, gather(values))


def fused_weight(spmd: ModuleType, sick: bool) -> Tensor:
    """15.10: queries, keys and values that are fused first and then cut, and not the other way round."""
    data, _ = _source(spmd)
    saved, x = [data(8, 8, dp=spmd.R, tp=spmd.R) for _ in range(3)], data(4, 5, 8, dp=spmd.S(0), tp=spmd.R)
    cut = partial(spmd.convert, axis="tp", src=spmd.R, dst=spmd.S(0))
    qkv = cut(torch.cat(saved)) if sick else torch.cat([cut(weight) for weight in saved])
    q, k, v = (x @ qkv.mT).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
    return (q @ k.mT).softmax(-1) @ v


def wide_gather(spmd: ModuleType, sick: bool) -> Tensor:
    """15.13: parameters gathered in a wider dtype than the one asked for."""
    data, _ = _source(spmd)
    shard = data(8, 6, dp=spmd.R, tp=spmd.S(0))
    return spmd.all_gather(shard if sick else shard.float(), "tp", src=spmd.S(0), dst=spmd.R)


def muon_on_shards(spmd: ModuleType, sick: bool) -> Tensor:
    """15.16: Muon's Newton–Schulz on the rows that a rank has, and not on the full matrix."""
    data, _ = _source(spmd)
    x = data(8, 6, dp=spmd.R, tp=spmd.S(0))
    if not sick:
        x = spmd.all_gather(x, "tp", src=spmd.S(0), dst=spmd.R)
    square = x.square().sum()
    x = x / (spmd.all_reduce(square, "tp", dst=spmd.R) if sick else square).sqrt()
    for _ in range(2):
        x = 1.5 * x - 0.5 * x @ x.mT @ x
    return x


BUGS = (  # in the order of their rooms
    local_count,
    replicas_in_norm,
    bias_on_each_rank,
    router_gradient,
    gather_of_heads,
    fused_weight,
    wide_gather,
    muon_on_shards,
)
