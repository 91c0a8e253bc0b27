"""Units: layers whose parameters are unsharded only while they compute.

A *unit* is a submodule with its parameters in flats. `unshard` gathers them, `reshard` frees their memory.
`unit_schedule.py` decides when.

Source: Rajbhandari et al., ZeRO, SC 2020, arXiv 1910.02054, section 7.2.2; Zhao et al., PyTorch FSDP, VLDB 2023,
arXiv 2304.11277, section 3.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from lib import comm
from lib.data_parallel.flat import Flat, cast_frozen
from lib.mesh import Group

ELSEWHERE = (
    "no rank holds the full parameters of this model, so they cannot be {} here: full_state_dict() gathers them, and "
    "load_full_state_dict() shards them"
)


class Unit:
    """Parameters that are unsharded together: one flat for trained parameters, one for frozen.

    Args:
        module: the submodule that uses them.
        stand_ins: values of its parameters while they are sharded.
    """

    def __init__(self, module: nn.Module, flats: list[Flat], stand_ins: StandIns) -> None:
        self.module, self.flats = module, flats
        self._nans = [stand_ins.of(flat.whole) for flat in flats]
        self._named = [named for flat in flats for named in zip(flat.names, flat.params, strict=True)]
        self._versions = [p._version for _, p in self._named]
        self.trained = [p for _, p in self._named if p.requires_grad]
        self.has_frozen = len(self.trained) < len(self._named)
        self.is_whole = False
        self.gradients_open: set[int] = set()  # parameters that still wait for their gradient
        self.calls_open = 0  # calls whose outputs still wait for their gradient
        self.inputs_open = 0  # calls whose inputs still wait for their gradient: the only end of a frozen layer
        self._coming: list[comm.Pending] = []

    def start(self) -> None:
        """Start to all-gather the shards."""
        if self.is_whole or self._coming:
            return
        self.check_untouched()
        with comm.label("unshard"):
            for flat in self.flats:
                flat.whole.untyped_storage().resize_(flat.whole.nbytes)
                self._coming.append(flat.gather())

    def unshard(self) -> None:
        """Return when all parameters are gathered."""
        self.start()
        self._arrive()
        if not self.is_whole:
            self.is_whole = True
            for flat in self.flats:
                for p, view in zip(flat.params, flat.views, strict=True):
                    p.data = view

    def reshard(self) -> None:
        """Free the memory of the full parameters.

        Tensors that autograd saved use the same storage, which is filled again in backward.
        """
        self._arrive()
        self.is_whole = False
        for flat, nan in zip(self.flats, self._nans, strict=True):
            for p in flat.params:
                p.data = nan.expand(p.shape)
            flat.whole.untyped_storage().resize_(0)
        self._versions = [p._version for _, p in self._named]

    def check_untouched(self) -> None:
        """Raise RuntimeError if a parameter was written while it was sharded."""
        stand_ins = {nan.data_ptr() for nan in self._nans}
        for (name, p), version in zip(self._named, self._versions, strict=True):
            replaced = not self.is_whole and p.numel() > 0 and p.data_ptr() not in stand_ins
            if p._version != version or replaced:
                raise RuntimeError(
                    f"{name} was written outside the forward and backward of its unit, where no rank holds the full "
                    "parameter, so the values are lost: write it before wrapping, or use load_full_state_dict()"
                )

    def _arrive(self) -> None:
        for pending in self._coming:
            pending.wait()
        self._coming = []


class StandIns:
    """NaN tensors in the place of sharded parameters, one per dtype and device; of integers the largest.

    Expanded to any shape, a stand-in takes no memory; reading a sharded parameter gives NaN, or an index out of range.
    """

    def __init__(self) -> None:
        self._nans: dict[tuple, Tensor] = {}

    def of(self, like: Tensor) -> Tensor:
        """The NaN tensor, shape [], with dtype and device of `like`."""
        key = like.dtype, like.device
        if key not in self._nans:
            has_nan = like.is_floating_point() or like.is_complex() or like.dtype == torch.bool
            value = torch.nan if has_nan else torch.iinfo(like.dtype).max
            self._nans[key] = torch.full((), value, dtype=like.dtype, device=like.device)
        return self._nans[key]


def make_units(module: nn.Module, units: list[nn.Module], group: Group, dtype: torch.dtype | None) -> list[Unit]:
    """Make the root, then the units, each with one flat for trained parameters and one per dtype for frozen."""
    made, stand_ins, parts = [], StandIns(), split_units(module, units)
    cast_frozen(module, {p.dtype for p in module.parameters() if p.requires_grad}, dtype)
    for one, named in parts:
        kinds: dict[tuple, dict[str, nn.Parameter]] = {}
        for name, p in sorted(named.items(), key=lambda item: not item[1].requires_grad):  # the trained first
            kinds.setdefault((dtype,) if p.requires_grad else (None, p.dtype, p.device), {})[name] = p
        flats = [Flat(some, group, cast, False, False) for (cast, *_), some in kinds.items()]
        made.append(Unit(one, flats, stand_ins))
    return made


def default_units(module: nn.Module) -> list[nn.Module]:
    """The children of each `nn.ModuleList` outside all units; of nested lists, those of the innermost."""
    units: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for one in module.modules():  # outer ones first
        if isinstance(one, nn.ModuleList) and one not in inside:
            called = [child for child in one if _has_forward(child)]
            units += called
            inside.update(below for child in called for below in child.modules())
    return units


def _has_forward(module: nn.Module) -> bool:
    """Whether a module has a forward; containers have none, so their hooks would never run."""
    return type(module).forward is not nn.Module.forward


def split_units(module: nn.Module, units: list[nn.Module]) -> list[tuple[nn.Module, dict[str, nn.Parameter]]]:
    """The root, then the units, each with its parameters by name; one that is also used outside is in the root.

    Raises:
        ValueError: a unit contains a second unit, or is not in the module.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    parts = {id(one): name for name, one in module.named_modules()}
    inside = Counter(below for unit in units for below in unit.modules())
    for unit in units:
        if id(unit) not in parts or unit is module:
            raise ValueError(f"a unit must be a submodule of the model, but {type(unit).__name__} is not")
        if not _has_forward(unit):
            kind = type(unit).__name__
            raise ValueError(f"unit {parts[id(unit)]!r} is a {kind}, which is never called: list its children")
        if inside[unit] > 1:
            raise ValueError(f"unit {parts[id(unit)]!r} is listed twice, or is inside another unit; list only one")
    everywhere, within = _uses(module), [_uses(unit) for unit in units]
    own = [
        {names[id(p)]: p for p in unit.parameters() if uses[id(p)] == everywhere[id(p)]}
        for unit, uses in zip(units, within, strict=True)
    ]
    taken = {name for named in own for name in named}
    root = {name: p for name, p in module.named_parameters() if name not in taken}
    return [(module, root), *zip(units, own, strict=True)]


def _uses(module: nn.Module) -> Counter[int]:
    """How often a module and those inside it hold each parameter."""
    return Counter(id(p) for one in module.modules() for p in one._parameters.values() if p is not None)
