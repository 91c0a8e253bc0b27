"""Placeholders: tensors with a shape and a dtype whose values are elsewhere, in a bucket or on other ranks.

The problem: a loop written for PyTorch looks for a gradient in `p.grad` and for values in `p`: it clips, skips a step,
averages weights, saves. With sharding they are elsewhere. A None or a NaN in their place is a calm answer:
`clip_grad_norm_` returns 0 and clips nothing, and a saved model is full of NaN.
The idea: a placeholder has the shape, the dtype and the device, and a gradient's placeholder can be cleared, in each of
the ways in which PyTorch clears gradients. Whatever would read or write values raises an error that says what to call
instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

# Attributes that give access to values; all others describe a tensor.
_VALUES = frozenset("data T mT H mH real imag".split())
_DESCRIBES = frozenset(
    "size dim ndimension numel nelement nbytes element_size stride storage_offset get_device data_ptr untyped_storage "
    "register_hook register_post_accumulate_grad_hook requires_grad_ empty_like zeros_like ones_like full_like "
    "rand_like randn_like new_empty new_zeros new_ones new_full new_tensor __len__ __hash__".split()
)

GRADIENT_OF_A_SHARD = (
    "{} has no gradient to read or write here: it is in a bucket, and this rank keeps a shard of the sum over all "
    "ranks. Call finish(), then clip_gradients(max_norm) and step() of the wrapper instead of clip_grad_norm_, a "
    "GradScaler or optimizer.step(); zero_grad() drops it"
)
GRADIENT_IN_FLIGHT = (
    "the gradient of {} is not averaged yet: call finish() before optimizer.step(), clip_gradients(max_norm) or "
    "anything else that uses p.grad"
)
SHARDED = (
    "no rank holds the full parameters of this model, so they cannot be read or written here ({}): full_state_dict() "
    "gathers them, and load_full_state_dict() shards them"
)
CONVERTED = (
    "{} converted or replaced after the model was wrapped (.to(), .double(), p.data = ...), so gradients or steps "
    "would not reach it: convert the model first, then wrap it"
)
_CONVERT = frozenset("to type double float half bfloat16 cfloat cdouble cpu cuda".split())


class Placeholder:
    """What both kinds have in common: `__torch_function__` sees each function of torch that is called with one."""

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if not _describes(func):
            here = next(x for x in _flat((*args, *(kwargs or {}).values())) if isinstance(x, cls))
            raise RuntimeError(here.refusal(_name(func)))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def refusal(self, what: str) -> str:
        """Why `what`, the name of a function of torch, cannot be called."""
        raise NotImplementedError

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"{type(self).__name__}({str(self.dtype)[6:]}{list(self.shape)})"


class ShardedParameter(Placeholder, nn.Parameter):
    """A parameter whose values are sharded, until its unit is unsharded: it becomes an `nn.Parameter` again."""

    def refusal(self, what: str) -> str:
        return CONVERTED.format("parameters would be") if what in _CONVERT else SHARDED.format(what)


@contextmanager
def with_values(params: Iterable[nn.Parameter], values: Mapping[int, Tensor]) -> Iterator[None]:
    """Inside, parameters have these values, by id, or NaN; and can be read."""
    before = []
    try:
        for p in params:
            its, p.__class__ = type(p), nn.Parameter
            before.append((p, its, p.data))
            p.data = values.get(id(p), p.data)
        yield
    finally:
        for p, its, data in before:
            p.data = data
            p.__class__ = its


class GradientPlaceholder(Placeholder, Tensor):
    """`p.grad` while the gradient of p is elsewhere.

    `zero_()` of it, as in `zero_grad(set_to_none=False)`, is noted in `is_zeroed`.
    """

    is_zeroed = False
    because = ""  # the sentence of its error

    @classmethod
    def of(cls, p: Tensor, memory: Tensor, because: str) -> GradientPlaceholder:
        """For the gradient of p; a view of one element of `memory`, of its dtype and device, which is never read."""
        no_memory = memory.detach().as_strided(p.shape, [0] * p.dim(), memory.storage_offset())
        made = no_memory.as_subclass(cls)
        made.because = because
        return made

    def refusal(self, what: str) -> str:
        return f"{self.because} ({what})"

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = _name(func)
        if name in ("data", "detach", "detach_"):  # as in p.grad.data.zero_()
            return args[0]
        if name == "zero_":
            args[0].is_zeroed = True
            return args[0]
        if name == "_foreach_zero_":
            for x in args[0]:
                x.zero_()
            return None
        return super().__torch_function__(func, types, args, kwargs)


class Placeholders:
    """The placeholders of the gradients of some tensors: a bucket places them, and the user's loop may clear them.

    Args:
        tensors: parameters, or the pieces of them that an optimizer steps.
        names: their names, for errors.
        memory: a tensor of their dtype and device that outlives them. None: their own memory.
        because: sentence of the error, with {} for the name.
    """

    def __init__(
        self, tensors: Sequence[nn.Parameter], names: Iterable[str], because: str, memory: Tensor | None = None
    ) -> None:
        self._tensors = tensors
        self._made = []
        for x, name in zip(tensors, names, strict=True):
            self._made.append(GradientPlaceholder.of(x, x if memory is None else memory, because.format(name)))
        self.placed: set[int] = set()

    def place(self, i: int) -> None:
        """The gradient of tensor i is elsewhere from now on."""
        self._made[i].is_zeroed = False
        self._tensors[i].grad = self._made[i]
        self.placed.add(i)

    def remove(self, i: int) -> None:
        """Take the placeholder of tensor i away, if the user did not."""
        self.placed.discard(i)
        if self._tensors[i].grad is self._made[i]:
            self._tensors[i].grad = None

    def remove_all(self) -> None:
        for i in list(self.placed):
            self.remove(i)

    def gone(self) -> set[int]:
        """The tensors whose placeholder the user took away, as `zero_grad()` does."""
        return {i for i in self.placed if self._tensors[i].grad is not self._made[i]}

    def zeroed(self) -> set[int]:
        """The tensors whose placeholder is there, and was zeroed."""
        return {i for i in self.placed - self.gone() if self._made[i].is_zeroed}


def accumulates(p: nn.Parameter) -> bool:
    """Inside a hook of p: whether this backward adds to p.grad; `torch.autograd.grad` only returns the gradient."""
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(p).node)
    except RuntimeError:  # torch does not answer for a leaf inside autograd.grad
        return False


def _name(func: Callable) -> str:
    """The name of a function or, of a getter or setter, that of its attribute."""
    if func.__name__ in ("__get__", "__set__", "__delete__"):
        return func.__self__.__name__
    return func.__name__


def _describes(func: Callable) -> bool:
    """Whether a function neither reads nor writes values."""
    if func.__name__ in ("__get__", "__set__", "__delete__"):
        return _name(func) not in _VALUES
    asks = func.__name__.startswith(("is_", "_is_")) and func.__name__ != "is_nonzero"  # as torch.compile does
    return asks or func.__name__ in _DESCRIBES


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value
