"""04.1: even shards of a tensor, and the tensor from its shards."""

from dataclasses import replace
from functools import partial
from math import prod

import torch
from torch import distributed as dist
from torch.nn.functional import pad

from course.check.compare import is_dense
from course.check.edits import exercise, read_mistakes
from course.check.exercise import random, several, shards_of, with_variants
from lib import comm

ZEROS, NOT_ZEROS, MISSING = "zeros", "not zeros", "missing"
SORTED = "what unshard returns, in ascending order"  # not judged: it tells a wrong order from wrong elements


def inputs(generator, n):
    # n divides the first; the second needs padding; of the third, the last rank gets padding alone; the last has one
    # element.
    shapes = ((2 * n, 3), (5, 7), (n + 1,), ())
    return [{"tensors": [random(generator, prod(shape)).view(shape) for shape in shapes]} for _ in range(n)]


def name(x, what="the part"):
    return f"x of shape {list(x.shape)}: {what}"


contiguous = torch.tensor_split


def in_turn(x, n):  # as striped attention deals tokens (Brandon et al. 2023, arXiv:2311.09431)
    return [x[r::n] for r in range(n)]


def in_turn_from_the_last(x, n):
    return in_turn(x, n)[::-1]


def to_and_fro(x, n):  # as Llama 3 deals pieces of a long sequence (Llama Team 2024, arXiv:2407.21783)
    i = torch.arange(len(x)) % (2 * n)
    return [x[torch.minimum(i, 2 * n - 1 - i) == r] for r in range(n)]


def places(size, n, deal):
    """The positions of each rank, padding included."""
    return deal(torch.arange(size + -size % n), n)


def body(answer, group, given, deal=contiguous):
    found = {}
    for x in given["tensors"]:
        part, unshard = several(answered(answer, x.clone(), group), 2)
        is_element = places(x.numel(), group.size, deal)[group.rank] < x.numel()
        fits = torch.is_tensor(part) and part.shape == is_element.shape
        found[name(x)] = part[is_element] if fits else part
        found[name(x, "its padding")] = (NOT_ZEROS if part[~is_element].any() else ZEROS) if fits else MISSING
        if comm.all_reduce(torch.tensor(int(fits and callable(unshard))), group, "min"):
            # As an optimizer might change a shard. The padding changes as well, and must not be in the result.
            found[name(x, "what unshard returns")] = full = unshard(1 - 2 * part)
            real = is_dense(full) and not full.is_complex()
            found[name(x, SORTED)] = full.flatten().sort().values if real else MISSING
    return found


def answered(answer, x, group):
    """Both results; a rank for which `chunk` made no piece has a sentence for each."""
    try:
        return answer(x, group)
    except IndexError as error:
        if str(error) != "tuple index out of range":
            raise
        return [f"IndexError: {error}"] * 2


def reference(given, deal=contiguous):
    """The full tensor has elements of each rank's own x, so a wrong order changes it."""
    found = [{} for _ in given]
    for tensors in zip(*(g["tensors"] for g in given), strict=True):
        full = torch.empty_like(tensors[0])
        for of_rank, x, at in zip(found, tensors, places(full.numel(), len(given), deal), strict=True):
            at = at[at < full.numel()]
            full.view(-1)[at] = 1 - 2 * x.flatten()[at]
            of_rank |= {
                name(x): x.flatten()[at],
                name(x, "its padding"): ZEROS,
                name(x, "what unshard returns"): full,
            }
    return found


def shard(x, group):
    n, flat = group.size, x.flatten()
    padded = pad(flat, (0, -len(flat) % n))
    part = padded.chunk(n)[group.rank]

    def unshard(part):
        whole = comm.all_gather(part, group)
        return whole[: x.numel()].view(x.shape)

    return part, unshard


def dealt(x, group, deal):
    n, flat = group.size, x.flatten()
    padded = pad(flat, (0, -len(flat) % n))
    part = deal(padded, n)[group.rank]

    def unshard(part):
        whole, at = torch.empty_like(padded), torch.cat(places(x.numel(), n, deal))
        whole[at] = comm.all_gather(part, group)
        return whole[: x.numel()].view(x.shape)

    return part, unshard


def by_torch_distributed(x, group, deal=contiguous):
    def unshard(part):
        parts = [torch.empty_like(part) for _ in range(group.size)]
        dist.all_gather(parts, part)
        in_order = torch.cat(places(x.numel(), group.size, deal)).argsort()
        return torch.cat(parts)[in_order][: x.numel()].reshape(x.shape)

    return [deal(torch.cat(shards_of(x.reshape(-1), group.size)), group.size)[dist.get_rank()], unshard]


def of_different_sizes(x, group, deal=contiguous):
    return deal(x.flatten(), group.size)[group.rank], None


def in_another_order(x, group, deal=contiguous):
    other = to_and_fro if deal is in_turn_from_the_last else in_turn_from_the_last
    return dealt(x, group, deal)[0], dealt(x, group, other)[1]


CONTIGUOUS = """
in the part:
padded.chunk(n)[group.rank] => padded[group.rank :: n]
    Rank r has every n-th element, beginning with element r.
        A shard is contiguous: rank r has the elements from r·k/n on, so that the shards side by side give the tensor.
in the part, its padding: padded.chunk(n)[group.rank] => flat.chunk(n)[group.rank]
    You cut with chunk(n) alone: it makes pieces of ceil(k/n) elements, the last is shorter, and where the elements run
    out there are fewer than n pieces.
        Pad with zeros until n divides the size, then cut.
"""

MISTAKES = """
in the part, its padding: return part, unshard => return part
    Return two things: part, and the function unshard.
in the part: pad(flat, (0, -len(flat) % n)) => flat[: len(flat) // n * n]
    The last elements have no owner: you cut k // n for each rank, and k % n are left over.
        Pad with zeros, then cut.
in the part, its padding: of_different_sizes
    Nothing is lost, but the shards have different sizes, and an all-gather needs equal sizes.
        Add zeros at the end until n divides the size; each shard then has ceil(k/n) elements.
in the part:
(0, -len(flat) % n) => (-len(flat) % n, 0)
    The zeros come first.
        Put them at the end: then all elements keep their positions.
-len(flat) % n => n - len(flat) % n
    You add n zeros where n divides the size already.
        The padding is -k % n, here 0; n - k % n is n.
in all:
pad(flat, (0, -len(flat) % n)) => pad(flat, (0, -len(flat) % n), value=7)
    The shards are right, but the padding is not zero. It counts in every norm of the shard.
        Use zeros.
whole[: x.numel()].view(x.shape) => whole
    The shards are right, and unshard returns the padding with the tensor.
        Only the first k elements belong to the tensor: cut the rest off, then restore the shape.
whole[: x.numel()].view(x.shape) => whole[: x.numel()]
    The shards are right, and unshard returns the right elements, flat.
        Restore the shape of x.
whole[: x.numel()].view(x.shape) => x
or def unshard(part): => def unshard(_):
    The shards are right, but unshard returns the old x.
        All-gather the given shards: the optimizer changed them.
in the part, its padding, in ascending order: whole[: x.numel()] => whole[: x.numel()].flip(0)
or in_another_order
    The shards are right, and unshard returns all of x in a wrong order.
        Put each element back to where it was in x.
"""

EXERCISE = exercise(
    globals() | {"MISTAKES": CONTIGUOUS + MISTAKES},
    points=2,
    right=(shard, by_torch_distributed),
    tolerances={"x of shape": 0},
)

RULES = {
    "contiguous": "contiguous",
    "in_turn": "dealt in turn, beginning with rank 0",
    "to_and_fro": "dealt to and fro",
    "in_turn_from_the_last": "dealt in turn, beginning with the last rank",
}


def row(deal, task):
    listed = """
whole[at] => whole[:]
    The shards are right, and unshard joins them one after the other.
        Put each element back into its place in x.
in the part:
"""
    for other in (name for name in RULES if name != deal.__name__):
        listed += f"deal(padded, n) => {other}(padded, n)\n"
        listed += f"    Your shards are {RULES[other]}.\n        In your row they are {RULES[deal.__name__]}.\n"

    def of_row(mistake):
        expression = f"partial({mistake.wrong.expression}, deal={deal.__name__})"
        return replace(mistake, wrong=replace(mistake.wrong, expression=expression))

    return replace(
        EXERCISE,
        task="Flatten and pad x as above. But the shards are not contiguous: deal the elements to the ranks "
        f"{task} `part` has the elements of this rank in the order in which they were dealt, and `unshard` puts "
        "each element back into its place in x.",
        body=partial(body, deal=deal),
        reference=partial(reference, deal=deal),
        right=(partial(dealt, deal=deal), partial(by_torch_distributed, deal=deal)),
        mistakes=tuple(map(of_row, read_mistakes(listed + MISTAKES, dealt))),
    )


EXERCISE = with_variants(
    EXERCISE,
    row(in_turn, "in turn: element 0 to rank 0, element 1 to rank 1, and after rank n - 1 to rank 0 again."),
    row(
        to_and_fro,
        "to and fro: elements 0 to n - 1 to ranks 0 to n - 1, the next n elements to ranks n - 1 to 0, the next n to "
        "ranks 0 to n - 1 again.",
    ),
    row(
        in_turn_from_the_last,
        "in turn, beginning with the last rank: element 0 to rank n - 1, element 1 to rank n - 2, and after rank 0 to "
        "rank n - 1 again.",
    ),
)
