"""Units: layers whose parameters are unsharded only while they compute, and the hooks that do this.

A *unit* is a submodule with its parameters in flats. `unshard` gathers them, `reshard` frees their memory.

The problem: the parameters of a layer must be gathered before it computes, in forward and again in backward, also by
a rank that skips it, because the other ranks wait.
The idea: hooks around forward and backward of each unit, and one order of units for all ranks (`UnitSchedule`).

Source: Rajbhandari et al., ZeRO, SC 2020, arXiv 1910.02054, section 7.2.2; Zhao et al., PyTorch FSDP, VLDB 2023,
arXiv 2304.11277, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from itertools import pairwise, takewhile
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch._C import _autograd
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.autograd.graph import register_multi_grad_hook

from lib import comm
from lib.data_parallel.bucketed_gradients import Gradients
from lib.data_parallel.flat import Flat
from lib.data_parallel.gradient_sums import with_gradient
from lib.data_parallel.placeholders import SHARDED, ShardedParameter
from lib.versions import WRITTEN_IN_FORWARD


class Unit:
    """Parameters that are unsharded together: one flat for trained parameters, one for frozen.

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

        Tensors that autograd saved use the same storage, which is filled again in backward.
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


class Pass(Enum):
    """The pass that the units are in.

        EVALUATION        FORWARD --- first gradient of an output ---> BACKWARD
        (no gradients)       ^                                         KEEPS_GRAPH, with create_graph
                             +--- finish, or the next forward ---------+

    Each forward of the root begins at the left.
    """

    EVALUATION = "units are gathered and resharded one by one"
    FORWARD = "the same; or they stay unsharded until backward"
    BACKWARD = "a unit is resharded when its gradients exist"
    KEEPS_GRAPH = "a second backward may go through this one: units stay unsharded to its end"


class UnitSchedule:
    """Unshards and reshards units, in hooks around the forward and backward of each.

    All ranks gather the same units in the same order, including units that a rank does not use.

    Args:
        units: the root, then the other units in the order in which forward uses them.
        reshard_after_forward, prefetch: as for `FSDP`.
        sums: told of each unit once per backward, when it will get no more gradients here, so that its sum starts:
            other ranks wait for it. In a backward through two forwards, ranks that skip units could differ in this:
            while a graph of the root is open, or a second backward may go through this one, units stay unsharded,
            and no sum starts, to the end.
    """

    def __init__(self, units: Sequence[Unit], reshard_after_forward: bool, prefetch: bool, sums: Gradients) -> None:
        self.units, self.reshard_after_forward, self.prefetch = units, reshard_after_forward, prefetch
        self.sums = sums
        root, *others = units
        self._orders = {True: [root, *others[::-1]], False: list(units)}  # in backward, and in forward
        self._state = Pass.FORWARD
        self._seen: set[Unit] = set()  # units that this pass unsharded
        self._passed: set[Unit] = set()  # units that backward passed
        self._task = -1  # autograd's number of the last backward
        for unit in units:
            for p in unit.trained:  # after the hook that sums the gradient
                p.register_post_accumulate_grad_hook(partial(self._gradient_is_there, unit))
            unit.module.register_forward_pre_hook(partial(self._before_forward, unit), with_kwargs=True)
            unit.module.register_forward_hook(partial(self._after_forward, unit))
        owners = {id(p): unit for unit in units for flat in unit.flats for p in flat.params}
        for module in root.module.modules():
            for unit in {owners[id(p)] for p in module._parameters.values() if p is not None}:
                module.register_forward_pre_hook(partial(self._before_layer, unit))
        self._of_storage = {flat.whole.untyped_storage()._cdata: unit for unit in units for flat in unit.flats}
        root.module.register_forward_pre_hook(self._watch_what_is_saved, prepend=True)
        root.module.register_forward_hook(lambda *_: _autograd._pop_saved_tensors_default_hooks(), always_call=True)

    def __reduce__(self) -> NoReturn:
        raise TypeError(SHARDED.format("copy, pickle"))

    @property
    def _backward(self) -> bool:
        return self._state in (Pass.BACKWARD, Pass.KEEPS_GRAPH)

    def end_backward(self) -> None:
        """Note that a backward ended, or was given up."""
        if self._backward:
            self._catch_up(may_pass=True)
            self._state = Pass.FORWARD
            self.sums.held = False  # finish() or the next microbatch sends the held buckets
            for unit in self.units:  # units that backward did not reach
                unit.inputs_open = 0
                unit.reshard()

    def end_step(self) -> None:
        """Note that the outputs of forward so far will get no backward."""
        self.end_backward()
        for unit in self.units:
            unit.calls_open = 0
            unit.reshard()

    def _before_forward(self, unit: Unit, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if torch.compiler.is_compiling() or callable(get_eval_frame_callback()):
            raise RuntimeError(
                f"torch.compile reached the gather of a {type(module).__name__}: compile only what is inside it, each "
                "unit alone (blocks[i] = torch.compile(blocks[i])) before the model is wrapped"
            )
        if unit is self.units[0]:
            self.end_backward()  # of the previous microbatch
        if self._backward:  # an activation checkpoint recomputes forward
            self._seen.add(unit)  # in its own order
            self._before_backward(unit)
        else:
            if unit is self.units[0]:
                self._seen.clear()
                self._state = Pass.FORWARD if torch.is_grad_enabled() else Pass.EVALUATION
            self._make_whole(unit)
        waits = self._backward and unit.inputs_open  # already, on the inputs of the first forward
        if unit.has_frozen and torch.is_grad_enabled() and not waits:
            unit.inputs_open += 1
            inputs = with_gradient((args, kwargs))  # without any, it waits for the end of backward
            register_multi_grad_hook(inputs, partial(self._inputs_are_done, unit), mode="all")

    def _before_layer(self, unit: Unit, module: nn.Module, args: tuple) -> None:
        """Gather the unit of a layer that is recomputed inside it; a layer that is called alone is refused."""
        if torch._C._current_graph_task_id() >= 0:
            self._reach(unit)
        elif not unit.is_whole:
            raise RuntimeError(f"a {type(module).__name__} called alone finds its parameters sharded: call the model")

    def _reach(self, unit: Unit) -> None:
        """Note that backward needs a unit, also if no output announced it."""
        if not self._backward or unit not in self._seen or not unit.is_whole:
            self._before_backward(unit)

    def _after_forward(self, unit: Unit, module: nn.Module, args: tuple, output: object) -> None:
        if self._backward:
            return
        unit.check_unwritten()
        if unit is self.units[0]:
            self._catch_up()
        outputs = with_gradient(output)
        unit.calls_open += self._state is Pass.FORWARD and (bool(outputs) or unit is not self.units[0])
        if outputs:
            register_multi_grad_hook(outputs, partial(self._backward_comes, unit), mode="any")
        if self.reshard_after_forward or not outputs:
            for one in self.units if unit is self.units[0] else [unit]:  # the root: also prefetched and unused units
                one.reshard()

    def _watch_what_is_saved(self, *_: object) -> None:
        """Gather a unit when backward reads a parameter that autograd saved: a module may hide an output of it."""
        outer = _autograd._top_saved_tensors_default_hooks(True)

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
            if unit is not None:
                self._reach(unit)
            return x

        _autograd._push_saved_tensors_default_hooks(pack, unpack)

    def _backward_comes(self, unit: Unit, gradient: Tensor) -> None:
        if self._state is Pass.BACKWARD and torch._C._current_graph_task_id() > self._task:
            self.end_backward()  # of a previous backward, without a forward between
            self.sums.end_microbatch()
        self._before_backward(unit, Pass.KEEPS_GRAPH if torch.is_grad_enabled() else Pass.BACKWARD, may_pass=True)
        unit.calls_open = max(0, unit.calls_open - 1)  # 0: a second backward through the same graph

    def _before_backward(self, unit: Unit, kind: Pass = Pass.BACKWARD, may_pass: bool = False) -> None:
        if not self._backward:
            self._state, self._task = kind, torch._C._current_graph_task_id()
            self.sums.held = kind is Pass.KEEPS_GRAPH or self.units[0].calls_open > 1
            self._seen, self._passed = set(), set()
            if unit is not self.units[0]:  # its output is also the output of the root
                self._before_backward(self.units[0])
        elif kind is Pass.KEEPS_GRAPH:
            self._state = kind
        self._make_whole(unit, may_pass)
        unit.gradients_open = {id(p) for p in unit.trained}

    def _make_whole(self, unit: Unit, may_pass: bool = False) -> None:
        if may_pass or unit not in self._seen:
            self._catch_up(unit, may_pass)
        self._seen.add(unit)
        unit.unshard()
        following = dict(pairwise(self._orders[self._backward])).get(unit)
        if self.prefetch and following is not None and following not in self._seen:
            following.start()

    def _catch_up(self, until: Unit | None = None, may_pass: bool = False) -> None:
        """Take part in gathers of units that this rank skipped, and other ranks may use.

        With `may_pass`, backward (not a recomputed forward in it) has reached `until`, or its end. Units before it get
        no more gradients if none of their calls is open: autograd runs from the last computation to the first.
        """
        for unit in takewhile(lambda one: one is not until, self._orders[self._backward]):
            if unit not in self._seen:
                self._seen.add(unit)
                unit.unshard()
                if not self.sums.held and (self.reshard_after_forward or self._state is not Pass.FORWARD):
                    unit.reshard()
            if may_pass and unit is not self.units[0] and not (until and unit.calls_open):
                self._pass(unit)

    def _pass(self, unit: Unit) -> None:
        if unit not in self._passed and not self.sums.held:
            self._passed.add(unit)
            if unit.trained:
                self.sums.no_more(unit.flats[0])
            unit.reshard()

    def _gradient_is_there(self, unit: Unit, p: nn.Parameter) -> None:
        unit.gradients_open.discard(id(p))
        if not unit.gradients_open:
            self._passed.add(unit)
        self._reshard_if_done(unit)

    def _inputs_are_done(self, unit: Unit, gradients: object) -> None:
        unit.inputs_open -= 1
        self._reshard_if_done(unit)

    def _reshard_if_done(self, unit: Unit) -> None:
        """Reshard after backward: when all parameter gradients exist, and input gradients if they are needed."""
        if unit.is_whole and not unit.gradients_open and not unit.inputs_open and not self.sums.held:
            unit.reshard()
