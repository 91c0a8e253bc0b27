"""The part of a tensor that this rank has: which region of the whole one, and its elements or their 64 sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lib.doctor.numbers.names import Names, plain_name
from lib.doctor.numbers.recorded_numbers import Numbers, Part, check_sum
from lib.doctor.numbers.region import Region
from lib.doctor.numbers.sketch import draws_of, sums_of
from lib.doctor.numbers.torch_insides import CannotSee, is_dtensor, region_of_dtensor, regions_of_fsdp1

# name, tensor → whole name, dim or None, index (or ranges along dim), of how many (or the whole size along dim)
CutFunction = Callable[[str, Tensor], tuple[str, int | None, int | list[tuple[int, int]], int]]
FORM = "(whole name, dim or None, index or [(start, stop), …], of)"


class Parts:
    """Makes parts of the tensors of a rank.

    Args:
        sketch: 64 sums of each tensor in place of its elements.
        like: a recording whose regions are sketched as well, if this rank has whole tensors.
    """

    def __init__(self, names: Names, cut: CutFunction | None, sketch: bool, like: Numbers | None) -> None:
        self.sketch, self._cut = sketch, cut
        self._of_fsdp1: dict[str, Region] = {}
        for module in names.modules:
            self._of_fsdp1 |= {plain_name(name): region for name, region in regions_of_fsdp1(module).items()}
        self._like: dict[str, set[Region]] = {}
        self._draws: dict[Region, Tensor] = {}
        if like is not None and not sketch:
            raise CannotSee("like= has a meaning only with sketch=True: a whole recording has every element")
        for rank in like.ranks if like else []:
            for name, part in rank.steps[0].tensors["weights"].items():
                self._like.setdefault(name, set()).add(part.region)

    def whole_name(self, name: str, parameter: nn.Parameter) -> str:
        """The name in one process."""
        return self._said(name, parameter)[0]

    def _said(self, name: str, parameter: nn.Parameter) -> tuple[str, Any, Any, Any]:
        """The answer of the user's function; without one, a tensor is a copy."""
        if self._cut is None:
            return name, None, 0, 1
        said = self._cut(name, parameter)
        if not isinstance(said, tuple | list) or len(said) != 4 or not isinstance(said[0], str):
            raise CannotSee(f"cut({name!r}, …) returned {said!r}, which is not {FORM}")
        return tuple(said)

    def part(self, name: str, parameter: nn.Parameter, tensor: Tensor) -> tuple[str, Part]:
        """The whole name, and what this rank has of a tensor of a parameter: the weight or the gradient."""
        whole_name = self.whole_name(name, parameter)
        tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor  # the gradient of a sparse embedding
        if is_dtensor(tensor):
            tensor = _reduced(tensor)
            region, tensor = region_of_dtensor(tensor), tensor.to_local()
        elif name in self._of_fsdp1:
            region = self._of_fsdp1[name]
        else:
            region = self._region(name, parameter, tensor)
        if not tensor.is_floating_point():
            raise CannotSee(
                f"{name} has elements of type {tensor.dtype}: only real floating-point tensors are compared. Give "
                "watch() the modules without it"
            )
        if region.numel != tensor.numel():
            raise CannotSee(
                f"{name} has {tensor.numel()} elements here, where {list(region.sizes)} of {list(region.shape)} were "
                "expected: its gradient, or the tensor itself, is cut in another way than the parameter"
            )
        return whole_name, self._stored(whole_name, region, tensor)

    def _region(self, name: str, parameter: nn.Parameter, tensor: Tensor) -> Region:
        """Of a plain tensor: the answer of the user's function, or all of it."""
        said = self._said(name, parameter)
        _, dim, index, of = said
        shape = list(tensor.shape)
        if dim is None:
            return Region.whole(tuple(shape))
        try:
            dim = range(tensor.ndim)[dim]
            if isinstance(index, int):
                ranges = [(index * shape[dim], (index + 1) * shape[dim])]
                shape[dim] *= of
            else:
                ranges = [(int(start), int(stop)) for start, stop in index]
                shape[dim] = of
        except (TypeError, ValueError, IndexError):
            raise CannotSee(f"cut({name!r}, …) returned {said!r}, which is not {FORM}") from None
        region = Region.along(tuple(shape), dim, ranges)
        if fault := region.fault():
            raise CannotSee(f"cut({name!r}, …) returned {said!r}: along dimension {dim} it {fault}")
        return region

    def _stored(self, name: str, region: Region, tensor: Tensor) -> Part:
        values = tensor.detach().flatten().cpu().clone()
        if torch.finfo(values.dtype).bits < 16:
            values = values.float()  # float8 can do nothing but be stored
        others = {}
        if self.sketch and region.is_whole:
            for other in self._like.get(name, set()) - {region}:
                others[other] = self._sums(other.take(values), other)
        return Part(
            region=region,
            dtype=str(tensor.dtype),
            values=self._sums(values, region) if self.sketch else values,
            square=torch.linalg.vector_norm(values, dtype=torch.float64).item() ** 2,
            largest=values.abs().max().item() if len(values) else 0.0,
            bits=check_sum(values),
            others=others,
        )

    def _sums(self, values: Tensor, region: Region) -> Tensor:
        """The 64 sums; the draws for them take longer than the sums, so they are kept: a byte an element."""
        if region not in self._draws:
            self._draws[region] = draws_of(region)
        return sums_of(values, self._draws[region])


def _reduced(tensor: Any) -> Any:
    """A DTensor of terms, whose sum the optimizer would take: the sum. All ranks call it."""
    if any(placement.is_partial() for placement in tensor.placements):
        from torch.distributed.tensor import Replicate  # loaded, because this is a DTensor

        return tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])
    return tensor
