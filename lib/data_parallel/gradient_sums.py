"""Gradients that are summed over ranks: the state of a step, and the checks against wrong use.

How they are summed is in `bucketed_gradients.py`, and in its simplest form in `book/trials/unbucketed.py`.
"""

import gc
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import NoReturn

import torch
from torch import Tensor, nn

from lib.clip import clip
from lib.facts import Fact
from lib.mesh import Group

_summed = weakref.WeakValueDictionary()  # the parameters whose gradients are summed, by id


class State(Enum):
    """State of the gradients since the last step."""

    IDLE = "nothing is new"
    ADDED = "this rank added its own, and more will follow"
    SUMMED = "the sums have arrived"


class GradientSums:
    """Base of all ways to sum: the parameters, and the state of a step.

    Args:
        facts: facts of the parameters on this rank; those that need no gradient are ignored.
        op: `"sum"` or `"mean"`, as for `BucketedDDP`.

    Attributes:
        begun: whether the step's last backward has begun, so that finish() must come next.

    Raises:
        ValueError: unknown op, or a parameter whose gradient a different object already sums.
    """

    begun: bool

    def __init__(self, facts: Iterable[Fact], op: str = "sum") -> None:
        if op not in ("mean", "sum"):
            raise ValueError(f"op={op!r} must be 'mean' or 'sum'")
        self.op = op
        self.facts = {id(fact.parameter): fact for fact in facts if fact.parameter.requires_grad}
        self.trained = [fact.parameter for fact in self.facts.values()]
        if any(id(p) in _summed for p in self.trained):
            raise ValueError(
                "a different wrapper already averages the gradients of this module, and twice would be wrong; "
                "wrap a copy of it (copy.deepcopy)"
            )
        _summed.update((id(p), p) for p in self.trained)
        self.state = State.IDLE
        self._backward_ended = True  # the last backward ended; an exception may have ended it early
        self.syncs = True

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a wrapped model cannot be copied or pickled, because no rank would sum the copy's gradients: wrap a copy "
            "of its module (copy.deepcopy(model.module)), or save its state_dict"
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside only adds to p.grad: for all microbatches of a step but the last."""
        if not self._backward_ended:
            self.give_up()
        self.forget_cleared()
        before, self.syncs, self.state = self.syncs, False, State.ADDED
        try:
            yield
        finally:
            self.syncs = before

    def before_forward(self) -> None:
        """Note that a forward with gradients begins.

        Raises:
            RuntimeError: sums are in flight, and finish() was not called.
        """
        if not self._backward_ended:
            self.give_up()
        self.forget_cleared()
        if self.begun:
            raise RuntimeError(
                "a backward was not followed by finish(): p.grad still holds this rank's own gradients. "
                "Call finish() before optimizer.step(), or wrap all but the last microbatch in no_sync()"
            )
        if self.state is State.SUMMED:
            self.state = State.IDLE

    def after_forward(self, output: object) -> None:
        """Note the output of a forward with gradients."""

    def forget_cleared(self) -> None:
        """Drop the gradients that the user cleared where p.grad is not the gradient itself; all ranks must call it."""

    def give_up(self) -> None:
        """Drop the gradients and sums of this step; all ranks must call it."""
        for p in self.trained:
            p.grad = None
        self.state, self._backward_ended = State.IDLE, True

    def finish(self) -> None:
        """Return when the sums have arrived; immediately if they already have. See `DataParallel.finish`."""
        raise NotImplementedError

    @property
    def arrived(self) -> bool:
        """Whether the sums have arrived, with no backward and no step since."""
        return self.state is State.SUMMED and not self.begun

    def check_summed(self, what: str) -> None:
        """Raise RuntimeError if the sums have not arrived, or a step already used them."""
        if not self.arrived:
            raise RuntimeError(
                f"{what} has no averaged gradient to work on: each step needs forward, backward() and finish() first"
            )

    def use(self) -> None:
        """Note that a step uses the sums, once; RuntimeError if there are none."""
        self.forget_cleared()
        self.check_summed("step()")
        self.state = State.IDLE

    def check_all_known(self, module: nn.Module) -> None:
        """Raise RuntimeError if a parameter of the module has a gradient that is not summed."""
        if any(p.grad is not None and p.requires_grad and id(p) not in _summed for p in module.parameters()):
            raise RuntimeError(
                "a parameter was added or unfrozen after the module was wrapped, so its gradient is not averaged; "
                "wrap a copy of the module as it is now (copy.deepcopy)"
            )

    def clip(self, world: Group, max_norm: float) -> Tensor:
        """Scale all gradients so that their joint norm is at most `max_norm`, and return the norm before scaling.

        Args:
            world: all ranks that hold shards of the model; a group of one, with no message, if each holds all of it.

        Raises:
            RuntimeError: the gradients are not summed yet.
        """
        self.forget_cleared()
        if self.state is State.ADDED or self.begun:
            raise RuntimeError(
                "clip_gradients() before finish() would clip this rank's own gradient, not the average"
            )
        held = list(self._held())
        return clip([gradient for gradient, _ in held], [square for _, square in held], world, max_norm)

    def _held(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each gradient on this rank, and its share of the squared norm."""
        return squares_of(self.trained, self.facts)

    def backward_begins(self) -> None:
        """Note that autograd has a gradient: the first of a backward must not be added to one that was cleared."""
        if self._backward_ended:
            self.forget_cleared()

    def gradient_came(self, p: nn.Parameter) -> None:
        """Make the gradient of a hook dense, and register a callback for the end of this backward."""
        if p.grad.requires_grad:
            raise RuntimeError(
                "backward(create_graph=True) gives gradients with a graph, which a sum over ranks would cut off: use "
                "torch.autograd.grad(..., create_graph=True) for the part that is differentiated again"
            )
        if p.grad.layout is not torch.strided:
            p.grad = p.grad.to_dense()
        if self._backward_ended:
            self._backward_ended = False
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._backward_ended = True


def any_gradient(params: Iterable[nn.Parameter]) -> bool:
    """Whether any parameter has a gradient that is not all zeros."""
    return any(p.grad is not None and bool(p.grad.any()) for p in params)


def squares_of(params: Iterable[nn.Parameter], facts: dict[int, Fact]) -> Iterator[tuple[Tensor, Tensor]]:
    """The gradient of each parameter that has one, and this rank's share of its square."""
    return ((p.grad, facts[id(p)].square(p.grad)) for p in params if p.grad is not None)


def with_gradient(values: object) -> list[Tensor]:
    """All tensors with gradients in a nested output, in any container: what Python's garbage collector finds in it."""
    tensors, left, seen = [], [values], set()
    while left:
        value = left.pop()
        is_globals = isinstance(value, dict) and "__name__" in value
        if id(value) in seen or is_globals or isinstance(value, (nn.Module, type)):
            continue
        seen.add(id(value))
        if not isinstance(value, Tensor):
            left += gc.get_referents(value)
        elif value.requires_grad:
            tensors.append(value)
    return tensors
