"""How much of the right tensor a part has, how far from it it is, and how far rounding may take it.

Measured, in healthy runs of one process and many layouts, on 1 to 4 ranks (see the tests): layouts round as often as
one process does, in a different order. The distance of a layout from the exact step, computed in a wider type, is at
most 2.4 times the distance of one process; with a mistake it is 44 times in bf16 and 15,000 times in float32, and more.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from lib.doctor.numbers.side_by_side import Held, Side

TIMES = 5.0  # a layout may be so many times as far from the exact step as one process is
WIDE = 1e-9  # in float64
WIDE_UPDATES = 1e-8  # AdamW divides by small numbers
STORED = {64: 1e-5, 32: 1e-5}  # computed in float64, with gradients of so many bits; 2e-2 in narrower ones
UNKNOWN = 0.05  # in narrower types, where no exact step says how large rounding is
UPDATES = 0.01  # of the elements whose slope is clear, in narrower types
ROUGHLY = (
    0.5  # updates after step 1, and sums, which do not show the clear slopes: in bf16 healthy ones differ by 0.21
)
LATER = 5.0  # after step 1 narrow types may be so many times farther apart: the weights are, by small slopes' signs
LOADED = 1e-7  # weights before the first step: the same, except for a cast
ZERO_WIDE, ZERO_EXACT, ZERO = (
    1e-9,
    1e-5,
    1e-2,
)  # of the usual size: so small a tensor may be rounding, as for a key's bias
CLEAR = 20  # times its rounding: AdamW makes a full step of any slope, so only clear ones have a right sign


@dataclass
class Share:
    """A part of a tensor on a rank, compared with the same elements of the right one.

    Attributes:
        share: g·ĝ / ĝ·ĝ, how often the right one is contained in it.
        apart: ‖g − ĝ‖, as a fraction of the usual norm of so many elements.
        rest: the same for g − share·ĝ, which one factor does not explain.
        allowed: how far rounding may take it.
        copies_differ: axes along which ranks that hold the same elements have different bits.
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
        """Whether all weights and gradients of both runs are float64."""
        return self.ours.bits == self.one.bits == {64}

    @property
    def zero(self) -> float:
        """What fraction of the usual size may be rounding alone."""
        if self.right.bits == {64}:
            return ZERO_WIDE
        return ZERO_EXACT if self.exact else ZERO


def rms(vector: Tensor) -> float:
    """The usual size of an element; 0 of an empty tensor."""
    return vector.square().mean().sqrt().item() if len(vector) else 0.0


class Copy(NamedTuple):
    """Which elements of a tensor a rank holds, and a number that differs where they do."""

    rank: int
    name: str
    region: Hashable
    bits: Hashable


class Compared(NamedTuple):
    """What was compared of one kind of tensors.

    Args:
        shares: of the parts that were compared.
        zeros: names of tensors that are zero except for rounding in both runs.
        doubtful: those of them that differ, where nothing says how large rounding is.
        unseen: names of tensors that cannot be compared.
    """

    shares: list[Share]
    zeros: list[str]
    doubtful: list[str]
    unseen: list[str]


def shares(sides: Sides, kind: str) -> Compared:
    """Each part of each rank beside the right one. Of updates, a rank's are those that its optimizer steps."""
    truth, found = sides.right.vectors(kind), Compared([], [], [], [])
    sizes = [rms(vector) for vector in truth.values()]
    usual = median([size for size in sizes if size] or [0.0])
    held_here = sides.ours.held(kind)
    copies = [Copy(held.rank, held.name, held.part.region, held.part.bits) for held in held_here]
    differ, same = copies_along([rank.axes for rank in sides.ours.run.ranks], copies)
    for i, held in enumerate(held_here):
        if not held.part.region.numel or not _is_owned(sides, kind, held):
            continue
        beside = _beside(sides, kind, held)
        if beside is None:
            found.unseen.append(held.name)
            continue
        mine, wanted, elements = beside
        allowed = _allowed(sides, kind, held.name)
        if kind == "updates":
            if _slopes_are_rounding(sides, held.name):
                found.zeros.append(held.name)
                continue
            clear = _clear(sides, held)
            mine, wanted = _but_for_the_type(sides, held, mine, wanted)[clear], wanted[clear]
            elements *= len(mine) / len(clear)
        if not len(mine) or allowed is math.inf:
            found.unseen.append(held.name)
            allowed = ROUGHLY  # of what it cannot see: copies with different bits, NaN, a step far too large
            if not len(mine):
                mine, wanted = held.part.values[:0].double(), wanted[:0]
        size = _norm(truth[held.name]) * math.sqrt(elements / held.part.region.of)
        share, apart, rest = _measured(mine, wanted, size or usual * math.sqrt(elements))
        is_small = rms(truth[held.name]) < sides.zero * usual and rms(mine) < ZERO * usual
        is_small = is_small and kind != "updates" and (kind != "weights" or sides.step > 0)
        if is_small and not differ[i] and (sides.zero < ZERO or apart <= allowed or rest > allowed):
            found.zeros.append(held.name)
            if sides.zero == ZERO and apart > allowed:
                found.doubtful.append(held.name)
            continue  # two roundings have no common factor; what has one is compared
        found.shares.append(
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
    return found


def _beside(sides: Sides, kind: str, held: Held) -> tuple[Tensor, Tensor, int] | None:
    """A part, the right one, and how many elements they are.

    Where the reference has no sums of this region, all regions together: then the shares of ranks are one.
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
    base, truth = sides.one.vectors(kind).get(name), sides.right.vectors(kind).get(name)
    if sides.exact is None or base is None:
        return _by_types(sides, name) * min(later, 2.0)
    return max(TIMES * later * rms(base - truth) / (rms(truth) or 1.0), WIDE)


def _by_types(sides: Sides, name: str) -> float:
    """How far rounding may take a tensor, as far as its types tell: of float32 weights, products may be in bfloat16."""
    if sides.is_wide:
        return WIDE
    if min(side.weight_bits[name] for side in (sides.ours, sides.one)) < 64:
        return UNKNOWN
    return STORED.get(min(side.gradient_bits.get(name, 64) for side in (sides.ours, sides.one)), 2e-2)


def _steps_of_the_type(sides: Sides, name: str) -> Tensor:
    """Of each weight, how far apart neighbouring numbers of its type are: an update cannot be finer."""
    held = next(held for held in sides.ours.held("weights") if held.name == name)
    return torch.finfo(held.part.torch_dtype).eps * sides.right.vectors("weights")[name].abs()


def _but_for_the_type(sides: Sides, held: Held, mine: Tensor, wanted: Tensor) -> Tensor:
    """An update, moved towards the right one by one step of the weights' type."""
    if sides.is_wide or not sides.ours.run.whole:
        return mine
    apart, steps = mine - wanted, held.part.region.take(_steps_of_the_type(sides, held.name))
    return wanted + apart.sign() * (apart.abs() - steps).clamp(min=0)


def _slopes_are_rounding(sides: Sides, name: str) -> bool:
    """Whether the gradient of a tensor is zero except for rounding: then its update says nothing. Exact zeros do."""
    slopes = sides.right.vectors("clipped")
    usual = median([size for size in map(rms, slopes.values()) if size] or [0.0])
    return name in slopes and 0 < rms(slopes[name]) <= sides.zero * usual


def _clear(sides: Sides, held: Held) -> Tensor:
    """Which elements have a slope far above its rounding, or exactly 0; of sums all."""
    slopes, noisy = (side.vectors("clipped").get(held.name) for side in (sides.right, sides.one))
    if not sides.ours.run.whole or slopes is None or noisy is None:
        return torch.ones(len(held.part.values), dtype=torch.bool)
    noise = (1e-12 if sides.is_wide else 0.02) * rms(slopes)
    if sides.exact:
        noise = rms(noisy - slopes)
    slopes, noisy = held.part.region.take(slopes), held.part.region.take(noisy)
    return (slopes.abs() > CLEAR * noise) | ((slopes == 0) & (noisy == 0))


def _is_owned(sides: Sides, kind: str, held: Held) -> bool:
    """Whether this rank's optimizer steps the parameter: with ZeRO-1 a rank steps some, and gets the others later."""
    options = sides.ours.steps[held.rank].options
    return kind != "updates" or not options or held.own_name in options


def copies_along(
    axes: Sequence[Mapping[str, tuple[int, int]]], parts: Sequence[Copy]
) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Of each part: the axes along which ranks that hold the same have different bits, and all such axes.

    Args:
        axes: of each rank: axis → (index, size).
    """
    lines: dict[tuple, list[int]] = {}  # parts that hold the same, on ranks that differ in one coordinate only
    for i, part in enumerate(parts):
        where = axes[part.rank]
        for axis in where:
            rest = tuple(place for name, place in where.items() if name != axis)
            lines.setdefault((part.name, part.region, axis, rest), []).append(i)
    differ: list[set[str]] = [set() for _ in parts]
    same: list[set[str]] = [set() for _ in parts]
    for (_, _, axis, _), line in lines.items():
        if len({parts[i].rank for i in line}) < 2:
            continue
        varies = len({parts[i].bits for i in line}) > 1
        for i in line:
            same[i].add(axis)
            if varies:
                differ[i].add(axis)
    return [tuple(sorted(axes)) for axes in differ], [tuple(sorted(axes)) for axes in same]
