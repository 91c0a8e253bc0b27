"""Chapter 07, randomness that must agree between ranks, and randomness that must not: exercise 07.4.

A mask may be drawn in many ways, so there is no right one to compare with. What is reported are properties.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import torch
from torch import Tensor
from torch.nn.functional import conv1d

from lib import comm
from lib.check.exercise import Data, Exercise, Mistake, everywhere, kind, several, whole
from lib.mesh import Group

FIRST, SECOND = "the first mask", "the second mask"
EQUAL, DIFFERENT = "equal on all ranks", "different on each rank"
DROPPED, KEPT = "as often as p says", "as often as 1 - p says"
SCALED, UNSCALED = "0 and 1/(1-p)", "0 and 1"
THE_SAME, NEW = "the same masks", "new masks"
ANEW, A_PART = "drawn for itself", "a part of the first"
RETURNED, SHARE, VALUES = "what was returned", "share of zeros", "what a mask holds"
RUN = 200  # so many numbers in a row are equal in two masks: they were drawn from the same seed


def _shapes(n: int) -> dict[str, tuple[int, int, int]]:
    """So many numbers that a frequency tells p from 1 - p."""
    return {FIRST: (4, 32 * n, 32), SECOND: (4, 32, 32)}


def _chances_inputs(generator: torch.Generator, n: int) -> list[Data]:
    return [{"p": whole(generator, 15, 35) / 100, "seed": whole(generator, 0, 2**40)}] * n


def _dropout_masks(answer: Callable, group: Group, given: Data) -> Data:
    p, shapes = given["p"], _shapes(group.size)

    def draw() -> tuple:
        return several(answer(p, shapes[FIRST], group), 2)

    torch.manual_seed(given["seed"])
    returned = answer(p, shapes[FIRST], group)
    masks = several(returned, 2)
    found: Data = {RETURNED: kind(returned)}
    found |= {f"shape of {name}": _shape(mask) for name, mask in zip(shapes, masks, strict=True)}
    fits = found == _right_shapes(group.size)
    if fits:
        found |= {SHARE: _frequency(masks, p), VALUES: _values(masks, p)}
        fits = found[SHARE] in (DROPPED, KEPT)
    if not comm.all_reduce(torch.tensor(int(fits)), group, "min"):
        return found | {FIRST: "not looked at, as masks of another rank are wrong"}
    with torch.random.fork_rng():
        next_drawn = torch.rand(4)
    dropped = [mask == 0 for mask in masks]
    firsts, seconds, nexts = (comm.all_gather(x[None], group) for x in (*dropped, next_drawn))
    following = [mask == 0 for mask in draw()]
    torch.manual_seed(given["seed"])
    again = draw()
    from_first = torch.tensor(int(_is_a_part(*dropped, group)))
    return found | {
        FIRST: EQUAL if (firsts == firsts[0]).all() else DIFFERENT,
        SECOND: EQUAL if any(_overlap(a, b) for a, b in permutations(seconds, 2)) else DIFFERENT,
        "what the second mask is": A_PART if comm.all_reduce(from_first, group, "max") else ANEW,
        "the generator afterwards": EQUAL if (nexts == nexts[0]).all() else DIFFERENT,
        "from the same state": THE_SAME if all(map(torch.equal, masks, again)) else NEW,
        "at the next call": THE_SAME if any(_overlap(a, b) for a in following for b in dropped) else NEW,
    }


def _shape(mask: object) -> str:
    return str(list(mask.shape)) if torch.is_tensor(mask) else f"none: {kind(mask)}"


def _right_shapes(n: int) -> Data:
    return {RETURNED: "2 results"} | {f"shape of {name}": str(list(shape)) for name, shape in _shapes(n).items()}


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether numbers from the middle of b follow each other somewhere in a, too."""
    a, b = (2 * x.flatten().float() - 1 for x in (a, b))
    run = b[len(b) // 2 :][:RUN]
    return bool(conv1d(a[None, None], run[None, None]).max() > RUN - 0.5)


def _is_a_part(first: Tensor, second: Tensor, group: Group) -> bool:
    return _overlap(first, second) or torch.equal(first[:, group.rank :: group.size], second)


def _frequency(masks: tuple, p: float) -> str:
    zeros = [(mask == 0).double().mean().item() for mask in masks]
    for said, wanted in ((DROPPED, p), (KEPT, 1 - p)):
        if all(abs(found - wanted) < 0.05 for found in zeros):
            return said
    return f"p = {p}, and {' and '.join(f'{found:.2f}' for found in zeros)} of them are zeros"


def _values(masks: tuple, p: float) -> str:
    values = torch.cat([mask.double().unique() for mask in masks])
    values = values[values != 0]
    rounding = max(torch.finfo(mask.dtype).eps if mask.is_floating_point() else 0 for mask in masks)
    for said, wanted in ((SCALED, 1 / (1 - p)), (UNSCALED, 1.0)):
        if len(values) and (values - wanted).abs().max() <= max(1e-6, rounding) * wanted:
            return said
    return f"0 and {', '.join(f'{value:.4g}' for value in values[:3].tolist())}, where p = {p}"


def _properties(given: list[Data]) -> list[Data]:
    right = _right_shapes(len(given)) | {
        SHARE: DROPPED,
        VALUES: SCALED,
        FIRST: EQUAL,
        SECOND: DIFFERENT,
        "what the second mask is": ANEW,
        "the generator afterwards": EQUAL,
        "from the same state": THE_SAME,
        "at the next call": NEW,
    }
    return everywhere(right, given)


def _found(name: str, what: str) -> Callable:
    return lambda given, want: everywhere({name: what}, given)


MASKS = Exercise(
    id="07.4",
    title="dropout_masks",
    points=3,
    body=_dropout_masks,
    inputs=_chances_inputs,
    reference=_properties,
    mistakes=(
        Mistake(
            "The second mask is as large as the first. It is for this rank's slice: [B, T/n, D].",
            lambda given, want: everywhere({f"shape of {SECOND}": want[0][f"shape of {FIRST}"]}, given),
        ),
        Mistake(
            "Both masks come from the seed that all ranks share, so the slices get the same one, or the same one "
            "shifted. Add the rank to the seed before you draw the second.",
            _found(SECOND, EQUAL),
        ),
        Mistake(
            "The first mask differs from rank to rank, and what is whole on every rank would not be equal any more. "
            "Draw it from the state that all ranks share.",
            _found(FIRST, DIFFERENT),
        ),
        Mistake(
            "The second mask, on some rank, is a part of the first: the two dropouts drop the same. Draw it anew, from "
            "a seed that is not the first one's.",
            _found("what the second mask is", A_PART),
        ),
        Mistake(
            "The masks are right, but afterwards the ranks' generators differ, and so will the next mask that must "
            "agree. Put the state back: draw the second mask inside of torch.random.fork_rng().",
            _found("the generator afterwards", DIFFERENT),
        ),
        Mistake(
            "The same state of the generator gives other masks, and a recomputation would not find those of forward. "
            "Nothing but that state may decide: draw the seed with torch.randint.",
            _found("from the same state", NEW),
        ),
        Mistake(
            "Two calls in a row give the same mask, or share one, so layers and steps drop the same. Let the seed come "
            "from the generator, drawn anew at each call, and let the generator move on.",
            _found("at the next call", THE_SAME),
        ),
        Mistake(
            "You keep with probability p. p is the part that is dropped: keep where torch.rand is at least p.",
            _found(SHARE, KEPT),
        ),
        Mistake(
            "The scale is missing: what is kept is multiplied by 1/(1-p), so that the mean stays.",
            _found(VALUES, UNSCALED),
        ),
    ),
)

EXERCISES = (MASKS,)
