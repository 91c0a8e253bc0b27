"""ZeRO-3: each rank keeps 1/n of all model states, and all-gathers a layer only while it computes.

The problem: ZeRO-2 still keeps all parameters on every rank, so a model cannot be larger than one device.
The idea: a layer needs its parameters only in its forward and in its backward. A *unit*, such as a block, is one flat
tensor, sharded over the ranks. An all-gather unshards it before the layer computes, its memory is freed afterwards,
and meanwhile the next is prefetched (`units.py`).

    forward    for each unit: unshard, compute, reshard
    backward   for each unit, from the last: unshard, compute, reduce-scatter its gradients, reshard
    step       on the shard. Nothing to send.

PyTorch calls it FSDP. Use it like the other stages:

    model = FSDP(GPT(config), group, partial(torch.optim.AdamW, lr=3e-4))

Source: Rajbhandari et al., ZeRO, SC 2020, arXiv 1910.02054, sections 5.3 and 7.2.2; Zhao et al., PyTorch FSDP,
VLDB 2023, arXiv 2304.11277.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import NoReturn

import torch
from torch import Tensor, nn

from lib import comm
from lib.data_parallel.bucketed_gradients import Gradients
from lib.data_parallel.ddp import broadcast_weights, replicas
from lib.data_parallel.flat import Flat, MakeOptimizer
from lib.data_parallel.placeholders import SHARDED
from lib.data_parallel.units import Unit, UnitSchedule, stand_in
from lib.data_parallel.zero import Sharded, cast_frozen, check_can_be_sharded
from lib.facts import Fact
from lib.launch import device
from lib.mesh import Group, second_lane
from lib.placement import parameter_like

Initialise = Callable[[str, Tensor], None]


class FSDP(Sharded):
    """Parameters, gradients and optimizer state sharded.

    forward: one all-gather per unit. backward: one all-gather and one reduce-scatter per unit. step: nothing. Together
    3(n−1)/n · Ψ elements per rank, all parameters twice and all gradients once (and padding, less than n per unit);
    2(n−1)/n · Ψ if units stay unsharded from forward to backward.

    A rank keeps 1/n of all model states: 16Ψ/n bytes with Adam, in float32 or in bfloat16 with master weights. While it
    computes, it also holds three unsharded units (the root, the current unit and the next) and the gradients of one.

    Outside its forward and backward a parameter cannot be read or written, because only its shard is stored.

    All ranks must run forward and backward equally often, because gathers are collective calls. A forward calls a unit
    once, or not at all, and a backward goes through one forward. A parameter that this rank's loss does not use counts
    as zero; a loss that uses none still needs a gradient (`loss + 0 * inputs.sum()`).

    Args:
        module: the module on this rank, or on the meta device.
        group, optimizer, op, dtype: as for `ZeRO1`.
        units: submodules that are unsharded one at a time, in the order in which forward uses them. None takes the
            children of each `nn.ModuleList`. Parameters in no unit, and parameters that are also used outside their
            unit (tied weights), form the *root*, which stays unsharded during all of forward and of backward.
        reshard_after_forward: False keeps units unsharded until their backward: fewer bytes sent, more memory.
        prefetch: start the all-gather of the next unit before the current unit computes.
        facts: of all parameters, if some are sharded over fewer ranks than the group, such as experts: over the ranks
            of their `sum_over`. Default: all over the group.
        init: called as init(name, tensor) for each parameter in the order of `named_parameters()`, to fill one full
            parameter at a time; all ranks get the values of rank 0.

    Raises:
        ValueError: nested units, or units that mix dtypes or devices; a model on the meta device without `init`, or
            with buffers.

    Attributes:
        units: the root, then the other units.

    Example:
        from functools import partial

        import torch
        from torch import nn

        from lib.data_parallel.fsdp import FSDP

        blocks = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
        model = FSDP(blocks, world, partial(torch.optim.AdamW, lr=3e-4), units=[blocks[0], blocks[2]])
        with model.no_sync():  # for all microbatches but the last
            (model(torch.randn(4, 4)).square().mean() / 2).backward()
        (model(torch.randn(4, 4)).square().mean() / 2).backward()
        model.finish()
        norm = model.clip_gradients(max_norm=1.0)
        model.step()
        assert norm.shape == ()
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
        facts: Sequence[Fact] | None = None,
        init: Initialise | None = None,
    ) -> None:
        check_can_be_sharded(module, optimizer, dtype)
        if any(p.is_meta for p in module.parameters()):
            leave_meta(module, init)
        if facts is None:
            broadcast_weights(module, group, parameters=init is None)  # otherwise `init` fills them
            facts = replicas(module, group, group.size)
        over = {fact.name: fact.sum_over for fact in facts}
        made = make_units(module, default_units(module) if units is None else list(units), over, dtype)
        fill(module, made, group, init)
        root, *others = made
        buckets = [flat for unit in (*others[::-1], root) for flat in unit.trained_flats]
        # Sums have a separate lane: they start when gradients exist, independent of the gather of the next unit.
        lanes = {ranks: second_lane(ranks) for ranks in dict.fromkeys(over.values())}
        of_lanes = [replace(fact, sum_over=lanes[fact.sum_over]) for fact in facts]
        gradients = Gradients(of_lanes, op, each=True, one_at_a_time=True, buckets=buckets)
        super().__init__(module, group, gradients, optimizer, [flat for unit in made for flat in unit.flats])
        self.units, self._schedule = made, UnitSchedule(made, reshard_after_forward, prefetch, gradients)

    def state_dict(self, *args, **kwargs) -> NoReturn:
        """Refused: no rank holds full parameters. Use `full_state_dict()` or `sharded_state_dict()`.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(SHARDED.format("state_dict"))

    def load_state_dict(self, *args, **kwargs) -> NoReturn:
        """Refused, as `state_dict()`: use `load_full_state_dict()` or `load_sharded_state_dict()`.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(SHARDED.format("load_state_dict"))

    def forward(self, *args, **kwargs):
        self._schedule.end_backward()  # first the gathers of the last backward, then its sums
        return super().forward(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._schedule.end_backward()  # each backward ends with the settings it began with
        with super().no_sync():
            yield
            self._schedule.end_backward()

    def finish(self) -> None:
        self._schedule.end_step()
        super().finish()

    def settle(self) -> None:
        for unit in self.units:
            unit.check_untouched()
        super().settle()

    def publish(self) -> None:
        """Send nothing: units gather the new parameters before they compute. Free the old."""
        for unit in self.units:
            unit.reshard()  # an exception may have left a unit unsharded

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._schedule.end_step()
        super().zero_grad(set_to_none)


def make_units(
    module: nn.Module, units: list[nn.Module], over: Mapping[str, Group], dtype: torch.dtype | None
) -> list[Unit]:
    """Make the root, then the units, each with a flat for trained parameters and one per dtype for frozen.

    Args:
        over: name of a parameter → the ranks over which it is sharded; each such group has flats of its own.
    """
    made, nan_of, parts = [], cache(stand_in), split_units(module, units)
    cast_frozen(module, {p.dtype for p in module.parameters() if p.requires_grad}, dtype)
    for one, named in parts:
        kinds: dict[tuple, dict[str, nn.Parameter]] = {}
        for name, p in sorted(named.items(), key=lambda item: not item[1].requires_grad):  # the trained first
            kind = (dtype,) if p.requires_grad else (None, p.dtype, p.device)
            kinds.setdefault((over[name], *kind), {})[name] = p
        flats = [Flat(some, group, cast, False, False) for (group, cast, *_), some in kinds.items()]
        made.append(Unit(one, flats, nan_of))
    return made


def default_units(module: nn.Module) -> list[nn.Module]:
    """The children of each `nn.ModuleList` outside all units; of nested lists, those of the innermost.

    A child in two places is called twice, so it is part of the root.
    """
    units: list[nn.Module] = []
    places = Counter(one for _, one in module.named_modules(remove_duplicate=False))
    inside: set[nn.Module] = set()
    for one in module.modules():  # outer ones first
        if isinstance(one, nn.ModuleList) and one not in inside:
            called = [child for child in one if _has_forward(child) and places[child] == 1]
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
    """In how many places a module has each parameter; a module inside may be in two."""
    every = (one for _, one in module.named_modules(remove_duplicate=False))
    return Counter(id(p) for one in every for p in one._parameters.values() if p is not None)


@torch.no_grad()
def fill(module: nn.Module, units: Sequence[Unit], group: Group, init: Initialise | None) -> None:
    """Keep this rank's shard of each parameter, with one full parameter in memory at a time."""
    where = {name: flat for unit in units for flat in unit.flats for name in flat.names}
    for name, p in module.named_parameters():
        values = p
        if init is not None:
            values = torch.empty_like(p, memory_format=torch.contiguous_format)
            init(name, values)
            values = comm.broadcast(values, group)
        where[name].load(name, values)
    for unit in units:
        unit.reshard()


def leave_meta(module: nn.Module, init: Initialise | None) -> None:
    """Replace parameters on the meta device by stand-ins on this rank's device."""
    if init is None:
        raise ValueError(
            "this model is on the meta device, so its parameters have no values: give init=, a function of name and "
            "tensor that fills the tensor"
        )
    if buffers := [name for name, x in module.named_buffers() if x.is_meta]:
        raise ValueError(
            f"buffer {buffers[0]} is on the meta device; make buffers on a real device, because init= fills parameters"
        )
    made, nan_of = {}, cache(stand_in)
    for one in module.modules():
        for name, p in one._parameters.items():
            if p is not None:
                new = parameter_like(p, nan_of(p.dtype, device()).expand(p.shape))
                one._parameters[name] = made.setdefault(id(p), new)
