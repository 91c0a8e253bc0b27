"""Placement of a tensor on several ranks: replicated, sharded, or as partial sums.

The problem: "the activation" becomes ambiguous. Every rank may hold all of it, a shard, or a partial sum, and all three
are plain tensors: no error is raised if you add a shard to a full tensor.
The idea: three placements, with the names of PyTorch's DTensor, and two functions. `shard` takes this rank's shard of a
full tensor, `unshard` recovers the full tensor. A fused weight, such as the projection of queries, keys and values, is
split section by section: `Fused`.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn

from lib import comm
from lib.cost.experts import experts_of_rank
from lib.mesh import Group
from lib.runtime.shapes import check_dim, check_plain, readable


@dataclass(frozen=True)
class Replicate:
    """The full tensor on every rank."""


@dataclass(frozen=True)
class Shard:
    """Split evenly along `dim`, in rank order.

    Args:
        dim: dimension of the tensor.
        copies: number of neighbouring ranks with the same shard; more than 1 if there are fewer shards than ranks.
    """

    dim: int
    copies: int = 1


@dataclass(frozen=True)
class Partial:
    """A partial sum on each rank; the tensor is their sum."""


@dataclass(frozen=True)
class Fused:
    """Sections side by side along `dim`, each split separately, so that a rank has a shard of every section.

    Args:
        dim: dimension of the tensor.
        sizes: full sizes of the sections.
        copies: for each section, as in `Shard`.
    """

    dim: int
    sizes: tuple[int, ...]
    copies: tuple[int, ...]

    def sections(self, group: Group) -> list[tuple[int, Shard]]:
        """(size on this rank, placement) of each section."""
        each = zip(self.sizes, self.copies, strict=True)
        return [(size * copies // group.size, Shard(self.dim, copies)) for size, copies in each]


Placement = Replicate | Shard | Partial | Fused


def shard(whole: Tensor, placement: Placement, group: Group) -> Tensor:
    """This rank's shard of a replicated tensor; a copy, without communication.

    Raises:
        ValueError: the dim cannot be split evenly, the placement is `Partial`, or no message could carry the tensor.
    """
    check_plain(whole)
    match placement:
        case Replicate():
            return whole.clone(memory_format=torch.contiguous_format)
        case Shard(dim, copies):
            size = whole.shape[check_dim(whole, dim)]
            parts = split_size(size, group, f"dim {dim} of a tensor {list(whole.shape)}", copies)
            part = whole.narrow(dim, group.rank // copies * parts, parts)
            return part.clone(memory_format=torch.contiguous_format)
        case Fused(dim, sizes):
            pieces = zip(whole.split(sizes, dim), placement.sections(group), strict=True)
            return torch.cat([shard(piece, part, group) for piece, (_, part) in pieces], dim)
    raise ValueError(f"a tensor cannot be split into partial sums in a unique way ({placement})")


def unshard(part: Tensor, placement: Placement, group: Group) -> Tensor:
    """The full tensor on all ranks. Shard: an all-gather, sends (n−1) · shard bytes; Partial: an all-reduce."""
    part = readable(part)
    match placement:
        case Replicate():
            return part.clone()
        case Partial():
            return comm.all_reduce(part, group)
        case Shard(dim, copies):
            return torch.cat(comm.all_gather(part, group, dim).chunk(group.size, dim)[::copies], dim)
        case Fused(dim):
            sections = placement.sections(group)
            pieces = zip(part.split([size for size, _ in sections], dim), sections, strict=True)
            return torch.cat([unshard(piece, cut, group) for piece, (_, cut) in pieces], dim)


def of_experts(whole: Tensor, group: Group) -> Tensor:
    """The experts of this rank in a stacked weight, along dim 0: some have one more if they do not divide; a view.

    On a group of one, of any tensor, all of it.
    """
    if group.size == 1:
        return whole
    mine = experts_of_rank(len(whole), group.size, group.rank)
    return whole[mine.start : mine.stop]


def all_experts(part: Tensor, group: Group) -> Tensor:
    """The stacked weight of all experts, from those of each rank: an all-gather along dim 0."""
    if group.size == 1:
        return part
    sizes = comm.all_gather(torch.tensor([len(part)], device=part.device), group).tolist()
    padded = part.new_zeros(max(sizes), *part.shape[1:])
    padded[: len(part)] = part
    every = comm.all_gather(padded, group).split(max(sizes))
    return torch.cat([some[:size] for some, size in zip(every, sizes, strict=True)])


def sections(placement: Placement, shape: torch.Size, group: Group) -> list[tuple[int, int, int, int]]:
    """The stretches of this rank's shard in the full tensor: (dim, start in the shard, start in the full tensor, size)
    of each; none if the shard is the full tensor.

    Args:
        shape: shape of the shard.

    Raises:
        ValueError: the placement is `Partial`.
    """
    match placement:
        case Replicate():
            return []
        case Shard(dim, copies):
            return [(dim, 0, group.rank // copies * shape[dim], shape[dim])]
        case Fused(dim, sizes):
            stretches, in_part, in_whole = [], 0, 0
            for whole_size, (size, cut) in zip(sizes, placement.sections(group), strict=True):
                stretches.append((dim, in_part, in_whole + group.rank // cut.copies * size, size))
                in_part, in_whole = in_part + size, in_whole + whole_size
            return stretches
    raise ValueError(f"a partial sum has no position in the full tensor ({placement})")


def copies_of(placement: Placement, shape: torch.Size, group: Group) -> int | Tensor:
    """Number of ranks of the group that hold each element of a shard; a tensor if sections differ.

    Args:
        shape: shape of the shard; the tensor can be expanded to it.
    """
    match placement:
        case Replicate():
            return group.size
        case Shard(_, copies):
            return copies
        case Fused(dim, _, copies) if len(set(copies)) > 1:
            each = torch.cat([torch.full((size,), cut.copies) for size, cut in placement.sections(group)])
            return each.view([-1 if d == dim % len(shape) else 1 for d in range(len(shape))])
        case Fused(_, _, copies):
            return copies[0]
    return 1


def distribute(
    whole: nn.Parameter | None, placement: Placement, group: Group, agreed: bool = False
) -> nn.Parameter | None:
    """This rank's shard, as a parameter, of a tensor on rank 0 of the group; on other ranks only its shape counts.

    With `agreed`, all ranks already hold the same tensor, and nothing is sent; nor for one on the meta device, or None.
    """
    if whole is None:
        return None
    values = whole.detach() if whole.is_meta or agreed else comm.broadcast(whole, group)
    return parameter_like(whole, shard(values, placement, group))


def parameter_like(p: nn.Parameter, values: Tensor) -> nn.Parameter:
    """A new parameter with the attributes that people set on p, such as `p._no_weight_decay = True`."""
    made = nn.Parameter(values, p.requires_grad)
    vars(made).update(vars(p))
    return made


def parts(module: nn.Module) -> dict[str, tuple[nn.Parameter, Placement]]:
    """Name → (this rank's shard, its placement), of all parameters; a tied parameter under each of its names.

    A module lists placements of its own parameters in `placements`; all others are replicated.
    """
    return {
        f"{where}.{name}".lstrip("."): (p, getattr(submodule, "placements", {}).get(name, Replicate()))
        for where, submodule in module.named_modules(remove_duplicate=False)
        for name, p in submodule._parameters.items()
        if p is not None
    }


def with_partial_gradients(module: nn.Module) -> set[int]:
    """The ids of all parameters whose gradients are partial sums, which a module lists in `partial_gradients`."""
    return {
        id(getattr(submodule, name))
        for submodule in module.modules()
        for name in getattr(submodule, "partial_gradients", ())
    }


def with_experts(module: nn.Module) -> dict[int, Group]:
    """`id` of a stacked weight of experts → the ranks that share them (`shared_by` of the module that has it)."""
    return {
        id(p): submodule.shared_by
        for submodule in module.modules()
        if hasattr(submodule, "shared_by")
        for p in submodule._parameters.values()
    }


def check_apart(module: nn.Module) -> None:
    """Raise ValueError if a trained parameter shares memory with another tensor of the module: shards would not."""
    held: dict[int, tuple[str, Tensor, np.ndarray]] = {}
    for where, submodule in module.named_modules():
        for name, x in {**vars(submodule), **submodule._parameters, **submodule._buffers}.items():
            if isinstance(x, Tensor) and x.layout is torch.strided and x.numel() and not x.is_meta:
                size, steps = x.element_size(), tuple(x.element_size() * step for step in x.stride())
                memory = {"version": 3, "shape": tuple(x.shape), "strides": steps, "data": (x.data_ptr(), True)}
                array = np.asarray(SimpleNamespace(__array_interface__=memory | {"typestr": f"|V{size}"}))
                held[id(x)] = f"{where}.{name}".lstrip("."), x, array  # NumPy compares addresses, and reads nothing
    ordered = sorted(held.values(), key=lambda entry: entry[1].data_ptr())
    for i, (name, x, here) in enumerate(ordered):
        for other, y, there in ordered[i + 1 :]:
            if not np.may_share_memory(here, there):  # nor can those that start later
                break
            if (x.requires_grad or y.requires_grad) and np.shares_memory(here, there):
                raise ValueError(
                    f"{name} and {other} share memory, which their shards would not: make them one parameter "
                    f"(module.{other} = module.{name}), or give each its own memory (.clone())"
                )


def split_size(size: int, group: Group, what: str, copies: int = 1) -> int:
    """Size of each rank's shard.

    Raises:
        ValueError: it cannot be split evenly.
    """
    n = group.size // copies
    if size % n:
        fits = f"use a multiple of {n}, such as {(size // n + 1) * n}"
        raise ValueError(f"{what}={size} cannot be split over {group.axis}={n}; {fits}")
    return size // n
