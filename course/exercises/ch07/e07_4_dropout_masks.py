"""07.4: dropout masks that must agree between ranks, and masks that must not.

A mask may be drawn in many ways, so there is no right one to compare with. Properties are reported.
"""

import os
from itertools import permutations

import torch
from torch import distributed as dist
from torch.nn.functional import conv1d, dropout

from course.check.edits import exercise
from course.check.exercise import everywhere, kind, several, whole
from lib import comm

FIRST, SECOND = "the first mask", "the second mask"
AMONG = {name: f"{name} compared among ranks" for name in (FIRST, SECOND)}
ORIGIN, AFTERWARDS = "where the second comes from", "the generator afterwards"
AGAIN, NEXT = "from the same state", "at the next call"
RETURNED, SHARE, VALUES = "what was returned", "share of zeros", "values"
EQUAL, DIFFERENT = "equal on all ranks", "different on each rank"
DROPPED, KEPT = "as often as p says", "as often as 1 - p says"
SCALED, UNSCALED = "0 and 1/(1-p)", "0 and 1"
THE_SAME, NEW = "the same masks", "new masks"
ANEW, A_PART = "drawn for itself", "a part of the first"
RUN = 200  # if so many consecutive elements of two masks are equal, both were drawn from the same seed


def shapes_of(n):
    """So many elements that a frequency tells p from 1 - p."""
    return {FIRST: (4, 32 * n, 32), SECOND: (4, 32, 32)}


def inputs(generator, n):
    return [{"p": whole(generator, 15, 35) / 100, "seed": whole(generator, 0, 2**40)}] * n


def body(answer, group, given):
    p, shapes = given["p"], shapes_of(group.size)
    torch.manual_seed(given["seed"])
    returned = answer(p, shapes[FIRST], group)
    masks = several(returned, 2)
    found = {RETURNED: kind(returned)}
    for name, mask in zip(shapes, masks, strict=True):
        found[f"shape of {name}"] = str(list(mask.shape)) if torch.is_tensor(mask) else f"none: {kind(mask)}"
    fits = found == right_shapes(group.size)
    if fits:
        found |= {SHARE: frequency(masks, p), VALUES: values(masks, p)}
        fits = found[SHARE] in (DROPPED, KEPT)
    if not comm.all_reduce(torch.tensor(int(fits)), group, "min"):
        return found | {AMONG[FIRST]: "not looked at: masks of some rank are wrong"}
    with torch.random.fork_rng():
        next_drawn = torch.rand(4)
    first, second = (mask == 0 for mask in masks)
    firsts, seconds, nexts = (comm.all_gather(x[None], group) for x in (first, second, next_drawn))
    following = [mask == 0 for mask in several(answer(p, shapes[FIRST], group), 2)]
    torch.manual_seed(given["seed"])
    again = several(answer(p, shapes[FIRST], group), 2)
    a_part = overlap(first, second) or torch.equal(first[:, group.rank :: group.size], second)
    return found | {
        AMONG[FIRST]: EQUAL if (firsts == firsts[0]).all() else DIFFERENT,
        AMONG[SECOND]: EQUAL if any(overlap(a, b) for a, b in permutations(seconds, 2)) else DIFFERENT,
        ORIGIN: A_PART if comm.all_reduce(torch.tensor(int(a_part)), group, "max") else ANEW,
        AFTERWARDS: EQUAL if (nexts == nexts[0]).all() else DIFFERENT,
        AGAIN: THE_SAME if all(map(torch.equal, masks, again)) else NEW,
        NEXT: THE_SAME if any(overlap(a, b) for a in following for b in (first, *seconds)) else NEW,
    }


def right_shapes(n):
    return {RETURNED: "2 results"} | {f"shape of {name}": str(list(shape)) for name, shape in shapes_of(n).items()}


def overlap(a, b):
    """Whether a run of elements from the middle of b also occurs in a."""
    a, b = (2 * x.flatten().float() - 1 for x in (a, b))
    run = b[len(b) // 2 :][:RUN]
    return bool(conv1d(a[None, None], run[None, None]).max() > RUN - 0.5)


def frequency(masks, p):
    zeros = [(mask == 0).double().mean().item() for mask in masks]
    for said, wanted in ((DROPPED, p), (KEPT, 1 - p)):
        if all(abs(found - wanted) < 0.05 for found in zeros):
            return said
    return f"p = {p}, and {' and '.join(f'{found:.2f}' for found in zeros)} of them are zeros"


def values(masks, p):
    values = torch.cat([mask[mask != 0].double().unique() for mask in masks])
    rounding = max(torch.finfo(mask.dtype).eps if mask.is_floating_point() else 0 for mask in masks)
    for said, wanted in ((SCALED, 1 / (1 - p)), (UNSCALED, 1.0)):
        if len(values) and (values - wanted).abs().max() <= max(1e-6, rounding) * wanted:
            return said
    return f"0 and {', '.join(f'{value:.4g}' for value in values[:3].tolist())}, where p = {p}"


def reference(given):
    right = right_shapes(len(given)) | {SHARE: DROPPED, VALUES: SCALED, AMONG[FIRST]: EQUAL, AMONG[SECOND]: DIFFERENT}
    return everywhere(right | {ORIGIN: ANEW, AFTERWARDS: EQUAL, AGAIN: THE_SAME, NEXT: NEW}, given)


def dropout_masks(p, shape, group):
    batch, tokens, features = shape
    shared = (torch.rand(shape) >= p) / (1 - p)
    seed = int(torch.randint(2**62, ()))
    with torch.random.fork_rng():
        torch.manual_seed(seed + group.rank)
        drawn = torch.rand(batch, tokens // group.size, features)
    return shared, (drawn >= p) / (1 - p)


seeds_of = {}


def mask(shape, p, generator=None):
    return (torch.rand(shape, generator=generator) >= p) / (1 - p)


def shard_of_a_second(p, shape, group):
    """Draws n times too many elements, and those that a serial run would."""
    return mask(shape, p), mask(shape, p).chunk(group.size, 1)[group.rank]


def by_a_generator(p, shape, group):
    own = torch.Generator().manual_seed(dist.get_rank() + int(torch.randint(2**40, ())))
    part = (shape[0], shape[1] // dist.get_world_size(), shape[2])
    return [mask(shape, p), mask(part, p, own).double()]


def by_dropout(p, shape, group):
    """Of ones; for the second, one seed of a whole row of them."""
    first = dropout(torch.ones(shape), p)
    seed = torch.randint(2**62, (group.size,))[group.rank]
    with torch.random.fork_rng():
        torch.manual_seed(seed.item())
        return first, dropout(torch.ones(shape[0], shape[1] // group.size, shape[2], dtype=torch.float64), p)


MISTAKES = """
in shape of the second mask: tokens // group.size => tokens
    The second mask is as large as the first.
        It is for this rank's shard: [B, T/n, D].
in the second mask compared among ranks: seed + group.rank => seed
    The second mask comes from the same seed on several ranks: shards get the same mask, or a shifted copy.
        Add the rank to the seed that all ranks share.
in the first mask compared among ranks:
torch.rand(shape) => torch.rand(shape, generator=torch.Generator().manual_seed(group.rank))
    The first mask differs from rank to rank, and so would replicated activations.
        Draw it from the shared state.
in where the second comes from: (drawn >= p) / (1 - p) => shared.chunk(group.size, 1)[group.rank]
    The second mask, on some rank, is a part of the first: both drop the same elements.
        Draw it anew, from another seed.
in the generator afterwards: with torch.random.fork_rng(): => if True:
    Afterwards the ranks' generators differ, and so will the next mask that must agree.
        Restore the state: draw the second mask inside torch.random.fork_rng().
in from the same state: int(torch.randint(2**62, ())) => int.from_bytes(os.urandom(5), "big")
    The same state of the generator gives different masks, so a recomputation would not repeat the masks of forward.
    They must depend on that state alone.
        Draw the seed with torch.randint.
in at the next call: int(torch.randint(2**62, ())) => 1000
or batch, tokens, features = shape => (batch, tokens, features), before = shape, torch.get_rng_state()
return shared, => torch.set_rng_state(before); return shared,
or torch.manual_seed(seed + group.rank) => torch.manual_seed(seeds_of.setdefault(seed, len(seeds_of)) + group.rank)
    Two calls in a row give the same mask, or share one, so layers and steps drop the same elements.
        Let the seed come from the generator, drawn anew at each call, and let the generator move on.
in share of zeros: torch.rand(shape) >= p => torch.rand(shape) < p
drawn >= p => drawn < p
    You keep with probability p. p is the fraction that is dropped.
        Keep where torch.rand is at least p.
in values: returns [mask > 0 for mask in result]
    The scale is missing: the mean of the activations shrinks.
        Multiply the elements that are kept by 1/(1-p).
"""

EQUIVALENT = """
2**62 => 2**56
or seed + group.rank => (2 * (seed + group.rank))
    Any seeds will do that come from the shared state and differ from rank to rank.
"""

EXERCISE = exercise(globals(), points=3, right=(dropout_masks, shard_of_a_second, by_a_generator, by_dropout))
