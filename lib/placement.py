"""Where a tensor is when several ranks have it: whole on each, in parts, or as the terms of a sum.

The problem: "the activation" is no longer one thing. It may lie whole on every rank, a slice of it on each, or a term
of a sum on each, and all three are just tensors: nothing stops you from adding a slice to a whole.
The idea: three words for it, those of PyTorch's DTensor, and two functions. `shard` takes this rank's part of a whole
tensor, `unshard` puts the parts together again.

    Replicate()   whole, and equal on all ranks
    Shard(dim)    cut along `dim`, part r on rank r
    Partial()     a term on each rank, and the tensor is their sum

A weight that several layers share, such as the fused projection of queries, keys and values, is cut section by section:
`Fused`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lib import comm
from lib.mesh import Group


@dataclass(frozen=True)
class Replicate:
    """Whole, and equal on all ranks."""


@dataclass(frozen=True)
class Shard:
    """Cut evenly along `dim`, in rank order.

    Args:
        dim: of the tensor.
        copies: so many neighbouring ranks have the same part: more than 1 where there are fewer parts than ranks.
    """

    dim: int
    copies: int = 1


@dataclass(frozen=True)
class Partial:
    """A term on each rank; the tensor is their sum."""


@dataclass(frozen=True)
class Fused:
    """Sections side by side along `dim`, each cut by itself, so that a rank has its part of every one of them.

    Args:
        dim: of the tensor.
        sizes: of the sections, whole.
        copies: of each section, see `Shard`.
    """

    dim: int
    sizes: tuple[int, ...]
    copies: tuple[int, ...]

    def sections(self, group: Group) -> list[tuple[int, Shard]]:
        """(size on this rank, placement) of each."""
        each = zip(self.sizes, self.copies, strict=True)
        return [(size * copies // group.size, Shard(self.dim, copies)) for size, copies in each]


Placement = Replicate | Shard | Partial | Fused


def shard(whole: Tensor, placement: Placement, group: Group) -> Tensor:
    """This rank's part of a tensor that all ranks have; a copy, and no communication.

    Raises:
        ValueError: the dim cannot be cut evenly, or the tensor is to be a sum.
    """
    match placement:
        case Replicate():
            return whole.clone(memory_format=torch.contiguous_format)
        case Shard(dim, copies):
            parts = split_size(whole.shape[dim], group, f"dim {dim} of a tensor {list(whole.shape)}", copies)
            part = whole.narrow(dim, group.rank // copies * parts, parts)
            return part.clone(memory_format=torch.contiguous_format)
        case Fused(dim, sizes):
            pieces = zip(whole.split(sizes, dim), placement.sections(group), strict=True)
            return torch.cat([shard(piece, part, group) for piece, (_, part) in pieces], dim)
    raise ValueError(f"there is no one way to make a tensor the sum of parts ({placement})")


def unshard(part: Tensor, placement: Placement, group: Group) -> Tensor:
    """The whole tensor, on all ranks, from what each has. Shard: sends (n−1) · part bytes; Partial: an all-reduce."""
    match placement:
        case Replicate():
            return part.detach().clone()
        case Partial():
            return comm.all_reduce(part, group)
        case Shard(dim, copies):
            parts = comm.all_gather(part, group, dim).chunk(group.size, dim)
            return torch.cat(parts[::copies], dim)
        case Fused(dim):
            sections = placement.sections(group)
            pieces = part.split([size for size, _ in sections], dim)
            wholes = [unshard(piece, one, group) for piece, (_, one) in zip(pieces, sections, strict=True)]
            return torch.cat(wholes, dim)


def sections(placement: Placement, shape: torch.Size, group: Group) -> list[tuple[int, int, int, int]]:
    """Where this rank's part lies in the whole tensor: (dim, start in the part, start in the whole, size) of each
    stretch of it that is one stretch there, too; none where the part is the whole.

    Args:
        shape: of the part.

    Raises:
        ValueError: the parts are terms of a sum.
    """
    match placement:
        case Replicate():
            return []
        case Shard(dim, copies):
            return [(dim, 0, group.rank // copies * shape[dim], shape[dim])]
        case Fused(dim, sizes):
            found, in_part, in_whole = [], 0, 0
            for whole_size, (size, one) in zip(sizes, placement.sections(group), strict=True):
                found.append((dim, in_part, in_whole + group.rank // one.copies * size, size))
                in_part, in_whole = in_part + size, in_whole + whole_size
            return found
    raise ValueError(f"a term of a sum lies nowhere in the whole tensor ({placement})")


def copies_of(placement: Placement, shape: torch.Size, group: Group) -> int | Tensor:
    """How many ranks of the group have each number of a part: one number, or where sections differ a tensor of them.

    Args:
        shape: of the part; the tensor can be expanded to it.
    """
    match placement:
        case Replicate():
            return group.size
        case Shard(_, copies):
            return copies
        case Fused(dim, _, copies) if len(set(copies)) > 1:
            sections = placement.sections(group)
            each = torch.cat([torch.full((size,), one.copies) for size, one in sections])
            return each.view([-1 if d == dim % len(shape) else 1 for d in range(len(shape))])
        case Fused(_, _, copies):
            return copies[0]
    return 1


def distribute(
    whole: nn.Parameter | None, placement: Placement, group: Group, agreed: bool = False
) -> nn.Parameter | None:
    """This rank's part, as a parameter, of what the group's rank 0 has; the others give the shape only.

    With `agreed` all have the same already, and nothing is sent.

    Whatever was drawn on each rank: from here on all have parts of one tensor. A parameter on the meta device, or None,
    stays that.
    """
    if whole is None:
        return None
    values = whole.detach() if whole.is_meta or agreed else comm.broadcast(whole, group)
    return nn.Parameter(shard(values, placement, group), requires_grad=whole.requires_grad)


def parts(module: nn.Module) -> dict[str, tuple[nn.Parameter, Placement]]:
    """Name → (this rank's part, how it lies on the ranks), of all parameters; a tied one under each of its names.

    A module says in `placements` how its own parameters lie; those it does not name are whole on every rank.
    """
    return {
        f"{where}.{name}".lstrip("."): (p, getattr(one, "placements", {}).get(name, Replicate()))
        for where, one in module.named_modules(remove_duplicate=False)
        for name, p in one._parameters.items()
        if p is not None
    }


def split_size(size: int, group: Group, what: str, copies: int = 1) -> int:
    """How much of `size` each rank gets.

    Raises:
        ValueError: it cannot be split evenly.
    """
    n = group.size // copies
    if size % n:
        fits = (size // n + 1) * n
        raise ValueError(
            f"{what}={size} cannot be split over {group.axis}={n}; use a multiple of {n}, such as {fits}"
        )
    return size // n
