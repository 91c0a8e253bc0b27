"""Live and peak bytes of tensors, by kind.

The problem: every technique of this book saves memory. The size of the process does not show it (the allocator keeps
freed memory), and a sum of `p.numel()` shows only the parameters. Activations are larger, and soon freed.
The idea: memory belongs to *storages*, which tensors only reference: a view and an in-place result share the storage of
their source. A `TorchDispatchMode` intercepts each operation; every storage is counted once, and a weak reference
reports when it is freed. The *kind* of a storage is looked up, not stored: storages that parameters, their `.grad` or
optimizer state reference *now* have that kind; all others are activations. Gradients that are views of a bucket, flat
parameters, tied weights and state made in the first step therefore need no special case.

Counted: full storages, in bytes, on all devices together; a storage without owner that existed before (the batch) from
the first operation that uses it. Not counted: memory that a kernel allocates and frees inside one operation
(workspaces), buffers of a communication library, rounding and unused blocks of the allocator, tensors on the meta
device.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
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


class _Counted(weakref.ref):
    """A weak reference to a storage: its `id`, its counted bytes, and its kind if that was given."""

    __slots__ = ("key", "bytes", "kind", "is_real")


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
            lists as `stored` also count as parameters.

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
        self.peak = self.peak_by_kind = _nothing()
        self._total = 0
        self._storages: dict[int, _Counted] = {}
        self._dead: deque[_Counted] = deque()
        self._told: dict[int, _Counted] = {}
        self._latest, self._marks_then = _nothing(), [-1]  # usage and addresses of all owners at the last look
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
            elif hasattr(owner, "state") and hasattr(owner, "param_groups"):
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
            counted = self._told[id(storage)] = self._count(storage)
            counted.kind = kind

    @property
    def live(self) -> Usage:
        """Bytes that are allocated now, by kind."""
        return self._quickly() or self._look_at_all()

    def _look_at_all(self) -> Usage:
        self._forget_the_dead()
        for storage in _alive(self._storages.values()):
            self._count(storage)  # storage.resize_(0), which frees a gathered buffer, is not an operation
        usage = _nothing()
        for counted in self._told.values():
            usage[counted.kind] += counted.bytes
        seen = set(self._told)
        for kind, tensors in self._owned():
            for storage in _storages(tensors):
                usage[kind] += 0 if id(storage) in seen else self._count(storage).bytes
                seen.add(id(storage))
        self._latest, self._marks_then = usage, self._marks()
        return self._with_total(usage)

    def _with_total(self, usage: Usage) -> Usage:
        owned = usage["parameter"] + usage["gradient"] + usage["optimizer"]
        return usage | {"activation": self._total - owned, "total": self._total}

    def _marks(self) -> list[int]:
        """Addresses and sizes of all owned tensors: while they do not change, only the total does."""
        parameters, own, buffers, values = self._held()
        gradients = [0 if (grad := p.grad) is None else _place(grad) for p in parameters + own]
        state = [len(value) if isinstance(value, list) else 1 for value in values]
        return [*map(_place, parameters + own + buffers), *gradients, len(self._told), sum(state)]

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
            self._count(storage)
        self._sample()
        return result

    def _count(self, storage: torch.UntypedStorage) -> _Counted:
        """Add a storage to the total if it is new, or the difference if its size changed."""
        counted = self._storages.get(id(storage))
        if counted is None or counted() is not storage:  # new, or its id belonged to a freed storage
            counted = self._storages[id(storage)] = _Counted(storage, self._dead.append)
            counted.key, counted.bytes, counted.kind = id(storage), 0, None
            counted.is_real = storage.device.type != "meta"
        size_bytes = storage.nbytes() if counted.is_real else 0
        if size_bytes != counted.bytes:
            self._total += size_bytes - counted.bytes
            counted.bytes = size_bytes
        return counted

    def _forget_the_dead(self) -> None:
        """Subtract freed storages. The callback of a weakref cannot: it runs at any time, on any thread."""
        while self._dead:
            counted = self._dead.popleft()
            self._total -= counted.bytes
            for known in (self._storages, self._told):
                if known.get(counted.key) is counted:
                    del known[counted.key]

    def _held(self) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Any]]:
        """Parameters of models, those that only optimizers have, buffers, and the values of optimizer states."""
        modules, optimizers = _alive(self._modules), _alive(self._optimizers)
        models = {id(p): p for module in modules for p in module._parameters.values() if p is not None}
        models |= {id(p): p for p in _alive(self._parameters)}  # also shards, while gathered parameters replace them
        own = {id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}
        buffers = [b for module in modules for b in module._buffers.values() if b is not None]
        values = [value for o in optimizers for entry in o.state.values() for value in entry.values()]
        return list(models.values()), [p for key, p in own.items() if key not in models], buffers, values

    def _owned(self) -> Iterator[tuple[str, list[Tensor]]]:
        """All owned tensors, by kind; a storage has the first kind yielded for it."""
        parameters, own, buffers, values = self._held()
        yield "parameter", parameters + buffers
        yield "gradient", [grad for p in parameters + own if (grad := p.grad) is not None]
        yield "optimizer", [*own, *_tensors(values)]  # LBFGS keeps lists of tensors

    def _sample(self) -> None:
        usage = self.live
        if not self.timeline or usage != self.timeline[-1][1]:
            self.timeline.append((self._now_s(), usage))
            self.peak_by_kind = {kind: max(usage[kind], self.peak_by_kind[kind]) for kind in usage}
            for one in (self, *self._open_phases):
                one.peak = max(one.peak, usage, key=lambda usage: usage["total"])

    def _quickly(self) -> Usage | None:
        """Current usage, if no owner gained or lost a tensor since the last full look; else None."""
        self._forget_the_dead()
        for counted in self._storages.values():
            storage = counted()
            if storage is None or counted.bytes != storage.nbytes() and counted.is_real:
                return None
        return self._with_total(self._latest) if self._marks() == self._marks_then else None

    def _now_s(self) -> float:
        return time.perf_counter() - self.start_s


def _alive(refs: Iterable[weakref.ref]) -> list[Any]:
    return [thing for ref in refs if (thing := ref()) is not None]


def _place(tensor: Tensor) -> int:
    """A value that changes if the tensor references a different storage."""
    plain = type(tensor) is Tensor or type(tensor) is nn.Parameter
    return tensor.data_ptr() if plain and tensor.layout is torch.strided else id(tensor)


def _nothing() -> Usage:
    return dict.fromkeys((*KINDS, "total"), 0)


def _tensors(values: Any) -> Iterator[Tensor]:
    """The tensors among an operation's arguments and results."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """The storages of tensors: several of one that wraps others, none of one that is sparse."""
    for tensor in tensors:
        plain = type(tensor) is Tensor or type(tensor) is nn.Parameter  # checked first: the other check is slow
        if not plain and is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            yield from _storages(_tensors([getattr(tensor, name) for name in names]))
        elif tensor.layout is torch.strided:
            yield tensor.untyped_storage()
