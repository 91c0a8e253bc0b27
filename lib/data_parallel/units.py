"""Units: layers whose parameters are unsharded only while they compute, and the hooks that do this.

A *unit* is a submodule with its parameters in flats. `unshard` gathers them, `reshard` frees their memory.

The problem: the parameters of a layer must be gathered before it computes, in forward and again in backward, also by
a rank that skips it, because the other ranks wait.
The idea: three hooks for each unit, and one order of units for all ranks (`UnitSchedule`).

    before its forward               unshard it, and prefetch the next
    after its forward                reshard it
    first gradient of its output     reshard those that ran after it; unshard it, and prefetch the one before

Backward needs no more, because autograd runs from the last computation to the first: when it reaches a unit, those that
ran after it have all their gradients.

Source: Rajbhandari et al., ZeRO, SC 2020, arXiv 1910.02054, section 7.2.2; Zhao et al., PyTorch FSDP, VLDB 2023,
arXiv 2304.11277, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch._C import _autograd
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks

from lib import comm
from lib.data_parallel.bucketed_gradients import Gradients
from lib.data_parallel.flat import Flat
from lib.data_parallel.gradient_sums import with_gradient
from lib.data_parallel.placeholders import SHARDED, ShardedParameter
from lib.versions import WRITTEN_IN_FORWARD


class Unit:
    """Parameters that are unsharded together: flats for trained parameters, and for frozen.

    Args:
        module: the submodule that uses them.
        nan_of: `stand_in` with the cache of the model: the values of parameters while they are sharded.
    """

    def __init__(self, module: nn.Module, flats: list[Flat], nan_of: Callable[..., Tensor]) -> None:
        self.module, self.flats = module, flats
        self._nans = [nan_of(flat.whole.dtype, flat.whole.device) for flat in flats]
        self._named = [named for flat in flats for named in zip(flat.names, flat.params, strict=True)]
        self._classes = [type(p) for _, p in self._named]
        self._versions = [p._version for _, p in self._named]
        self.trained_flats = [flat for flat in flats if flat.params[0].requires_grad]
        self.is_whole = False
        self._coming: list[comm.Pending] = []

    def start(self) -> None:
        """Start to all-gather the shards."""
        if self.is_whole or self._coming:
            return
        self.check_untouched()
        with comm.label("unshard"):
            for flat in self.flats:
                flat.whole.untyped_storage().resize_(flat.whole.nbytes)
                self._coming.append(flat.publish())

    def unshard(self) -> None:
        """Return when all parameters are gathered."""
        self.start()
        self._arrive()
        if not self.is_whole:
            self.is_whole = True
            for (_, p), its in zip(self._named, self._classes, strict=True):
                p.__class__ = its
            for flat in self.flats:
                for p, view in zip(flat.params, flat.views, strict=True):
                    p.data = view

    def reshard(self) -> None:
        """Free the memory of the full parameters.

        Tensors that autograd saved use the same storage: backward fills it again.
        """
        self._arrive()
        self.is_whole = False
        for flat, nan in zip(self.flats, self._nans, strict=True):
            for p in flat.params:
                p.__class__ = nn.Parameter
                p.data = nan.expand(p.shape)
                p.__class__ = ShardedParameter
            flat.whole.untyped_storage().resize_(0)
        self._versions = [p._version for _, p in self._named]

    def check_unwritten(self) -> None:
        """Raise RuntimeError if forward wrote into a parameter, or into its `.data`, which has no version."""
        for (name, p), version in zip(self._named, self._versions, strict=True):
            if p._version != version:
                raise RuntimeError(WRITTEN_IN_FORWARD.format(name))
        for flat in self.flats:
            if name := flat.written():
                raise RuntimeError(WRITTEN_IN_FORWARD.format(name))

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


def stand_in(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A NaN, shape [], instead of sharded parameters: expanded to any shape, it takes no memory.

    Of integers it is the largest, an index out of range. A model has its own of each kind (`functools.cache`).
    """
    has_nan = dtype.is_floating_point or dtype.is_complex or dtype == torch.bool
    return torch.full((), torch.nan if has_nan else torch.iinfo(dtype).max, dtype=dtype, device=device)


TWICE = (
    "a {} with the parameter {} is called where all ranks do not gather it: a second time in a forward of the model, "
    "before a unit that comes earlier in units=, or without the model. List units= in the order of forward, and leave "
    "out what a forward calls twice: then it is part of the root"
)
TWO_FORWARDS = (
    "one backward goes through two forwards of an FSDP model, which would hold all units until its end: run the "
    "backward of each forward by itself, since gradients add up, or one forward of both inputs (torch.cat)"
)
ALREADY_FREED = (
    "backward has passed the unit of {} and freed it, and now reads a parameter of it that a second layer used: leave "
    "that unit out of units=, which makes it part of the root"
)


class UnitSchedule:
    """Unshards and reshards units, in hooks around the forward and backward of each.

    Each forward gathers all units in their order, and each backward the root, then the others in reverse: so all ranks
    gather the same units in the same order, also units that a rank does not use.

    Args:
        units: the root, then the rest in the order in which forward uses them.
        reshard_after_forward, prefetch: as for `FSDP`.
        sums: told of each unit that backward has passed, so that its sum starts: other ranks wait for it.

    Raises:
        RuntimeError: in forward, for a unit that is called twice or in a different order; in backward, for one that
            goes through two forwards.
    """

    def __init__(self, units: Sequence[Unit], reshard_after_forward: bool, prefetch: bool, sums: Gradients) -> None:
        self.units, self.reshard_after_forward, self.prefetch = units, reshard_after_forward, prefetch
        self.sums = sums
        self.root, *others = units
        self._orders = {True: [self.root, *others[::-1]], False: list(units)}  # in backward, and in forward
        self._order, self._gathered = self._orders[False], len(units)  # of this pass, and how many are gathered
        self._forward = 0  # number of the last forward
        self._backward = 0  # number of the forward that backward goes through; 0 outside of backward
        self._keeps_graph = False  # a second backward may go through this one, so units stay unsharded
        self._watching = ExitStack()
        for unit in units:
            unit.module.register_forward_pre_hook(partial(self._before_forward, unit))
            unit.module.register_forward_hook(partial(self._after_forward, unit))
        owners = {id(p): unit for unit in units for flat in unit.flats for p in flat.params}
        for module in self.root.module.modules():
            for unit in {owners[id(p)] for p in module._parameters.values() if p is not None}:
                module.register_forward_pre_hook(partial(self._before_layer, unit))
        self._of_storage = {flat.whole.untyped_storage()._cdata: unit for unit in units for flat in unit.flats}
        self.root.module.register_forward_hook(lambda *_: self._watching.close(), always_call=True)

    def __reduce__(self) -> NoReturn:
        raise TypeError(SHARDED.format("copy, pickle"))

    def end_backward(self) -> None:
        """Note that a backward ended, or was given up."""
        if self._backward:
            self._reach(None)
            self._backward = 0
            if not self._keeps_graph:
                self.root.reshard()

    def end_step(self) -> None:
        """Note that the outputs of forward so far will get no backward."""
        self.end_backward()
        for unit in self.units:
            unit.reshard()

    def _before_forward(self, unit: Unit, module: nn.Module, args: tuple) -> None:
        if torch.compiler.is_compiling() or callable(get_eval_frame_callback()):
            raise RuntimeError(
                f"torch.compile reached the gather of a {type(module).__name__}: compile only what is inside it, each "
                "unit alone (blocks[i] = torch.compile(blocks[i])) before the model is wrapped"
            )
        if unit is self.root:
            self.end_backward()
            self._forward += 1
            self._order, self._gathered = self._orders[False], 0
            self._watching.enter_context(self._watch())
        elif not self._backward and unit.flats and unit not in self._order[self._gathered :]:
            raise RuntimeError(TWICE.format(type(module).__name__, unit.flats[0].names[0]))
        self._reach(unit, is_recomputed=bool(self._backward))

    def _before_layer(self, unit: Unit, module: nn.Module, args: tuple) -> None:
        """Gather the unit of a layer that is recomputed inside it; a layer that is called alone is refused."""
        if self._backward:
            self._reach(unit, is_recomputed=True)
        elif not unit.is_whole:
            raise RuntimeError(f"a {type(module).__name__} called alone finds its parameters sharded: call the model")

    def _after_forward(self, unit: Unit, module: nn.Module, args: tuple, output: object) -> None:
        number = self._backward or self._forward  # an activation checkpoint runs forward again in backward
        if outputs := with_gradient(output):
            register_multi_grad_hook(outputs, lambda _: self._backward_is_at(unit, number), mode="any")
        if self._backward:
            return
        unit.check_unwritten()
        if unit is self.root:
            self._reach(None)
        if self._reshards:
            unit.reshard()

    def _watch(self) -> saved_tensors_hooks:
        """Gather a unit when backward reads a parameter that autograd saved: a module may hide an output of it."""
        number = self._forward
        outer = _autograd._top_saved_tensors_default_hooks(True)  # no public function tells them

        def pack(x: Tensor) -> tuple:
            unit = self._of_storage.get(x.untyped_storage()._cdata) if x.layout is torch.strided else None
            if outer and unit is None:
                return None, outer[0](x), None
            return unit, x.detach(), x._version  # x itself would keep its own graph alive

        def unpack(saved: tuple) -> Tensor:
            unit, x, version = saved
            if version is None:
                return outer[1](x)
            if x._version != version:  # with hooks, autograd does not check it
                raise RuntimeError(
                    f"backward needs a tensor {list(x.shape)} as it was in forward, but step(), a load or an operation "
                    "in place has changed it: run backward before that, or forward again after it"
                )
            if unit is not None and not (unit.is_whole and self._backward):
                self._backward_is_at(unit, number)
                if not unit.is_whole:
                    raise RuntimeError(ALREADY_FREED.format(unit.flats[0].names[0]))
            return x

        return saved_tensors_hooks(pack, unpack)

    def _backward_is_at(self, unit: Unit, number: int) -> None:
        """Backward, through the forward of this number, reaches a unit: the first gradient of its output exists."""
        if not self._backward:
            Variable._execution_engine.queue_callback(self.end_backward)  # as torch's own wrappers do
            self.sums.end_microbatch()  # of an earlier backward through the same forward
            self._backward, self._keeps_graph = number, torch.is_grad_enabled()
            self._order, self._gathered = self._orders[True], 0
        if number != self._backward:
            raise RuntimeError(TWO_FORWARDS)
        self._reach(unit)

    @property
    def _reshards(self) -> bool:
        """Whether this pass reshards the units that it has passed."""
        if self._backward:
            return not self._keeps_graph
        return self.reshard_after_forward or not torch.is_grad_enabled()

    def _reach(self, unit: Unit | None, is_recomputed: bool = False) -> None:
        """Gather the units up to this one, in the order of all ranks, and reshard those before it. None: to the end.

        A forward that is recomputed in backward reaches units before backward does, so none is passed.
        """
        for i, one in enumerate(self._order):
            if i == self._gathered:
                one.unshard()
                self._gathered += 1
            if one is unit:
                break
            if one.is_whole and one is not self.root and self._reshards and not is_recomputed:
                self._pass(one)
        if self.prefetch and self._gathered < len(self._order):
            self._order[self._gathered].start()

    def _pass(self, unit: Unit) -> None:
        if self._backward:
            for flat in unit.trained_flats:
                self.sums.no_more(flat)  # a parameter without a gradient here counts as zero
        unit.reshard()
