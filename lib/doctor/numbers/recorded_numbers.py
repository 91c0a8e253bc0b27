"""What `watch` writes down, and how it is read again: plain numbers and tensors, so that a file runs no code."""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lib.doctor.numbers.region import Region
from lib.doctor.numbers.sketch import SUMS

FORMAT = "numbers of a training step, 1"
KINDS = ("weights", "gradients", "clipped", "updates")
CLOCKS_S = 60.0  # clocks of hosts may differ by so much


def check_sum(values: Tensor) -> int:
    """A number that differs where a bit does, except for the sign of a zero."""
    return zlib.crc32((values + 0).view(torch.uint8).numpy())


@dataclass
class Part:
    """What a rank has of a tensor.

    Attributes:
        region: of the whole tensor.
        dtype: of the tensor in the program, such as "torch.bfloat16".
        values: its elements, flattened; or their 64 sums.
        square: the sum of all squares.
        largest: the largest magnitude.
        bits: a check sum of the elements, of a difference of sums that of the sums; equal copies have equal ones.
        others: in one process, the 64 sums of regions that a parallel run cuts.
    """

    region: Region
    dtype: str
    values: Tensor
    square: float
    largest: float
    bits: int
    others: dict[Region, Tensor] = field(default_factory=dict)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type that `dtype` names; a file is read only if it is a floating-point type."""
        return getattr(torch, self.dtype.removeprefix("torch."), None)

    def minus(self, before: Part) -> Part:
        """The difference of two such parts; of sums it is the sum of differences."""
        others = {region: sums - before.others[region] for region, sums in self.others.items()}
        values = self.values.double() - before.values.double()
        norm = torch.linalg.vector_norm(values).item()
        largest = values.abs().max().item() if len(values) else 0.0
        return Part(self.region, self.dtype, values, norm**2, largest, check_sum(values), others)


@dataclass
class StepNumbers:
    """A step of a rank: the links of the chain, each as far as the program showed it.

    `rows` has a number for each row of its batches, `places` one for each place in a row; `row_shapes` has the shape
    of a row for each batch. `strangers` are tensors of the optimizer that are no parameters of the model; if there are
    some, they may be copied into the model later, and only a `settled` step includes that.
    """

    rows: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    row_shapes: list[list[int]] = field(default_factory=list)
    batch: list[tuple[Tensor, ...]] = field(default_factory=list)
    loss: float | None = None
    norm: float | None = None
    tensors: dict[str, dict[str, Part]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    strangers: int = 0
    settled: bool = False
    buffers: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass
class RankNumbers:
    """All steps of a rank, and its place.

    `axes`: name → (index, size); `rows`: axis → own, same or parts; `buffers`: small ones, before the first step.
    """

    rank: int
    world: int
    axes: dict[str, tuple[int, int]]
    rows: dict[str, str]
    whole: bool
    aliases: dict[str, str]
    optimizer: str
    device: str
    left_out: list[str]
    buffers: dict[str, Tensor]
    began_s: float
    ended_s: float = 0.0
    steps: list[StepNumbers] = field(default_factory=list)


@dataclass
class Numbers:
    """A recorded run: one of each rank, in order."""

    folder: str
    ranks: list[RankNumbers]

    @property
    def whole(self) -> bool:
        """Whether it has every element, not sums."""
        return self.ranks[0].whole

    @property
    def steps(self) -> int:
        return len(self.ranks[0].steps)


def write_rank(path: Path, rank: RankNumbers) -> None:
    """Write the steps of a rank so far; a reader finds the old file or the new file, never a part."""
    rank.ended_s = time.time()
    plain = {key: value for key, value in vars(rank).items() if key != "steps"}
    plain |= {"format": FORMAT, "torch": str(torch.__version__), "steps": [_plain_step(step) for step in rank.steps]}
    half = path.with_suffix(".half")
    torch.save(plain, half)
    half.replace(path)


def _plain_step(step: StepNumbers) -> dict[str, Any]:
    tensors = {
        kind: {name: _plain_part(part) for name, part in parts.items()} for kind, parts in step.tensors.items()
    }
    return vars(step) | {"tensors": tensors}


def _plain_part(part: Part) -> dict[str, Any]:
    others = [(tuple(region), sums) for region, sums in part.others.items()]
    return vars(part) | {"region": tuple(part.region), "others": others}


def read_numbers(folder: str | Path) -> Numbers:
    """The run that `watch` wrote into a folder.

    Raises:
        ValueError: no such folder; a file is missing, cut short, of a different kind or run. It names the file.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give the one that watch() wrote to")
    paths = sorted(folder.glob("rank*.pt"))
    if not paths:
        raise ValueError(f"{folder} has no rank*.pt: did watch() see an optimizer step there?")
    ranks = sorted((_read_rank(path) for path in paths), key=lambda rank: rank.rank)
    _check_ranks(folder, ranks)
    return Numbers(str(folder), ranks)


def _read_rank(path: Path) -> RankNumbers:
    try:
        plain = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of the zip, of the pickle, of the system: each version of torch has its own
        raise ValueError(
            f"{path} cannot be read: cut short, or not written by watch() ({type(error).__name__})"
        ) from None
    if not isinstance(plain, dict) or plain.get("format") != FORMAT:
        raise ValueError(f"{path} was not written by watch(), or by a different version of it")
    try:
        steps = [_step(one, plain["whole"]) for one in plain["steps"]]
        kept = {key: plain[key] for key in RankNumbers.__dataclass_fields__ if key != "steps"}
        kept["axes"] = {str(name): (int(index), int(size)) for name, (index, size) in kept["axes"].items()}
        rank = RankNumbers(**kept, steps=steps)
        if path.name != f"rank{rank.rank}.pt" or not 0 <= rank.rank < rank.world:
            raise ValueError(f"it is of rank {rank.rank} of {rank.world}")
        _check_rank(rank)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{path} is damaged, or was not written by watch(): {error}") from None
    return rank


def _check_rank(rank: RankNumbers) -> None:
    """Raise ValueError if a file contradicts itself."""
    words = [rank.optimizer, rank.device, *rank.left_out, *rank.aliases, *rank.aliases.values()]
    if not all(isinstance(word, str) for word in words) or not isinstance(rank.aliases, dict):
        raise ValueError("its names are no words")
    if not all(isinstance(buffer, Tensor) for buffer in rank.buffers.values()):
        raise ValueError("its buffers are no tensors")
    if not rank.steps or not all(isinstance(second, float) for second in (rank.began_s, rank.ended_s)):
        raise ValueError("it has no steps, or no time")
    if rank.rows.keys() != rank.axes.keys() or not all(index < size for index, size in rank.axes.values()):
        raise ValueError("its axes have no rows, or no place")
    shapes = {name: part.region.shape for name, part in rank.steps[0].tensors["weights"].items()}
    for step in rank.steps:
        if step.tensors["weights"].keys() != shapes.keys():
            raise ValueError("its steps have different tensors")
        for parts in step.tensors.values():
            if odd := [name for name, part in parts.items() if shapes.get(name) != part.region.shape]:
                raise ValueError(f"{odd[0]} has two shapes")


def _step(plain: dict[str, Any], whole: bool) -> StepNumbers:
    tensors = {kind: {str(name): _part(one, whole) for name, one in plain["tensors"][kind].items()} for kind in KINDS}
    step = StepNumbers(**plain | {"tensors": tensors})
    if not all(number is None or isinstance(number, float) for number in (step.loss, step.norm)):
        raise ValueError("a loss or a norm is no number")
    if not all(isinstance(row, int) for row in (*step.rows, *step.places, step.strangers)):
        raise ValueError("rows are no numbers")
    if not all(isinstance(options, dict) for options in (*step.options.values(), *step.buffers.values())):
        raise ValueError("options or buffers are none")
    for buffer in step.buffers.values():
        numbers = [buffer["sum"], buffer["signed"], buffer["size"], float(buffer["floating"])]
        if not all(isinstance(number, float) for number in numbers) or not isinstance(buffer["shape"], list):
            raise ValueError("a buffer has no sums")
    if not all(isinstance(shape, list) for shape in step.row_shapes):
        raise ValueError("rows have no shapes")
    return step


def _part(plain: dict[str, Any], whole: bool) -> Part:
    part = Part(**plain | {"region": _region(plain["region"]), "others": {}})
    part.others = {_region(region): sums for region, sums in plain["others"]}
    if fault := part.region.fault():
        raise ValueError(f"a part {fault}")
    if part.values.shape != (part.region.numel if whole else SUMS,):
        raise ValueError(f"a part of {part.region.numel} elements has {list(part.values.shape)}")
    if any(sums.shape != (SUMS,) for sums in part.others.values()):
        raise ValueError("a part has different sums")
    is_plain = part.values.layout == torch.strided and part.values.device.type == "cpu"
    if not is_plain or not isinstance(part.torch_dtype, torch.dtype) or not part.torch_dtype.is_floating_point:
        raise ValueError(f"a part has elements of type {part.dtype}, or none")
    part.square, part.largest = float(part.square), float(part.largest)
    return part


def _region(plain: Any) -> Region:
    shape, ranges, flat = plain
    return Region(
        tuple(map(int, shape)), tuple(tuple((int(a), int(b)) for a, b in held) for held in ranges), bool(flat)
    )


def _check_ranks(folder: Path, ranks: list[RankNumbers]) -> None:
    """Raise ValueError if these are not the files of one run."""
    world = ranks[0].world
    here = {rank.rank for rank in ranks}
    if odd := [rank for rank in ranks if rank.world != world]:
        raise ValueError(
            f"{folder} has files of two runs: rank {ranks[0].rank} was one of {world}, rank {odd[0].rank} one of "
            f"{odd[0].world}; record into an empty folder"
        )
    if missing := sorted({*range(world)} - here):
        raise ValueError(f"{folder} has no file of rank {missing[0]}: {len(here)} of {world} ranks are there")
    steps = [len(rank.steps) for rank in ranks]
    if len({*steps}) > 1:
        raise ValueError(f"{folder}: the ranks recorded {', '.join(map(str, steps))} steps; did a rank end early?")
    for what in ("whole", "optimizer"):
        if len({getattr(rank, what) for rank in ranks}) > 1:
            raise ValueError(f"{folder} has files of two runs: they differ in {what}")
    if len({tuple(rank.axes) for rank in ranks}) > 1:
        raise ValueError(f"{folder}: ranks name different axes; give watch() the same axes= on every rank")
    latest, earliest = max(ranks, key=lambda rank: rank.began_s), min(ranks, key=lambda rank: rank.ended_s)
    if latest.began_s > earliest.ended_s + CLOCKS_S:
        raise ValueError(
            f"{folder} has files of two runs: rank {latest.rank} began {latest.began_s - earliest.ended_s:.0f} s after "
            f"rank {earliest.rank} had ended; record into an empty folder"
        )
    _check_places(folder, ranks)
    _check_shapes(folder, ranks)


def _check_places(folder: Path, ranks: list[RankNumbers]) -> None:
    """Raise ValueError if two ranks have the same place."""
    places = [tuple(rank.axes.values()) for rank in ranks]
    if len({*places}) < len(ranks):
        twice = next(place for place in places if places.count(place) > 1)
        named = dict(zip(ranks[0].axes, twice, strict=True))
        raise ValueError(
            f"{folder}: {places.count(twice)} ranks have the same place, {named}: axes= must give each rank its own "
            "indices"
        )


def _check_shapes(folder: Path, ranks: list[RankNumbers]) -> None:
    """Raise ValueError if ranks say different shapes of a whole tensor, or no rank has some of its elements."""
    held: dict[str, dict[Region, None]] = {}
    for rank in ranks:
        for name, part in rank.steps[0].tensors["weights"].items():
            held.setdefault(name, {})[part.region] = None
    for name, regions in held.items():
        shapes = {region.shape for region in regions}
        if len(shapes) > 1:
            listed = " and ".join(str(list(shape)) for shape in sorted(shapes))
            raise ValueError(
                f"{folder}: ranks say that {name} has shapes {listed}; shards of unequal size need ranges in cut"
            )
        shape = shapes.pop()
        elements = Region.whole(shape).numel
        if sum(region.numel for region in regions) < elements:
            there = sum(region.numel for region in regions)
            raise ValueError(
                f"{folder} has {there} of {elements} elements of {name}: if its shards have the names of whole "
                "tensors, give watch() a cut= that says so"
            )
