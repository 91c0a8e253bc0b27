"""Gradients that become sums over ranks: which, and where a step stands; and the naive way to sum them.

g = (1/N) Σ gᵢ is one line of mathematics, and `NaiveGradients` does it in one line of code after backward. What it
shares with the real form (`bucketed_gradients.py`) is everything that can be done wrong: to step before the sums are
there, to send twice, to forget who adds up what.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lib import comm
from lib.data_parallel.buckets import any_gradient
from lib.facts import Fact, clip
from lib.mesh import Group

_FORGOTTEN = (
    "a backward was not followed by finish(): p.grad still holds this rank's own gradients. "
    "Call finish() before optimizer.step(), or wrap all but the last microbatch in no_sync()"
)
_summed = weakref.WeakValueDictionary()  # the parameters whose gradients somebody sums, by id


class State(Enum):
    """What has become of the gradients since they were used up."""

    IDLE = "nothing is new"
    ADDED = "this rank has added to its own, and said that more will come"
    SUMMED = "the sums are there"


class GradientSums:
    """What the naive and the real form share: which parameters, and where a step stands.

    Args:
        facts: of the parameters on this rank. Those that need no gradient are left alone.
        op: `"sum"` where losses have been divided by the global count; `"mean"` where each rank's loss is a mean over
            its own rows, as many on each rank.

    Raises:
        ValueError: unknown op, nothing to train, or a parameter whose gradient somebody else sums already.
    """

    def __init__(self, facts: Iterable[Fact], op: str = "sum") -> None:
        if op not in ("mean", "sum"):
            raise ValueError(f"op={op!r} must be 'mean' or 'sum'")
        self.op = op
        self.facts = {id(fact.parameter): fact for fact in facts if fact.parameter.requires_grad}
        self.trained = [fact.parameter for fact in self.facts.values()]
        if not self.trained:
            raise ValueError("no parameter of this module requires a gradient, so there is nothing to average")
        if any(id(p) in _summed for p in self.trained):
            raise ValueError(
                "another wrapper averages the gradients of this module already, and twice would be wrong; "
                "wrap a copy of it (copy.deepcopy)"
            )
        _summed.update((id(p), p) for p in self.trained)
        self.state = State.IDLE
        self._through = True  # the last backward has come to its end; an exception may have ended it before
        self.syncs = True

    @property
    def begun(self) -> bool:
        """Whether the step's last backward has begun, so that finish() must come next."""
        raise NotImplementedError

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside only adds to p.grad: for all microbatches of a step but the last."""
        if not self._through:
            self.give_up()
        before, self.syncs, self.state = self.syncs, False, State.ADDED
        try:
            yield
        finally:
            self.syncs = before

    def before_forward(self) -> None:
        """A forward that wants gradients begins.

        Raises:
            RuntimeError: sums are under way, and nobody has waited for them.
        """
        if not self._through:
            self.give_up()
        if self.begun:
            raise RuntimeError(_FORGOTTEN)
        if self.state is State.SUMMED:
            self.state = State.IDLE

    def after_forward(self, output: object) -> None:
        """A forward that wants gradients has given this."""

    def give_up(self) -> None:
        """Forget the step: no gradient, no sum. On all ranks."""
        for p in self.trained:
            p.grad = None
        self.state, self._through = State.IDLE, True

    def finish(self) -> None:
        """Return when the sums are there; at once if they are already.

        Call it before any other communication of the same ranks, as they may differ in what they have sent so far. A
        parameter that took no part in this rank's loss counts as zero, and so it does if that holds on every rank.
        """
        raise NotImplementedError

    def has_sums(self) -> bool:
        """Whether the sums are there, and neither a backward nor an optimizer's zero_grad() has come since."""
        return self.state is State.SUMMED and not self.begun and any_gradient(self.trained)

    def check_all_known(self, module: nn.Module) -> None:
        """Raises RuntimeError where a parameter of the module has a gradient that nobody sums."""
        strangers = [p for p in module.parameters() if p.requires_grad and id(p) not in _summed]
        if any(p.grad is not None for p in strangers):
            raise RuntimeError(
                "a parameter was added or unfrozen after the module was wrapped, so nobody averages its gradient; "
                "wrap a copy of the module as it is now (copy.deepcopy)"
            )

    def clip(self, world: Group, max_norm: float) -> Tensor:
        """Scale all gradients so that their joint norm is at most `max_norm`, and return the norm it was.

        Args:
            world: all ranks that have parts of the model. Where all have the same, a group of one: no message.

        Raises:
            RuntimeError: the gradients are not summed yet.
        """
        if self.state is State.ADDED or self.begun:
            raise RuntimeError(
                "clip_gradients() before finish() would clip this rank's own gradient, not the average"
            )
        held = [(g, square) for g, square in self._held() if g is not None]
        # Who holds nothing, or only some of the dtypes, must add a number of the same dtype as the others.
        nothing = sum(p.new_zeros((), dtype=torch.promote_types(p.dtype, torch.float32)) for p in self.trained)
        return clip([g for g, _ in held], [nothing, *(square() for _, square in held)], world, max_norm)

    def _held(self) -> Iterator[tuple[Tensor | None, Callable[[], Tensor]]]:
        """Each gradient that this rank holds, and how its square is counted."""
        for p in self.trained:
            yield p.grad, lambda p=p: self.facts[id(p)].square(p.grad)

    def _gradient_came(self, p: nn.Parameter) -> None:
        """Called from a hook: sums are of dense tensors. And know whether this backward comes to its end."""
        if p.grad.requires_grad:
            raise RuntimeError(
                "backward(create_graph=True) gives gradients with a graph, which a sum over ranks would cut off: use "
                "torch.autograd.grad(..., create_graph=True) for the part that is differentiated again"
            )
        if p.grad.layout is not torch.strided:
            p.grad = p.grad.to_dense()
        if self._through:
            self._through = False
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_is_through)

    def _backward_is_through(self) -> None:
        self._through = True


class NaiveGradients(GradientSums):
    """One all-reduce per parameter, all of them after backward.

    forward, backward: no communication. finish: one all-reduce per tensor, together 2(n−1)/n · Ψ elements per rank.
    """

    def __init__(self, facts: Iterable[Fact], op: str = "sum") -> None:
        super().__init__(facts, op)
        self._own = False  # p.grad is what the last backward has left on this rank
        for p in self.trained:
            p.register_post_accumulate_grad_hook(self._note)

    @property
    def begun(self) -> bool:
        return self._own

    def _note(self, p: nn.Parameter) -> None:
        self._gradient_came(p)
        self._own = self._own or self.syncs

    def give_up(self) -> None:
        super().give_up()
        self._own = False

    @torch.no_grad()
    def finish(self) -> None:
        if self.has_sums():
            return
        for p in self.trained:
            if not p.requires_grad:
                continue  # frozen since
            if p.grad is None:
                p.grad = torch.zeros_like(p)  # no part here, perhaps elsewhere
            group = self.facts[id(p)].sum_over
            with comm.label("gradient"):
                p.grad = comm.all_reduce(p.grad, group, self.op)
        self.is_summed()

    def is_summed(self) -> None:
        """p.grad is no longer this rank's own."""
        self._own, self.state = False, State.SUMMED


def with_gradient(values: object) -> list[Tensor]:
    """The tensors that backward goes through, in lists, dicts and objects of any class."""
    found: list[Tensor] = []
    leaves, seen = tree_leaves(values), set()
    while leaves:
        leaf = leaves.pop()
        if isinstance(leaf, Tensor):
            found += [leaf] if leaf.requires_grad else []
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, (nn.Module, type)) and id(leaf) not in seen:
            seen.add(id(leaf))
            leaves += tree_leaves(vars(leaf))
    return found
