"""Units: layers whose parameters are whole only while they compute.

A *unit* is a submodule with its parameters in flats. `unshard` collects them, `reshard` gives the memory back.
`UnitSchedule` says when, by hooks around each unit's forward and backward.

Source: Rajbhandari et al., ZeRO, SC 2020, arXiv 1910.02054, section 7.2.2; Zhao et al., PyTorch FSDP, VLDB 2023,
arXiv 2304.11277, section 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, takewhile

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from lib import comm
from lib.data_parallel.flat import Flat
from lib.mesh import Group


class UnitSchedule:
    """When units become whole, and when they give their memory back: hooks around each unit's forward and backward.

    All ranks gather the same units in the same order, also those that one of them does not use.

    Args:
        units: the root, then the others in the order in which forward uses them.
        reshard_after_forward, prefetch: as for `FSDP`.
        passed: called with each unit once in a backward, when no more gradients come for it: its sum can leave even if
            this rank did not use all of it. Other ranks wait for that sum before they go on to the next unit.
    """

    def __init__(
        self, units: Sequence[Unit], reshard_after_forward: bool, prefetch: bool, passed: Callable[[Unit], None]
    ) -> None:
        self.units, self.reshard_after_forward, self.prefetch = units, reshard_after_forward, prefetch
        self.passed = passed
        root, *others = units
        self._order = {"forward": list(units), "backward": [root, *others[::-1]]}
        self._next = {direction: dict(pairwise(order)) for direction, order in self._order.items()}
        self._seen: set[Unit] = set()  # those that this pass has made whole
        self._passed: set[Unit] = set()  # those that backward is through with
        self._trains = False  # the last forward of the root was one that wants gradients
        self._backward = False  # between the first gradient of an output and finish()
        for unit in units:
            for p in unit.trained:  # behind the hook of whoever sums the gradient
                p.register_post_accumulate_grad_hook(partial(self._gradient_is_there, unit))
            unit.module.register_forward_pre_hook(partial(self._before_forward, unit), with_kwargs=True)
            unit.module.register_forward_hook(lambda _, args, output, unit=unit: self._after_forward(unit, output))

    def end_backward(self) -> None:
        """A backward is through, or given up."""
        if self._backward:
            self._catch_up("backward", may_pass=True)
            self._backward = False
            for unit in self.units:  # what backward did not go through
                unit.inputs_open = 0
                unit.reshard()

    def end_step(self) -> None:
        """No backward of what forward has computed so far comes any more."""
        self.end_backward()
        for unit in self.units:
            unit.calls_open = 0
            unit.reshard()

    def _before_forward(self, unit: Unit, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if unit is self.units[0]:
            self.end_backward()  # of the microbatch before
        if self._backward:  # an activation checkpoint computes forward again
            self._seen.add(unit)  # in its own order
            self._before_backward(unit)
        else:
            if unit is self.units[0]:
                self._seen.clear()
                self._trains = torch.is_grad_enabled()
            self._make_whole(unit, "forward")
        waits = self._backward and unit.inputs_open  # already, on what was given the first time
        inputs = _with_gradient((args, kwargs)) if unit.has_frozen and torch.is_grad_enabled() and not waits else []
        if inputs:
            unit.inputs_open += 1
            register_multi_grad_hook(inputs, partial(self._inputs_are_done, unit), mode="all")

    def _after_forward(self, unit: Unit, output: object) -> None:
        if self._backward:
            return
        if unit is self.units[0]:
            self._catch_up("forward")
        outputs = _with_gradient(output)
        unit.calls_open += self._trains
        if outputs:
            when_backward_comes = partial(self._backward_comes, unit)
            register_multi_grad_hook(outputs, when_backward_comes, mode="any")
        if self.reshard_after_forward or not outputs:
            self._let_go(unit)

    def _let_go(self, unit: Unit) -> None:
        """The root takes along what was asked for and not used."""
        for one in self.units if unit is self.units[0] else [unit]:
            one.reshard()

    def _backward_comes(self, unit: Unit, gradient: Tensor) -> None:
        unit.calls_open -= 1
        self._before_backward(unit, may_pass=True)

    def _before_backward(self, unit: Unit, may_pass: bool = False) -> None:
        if not self._backward:
            self._backward = True
            self._seen.clear()
            self._passed.clear()
            if unit is not self.units[0]:  # its output is the root's, too
                self._before_backward(self.units[0])
        self._make_whole(unit, "backward", may_pass)
        unit.gradients_open = {id(p) for p in unit.trained}

    def _make_whole(
        self,
        unit: Unit,
        direction: str,
        may_pass: bool = False,
    ) -> None:
        if may_pass or unit not in self._seen:
            self._catch_up(direction, unit, may_pass)
        self._seen.add(unit)
        unit.unshard()
        following = self._next[direction].get(unit)
        if self.prefetch and following is not None and following not in self._seen:
            following.start()

    def _catch_up(self, direction: str, until: Unit | None = None, may_pass: bool = False) -> None:
        """Take part in gathers of units that this rank has skipped, and others may not have.

        Args:
            may_pass: backward has come to `until`, or to its end. Units before it get no more gradients if no call of
                theirs is open, as autograd goes from what was computed last to what was computed first. (An activation
                checkpoint that computes forward again is no such sign.)
        """
        for unit in takewhile(lambda one: one is not until, self._order[direction]):
            if unit not in self._seen:
                self._seen.add(unit)
                unit.unshard()
                if direction == "backward" or self.reshard_after_forward or not self._trains:
                    unit.reshard()
            if may_pass and unit is not self.units[0] and not (until and unit.calls_open):
                self._pass(unit)

    def _pass(self, unit: Unit) -> None:
        if unit not in self._passed:
            self._passed.add(unit)
            self.passed(unit)
            unit.reshard()

    def _gradient_is_there(self, unit: Unit, p: nn.Parameter) -> None:
        unit.gradients_open.discard(id(p))
        if not unit.gradients_open:
            self._passed.add(unit)
        unit.reshard_if_done()

    def _inputs_are_done(self, unit: Unit, gradients: object) -> None:
        unit.inputs_open -= 1
        unit.reshard_if_done()


class Unit:
    """Parameters that become whole together: one flat of those that are trained, one of those that are frozen."""

    def __init__(self, module: nn.Module, flats: list[Flat]) -> None:
        self.module, self.flats = module, flats
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
        for flat in self.flats:
            for p in flat.params:
                p.data = stand_in(flat.whole, p.shape)
            flat.whole.untyped_storage().resize_(0)

    def reshard_if_done(self) -> None:
        """When backward has passed: all gradients of parameters are there, and of inputs where that matters."""
        if self.is_whole and not self.gradients_open and not self.inputs_open:
            self.reshard()

    def _arrive(self) -> None:
        for pending in self._coming:
            pending.wait()
        self._coming = []


_nans: dict[tuple, Tensor] = {}


def stand_in(like: Tensor, shape: torch.Size) -> Tensor:
    """A tensor of this shape that takes no memory and reads NaN everywhere, so that whoever looks too early sees it."""
    key = like.dtype, like.device
    if key not in _nans:
        _nans[key] = torch.full((), torch.nan, dtype=like.dtype, device=like.device)
    return _nans[key].expand(shape)


def make_units(module: nn.Module, units: list[nn.Module], group: Group, dtype: torch.dtype | None) -> list[Unit]:
    """The root, then the units, each with flats for what is trained and what is frozen."""
    made = []
    for one, named in split_units(module, units):
        trained = {name: p for name, p in named.items() if p.requires_grad}
        frozen = {name: p for name, p in named.items() if not p.requires_grad}
        for p in frozen.values():  # full precision is for the optimizer only
            p.data = p.data.to(dtype or p.dtype)
        made.append(Unit(one, [Flat(some, group, dtype, False, False) for some in (trained, frozen) if some]))
    return made


def default_units(module: nn.Module) -> list[nn.Module]:
    """The children of each `nn.ModuleList` that is not inside another unit."""
    units: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for one in module.modules():  # outer ones first
        if isinstance(one, nn.ModuleList) and one not in inside:
            units += one
            inside.update(below for child in one for below in child.modules())
    return units


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


def _with_gradient(values: object) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor) and x.requires_grad]
