"""04.1: even shards of a tensor, and the tensor from its shards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.functional import pad

from lib import comm
from lib.check.exercise import Data, Exercise, Mistake, random, several, shards_of
from lib.mesh import Group

ZEROS, NOT_ZEROS = "zeros", "not zeros"


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    # n divides the first; the second needs padding; of the third, the last rank gets only padding.
    shapes = ((2 * n, 3), (5, 7), (n + 1,))
    return [{"tensors": [random(generator, *shape) for shape in shapes]} for _ in range(n)]


def name(x: Tensor, what: str = "the part") -> str:
    return f"x of shape {list(x.shape)}: {what}"


def filled(x: Tensor, rank: int, n: int) -> int:
    """How many elements of this rank's shard are elements of x."""
    size = ceil(x.numel() / n)
    return min(max(x.numel() - rank * size, 0), size)


def body(answer: Callable, group: Group, given: Data) -> Data:
    found: Data = {}
    for x in given["tensors"]:
        part, unshard = several(answer(x.clone(), group), 2)
        elements = filled(x, group.rank, group.size)
        fits = torch.is_tensor(part) and part.shape == (ceil(x.numel() / group.size),)
        found[name(x)] = part[:elements] if fits else part
        found[name(x, "its padding")] = ZEROS if fits and not part[elements:].any() else NOT_ZEROS
        if comm.all_reduce(torch.tensor(int(fits and callable(unshard))), group, "min"):
            # As an optimizer might change a shard. The padding changes as well, and must not be in the result.
            found[name(x, "what unshard returns")] = unshard(1 - 2 * part)
    return found


def reference(given: list[Data]) -> list[Data]:
    """The full tensor has elements of each rank's own x, so a wrong order changes it."""
    n, found = len(given), [{} for _ in given]
    for tensors in zip(*(g["tensors"] for g in given), strict=True):
        shards = [shards_of(x.flatten(), n)[r] for r, x in enumerate(tensors)]
        for r, x in enumerate(tensors):
            changed = 1 - 2 * torch.cat(shards)[: x.numel()].view_as(x)
            found[r] |= {
                name(x): shards[r][: filled(x, r, n)],
                name(x, "its padding"): ZEROS,
                name(x, "what unshard returns"): changed,
            }
    return found


# ---- programs -------------------------------------------------------------------------------------------------------


def shard(x, group, pads=lambda size, n: -size % n, front=False, cut="contiguous", fill=0.0, back="x"):
    n, flat = group.size, x.flatten()
    padding = (pads(len(flat), n), 0) if front else (0, pads(len(flat), n))
    flat = pad(flat, padding, value=fill)
    part = flat[group.rank :: n] if cut == "strided" else flat.tensor_split(n)[group.rank]

    def unshard(part):
        full = comm.all_gather(part, group)
        return {"x": full[: x.numel()].view_as(x), "padded": full, "flat": full[: x.numel()], "old": x}[back]

    return part.clone(), unshard


def shard_by_torch_distributed(x, group):
    n, size = dist.get_world_size(), ceil(x.numel() / dist.get_world_size())
    part = x.new_zeros(size)
    mine = x.reshape(-1)[dist.get_rank() * size :][:size]
    part[: len(mine)] = mine

    def unshard(part):
        parts = [torch.empty_like(part) for _ in range(n)]
        dist.all_gather(parts, part)
        return torch.cat(parts)[: x.numel()].reshape(x.shape)

    return [part, unshard]


def truncated(x, group):
    return shard(x.flatten()[: x.numel() // group.size * group.size], group)


EXERCISE = Exercise(
    id="04.1",
    title="shard",
    points=2,
    body=body,
    inputs=inputs,
    reference=reference,
    right=(shard, shard_by_torch_distributed),
    mistakes=(
        Mistake(
            "The last elements have no owner: you cut k // n for each rank, and k % n of them are left over. Add "
            "zeros until n divides the size, then cut.",
            truncated,
            about=("the part",),
        ),
        Mistake(
            "Nothing is lost, but the shards have different sizes, and an all-gather needs equal sizes. Add zeros at "
            "the end until n divides the size; each shard then has ceil(k/n) elements.",
            partial(shard, pads=lambda size, n: 0),
            about=("the part",),
        ),
        Mistake(
            "Rank r has every n-th element, beginning with element r. A shard is contiguous: rank r has the elements "
            "from r·k/n on, so that the shards side by side give the tensor.",
            partial(shard, cut="strided"),
            about=("the part",),
        ),
        Mistake(
            "The zeros come first. Put them at the end: then all elements keep their positions.",
            partial(shard, front=True),
            about=("the part",),
        ),
        Mistake(
            "You add n zeros where n divides the size already. The padding is -k % n, here 0; n - k % n is n.",
            partial(shard, pads=lambda size, n: n - size % n),
            about=("the part",),
        ),
        Mistake(
            "The shards are right, but the padding is not zero. It counts in every norm of the shard: use zeros.",
            partial(shard, fill=7.0),
        ),
        Mistake(
            "The shards are right, and unshard returns the padding with the tensor. Only the first k elements belong "
            "to the tensor: cut the rest off, then restore the shape.",
            partial(shard, back="padded"),
        ),
        Mistake(
            "The shards are right, and unshard returns the right elements, flat. Restore the shape of x.",
            partial(shard, back="flat"),
        ),
        Mistake(
            "The shards are right, but unshard returns the old x. It must all-gather the shards that it is called "
            "with: the optimizer changed them.",
            partial(shard, back="old"),
        ),
    ),
)
