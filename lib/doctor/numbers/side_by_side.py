"""Two runs, and perhaps the exact step, in one form.

The problem: one run has whole tensors, the second has shards of a different layout; a recording has elements or their
sums; and a tied weight has one name here and two there.
The idea: for any region of any tensor, the right run can say its vector, of elements or of sums. Shares, norms and
distances are the same operations on either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lib.doctor.numbers.recorded_numbers import Numbers, Part, StepNumbers
from lib.doctor.numbers.region import Region
from lib.runtime.words import counted, few


class Held(NamedTuple):
    """A part of a tensor on a rank. `name` is the name in the reference, `own_name` the name on this rank."""

    rank: int
    name: str
    own_name: str
    part: Part


class Side:
    """One of the two runs, at one step.

    Attributes:
        run: the recording.
        steps: this step of each rank.
        weight_bits, gradient_bits: name → bits of its narrowest type.
        bits: all of them.
    """

    steps: list[StepNumbers]

    def __init__(self, run: Numbers, step: int, aliases: dict[str, str]) -> None:
        self.run, self.steps = run, [rank.steps[step] for rank in run.ranks]
        self._aliases = aliases
        self._held: dict[str, list[Held]] = {}
        self._whole: dict[str, dict[str, Tensor]] = {}
        self._regions: dict[str, dict[tuple[str, Region], Tensor]] = {}
        self.weight_bits = self._narrowest("weights")
        self.gradient_bits = self._narrowest("clipped")
        self.bits = {*self.weight_bits.values(), *self.gradient_bits.values()}

    def _narrowest(self, kind: str) -> dict[str, int]:
        """Name → bits of the narrowest type that a rank has it in."""
        found: dict[str, int] = {}
        for held in self.held(kind):
            found[held.name] = min(found.get(held.name, 64), torch.finfo(held.part.torch_dtype).bits)
        return found

    def held(self, kind: str) -> list[Held]:
        """All parts of a kind, by rank and in the order of the model."""
        if kind not in self._held:
            self._held[kind] = [
                Held(rank, self._aliases.get(name, name), name, part)
                for rank, step in enumerate(self.steps)
                for name, part in step.tensors[kind].items()
            ]
        return self._held[kind]

    def names(self, kind: str) -> list[str]:
        """Names of all tensors of a kind, in the order of the model."""
        return list(dict.fromkeys(held.name for held in self.held(kind)))

    def vectors(self, kind: str) -> dict[str, Tensor]:
        """Name → all elements of the whole tensor, flattened in float64, or its 64 sums. Lowest ranks first."""
        if kind not in self._whole:
            by_name: dict[str, list[Held]] = {}
            for held in self.held(kind):
                by_name.setdefault(held.name, []).append(held)
            join = _elements if self.run.whole else _sums
            found = {name: join(parts) for name, parts in by_name.items()}
            self._whole[kind] = {name: vector for name, vector in found.items() if vector is not None}
        return self._whole[kind]

    def vector(self, kind: str, name: str, region: Region) -> Tensor | None:
        """Elements or sums of a region; None if the recording cannot say them."""
        whole = self.vectors(kind).get(name)
        if whole is None:
            return None
        if self.run.whole:
            return region.take(whole)
        if region.is_whole:
            return whole
        return self._sums_of_regions(kind).get((name, region))

    def _sums_of_regions(self, kind: str) -> dict[tuple[str, Region], Tensor]:
        if kind not in self._regions:
            found = {}
            for held in reversed(self.held(kind)):
                found |= {(held.name, region): sums for region, sums in held.part.others.items()}
                found[held.name, held.part.region] = held.part.values
            self._regions[kind] = found
        return self._regions[kind]


def _elements(parts: list[Held]) -> Tensor:
    """The whole tensor, of the lowest ranks that hold its elements; nan where none does."""
    whole = torch.full((parts[0].part.region.of,), math.nan, dtype=torch.float64)
    for held in reversed(parts):
        held.part.region.put(held.part.values.double(), whole)
    return whole


def _sums(parts: list[Held]) -> Tensor | None:
    """The sums of the whole tensor, if the regions are all of it, once each."""
    regions = {}
    for held in reversed(parts):
        regions[held.part.region] = held.part.values
    for region, sums in regions.items():
        if region.is_whole:
            return sums
    if sum(region.numel for region in regions) != parts[0].part.region.of:
        return None
    return torch.stack(list(regions.values())).sum(0)


def shared_names(one: Numbers, *others: Numbers) -> dict[str, str]:
    """Names of tied tensors, in any of the runs → the name that the first run has."""
    aliases = [rank.aliases for run in (one, *others) for rank in run.ranks]
    return names_of_ties(aliases, [name for rank in one.ranks for name in rank.steps[0].tensors["weights"]])


def names_of_ties(aliases: Iterable[dict[str, str]], own: list[str]) -> dict[str, str]:
    """All names of a tied tensor → the first of them in a list of names, or any."""
    groups: list[set[str]] = []
    for of_rank in aliases:
        for pair in of_rank.items():
            joined = {*pair}.union(*(group for group in groups if group & {*pair}))
            groups = [group for group in groups if not group & joined] + [joined]
    found = {}
    for group in groups:
        found |= dict.fromkeys(group, next((name for name in own if name in group), min(group)))
    return found


def check_same_model(one: Numbers, second: Numbers, aliases: dict[str, str]) -> None:
    """Raise ValueError, with the difference, if two recordings are not of one model, kind and number of steps."""
    if one.whole != second.whole:
        kinds = {True: "every element", False: "sums (sketch=True)"}
        raise ValueError(
            f"{one.folder} has {kinds[one.whole]}, {second.folder} has {kinds[second.whole]}: record both in one way"
        )
    if one.steps != second.steps:
        raise ValueError(
            f"{one.folder} has {counted(one.steps, 'step')}, {second.folder} has {second.steps}: watch both "
            "with the same steps="
        )
    shapes = [dict(_shapes(run, aliases)) for run in (one, second)]
    for mine, theirs, here, there in ((*shapes, one, second), (*reversed(shapes), second, one)):
        if missing := [name for name in mine if name not in theirs]:
            raise ValueError(
                f"{len(missing)} tensors are only in {here.folder} ({few(missing)}), not in {there.folder}: "
                "a different model, or different names, which cut= can give"
            )
    for name, shape in shapes[0].items():
        if shapes[1][name] != shape:
            raise ValueError(
                f"{name} has shape {list(shape)} in {one.folder}, {list(shapes[1][name])} in {second.folder}: another "
                "model, or a cut that is not told: give watch() a cut="
            )


def _shapes(run: Numbers, aliases: dict[str, str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for rank in run.ranks:
        for name, part in rank.steps[0].tensors["weights"].items():
            yield aliases.get(name, name), part.region.shape
