"""What a checkpoint holds, written and read by `torch.distributed.checkpoint` (DCP).

DCP stores tensors by name, each as any boxes of it, and reads any boxes back: its *planner* says which boxes a rank
has, its *storage* where they are in which file. Both are used as they are; what this file adds is the boxes of *our*
parameters and of their optimizer state, by serial name:

    model.blocks.0.attention.qkv.weight                   the parameter: of master weights, those
    optimizer.blocks.0.attention.qkv.weight.exp_avg       state of its shape, cut as the parameter is
    optimizer.blocks.0.attention.qkv.weight.step          state that is one number, stored once

A box that several ranks have is written by one of them. So a checkpoint is as large as the model with its optimizer,
12 bytes a parameter for Adam in float32, whatever the layout; and 1 to 2 kB for each box.

DCP keeps its list of boxes as a pickle, which may run any code when it is read: read only what you trust.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lib.checkpoint.boxes import Box, boxes_of_part
from lib.checkpoint.settings import CheckpointError
from lib.mesh import Group
from lib.parallel import ParallelGPT, Piece

WEIGHT, STATE = "model.", "optimizer."


@dataclass
class Stored:
    """A tensor of a checkpoint: its whole shape, and the boxes of it that this rank has."""

    shape: torch.Size
    boxes: dict[Box, Tensor]


def contents(model: ParallelGPT) -> dict[str, Stored]:
    """What this rank has to save, by name; the tensors are views of what the model and its optimizer hold."""
    found: dict[str, Stored] = {}
    for piece in model.pieces():
        name, shape = piece.fact.name, model.shapes[piece.fact.name]
        found[WEIGHT + name] = _cut(piece, piece.held, shape)
        for key, value in model.optimizer.state.get(piece.held, {}).items():
            if isinstance(value, Tensor):
                alike = value.shape == piece.held.shape
                found[f"{STATE}{name}.{key}"] = _cut(piece, value, shape) if alike else _whole(value)
    return found


def _cut(piece: Piece, values: Tensor, shape: torch.Size) -> Stored:
    """Values side by side with the piece's own, as boxes of the whole parameter."""
    fact = piece.fact
    return Stored(shape, dict(boxes_of_part(values, piece.span, fact.parameter.shape, fact.placement, fact.cut_over)))


def _whole(x: Tensor) -> Stored:
    return Stored(x.shape, {Box((0,) * x.dim(), tuple(x.shape)): x})


def gather(mine: object, world: Group) -> list:
    """What each rank says, on every rank."""
    said = [mine]
    if world.size > 1:
        said = [None] * world.size
        dist.all_gather_object(said, mine)
    return said


# ---- to storage -----------------------------------------------------------------------------------------------------


class Save:
    """One checkpoint on its way to a folder. All ranks make it, and all call `finish`.

    A copy is taken here, so training may go on at once. A thread writes this rank's file; it never communicates.
    """

    def __init__(self, model: ParallelGPT, folder: str) -> None:
        self.world, self.folder = model.mesh.world, folder
        self._planner, self._writer = _SavePlanner(), FileSystemWriter(folder)
        self._planner.set_up_planner(contents(model))
        plans, self._metadata = self._planner.create_global_plan(
            gather(self._planner.create_local_plan(), self.world)
        )  # each rank works out the same
        plan = self._planner.finish_plan(self._writer.prepare_global_plan(plans)[self.world.rank])
        self._planner.take_copies(plan)
        self._said: object = None  # what was written, or why not
        self._thread = threading.Thread(target=self._write, args=(plan,), daemon=True)
        self._thread.start()

    def _write(self, plan: SavePlan) -> None:
        try:
            self._writer.prepare_local_plan(plan)  # makes the folder
            self._said = self._writer.write_data(plan, self._planner).value()
        except Exception as error:  # of a disk, or of DCP: every rank must hear of it
            self._said = reason(error)

    @property
    def writes(self) -> bool:
        """Whether this rank's file is on its way still."""
        return self._thread.is_alive()

    def finish(self) -> str:
        """Wait until all ranks have written; then rank 0 writes the list of all boxes.

        Returns:
            Why there is no checkpoint; "" if there is one. The same on all ranks.
        """
        self._thread.join()
        said = gather(self._said, self.world)
        failed = [f"rank {rank}: {one}" for rank, one in enumerate(said) if isinstance(one, str)]
        if not failed and self.world.rank == 0:
            try:
                self._writer.finish(self._metadata, said)
            except OSError as error:
                failed = [f"rank 0: {reason(error)}"]
        return gather("; ".join(failed), self.world)[0]


def reason(error: Exception) -> str:
    """What an error says; of the system's own, without its number."""
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}".splitlines()[0]


class _SavePlanner(DefaultSavePlanner):
    """Write items are the boxes; what is written are copies of them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [
                WriteItem(
                    MetadataIndex(name, box.offset),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(_chunk(box), TensorProperties(dtype=x.dtype), stored.shape),
                )
                for name, stored in self.state_dict.items()
                for box, x in stored.boxes.items()
            ]
        )
        return self.plan

    def take_copies(self, plan: SavePlan) -> None:
        """Of what this rank writes; from here on the model may change."""
        here = {
            MetadataIndex(name, box.offset): x
            for name, stored in self.state_dict.items()
            for box, x in stored.boxes.items()
        }
        self._copies = {item.index: here[item.index].detach().clone().cpu() for item in plan.items}
        self.state_dict = {}

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._copies[index]


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))


# ---- from storage ---------------------------------------------------------------------------------------------------


def read_metadata(folder: str) -> Metadata:
    """Which boxes a checkpoint has, and where.

    Raises:
        CheckpointError: its list of them cannot be read.
    """
    try:
        return FileSystemReader(folder).read_metadata()
    except Exception as error:  # unpickling what is cut short may say anything
        raise CheckpointError(f"{folder}/.metadata cannot be read: {reason(error)}") from None


def shapes_in(metadata: Metadata) -> dict[str, torch.Size]:
    """Serial name → shape, of all parameters of a checkpoint."""
    found = metadata.state_dict_metadata.items()
    return {name.removeprefix(WEIGHT): x.size for name, x in found if name.startswith(WEIGHT)}


def check_shapes(shapes: Mapping[str, torch.Size], metadata: Metadata, folder: str) -> None:
    """Whether a checkpoint is of a model with these parameters.

    Raises:
        CheckpointError: it is not; names the first that differs.
    """
    stored = shapes_in(metadata)
    for name in (*shapes, *stored):
        here, there = (list(of[name]) if name in of else None for of in (shapes, stored))
        if here != there:
            of_ours, of_its = ("no such parameter" if size is None else f"shape {size}" for size in (here, there))
            raise CheckpointError(
                f"{folder} is of another model: {name} has {of_its} there, and {of_ours} here; use the sizes that it "
                "was made with"
            )


@torch.no_grad()
def restore(model: ParallelGPT, folder: str) -> None:
    """Fill the model and its optimizer with this rank's boxes of a checkpoint, whatever layout it was saved under.

    All ranks must call it.

    Raises:
        CheckpointError: it is of another model, or a file cannot be read; on every rank.
    """
    problem = ""
    try:
        _read(model, folder)
    except CheckpointError as error:
        problem = str(error)
    except Exception as error:  # torch.load of what is damaged may say anything
        problem = f"{folder} cannot be read: {reason(error)}"
    if first := next(filter(None, gather(problem, model.mesh.world)), ""):
        raise CheckpointError(first)
    model.publish()


def _read(model: ParallelGPT, folder: str) -> None:
    metadata = read_metadata(folder)
    check_shapes(model.shapes, metadata, folder)
    keys: dict[str, dict[str, TensorStorageMetadata]] = {}
    for name, x in metadata.state_dict_metadata.items():
        if name.startswith(STATE):
            of, _, key = name.removeprefix(STATE).rpartition(".")
            keys.setdefault(of, {})[key] = x
    wanted: dict[str, Stored] = {}
    stepped = {id(p) for group in model.optimizer.param_groups for p in group["params"]}
    for piece in model.pieces():
        name, shape = piece.fact.name, model.shapes[piece.fact.name]
        wanted[WEIGHT + name] = _cut(piece, piece.held, shape)
        if id(piece.held) not in stepped:  # frozen
            continue
        state = model.optimizer.state[piece.held] = {}
        for key, x in keys.get(name, {}).items():
            alike = x.size == shape
            state[key] = torch.zeros_like(piece.held) if alike else torch.zeros(x.size, dtype=x.properties.dtype)
            wanted[f"{STATE}{name}.{key}"] = _cut(piece, state[key], shape) if alike else _whole(state[key])
    read_boxes(wanted, metadata, folder)


def read_boxes(wanted: dict[str, Stored], metadata: Metadata, folder: str) -> None:
    """Read boxes of a checkpoint into the tensors that stand for them; no communication."""
    planner, reader = _LoadPlanner(flatten_state_dict=False), FileSystemReader(folder)
    planner.set_up_planner(wanted, metadata)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()


class _LoadPlanner(DefaultLoadPlanner):
    """Read items are the stored boxes' overlaps with ours."""

    def set_up_planner(
        self, state_dict: dict[str, Stored], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata = state_dict, metadata

    def create_local_plan(self) -> LoadPlan:
        items = []
        for name, stored in self.state_dict.items():
            there = self.metadata.state_dict_metadata[name]
            items += create_read_items_for_chunk_list(name, there, [_chunk(box) for box in stored.boxes])
        self._here = {
            MetadataIndex(name, box.offset): x
            for name, stored in self.state_dict.items()
            for box, x in stored.boxes.items()
        }
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._here[index]
