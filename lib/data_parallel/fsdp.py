"""ZeRO-3: each rank keeps one n-th of everything, and collects a layer only to compute with it.

The problem: ZeRO-2 still keeps all parameters on every rank, 2 of 16 bytes a parameter, so that a model cannot be
larger than one device.
The idea: a layer's parameters are needed twice in a step, for its forward and for its backward. Between those moments
n−1 of n parts can live elsewhere. A *unit*, such as a block, is one flat tensor of which a rank keeps its shard; an
all-gather makes it whole (unshard), and its memory is given back when the layer is done (reshard). While a unit
computes, the next one is already on its way.

    forward    for each unit: unshard, compute, reshard
    backward   for each unit, from the last: unshard, compute, reduce-scatter its gradients, reshard
    step       on the shard. Nothing to send.

That is 3(n−1)/n · Ψ: all parameters twice, all gradients once.

PyTorch calls it FSDP; it is used like the other stages:

    model = FSDP(GPT(config), group, partial(torch.optim.AdamW, lr=3e-4))

Source: Rajbhandari et al., ZeRO, SC 2020, arXiv 1910.02054, sections 5.3 and 7.2.2; Zhao et al., PyTorch FSDP,
VLDB 2023, arXiv 2304.11277.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from lib import comm
from lib.data_parallel.flat import Flat, MakeOptimizer
from lib.data_parallel.zero import ZeRO2
from lib.launch import device
from lib.mesh import Group

Initialise = Callable[[str, Tensor], None]


class FSDP(ZeRO2):
    """Parameters, gradients and optimizer state sharded.

    forward: one all-gather per unit. backward: one all-gather and one reduce-scatter per unit. step: nothing.
    Together 3(n−1)/n · Ψ elements per rank (and padding, less than n a unit); 2(n−1)/n · Ψ if units stay whole from
    forward to backward.

    A rank keeps Ψ/n of everything: in float32 with Adam 16Ψ/n bytes, and in bfloat16 with master weights just as
    many. While it computes, the root, the unit at work and the next one are whole, with one unit's gradients.

    Outside of its forward and backward a parameter reads NaN: it is elsewhere. `full_state_dict()` collects it.

    Args:
        module: this rank's copy. Its parameters may be on the meta device, where they have no memory: then give
            `init`, and the model is made shard by shard and may be larger than one rank.
        group, optimizer, op, dtype: as for `ZeRO1`.
        units: submodules that are made whole one at a time, in the order in which forward uses them. None takes the
            children of each `nn.ModuleList`. The parameters of none of them, and those that are used outside, too
            (tied weights), form the *root*, which is whole from the beginning of forward, and of backward, to its end.
        reshard_after_forward: False keeps units whole until their backward: fewer bytes on the wire, more in memory.
        prefetch: ask for the next unit before this one computes.
        init: called as init(name, tensor) for each parameter in the order of `named_parameters()`, to fill a whole
            one at a time; all ranks get what rank 0 has drawn.

    Raises:
        ValueError: units that hold one another, or that mix dtypes or devices; a model on the meta device without
            `init`, or with buffers.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        optimizer: MakeOptimizer,
        units: Iterable[nn.Module] | None = None,
        op: str = "mean",
        dtype: torch.dtype | None = None,
        reshard_after_forward: bool = True,
        prefetch: bool = True,
        init: Initialise | None = None,
    ) -> None:
        self.reshard_after_forward, self.prefetch, self._init = reshard_after_forward, prefetch, init
        self._unit_modules = default_units(module) if units is None else list(units)
        self._backward = False  # between the first gradient of an output and finish()
        if any(p.is_meta for p in module.parameters()):
            leave_meta(module, init)
        super().__init__(module, group, optimizer, op, dtype=dtype)
        frozen = [flat for flat in self._flats() if flat not in self.buckets]
        self.frozen = nn.ParameterList(x for flat in frozen for x in (flat.whole, flat.shard))
        for unit in self.units:
            unit.module.register_forward_pre_hook(partial(self._before_forward, unit), with_kwargs=True)
            unit.module.register_forward_hook(lambda _, args, output, unit=unit: self._after_forward(unit, output))

    def _start_equal(self) -> None:
        if self._init is None:
            return super()._start_equal()
        for x in self.module.buffers():  # of parameters, all get what is drawn
            x.copy_(comm.broadcast(x, self.group))

    @torch.no_grad()
    def _make_buckets(self) -> list[Flat]:
        self.units = []
        for module, named in split_units(self.module, self._unit_modules):
            trained = {name: p for name, p in named.items() if p.requires_grad}
            frozen = {name: p for name, p in named.items() if not p.requires_grad}
            for p in frozen.values():  # nobody needs them in full precision
                p.data = p.data.to(self.dtype or p.dtype)
            flats = [Flat(some, self.group, self.dtype, False, False) for some in (trained, frozen) if some]
            self.units.append(Unit(module, flats, self.group))
        self._fill()
        for unit in self.units:
            unit.reshard()
        root, *others = self.units
        backward = [root, *others[::-1]]
        self._follows = {"forward": dict(pairwise(self.units)), "backward": dict(pairwise(backward))}
        self._unit_of = {id(p): unit for unit in self.units for p in unit.trained}
        return [unit.flats[0] for unit in (*backward[1:], root) if unit.trained]

    def _fill(self) -> None:
        where = {name: flat for flat in self._flats() for name in flat.names}
        for name, p in self.module.named_parameters():
            values = p
            if self._init is not None:
                values = torch.empty_like(p, memory_format=torch.contiguous_format)
                self._init(name, values)
                values = comm.broadcast(values, self.group)
            where[name].load(name, values)

    def _flats(self) -> list[Flat]:
        return [flat for unit in self.units for flat in unit.flats]

    def _publish(self) -> None:
        """Nobody is told of new parameters: whoever needs them collects them."""
        for unit in self.units:  # an exception may have left one whole
            unit.reshard()

    @torch.no_grad()
    def finish(self) -> None:
        super().finish()
        self._backward = False
        for unit in self.units:  # what backward did not go through
            unit.inputs_open = 0
            unit.reshard()

    # ---- when units become whole ------------------------------------------------------------------------------------

    def _before_forward(self, unit: Unit, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if unit is self.units[0]:
            self._backward = False
        if self._backward:  # an activation checkpoint computes forward again
            self._before_backward(unit)
        else:
            self._make_whole(unit, "forward")
        waits = self._backward and unit.inputs_open  # already, on what was given the first time
        inputs = _with_gradient((args, kwargs)) if unit.has_frozen and torch.is_grad_enabled() and not waits else []
        if inputs:
            unit.inputs_open += 1
            register_multi_grad_hook(inputs, partial(self._inputs_are_done, unit), mode="all")

    def _after_forward(self, unit: Unit, output: object) -> None:
        if self._backward:
            return
        outputs = _with_gradient(output)
        if outputs:
            when_backward_comes = partial(self._before_backward, unit)
            register_multi_grad_hook(outputs, when_backward_comes, mode="any")
        if self.reshard_after_forward or not outputs:
            self._let_go(unit)

    def _let_go(self, unit: Unit) -> None:
        """The root takes along what was asked for and not used."""
        for one in self.units if unit is self.units[0] else [unit]:
            one.reshard()

    def _before_backward(self, unit: Unit, gradient: Tensor | None = None) -> None:
        self._backward = True
        self._make_whole(unit, "backward")
        unit.gradients_open = {id(p) for p in unit.trained}

    def _make_whole(self, unit: Unit, direction: str) -> None:
        unit.unshard()
        if self.prefetch and unit in self._follows[direction]:
            self._follows[direction][unit].start()

    def _gradient_is_there(self, bucket: Flat, i: int, p: nn.Parameter) -> None:
        super()._gradient_is_there(bucket, i, p)
        unit = self._unit_of[id(p)]
        unit.gradients_open.discard(id(p))
        unit.reshard_if_done()

    def _inputs_are_done(self, unit: Unit, gradients: object) -> None:
        unit.inputs_open -= 1
        unit.reshard_if_done()


class Unit:
    """Parameters that become whole together: one flat of those that are trained, one of those that are frozen."""

    def __init__(self, module: nn.Module, flats: list[Flat], group: Group) -> None:
        self.module, self.flats, self.group = module, flats, group
        self.trained = [p for flat in flats for p in flat.params if p.requires_grad]
        self.has_frozen = any(not p.requires_grad for flat in flats for p in flat.params)
        self.is_whole = False
        self.gradients_open: set[int] = set()  # parameters whose gradient backward still owes
        self.inputs_open = 0  # calls whose inputs still wait for their gradient, as frozen layers show no other end
        self._coming: list[comm.Pending] = []

    def start(self) -> None:
        """Ask for the shards of the others."""
        if self.is_whole or self._coming:
            return
        with comm.label("unshard"):
            for flat in self.flats:
                shard, whole = flat.shard, flat.whole
                whole.untyped_storage().resize_(whole.nbytes)
                pending = comm.all_gather_start(shard, self.group, out=whole)
                self._coming.append(pending)

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


def leave_meta(module: nn.Module, init: Initialise | None) -> None:
    """Put stand-ins on this rank's device in the place of parameters on the meta device."""
    if init is None:
        raise ValueError(
            "this model is on the meta device, so its parameters have no values: give init=, a function of name and "
            "tensor that fills the tensor"
        )
    buffers = [name for name, x in module.named_buffers() if x.is_meta]
    if buffers:
        raise ValueError(
            f"buffer {buffers[0]} is on the meta device; make buffers on a real one, as init= fills parameters"
        )
    made: dict[int, nn.Parameter] = {}
    for one in module.modules():
        for name, p in one._parameters.items():
            if p is not None:
                like = torch.empty(0, dtype=p.dtype, device=device())
                one._parameters[name] = made.setdefault(
                    id(p), nn.Parameter(stand_in(like, p.shape), requires_grad=p.requires_grad)
                )


def _with_gradient(values: object) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor) and x.requires_grad]
