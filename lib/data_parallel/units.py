"""Units: layers whose parameters are whole only while they compute.

A *unit* is a submodule with its parameters in flats. `unshard` collects them, `reshard` gives the memory back. When,
says `unit_schedule.py`.

Source: Rajbhandari et al., ZeRO, SC 2020, arXiv 1910.02054, section 7.2.2; Zhao et al., PyTorch FSDP, VLDB 2023,
arXiv 2304.11277, section 3.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn

from lib import comm
from lib.data_parallel.flat import Flat
from lib.mesh import Group

ELSEWHERE = (
    "no rank has this model's parameters as a whole, so they cannot be {} here: full_state_dict() collects them, and "
    "load_full_state_dict() spreads them out"
)


class Unit:
    """Parameters that become whole together: one flat of those that are trained, one of those that are frozen.

    Args:
        module: whose they are.
        stand_ins: what its parameters read meanwhile.
    """

    def __init__(self, module: nn.Module, flats: list[Flat], stand_ins: StandIns) -> None:
        self.module, self.flats = module, flats
        self._nans = [stand_ins.of(flat.whole) for flat in flats]
        self._versions = [p._version for flat in flats for p in flat.params]
        self.trained = [p for flat in flats for p in flat.params if p.requires_grad]
        self.has_frozen = any(not p.requires_grad for flat in flats for p in flat.params)
        self.is_whole = False
        self.gradients_open: set[int] = set()  # parameters whose gradient backward still owes
        self.calls_open = 0  # calls whose outputs still wait for their gradient
        self.inputs_open = 0  # calls whose inputs still wait for their gradient, as frozen layers show no other end
        self._coming: list[comm.Pending] = []

    def start(self) -> None:
        """Ask for the shards of the others."""
        if self.is_whole or self._coming:
            return
        self.check_untouched()
        with comm.label("unshard"):
            for flat in self.flats:
                flat.whole.untyped_storage().resize_(flat.whole.nbytes)
                self._coming.append(flat.gather())

    def unshard(self) -> None:
        """Return when all parameters are there."""
        self.start()
        self._arrive()
        if not self.is_whole:
            self.is_whole = True
            for flat in self.flats:
                for p, view in zip(flat.params, flat.views, strict=True):
                    p.data = view

    def reshard(self) -> None:
        """Give the memory back.

        What autograd has saved of it looks at the same storage, and in backward finds it filled again.
        """
        self._arrive()
        self.is_whole = False
        for flat, nan in zip(self.flats, self._nans, strict=True):
            for p in flat.params:
                p.data = nan.expand(p.shape)
            flat.whole.untyped_storage().resize_(0)
        self._versions = [p._version for flat in self.flats for p in flat.params]

    def check_untouched(self) -> None:
        """Raises RuntimeError where a parameter was written while it was elsewhere."""
        params = [(name, p) for flat in self.flats for name, p in zip(flat.names, flat.params, strict=True)]
        for (name, p), version in zip(params, self._versions, strict=True):
            if p._version != version:
                raise RuntimeError(
                    f"{name} was written outside of its unit's forward and backward, where it is on no rank as a "
                    "whole, so that this is lost: write it before the model is wrapped, or use load_full_state_dict()"
                )

    def _arrive(self) -> None:
        for pending in self._coming:
            pending.wait()
        self._coming = []


class StandIns:
    """A model's NaN, one of each dtype and device.

    Expanded to any shape it takes no memory, and whoever looks at a parameter that is elsewhere sees it.
    """

    def __init__(self) -> None:
        self._nans: dict[tuple, Tensor] = {}

    def of(self, like: Tensor) -> Tensor:
        """[]; of the dtype and device of `like`."""
        key = like.dtype, like.device
        if key not in self._nans:
            self._nans[key] = torch.full((), torch.nan, dtype=like.dtype, device=like.device)
        return self._nans[key]


def make_units(module: nn.Module, units: list[nn.Module], group: Group, dtype: torch.dtype | None) -> list[Unit]:
    """The root, then the units, each with flats for what is trained and what is frozen."""
    made, stand_ins = [], StandIns()
    for one, named in split_units(module, units):
        trained = {name: p for name, p in named.items() if p.requires_grad}
        frozen = {name: p for name, p in named.items() if not p.requires_grad}
        for p in frozen.values():  # full precision is for the optimizer only
            p.data = p.data.to(dtype or p.dtype)
        flats = [Flat(some, group, dtype, False, False) for some in (trained, frozen) if some]
        made.append(Unit(one, flats, stand_ins))
    return made


def default_units(module: nn.Module) -> list[nn.Module]:
    """The children of each `nn.ModuleList` that is not inside another unit; of lists of lists, the innermost."""
    units: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for one in module.modules():  # outer ones first
        if isinstance(one, nn.ModuleList) and one not in inside:
            called = [child for child in one if _has_forward(child)]
            units += called
            inside.update(below for child in called for below in child.modules())
    return units


def _has_forward(module: nn.Module) -> bool:
    """Containers have none, so no hook would ever say that they are used."""
    return type(module).forward is not nn.Module.forward


def split_units(module: nn.Module, units: list[nn.Module]) -> list[tuple[nn.Module, dict[str, nn.Parameter]]]:
    """The root, then the units, each with its parameters by name; what is used outside of its unit, too, is the root's.

    Raises:
        ValueError: a unit holds another one, or is no part of the module.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    parts = {id(one): name for name, one in module.named_modules()}
    inside = Counter(below for unit in units for below in unit.modules())
    for unit in units:
        if id(unit) not in parts or unit is module:
            raise ValueError(f"a unit must be a submodule of the model, but {type(unit).__name__} is none")
        if not _has_forward(unit):
            raise ValueError(
                f"unit {parts[id(unit)]!r} is a {type(unit).__name__}, which is never called: name what is in it"
            )
        if inside[unit] > 1:
            raise ValueError(
                f"unit {parts[id(unit)]!r} is given twice, or lies inside another unit; name one of them"
            )
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
