"""What only private names of torch say: how a DTensor and a parameter of FSDP1 are cut. Only this file uses them.

They may change with any version of torch. Each is looked up where it is needed, and where it is missing a sentence
says which part cannot be seen, and the way out. Tried with torch 2.13.0.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from lib.doctor.numbers.region import Range, Region, ranges_of

GIVE = "give watch() a cut= that says it"


class CannotSee(ValueError):
    """Something of this program cannot be recorded; the message says why, and the way out."""


def loaded(module: str, name: str) -> Any:
    """A public name of a module of torch, or None if the program never loaded that module."""
    return getattr(sys.modules.get(module), name, None)


def _inside(thing: Any, name: str, says: str) -> Any:
    """A private attribute."""
    try:
        return getattr(thing, name)
    except AttributeError:
        of = thing.__name__ if isinstance(thing, type) else type(thing).__name__
        raise CannotSee(f"torch {torch.__version__} has no {of}.{name}, which says {says}: {GIVE}") from None


def is_dtensor(tensor: Tensor) -> bool:
    """Whether this is a DTensor; if the program never loaded them, none is."""
    kind = loaded("torch.distributed.tensor", "DTensor")
    return kind is not None and isinstance(tensor, kind)


def region_of_dtensor(tensor: Any) -> Region:
    """Which elements of the whole tensor this rank holds.

    Along its dimension, a list of all indices is split as the placement splits the tensor. This is right for
    uneven shards, and for the strided shards of FSDP2 around tensor parallelism.

    Raises:
        CannotSee: this version of torch, or this placement, does not say how it splits.
    """
    mesh, where = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if where is None:
        return Region.span(tuple(tensor.shape), 0, 0)  # this rank is not part of the mesh
    index: dict[int, Tensor] = {}
    for axis, placement in enumerate(tensor.placements):
        dim = getattr(placement, "dim", None)
        if dim is None:
            continue  # a copy
        shape = [1] * tensor.ndim
        shape[dim] = -1
        split = _inside(placement, "_split_tensor", "how a DTensor is cut")
        along = index.get(dim, torch.arange(tensor.shape[dim]))
        parts, _ = split(along.view(shape), mesh.size(axis), with_padding=False, contiguous=True)
        index[dim] = parts[where[axis]].flatten() if where[axis] < len(parts) else along[:0]
    ranges: list[tuple[Range, ...]] = [((0, size),) for size in tensor.shape]
    for dim, along in index.items():
        ranges[dim] = tuple(ranges_of(along))
    region = Region(tuple(tensor.shape), tuple(ranges))
    if region.sizes != tuple(tensor.to_local().shape):
        raise CannotSee(
            f"a DTensor with placements {tensor.placements} has {list(tensor.to_local().shape)} here, where "
            f"{list(region.sizes)} were expected: {GIVE}"
        )
    return region


def regions_of_fsdp1(model: nn.Module) -> dict[str, Region]:
    """Parameter → which elements of it, flattened, this rank holds; empty if nothing is wrapped by FSDP1.

    Raises:
        CannotSee: FSDP1 does not keep the original parameters, or this version of torch does not say how it cuts them.
    """
    wrapper = loaded("torch.distributed.fsdp", "FullyShardedDataParallel")
    if wrapper is None:
        return {}
    found = {}
    for prefix, module in model.named_modules():
        if not isinstance(module, wrapper):
            continue
        handle = _inside(module, "_handle", "which parameters FSDP1 flattened")
        if handle is None:
            continue  # a wrapper without parameters
        if not _inside(handle, "_use_orig_params", "whether FSDP1 keeps the original parameters"):
            raise CannotSee(
                "FSDP1 without use_orig_params has one flat parameter in place of yours, and their gradients have no "
                "names: wrap with FullyShardedDataParallel(..., use_orig_params=True)"
            )
        flat = _inside(handle, "flat_param", "the tensor that FSDP1 flattened")
        names = _inside(flat, "_fqns", "the names of the flattened parameters")
        shapes = _inside(flat, "_shapes", "the shapes of the flattened parameters")
        infos = _inside(flat, "_shard_param_infos", "how FSDP1 cuts")
        for name, shape, info in zip(names, shapes, infos, strict=True):
            start = stop = 0
            if _inside(info, "in_shard", "how FSDP1 cuts"):
                start = _inside(info, "intra_param_start_idx", "how FSDP1 cuts")
                stop = _inside(info, "intra_param_end_idx", "how FSDP1 cuts") + 1
            found[f"{prefix}.{name}".lstrip(".")] = Region.span(tuple(shape), start, stop)
    return found


def meshes_of(model: nn.Module) -> list[tuple[tuple[str, ...], Any]]:
    """Names of the axes and the mesh, for each mesh on which a parameter is cut. Axes without a name are "".

    Where FSDP2 made the mesh itself, its one axis is dp.
    """
    fsdp2 = loaded("torch.distributed.fsdp", "FSDPModule")
    is_fsdp2 = fsdp2 is not None and any(isinstance(module, fsdp2) for module in model.modules())
    found = {}
    for parameter in model.parameters():
        if is_dtensor(parameter):
            mesh = parameter.device_mesh
            names = tuple(mesh.mesh_dim_names or ("dp" if is_fsdp2 and mesh.ndim == 1 else "",) * mesh.ndim)
            found[names, mesh] = None
    return list(found)
