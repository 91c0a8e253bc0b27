"""How much of the right tensor a part has, how far from it it is, and how far rounding may take it.

Measured, in healthy runs of one process and many layouts, on 1 to 4 ranks (see the tests): layouts round as often as
one process does, in another order. So the distance of a layout from the exact step, computed in a wider type, is at
most 2.4 times that of one process; with a mistake it is 44 times in bf16 and 15,000 times in float32, and more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lib.doctor.numbers.recorded_numbers import Numbers
from lib.doctor.numbers.side_by_side import Held, Side

TIMES = 5.0  # a layout may be so many times as far from the exact step as one process is
WIDE = 1e-9  # in float64
WIDE_UPDATES = 1e-8  # AdamW divides by small numbers
UNKNOWN = 0.05  # in narrower types, where no exact step says how large rounding is
UPDATES = 0.01  # of the elements whose slope is clear, in narrower types
LOADED = 1e-7  # weights before the first step: the same, but for a cast
ZERO_WIDE, ZERO = 1e-5, 1e-2  # a tensor so small beside the largest is rounding, as the gradient of a bias of keys
ROUGHLY = (
    0.5  # updates after step 1, and sums, which do not show the clear slopes: in bf16 healthy ones differ by 0.21
)
LATER = 5.0  # after step 1 narrow types may be so many times farther apart: the weights are, by small slopes' signs
CLEAR = 20  # times its rounding: AdamW makes a full step of any slope, so only clear ones have a right sign


@dataclass
class Share:
    """A part of a tensor on a rank, beside the same elements of the right one.

    Attributes:
        share: g·ĝ / ĝ·ĝ, how often the right one is contained in it.
        apart: ‖g − ĝ‖, as a fraction of the usual norm of so many elements.
        rest: the same for g − share·ĝ: what one factor does not explain.
        allowed: how far rounding may take it.
        copies_differ: axes along which ranks that hold the same elements have other bits.
        copies: axes along which ranks hold the same elements.
    """

    rank: int
    name: str
    own_name: str
    share: float
    apart: float
    rest: float
    allowed: float
    is_finite: bool
    copies_differ: tuple[str, ...]
    copies: tuple[str, ...]

    @property
    def is_sick(self) -> bool:
        return not self.apart <= self.allowed or bool(self.copies_differ)


@dataclass
class Sides:
    """What is compared: our run, one process, and the exact step if there is one."""

    ours: Side
    one: Side
    exact: Side | None
    step: int

    @property
    def right(self) -> Side:
        """What counts as right."""
        return self.exact or self.one

    @property
    def is_wide(self) -> bool:
        return self.ours.is_wide and self.one.is_wide

    @property
    def zero(self) -> float:
        """What fraction of the largest tensor is zero but for rounding."""
        return ZERO_WIDE if self.exact or self.is_wide else ZERO


def rms(vector: Tensor) -> float:
    """The usual size of an element; 0 of an empty tensor."""
    return vector.square().mean().sqrt().item() if len(vector) else 0.0


class Compared(NamedTuple):
    """The shares of one kind of tensors; names of those that are zero but for rounding in both runs; names of those
    that cannot be compared.
    """

    shares: list[Share]
    zeros: list[str]
    unseen: list[str]


def shares(sides: Sides, kind: str) -> Compared:
    """Each part of each rank beside the right one. Of updates, a rank's are those that its optimizer steps."""
    truth, found, zeros, unseen = sides.right.vectors(kind), [], {}, {}
    top = max((rms(vector) for vector in truth.values()), default=0.0)
    held_here = sides.ours.held(kind)
    differ, same = copies_along(sides.ours.run, held_here)
    for i, held in enumerate(held_here):
        if not held.part.region.numel or not _is_owned(sides, kind, held):
            continue
        beside = _beside(sides, kind, held)
        if beside is None:
            unseen[held.name] = None
            continue
        mine, wanted, elements = beside
        allowed, usual = _allowed(sides, kind, held.name), rms(truth[held.name])
        if kind == "updates":
            if _slopes_are_rounding(sides, held.name):
                zeros[held.name] = None
                continue
            clear = _clear(sides, held)
            mine, wanted = _but_for_the_type(sides, held, mine, wanted)[clear], wanted[clear]
            elements *= len(mine) / len(clear)
        elif usual < sides.zero * top and rms(mine) < ZERO * top:
            zeros[held.name] = None
            continue
        if allowed is math.inf or not len(mine):
            unseen[held.name] = None
            if not differ[i]:
                continue  # copies must have the same bits, whatever may be said of their values
        size = _norm(truth[held.name]) * math.sqrt(elements / held.part.region.of)
        share, apart, rest = _measured(mine, wanted, size)
        found.append(
            Share(
                rank=held.rank,
                name=held.name,
                own_name=held.own_name,
                share=share,
                apart=apart,
                rest=rest,
                allowed=allowed,
                is_finite=math.isfinite(held.part.square),
                copies_differ=differ[i],
                copies=same[i],
            )
        )
    return Compared(found, list(zeros), list(unseen))


def _beside(sides: Sides, kind: str, held: Held) -> tuple[Tensor, Tensor, int] | None:
    """A part, the right one, and how many elements they are.

    Where the other recording has no sums of this region, all regions together: then the shares of ranks are one.
    """
    wanted = sides.right.vector(kind, held.name, held.part.region)
    if wanted is not None:
        return held.part.values.double(), wanted, held.part.region.numel
    mine, right = sides.ours.vectors(kind).get(held.name), sides.right.vectors(kind).get(held.name)
    if mine is None or right is None:
        return None
    return mine, right, held.part.region.of


def _norm(vector: Tensor) -> float:
    return torch.linalg.vector_norm(vector).item()


def _measured(mine: Tensor, wanted: Tensor, size: float) -> tuple[float, float, float]:
    """Share, distance, and distance that one factor leaves; `size` is the usual norm of so many elements."""
    square = (wanted @ wanted).item()
    share = (mine @ wanted).item() / square if square else math.nan
    apart = _norm(mine - wanted) / (size or 1.0)
    rest = _norm(mine - (share if square else 0.0) * wanted) / (size or 1.0)
    return share, apart, rest


def _allowed(sides: Sides, kind: str, name: str) -> float:
    """How far rounding may take a part of this tensor; infinite if nothing can be said."""
    if kind == "weights" and not sides.step:
        return LOADED
    if kind == "updates":
        if sides.is_wide:
            return WIDE_UPDATES
        if rms(_steps_of_the_type(sides, name)) >= rms(sides.right.vectors("updates")[name]):
            return math.inf
        if sides.step or not sides.ours.run.whole:
            return ROUGHLY
        return max(UPDATES, _allowed(sides, "clipped", name))  # of SGD, an update has the rounding of its gradient
    later = LATER if sides.step and not sides.is_wide else 1.0
    base, truth = sides.one.vectors(kind).get(name), sides.right.vectors(kind)[name]
    if sides.exact is None or base is None:
        return WIDE if sides.is_wide else UNKNOWN * min(later, 2.0)
    return max(TIMES * later * rms(base - truth) / (rms(truth) or 1.0), WIDE)


def _steps_of_the_type(sides: Sides, name: str) -> Tensor:
    """Of each weight, how far apart neighbouring numbers of its type are: an update cannot be finer."""
    held = next(held for held in sides.ours.held("weights") if held.name == name)
    dtype = getattr(torch, held.part.dtype.removeprefix("torch."))
    return torch.finfo(dtype).eps * sides.right.vectors("weights")[name].abs()


def _but_for_the_type(sides: Sides, held: Held, mine: Tensor, wanted: Tensor) -> Tensor:
    """An update, moved towards the right one by what the type of the weights may have rounded."""
    if sides.is_wide or not sides.ours.run.whole:
        return mine
    apart, steps = mine - wanted, held.part.region.take(_steps_of_the_type(sides, held.name))
    return wanted + apart.sign() * (apart.abs() - steps).clamp(min=0)


def _slopes_are_rounding(sides: Sides, name: str) -> bool:
    """Whether the gradient of a tensor is zero but for rounding, or missing: its update says nothing."""
    slopes = sides.right.vectors("clipped")
    return name not in slopes or rms(slopes[name]) <= sides.zero * max(map(rms, slopes.values()))


def _clear(sides: Sides, held: Held) -> Tensor:
    """Which elements have a slope far above its rounding, or exactly 0; of sums all."""
    if not sides.ours.run.whole:
        return torch.ones(len(held.part.values), dtype=torch.bool)
    slopes, noisy = sides.right.vectors("clipped")[held.name], sides.one.vectors("clipped")[held.name]
    noise = (1e-12 if sides.is_wide else 0.02) * rms(slopes)
    if sides.exact:
        noise = rms(noisy - slopes)
    slopes, noisy = held.part.region.take(slopes), held.part.region.take(noisy)
    return (slopes.abs() > CLEAR * noise) | ((slopes == 0) & (noisy == 0))


def _is_owned(sides: Sides, kind: str, held: Held) -> bool:
    """Whether this rank's optimizer steps the parameter: with ZeRO-1 a rank steps some, and gets the others later."""
    options = sides.ours.steps[held.rank].options
    return kind != "updates" or not options or held.own_name in options


def copies_along(run: Numbers, parts: list[Held]) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Of each part: the axes along which ranks that hold the same have other bits, and those along which they exist."""
    holders: dict[tuple, list[int]] = {}
    for i, held in enumerate(parts):
        holders.setdefault((held.name, held.part.region), []).append(i)
    differ: list[set[str]] = [set() for _ in parts]
    same: list[set[str]] = [set() for _ in parts]
    for copies in holders.values():
        for i in copies:
            for j in copies:
                axis = _axis_between(run, parts[i].rank, parts[j].rank)
                if axis is None:
                    continue
                same[i].add(axis)
                if not parts[i].part.same_bits(parts[j].part):
                    differ[i].add(axis)
    return [tuple(sorted(axes)) for axes in differ], [tuple(sorted(axes)) for axes in same]


def _axis_between(run: Numbers, a: int, b: int) -> str | None:
    """The one axis along which two ranks are neighbours, or None."""
    here, there = run.ranks[a].axes, run.ranks[b].axes
    along = [axis for axis in here if here[axis] != there[axis]]
    return along[0] if len(along) == 1 else None
