"""04.1: even shards of a tensor, and the tensor from its shards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.functional import pad

from course.check.exercise import Data, Exercise, Mistake, is_dense, random, several, with_variants
from lib import comm
from lib.mesh import Group

ZEROS, NOT_ZEROS, MISSING = "zeros", "not zeros", "missing"
SORTED = "what unshard returns, in ascending order"  # not judged: it tells a wrong order from wrong elements
Owner = Callable[[Tensor, int, int], Tensor]  # (positions, their number, number of ranks) -> the rank of each


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    # n divides the first; the second needs padding; of the third, the last rank gets padding.
    shapes = ((2 * n, 3), (5, 7), (n + 1,))
    return [{"tensors": [random(generator, *shape) for shape in shapes]} for _ in range(n)]


def name(x: Tensor, what: str = "the part") -> str:
    return f"x of shape {list(x.shape)}: {what}"


# ---- the rank of each element ---------------------------------------------------------------------------------------


def contiguous(i: Tensor, size: int, n: int) -> Tensor:
    return i * n // size


def in_turn(i: Tensor, size: int, n: int) -> Tensor:
    """As striped attention deals tokens (Brandon et al. 2023, arXiv:2311.09431)."""
    return i % n


def in_turn_from_the_last(i: Tensor, size: int, n: int) -> Tensor:
    return n - 1 - i % n


def to_and_fro(i: Tensor, size: int, n: int) -> Tensor:
    """As Llama 3 deals pieces of a long sequence (Llama Team 2024, arXiv:2407.21783)."""
    return torch.minimum(i % (2 * n), 2 * n - 1 - i % (2 * n))


RULES = {
    contiguous: "contiguous",
    in_turn: "dealt in turn, beginning with rank 0",
    to_and_fro: "dealt to and fro",
    in_turn_from_the_last: "dealt in turn, beginning with the last rank",
}


def owners(owner: Owner, size: int, n: int) -> Tensor:
    return owner(torch.arange(size), size, n)


# ---- in a rank, and in one process ----------------------------------------------------------------------------------


def body(owner: Owner, answer: Callable, group: Group, given: Data) -> Data:
    found: Data = {}
    for x in given["tensors"]:
        part, unshard = several(answer(x.clone(), group), 2)
        size = x.numel() + -x.numel() % group.size
        is_element = torch.arange(size)[owners(owner, size, group.size) == group.rank] < x.numel()
        fits = torch.is_tensor(part) and part.shape == is_element.shape
        found[name(x)] = part[is_element] if fits else part
        found[name(x, "its padding")] = (NOT_ZEROS if part[~is_element].any() else ZEROS) if fits else MISSING
        if comm.all_reduce(torch.tensor(int(fits and callable(unshard))), group, "min"):
            # As an optimizer might change a shard. The padding changes as well, and must not be in the result.
            found[name(x, "what unshard returns")] = full = unshard(1 - 2 * part)
            real = is_dense(full) and not full.is_complex()
            found[name(x, SORTED)] = full.flatten().sort().values if real else MISSING
    return found


def reference(owner: Owner, given: list[Data]) -> list[Data]:
    """The full tensor has elements of each rank's own x, so a wrong order changes it."""
    n, found = len(given), [{} for _ in given]
    for tensors in zip(*(g["tensors"] for g in given), strict=True):
        size = tensors[0].numel()
        rank_of = owners(owner, size + -size % n, n)[:size]
        own = torch.stack(tensors).flatten(1).gather(0, rank_of[None]).view_as(tensors[0])
        for r, x in enumerate(tensors):
            found[r] |= {name(x): x.flatten()[rank_of == r], name(x, "its padding"): ZEROS}
            found[r][name(x, "what unshard returns")] = 1 - 2 * own
    return found


# ---- programs -------------------------------------------------------------------------------------------------------


def shard(x, group, owner=contiguous, pads=lambda size, n: -size % n, front=False, fill=0.0, back="x", put=None):
    """With a place for each mistake."""
    n, flat = group.size, x.flatten()
    flat = pad(flat, (pads(len(flat), n), 0) if front else (0, pads(len(flat), n)), value=fill)
    rank_of = owners(owner, len(flat), n)

    def unshard(part):
        joined = comm.all_gather(part, group)
        full = torch.empty_like(joined)
        full[owners(put or owner, len(flat), n).argsort(stable=True)] = joined
        cut = {"x": full, "flat": full, "joined": joined}.get(back, x.flatten())[: x.numel()]
        return {"padded": full, "flat": cut}.get(back, cut.view_as(x))

    return flat[rank_of == group.rank], unshard


def shard_by_torch_distributed(x, group, owner=contiguous):
    n, r = dist.get_world_size(), dist.get_rank()
    padded = torch.cat([x.reshape(-1), x.new_zeros(-x.numel() % n)])
    rank_of = owners(owner, len(padded), n)

    def unshard(part):
        parts = [torch.empty_like(part) for _ in range(n)]
        dist.all_gather(parts, part)
        for rank, received in enumerate(parts):
            padded[rank_of == rank] = received
        return padded[: x.numel()].reshape(x.shape)

    return [padded[rank_of == r], unshard]


def gathered_before(x, group, owner):
    """`unshard` forgets what it is called with."""
    part, unshard = shard(x, group, owner)
    return part, lambda changed: unshard(part)


def truncated(x, group, owner):
    return shard(x.flatten()[: x.numel() // group.size * group.size], group, owner)


EVERY_NTH = Mistake(
    "Rank r has every n-th element, beginning with element r. A shard is contiguous: rank r has the elements from "
    "r·k/n on, so that the shards side by side give the tensor.",
    partial(shard, owner=in_turn),
    about=("the part",),
)


def exercise(owner: Owner = contiguous, task: str = "") -> Exercise:
    """The exercise with another rule which rank has an element."""
    wrong = partial(partial, shard, owner=owner)
    joined = Mistake(
        "The shards are right, and unshard joins them one after the other. Put each element back into its place in x.",
        wrong(back="joined"),
    )
    others = {other: rule for other, rule in RULES.items() if other is not owner}
    of_other_rows = (
        Mistake(
            f"Your shards are {rule}. In your row they are {RULES[owner]}.",
            partial(shard, owner=other, put=owner),
            about=("the part",),
        )
        for other, rule in others.items()
    )
    return Exercise(
        id="04.1",
        title="shard",
        points=2,
        body=partial(body, owner),
        inputs=inputs,
        reference=partial(reference, owner),
        task=task,
        right=(wrong(), partial(shard_by_torch_distributed, owner=owner)),
        mistakes=(
            Mistake(
                "Return two things: part, and the function unshard.",
                lambda x, group: shard(x, group, owner)[0],
                about=("the part", "its padding"),
            ),
            *((joined, *of_other_rows) if task else (EVERY_NTH,)),
            Mistake(
                "The last elements have no owner: you cut k // n for each rank, and k % n of them are left over. Add "
                "zeros until n divides the size, then cut.",
                partial(truncated, owner=owner),
                about=("the part",),
            ),
            Mistake(
                "Nothing is lost, but the shards have different sizes, and an all-gather needs equal sizes. Add zeros "
                "at the end until n divides the size; each shard then has ceil(k/n) elements.",
                wrong(pads=lambda size, n: 0),
                about=("the part", "its padding"),
            ),
            Mistake(
                "The zeros come first. Put them at the end: then all elements keep their positions.",
                wrong(front=True),
                about=("the part",),
            ),
            Mistake(
                "You add n zeros where n divides the size already. The padding is -k % n, here 0; n - k % n is n.",
                wrong(pads=lambda size, n: n - size % n),
                about=("the part",),
            ),
            Mistake(
                "The shards are right, but the padding is not zero. It counts in every norm of the shard: use zeros.",
                wrong(fill=7.0),
            ),
            Mistake(
                "The shards are right, and unshard returns the padding with the tensor. Only the first k elements "
                "belong to the tensor: cut the rest off, then restore the shape.",
                wrong(back="padded"),
            ),
            Mistake(
                "The shards are right, and unshard returns the right elements, flat. Restore the shape of x.",
                wrong(back="flat"),
            ),
            *(
                Mistake(
                    "The shards are right, but unshard returns the old x. It must all-gather the shards that it is "
                    "called with: the optimizer changed them.",
                    old,
                )
                for old in (wrong(back="old"), partial(gathered_before, owner=owner))
            ),
            Mistake(
                "The shards are right, and unshard returns all elements of x in a wrong order. Put each element back "
                "at the place where it was in x.",
                wrong(put=[*others][-1]),
                about=("the part", "its padding", SORTED),
            ),
        ),
    )


AS_ABOVE = "Flatten and pad x as above. But the shards are not contiguous: deal the elements to the ranks"
PART = (
    "`part` has the elements of this rank in the order in which they were dealt, and `unshard` puts each element back "
    "into its place in x."
)

EXERCISE = with_variants(
    exercise(),
    exercise(
        in_turn,
        f"{AS_ABOVE} in turn: element 0 to rank 0, element 1 to rank 1, and after rank n - 1 to rank 0 again. {PART}",
    ),
    exercise(
        to_and_fro,
        f"{AS_ABOVE} to and fro: elements 0 to n - 1 to ranks 0 to n - 1, the next n elements to ranks n - 1 to 0, the "
        f"next n to ranks 0 to n - 1 again. {PART}",
    ),
    exercise(
        in_turn_from_the_last,
        f"{AS_ABOVE} in turn, beginning with the last rank: element 0 to rank n - 1, element 1 to rank n - 2, and "
        f"after rank 0 to rank n - 1 again. {PART}",
    ),
)
