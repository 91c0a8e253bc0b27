"""Chapter 07, randomness that must agree between ranks, and randomness that must not: exercise 07.4.

A mask may be drawn in many ways, so there is no right one to compare with. What is reported are properties.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import torch
from torch import Tensor

from lib import comm
from lib.check.exercise import Data, Exercise, Mistake, everywhere, pair, whole
from lib.mesh import Group

FIRST, SECOND = "the first mask", "the second mask"
EQUAL, DIFFERENT = "equal on all ranks", "different on each rank"
DROPPED, KEPT = "as often as p says", "as often as 1 - p says"
SCALED, UNSCALED, OTHERS = "0 and 1/(1-p)", "0 and 1", "others"
THE_SAME, NEW = "the same masks", "new masks"
ANEW, A_SLICE = "drawn for itself", "a slice of the first"


def _shapes(n: int) -> dict[str, tuple[int, int, int]]:
    """So many numbers that a frequency tells p from 1 - p."""
    return {FIRST: (4, 32 * n, 32), SECOND: (4, 32, 32)}


def _chances_inputs(generator: torch.Generator, n: int) -> list[Data]:
    return [{"p": whole(generator, 15, 35) / 100, "seed": whole(generator, 0, 2**40)}] * n


def _dropout_masks(answer: Callable, group: Group, given: Data) -> Data:
    p, shapes = given["p"], _shapes(group.size)

    def draw() -> list:
        return list(pair(answer(p, shapes[FIRST], group)))

    torch.manual_seed(given["seed"])
    masks = draw()
    found: Data = {f"shape of {name}": _shape(mask) for name, mask in zip(shapes, masks, strict=True)}
    fits = found == _right_shapes(group.size)
    if not comm.all_reduce(torch.tensor(int(fits)), group, "min"):
        return found | {FIRST: "not looked at, as a shape is wrong"}
    first, second = masks
    firsts, seconds, next_drawn = (comm.all_gather(x.double()[None], group) for x in (*masks, torch.rand(4)))
    following = draw()
    torch.manual_seed(given["seed"])
    again = draw()
    return found | {
        FIRST: EQUAL if (firsts == first).all() else DIFFERENT,
        SECOND: EQUAL if any(torch.equal(a, b) for a, b in combinations(seconds, 2)) else DIFFERENT,
        "what the second mask is": A_SLICE if _is_slice(first, second, group) else ANEW,
        "the generator afterwards": EQUAL if (next_drawn == next_drawn[0]).all() else DIFFERENT,
        "from the same state": THE_SAME if all(map(torch.equal, masks, again)) else NEW,
        "at the next call": THE_SAME if any(map(torch.equal, masks, following)) else NEW,
        "share of zeros": _frequency(masks, p),
        "what a mask holds": _values(masks, p),
    }


def _shape(mask: object) -> str:
    return str(list(mask.shape)) if torch.is_tensor(mask) else "no tensor"


def _right_shapes(n: int) -> Data:
    return {f"shape of {name}": str(list(shape)) for name, shape in _shapes(n).items()}


def _is_slice(first: Tensor, second: Tensor, group: Group) -> bool:
    """Whether both drop the same of this rank's tokens, on any rank."""
    mine = first.chunk(group.size, 1)[group.rank]
    equal = torch.tensor(int(torch.equal(mine == 0, second == 0)))
    return bool(comm.all_reduce(equal, group, "max"))


def _frequency(masks: list[Tensor], p: float) -> str:
    zeros = [(mask == 0).double().mean().item() for mask in masks]
    for said, wanted in ((DROPPED, p), (KEPT, 1 - p)):
        if all(abs(found - wanted) < 0.05 for found in zeros):
            return said
    return f"p = {p}, and {' and '.join(f'{found:.2f}' for found in zeros)} of them are zeros"


def _values(masks: list[Tensor], p: float) -> str:
    values = torch.cat([mask.double().unique() for mask in masks])
    values = values[values != 0]
    for said, wanted in ((SCALED, 1 / (1 - p)), (UNSCALED, 1.0)):
        if len(values) and (values - wanted).abs().max() < 1e-6:
            return said
    return OTHERS


def _properties(given: list[Data]) -> list[Data]:
    right = _right_shapes(len(given)) | {
        FIRST: EQUAL,
        SECOND: DIFFERENT,
        "what the second mask is": ANEW,
        "the generator afterwards": EQUAL,
        "from the same state": THE_SAME,
        "at the next call": NEW,
        "share of zeros": DROPPED,
        "what a mask holds": SCALED,
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
            "Both masks come from the seed that all ranks share, so the slices get the same one. Add the rank to the "
            "seed before you draw the second.",
            _found(SECOND, EQUAL),
        ),
        Mistake(
            "The first mask differs from rank to rank, and what is whole on every rank would not be equal any more. "
            "Draw it from the state that all ranks share.",
            _found(FIRST, DIFFERENT),
        ),
        Mistake(
            "The second mask is this rank's slice of the first: the two dropouts drop the same. Draw again.",
            _found("what the second mask is", A_SLICE),
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
            "Two calls in a row give the same mask, so every layer and every step drops the same. Let the seed come "
            "from the generator, drawn anew at each call, and let the generator move on.",
            _found("at the next call", THE_SAME),
        ),
        Mistake(
            "You keep with probability p. p is the part that is dropped: keep where torch.rand is at least p.",
            _found("share of zeros", KEPT),
        ),
        Mistake(
            "The scale is missing: what is kept is multiplied by 1/(1-p), so that the mean stays.",
            _found("what a mask holds", UNSCALED),
        ),
    ),
)

EXERCISES = (MASKS,)
