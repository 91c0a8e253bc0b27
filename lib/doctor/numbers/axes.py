"""Where a rank stands along each axis of its layout, and along which axes ranks read different rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from lib.doctor.numbers.torch_insides import CannotSee, loaded, meshes_of

Axes = dict[str, tuple[int, int]]  # name → index of this rank, and size

ALL_RANKS = "ranks"  # the axis of a program that names none
OWN_ROWS = re.compile(r"dp|dp_\w+|ddp|hsdp|fsdp|ep|edp|zero\w*|data\w*|replica\w*|replicate|shard|ranks")
SAME_ROWS = re.compile(r"tp|mp|pp|sp|model\w*|tensor\w*|pipe\w*|stages?")
PARTS_OF_ROWS = re.compile(r"cp|context\w*|seq\w*|ring\w*|ulysses\w*")
KINDS = ("own", "same", "parts")  # what the ranks along an axis read


def axes_of(given: Any, model: nn.Module) -> Axes:
    """The axes that a program names, or those that its wrappers and DTensors show.

    Args:
        given: axis → (index, size), a DeviceMesh whose axes have names, or None.

    Raises:
        CannotSee: an index outside its axis, or a mesh whose axes have no names.
    """
    if isinstance(given, Mapping):
        for name, (index, size) in given.items():
            if not 0 <= index < size:
                raise CannotSee(f"axes={dict(given)}: rank {index} of {size} along {name} does not exist")
        return {name: (int(index), int(size)) for name, (index, size) in given.items()}
    if given is not None:
        return _of_mesh(tuple(getattr(given, "mesh_dim_names", None) or ("",) * given.ndim), given)
    found: Axes = {}
    for names, mesh in meshes_of(model):
        found |= _of_mesh(names, mesh)
    wrappers = (
        ("torch.nn.parallel", "DistributedDataParallel"),
        ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    )
    for where, name in wrappers:
        kind = loaded(where, name)
        if kind is not None and isinstance(model, kind):
            found.setdefault("dp", (dist.get_rank(model.process_group), dist.get_world_size(model.process_group)))
    if not found and dist.is_initialized():
        return {ALL_RANKS: (dist.get_rank(), dist.get_world_size())}
    return found


def _of_mesh(names: tuple[str, ...], mesh: Any) -> Axes:
    if "" in names:
        raise CannotSee(
            f"the axes of {mesh} have no names: give watch() axes={{'dp': (index, size), …}}, or name the mesh's axes "
            "with mesh_dim_names"
        )
    where = mesh.get_coordinate() or [0] * mesh.ndim
    return {name: (where[i], mesh.size(i)) for i, name in enumerate(names)}


def rows_along(axes: Axes, given: Mapping[str, str]) -> dict[str, str]:
    """Axis → whether its ranks read their "own" rows, the "same" rows, or "parts" of the same rows.

    Raises:
        CannotSee: the name of an axis does not say it, and `given` does not either.
    """
    found = {}
    for axis, (_, size) in axes.items():
        name = axis.lower()
        if axis in given:
            if given[axis] not in KINDS:
                raise CannotSee(f"rows={{{axis!r}: {given[axis]!r}}} must be one of {', '.join(map(repr, KINDS))}")
            found[axis] = given[axis]
        elif PARTS_OF_ROWS.fullmatch(name):
            found[axis] = "parts"
        elif SAME_ROWS.fullmatch(name):
            found[axis] = "same"
        elif OWN_ROWS.fullmatch(name) or size == 1:
            found[axis] = "own"
        else:
            raise CannotSee(
                f"ranks along {axis!r}: do they read their own rows of the batch, the same rows, or parts of the same "
                f"rows? Give watch() rows={{{axis!r}: 'own'}}, 'same' or 'parts'"
            )
    return found
