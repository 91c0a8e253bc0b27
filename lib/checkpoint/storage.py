"""The content of a checkpoint, written and read by `torch.distributed.checkpoint` (DCP).

DCP stores tensors by name, each as any boxes of it, and reads any boxes: its *planner* lists the boxes of a rank, its
*storage* their place in the files. Both are used unchanged; this file adds the boxes of *our* parameters and of their
optimizer states, by serial name:

    model.blocks.0.attention.qkv.weight                   the parameter, or its master weight if there is one
    optimizer.blocks.0.attention.qkv.weight.exp_avg       state of its shape, sharded like the parameter
    optimizer.blocks.0.attention.qkv.weight.step          state that is one number, stored once

A box on several ranks is written by one of them. A checkpoint therefore has the size of the model and its optimizer
states, 12 bytes per parameter for Adam in float32, in any layout, plus 1 to 2 kB per box.

DCP stores its list of boxes as a pickle, which may run any code when it is read: read only files that you trust.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lib import comm
from lib.checkpoint.boxes import Box, boxes_of_part
from lib.checkpoint.files import CheckpointError, check_files, checksum, note_checksums, reason, unseen
from lib.cost.experts import experts_of_rank
from lib.data_parallel.state_dicts import check_keys, check_state, fitting
from lib.parallel_model import ParallelModel, Piece

WEIGHT, STATE = "model.", "optimizer."
METADATA = ".metadata"


class Stored(NamedTuple):
    """A tensor of a checkpoint: its full shape, and its boxes on this rank."""

    shape: torch.Size
    boxes: dict[Box, Tensor]


def contents(model: ParallelModel) -> dict[str, Stored]:
    """The tensors to save or to fill on this rank, by name; they are views of model and optimizer state."""
    tensors: dict[str, Stored] = {}
    for piece in model.pieces():
        name, shape = piece.fact.name, model.shapes[piece.fact.name]
        tensors[WEIGHT + name] = _cut(piece, piece.held, shape)
        for key, value in model.optimizer.state.get(piece.held, {}).items():
            if isinstance(value, Tensor):
                alike = value.shape == piece.held.shape
                tensors[f"{STATE}{name}.{key}"] = _cut(piece, value, shape) if alike else as_one_box(value)
    return tensors


def _cut(piece: Piece, values: Tensor, shape: torch.Size) -> Stored:
    """Values in the layout of a piece, as boxes of the full parameter."""
    fact = piece.fact
    boxes = boxes_of_part(values, piece.span, fact.parameter.shape, fact.placement, fact.cut_over)
    if (ep := fact.experts_over).size > 1:
        first = experts_of_rank(shape[0], ep.size, ep.rank).start
        boxes = ((box.behind(first), x) for box, x in boxes)
    return Stored(shape, dict(boxes))


def as_one_box(x: Tensor) -> Stored:
    """A full tensor, as one box."""
    return Stored(x.shape, {Box((0,) * x.dim(), tuple(x.shape)): x})


# ---- to storage -----------------------------------------------------------------------------------------------------


class Save:
    """One save of a checkpoint to a folder. All ranks make it, and all call `finish`.

    The state is copied first, so training continues while a thread writes this rank's file, without communication.

    Args:
        model: what `assemble` or `parallelize` made, in any layout.
        folder: of the checkpoint; all machines share it, and it holds no other.

    Example:
        import tempfile

        from lib import comm
        from lib.checkpoint.storage import Save, restore

        # model: of the example of assemble()
        folder = comm.all_gather_object(tempfile.mkdtemp(), world)[0]
        assert Save(model, folder).finish() == ""
        restore(model, folder)
    """

    def __init__(self, model: ParallelModel, folder: str) -> None:
        self.world, self.folder = model.mesh.world, folder
        self._planner, self._writer = _SavePlanner(flatten_state_dict=False), FileSystemWriter(folder)
        here = contents(model)
        plans = comm.all_gather_object(SavePlan(_items(here)), self.world)
        plans, self._metadata = self._planner.create_global_plan(plans)  # each rank computes the same
        plan = self._writer.prepare_global_plan(plans)[self.world.rank]
        tensors = _by_index(here)
        self._planner.copies = {item.index: tensors[item.index].detach().clone().cpu() for item in plan.items}
        self._said: object = None  # the result of writing, or the error
        self._thread = threading.Thread(target=self._write, args=(plan,), daemon=True)
        self._thread.start()

    def _write(self, plan: SavePlan) -> None:
        try:
            self._writer.prepare_local_plan(plan)  # makes the folder
            written = self._writer.write_data(plan, self._planner).value()
            names = {result.storage_data.relative_path for result in written}
            self._said = written, {name: checksum(self.folder, name) for name in names}
        except Exception as error:  # of a disk, or of DCP: every rank must get it
            self._said = reason(error)

    @property
    def writes(self) -> bool:
        """Whether the thread is still writing the file of this rank."""
        return self._thread.is_alive()

    def finish(self) -> str:
        """Wait until all ranks have written; return why there is no checkpoint, or ""; equal on all ranks."""
        self._thread.join()
        said = comm.all_gather_object(self._said, self.world)
        failed = [f"rank {rank}: {answer}" for rank, answer in enumerate(said) if isinstance(answer, str)]
        if not failed and self.world.rank == 0:
            failed = self._complete(said)
        return comm.all_gather_object("; ".join(failed), self.world)[0]

    def _complete(self, said: list) -> list[str]:
        """Check that all files are here, and write the list of boxes, on rank 0; return what failed."""
        sizes: dict[str, int] = {}  # the bytes that each written file must have at least
        for place in (result.storage_data for written, _ in said for result in written):
            sizes[place.relative_path] = max(sizes.get(place.relative_path, 0), place.offset + place.length)
        if lost := unseen(self.folder, sizes):
            return [f"rank 0 cannot read {', '.join(lost)}: all machines must share the folder"]
        try:
            self._writer.finish(self._metadata, [written for written, _ in said])
            sums = {name: each for _, some in said for name, each in some.items()}
            note_checksums(self.folder, sums | {METADATA: checksum(self.folder, METADATA)})
        except OSError as error:
            return [f"rank 0: {reason(error)}"]
        return []


class _SavePlanner(DefaultSavePlanner):
    """Finds the copy of a box to write."""

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.copies[index]


def _items(tensors: dict[str, Stored]) -> list[WriteItem]:
    """The write items of DCP, one for each box."""
    items = []
    for name, stored in tensors.items():
        for box, x in stored.boxes.items():
            data = TensorWriteData(_chunk(box), TensorProperties(dtype=x.dtype), stored.shape)
            items.append(WriteItem(MetadataIndex(name, box.offset), WriteItemType.SHARD, tensor_data=data))
    return items


def _by_index(tensors: dict[str, Stored]) -> dict[MetadataIndex, Tensor]:
    return {MetadataIndex(name, box.offset): x for name, stored in tensors.items() for box, x in stored.boxes.items()}


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))


# ---- from storage ---------------------------------------------------------------------------------------------------


def read_metadata(folder: str) -> Metadata:
    """The list of boxes of a checkpoint. Raises CheckpointError if it is missing, damaged or cannot be read."""
    check_files(folder, [METADATA])
    try:
        return FileSystemReader(folder).read_metadata()
    except Exception as error:  # a pickle of a different torch may raise any error
        raise CheckpointError(f"{METADATA} of {folder} cannot be read by this torch: {reason(error)}") from None


def files_of(metadata: Metadata) -> list[str]:
    """The names of the files that hold the boxes."""
    return sorted({where.relative_path for where in metadata.storage_data.values()})


def check_shapes(shapes: Mapping[str, torch.Size], metadata: Metadata, folder: str) -> None:
    """Raise CheckpointError unless a checkpoint is of a model with these parameters; it names the first difference."""
    entries = metadata.state_dict_metadata.items()
    stored = {name.removeprefix(WEIGHT): x.size for name, x in entries if name.startswith(WEIGHT)}
    for name in (*shapes, *stored):
        here, there = (list(of[name]) if name in of else None for of in (shapes, stored))
        if here != there:
            of_ours, of_its = ("no such parameter" if size is None else f"shape {size}" for size in (here, there))
            raise CheckpointError(
                f"{folder} is of a different model: {name} has {of_its} there, and {of_ours} here; use the sizes "
                "of the checkpoint"
            )


@torch.no_grad()
def restore(model: ParallelModel, folder: str) -> None:
    """Fill model and optimizer state of all ranks with their boxes of a checkpoint from any layout.

    Raises:
        CheckpointError: it is of a different model, or a file cannot be read; raised on every rank.
    """
    problem = ""
    try:
        _read(model, folder)
    except CheckpointError as error:
        problem = str(error)
    except (KeyError, ValueError) as error:
        problem = f"{folder} does not fit: {error.args[0]}"
    except Exception as error:  # torch.load of a damaged file may raise any error
        problem = f"{folder} cannot be read: {reason(error)}"
    if first := next(filter(None, comm.all_gather_object(problem, model.mesh.world)), ""):
        raise CheckpointError(first)
    model.publish()


def _read(model: ParallelModel, folder: str) -> None:
    metadata, world = read_metadata(folder), model.mesh.world
    check_shapes(model.shapes, metadata, folder)
    check_files(folder, files_of(metadata)[world.rank :: world.size])
    there = metadata.state_dict_metadata
    like = {name: torch.empty(x.size, dtype=x.properties.dtype, device="meta") for name, x in there.items()}
    saved: dict[str, dict[str, Tensor]] = {name: {} for name in model.shapes}
    for name in like.keys() - {WEIGHT + name for name in saved}:
        of, _, key = name.removeprefix(STATE).rpartition(".")
        check_keys((), {name} if of not in saved or not name.startswith(STATE) else ())
        saved[of][key] = like[name]
    stepped = {id(p) for group in model.optimizer.param_groups for p in group["params"]}
    for piece in model.pieces():
        name, shape = piece.fact.name, model.shapes[piece.fact.name]
        fitting(like[WEIGHT + name], name, piece.held.new_empty(shape, device="meta"))
        if id(piece.held) in stepped:  # it is not frozen
            check_state(model.optimizer, piece.held, name, saved[name], shape)
            model.optimizer.state[piece.held] = {
                key: torch.zeros_like(piece.held) if x.shape == shape else torch.zeros(x.shape, dtype=x.dtype)
                for key, x in saved[name].items()
            }
    read_boxes(contents(model), metadata, folder)


def read_boxes(wanted: dict[str, Stored], metadata: Metadata, folder: str) -> None:
    """Read boxes of a checkpoint into their tensors, each from the stored boxes that overlap it, without messages."""
    items = []
    for name, stored in wanted.items():
        there = metadata.state_dict_metadata[name]
        items += create_read_items_for_chunk_list(name, there, [_chunk(box) for box in stored.boxes])
    planner, reader = _LoadPlanner(), FileSystemReader(folder)
    planner.tensors = _by_index(wanted)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(LoadPlan(items), planner).wait()


class _LoadPlanner(DefaultLoadPlanner):
    """Finds the tensor of a box to fill."""

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.tensors[index]
