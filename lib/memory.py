"""Live and peak bytes of tensors, by kind.

The problem: every technique of this book saves memory. The size of the process does not show it (the allocator keeps
freed memory), and a sum of `p.numel()` shows only the parameters. Activations are larger, and soon freed.
The idea: memory belongs to *storages*, which tensors only reference: a view and an in-place result share the storage of
their source. A `TorchDispatchMode` intercepts each operation, and every storage is counted once while it lives. The
*kind* of a storage is looked up, not stored: storages that parameters, their `.grad` or optimizer state reference *now*
have that kind; all others are activations. Gradients that are views of a bucket, flat parameters, tied weights and
state made in the first step therefore need no special case.

Counted: full storages, in bytes, on all devices together; a storage without owner that existed before (the batch) from
the first operation that uses it. Not counted: memory that a kernel allocates and frees inside one operation
(workspaces), buffers of a communication library, rounding and unused blocks of the allocator, tensors on the meta
device.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

KINDS = ("parameter", "gradient", "optimizer", "activation")
Usage = dict[str, int]  # bytes of each of KINDS, and "total"


@dataclass
class Phase:
    """A named interval with its peak; times as in the timeline."""

    name: str
    start_s: float
    end_s: float
    peak: Usage


class MemoryTracker(TorchDispatchMode):
    """Counts tensor bytes while it is entered. For example:

        with MemoryTracker(model, optimizer) as memory:
            with memory.phase("forward"):
                loss = mean_loss(model(tokens), targets)
            loss.backward()
            optimizer.step()
        memory.peak["activation"], memory.phases[0].peak["total"]

    Kinds, the first that fits: "parameter" (a model's parameters and buffers), "gradient" (their `.grad`, and that of
    master weights), "optimizer" (tensors in `state`, and master weights, which only the optimizer holds), "activation"
    (everything else: tensors saved for backward, temporaries, the batch). The tracker keeps no tensor alive. It tracks
    the thread that entered it, and autograd. It may be entered again, and then continues; outside, `live` falls when a
    tensor is freed but does not rise. It slows down a step of a small model dozens of times: track a step or two.

    Args:
        owners: any number of models and optimizers (objects with `state` and `param_groups`). Tensors that a module
            lists as `stored` also count as parameters, and an optimizer that it has as `optimizer`, such as `ZeRO1`,
            belongs to it.

    Attributes:
        peak: usage at the time of the highest total.
        peak_by_kind: the highest of each kind, possibly at different times.
        timeline: (time_s, usage) whenever the usage changed, in seconds since `start_s`.
        phases: one `Phase` per finished `with memory.phase(name)`.
        start_s: `time.perf_counter()` when the tracker was made.

    Raises:
        TypeError: an owner is neither a model nor an optimizer.
    """

    def __init__(self, *owners: Any) -> None:
        super().__init__()
        self.start_s = time.perf_counter()
        self.timeline: list[tuple[float, Usage]] = []
        self.phases: list[Phase] = []
        self.peak = self.peak_by_kind = dict.fromkeys((*KINDS, "total"), 0)
        self._known: MutableMapping[torch.UntypedStorage, str | None] = weakref.WeakKeyDictionary()  # kind, if given
        self._open_phases: list[Phase] = []
        self._modules: list[weakref.ref[nn.Module]] = []
        self._parameters: list[weakref.ref[Tensor]] = []
        self._optimizers: list[weakref.ref[Any]] = []
        self.watch(*owners)

    def watch(self, *owners: Any) -> None:
        """Add models (with their current modules) and optimizers, such as those made inside the `with`."""
        for owner in owners:
            if isinstance(owner, nn.Module):
                self._modules += [weakref.ref(module) for module in owner.modules()]
                stored = [x for module in owner.modules() for x in getattr(module, "stored", ())]
                self._parameters += [weakref.ref(p) for p in (*owner.parameters(), *stored)]
                own = (getattr(module, "optimizer", None) for module in owner.modules())
                self._optimizers += [weakref.ref(optimizer) for optimizer in own if _is_optimizer(optimizer)]
            elif _is_optimizer(owner):
                self._optimizers.append(weakref.ref(owner))
            else:
                name = type(owner).__name__
                raise TypeError(f"{name} is neither a model nor an optimizer; for tensors use count_as(kind, tensor)")

    def count_as(self, kind: str, *tensors: Tensor) -> None:
        """Set the kind of the storages of these tensors, such as shards that a technique keeps in a list.

        Raises:
            ValueError: no such kind.
        """
        if kind not in KINDS:
            raise ValueError(f"there is no kind {kind!r}; use one of {', '.join(KINDS)}")
        for storage in _storages(tensors):
            self._known[storage] = kind

    @property
    def live(self) -> Usage:
        """Bytes that are allocated now, by kind."""
        kinds = dict(self._known.items())
        for kind, tensors in self._owned():
            for storage in _storages(tensors):
                if storage not in kinds:
                    self._known[storage] = None  # it still counts when it has no owner
                kinds[storage] = kinds.get(storage) or kind
        usage = dict.fromkeys(KINDS, 0)
        for storage, kind in kinds.items():
            usage[kind or "activation"] += storage.nbytes()  # 0 after resize_(0), which frees a gathered buffer
        return usage | {"total": sum(usage.values())}

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Name a phase, for figures, and record its peak. Phases may be nested."""
        self._sample()
        phase = Phase(name, self._now_s(), self._now_s(), self.live)
        self._open_phases.append(phase)
        try:
            yield phase
        finally:
            self._sample()
            phase.end_s = self._now_s()
            self.phases.append(self._open_phases.pop())

    def reset_peak(self) -> None:
        """Clear the peaks so far (of the first step, for example); the timeline stays."""
        self.peak = self.peak_by_kind = self.live

    def __enter__(self) -> MemoryTracker:
        self._sample()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._sample()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(hasattr(cls, "__tensor_flatten__") for cls in types):
            return NotImplemented  # a wrapper such as DTensor calls again, with its inner tensors
        result = func(*args, **(kwargs or {}))
        for storage in _storages(_tensors((args, list((kwargs or {}).values()), result))):
            self._known.setdefault(storage)
        self._sample()
        return result

    def _owned(self) -> Iterator[tuple[str, list[Tensor]]]:
        """All owned tensors, by kind; a storage has the first kind yielded for it."""
        modules, optimizers = _alive(self._modules), _alive(self._optimizers)
        models = {id(p): p for module in modules for p in module._parameters.values() if p is not None}
        models |= {id(p): p for p in _alive(self._parameters)}  # also shards, while gathered parameters replace them
        stepped = {id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}
        own = [p for key, p in stepped.items() if key not in models]
        buffers = [b for module in modules for b in module._buffers.values() if b is not None]
        yield "parameter", [*models.values(), *buffers]
        yield "gradient", [grad for p in (*models.values(), *own) if (grad := p.grad) is not None]
        values = [value for o in optimizers for entry in o.state.values() for value in entry.values()]
        yield "optimizer", [*own, *_tensors(values)]  # LBFGS keeps lists of tensors

    def _sample(self) -> None:
        usage = self.live
        if not self.timeline or usage != self.timeline[-1][1]:
            self.timeline.append((self._now_s(), usage))
            self.peak_by_kind = {kind: max(usage[kind], self.peak_by_kind[kind]) for kind in usage}
            for phase in (self, *self._open_phases):
                phase.peak = max(phase.peak, usage, key=lambda usage: usage["total"])

    def _now_s(self) -> float:
        return time.perf_counter() - self.start_s


def _is_optimizer(thing: Any) -> bool:
    return hasattr(thing, "state") and hasattr(thing, "param_groups")


def _alive(refs: Iterable[weakref.ref]) -> list[Any]:
    return [thing for ref in refs if (thing := ref()) is not None]


def _tensors(values: Any) -> Iterator[Tensor]:
    """The tensors among an operation's arguments and results."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """The storages of tensors: several of one that wraps others, none of one that is sparse or meta."""
    for tensor in tensors:
        plain = type(tensor) is Tensor or type(tensor) is nn.Parameter  # checked first: the other check is slow
        if not plain and is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            yield from _storages(_tensors([getattr(tensor, name) for name in names]))
        elif tensor.layout is torch.strided and (storage := tensor.untyped_storage()).device.type != "meta":
            yield storage
