"""Weight gradients later: backward in two halves.

The problem: backward of a linear layer computes two things. The gradient of its input, ∂x = ∂y · W, is what the layer
before waits for, and through it the rank before. The gradient of its weight, ∂W = ∂yᵀ · x, is wanted by nobody until
the optimizer steps. Autograd computes both before it goes on.
The naive way asks autograd twice, once for the input's gradient and once for the weights'. Then it goes back through
the whole stage twice.
The idea: inside of `DeferWeightGradients` a linear layer's backward computes the first, and puts the second into a
queue, with the two tensors that it needs. Whoever has the queue runs it when there is time. No layer has to know: the
mode is asked by `torch.nn.functional.linear` itself, and a layer with its own backward can ask, too (`queue_here`).

Deferred is what only the optimizer waits for, the gradient of an `nn.Parameter`. All else autograd does at once, as
ever: weights that were made of others (an adapter's sum, a norm of weights, a network's output), as what they were made
of may be asked for sooner; linear layers under `torch.autocast`; and norms and embeddings, which are cheap. Inside of
forward, `torch.autograd.grad` is right for all but a deferred weight itself: it says that it was not used.
Read before: `lib/pipeline/schedules/zero_bubble.py`. Chapter 12 · Qi et al. 2024, section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function
from torch.utils.checkpoint import CheckpointError

_OTHER_TENSORS = (
    "torch.utils.checkpoint has computed this layer again without deferring its weight gradient, and so has kept "
    "other tensors than the first time: give it context_fn=lambda: (nullcontext(), DeferWeightGradients(queue)) with "
    "the same queue, or let the stage do it, Stage(module, recompute=True)"
)
_LEAF = torch.empty((), requires_grad=True)  # whatever autograd goes back to ends in a leaf


class Queue:
    """Weight gradients that are deferred.

    `run()` computes them and adds them to `.grad`, once: in one backward, so that hooks see a weight's whole gradient.
    """

    def __init__(self) -> None:
        self._jobs: list[Callable[[], Tensor]] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def put(self, job: Callable[[], Tensor]) -> None:
        """A job gives a number, whose backward is the work."""
        self._jobs.append(job)

    def run(self) -> None:
        ends = []
        with torch.enable_grad():
            while self._jobs:  # the first one last: autograd begins with what was made last
                ends.append(self._jobs.pop()())
        if ends:
            torch.autograd.backward(ends)


class DeferWeightGradients(TorchFunctionMode):
    """Inside, linear layers defer the gradients of weight and bias.

    For example:

        queue = Queue()
        with DeferWeightGradients(queue):
            y = stage(x)
        y.backward(gradient)  # x.grad is there, weights have none yet
        queue.run()  # now they have

    Args:
        queue: where they are put.
    """

    def __init__(self, queue: Queue) -> None:
        super().__init__()
        self.queue = queue

    def __torch_function__(
        self,
        func: Callable,
        types: tuple,
        args: tuple = (),
        kwargs: dict | None = None,
    ) -> object:
        if func is queue_here:
            return self.queue
        if func is linear:
            return _linear(self.queue, *args, **kwargs or {})
        return func(*args, **kwargs or {})


def queue_here() -> Queue | None:
    """Where weight gradients are deferred to just now, if they are: a layer with its own backward asks in forward."""
    return handle_torch_function(queue_here, ()) if has_torch_function((None,)) else None


def _linear(queue: Queue, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, deferred where nothing but the optimizer waits for its weights' gradients."""
    made = any(w is not None and w.requires_grad and not isinstance(w, nn.Parameter) for w in (weight, bias))
    return linear(input, weight, bias) if made else linear_later(queue, input, weight, bias)


def linear_later(queue: Queue, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x · Wᵀ + b; weights that want a gradient get it later, and so does what they were made of, if they were.

    That must be nothing whose gradient is needed before.
    """
    trains = torch.is_grad_enabled() and any(w is not None and w.requires_grad for w in (weight, bias))
    if not trains or weight.dim() < 2 or torch.is_autocast_enabled(x.device.type):
        return linear(x, weight, bias)
    zero = _Later.apply(_LEAF, x.detach(), (weight, bias), queue)
    return _Linear.apply(x, zero, (weight, bias))


def as_rows(x: Tensor) -> Tensor:
    """x[…, D] → [N, D]."""
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


class _Linear(torch.autograd.Function):
    """x[…, D] · W[F, D]ᵀ + b[F] + 0 → y[…, F].

    `weights` are W and b, hidden from autograd in a tuple. For it, `zero` is in
    their place: it goes back there when it would go back to them, with ∂y.
    """

    @staticmethod
    def forward(ctx, x: Tensor, zero: Tensor, weights: tuple) -> Tensor:
        ctx.weights = weights
        ctx.save_for_backward(weights[0])
        # Without a base, or nobody could work on it in place.
        return linear(x, *weights).detach()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        (kept,), own = _saved(ctx), ctx.weights[0]
        if kept.data_ptr() != own.data_ptr() or kept.stride() != own.stride():
            raise RuntimeError(_OTHER_TENSORS)
        of_x = gradient @ own.conj() if ctx.needs_input_grad[0] else None
        return of_x, gradient, None


def _saved(ctx) -> tuple[Tensor, ...]:
    """What forward has kept, also where an activation checkpoint has computed it again."""
    try:
        return ctx.saved_tensors
    except CheckpointError as error:
        raise RuntimeError(_OTHER_TENSORS) from error


class _Later(torch.autograd.Function):
    """A zero like y[…, F]; its backward puts the weights' gradients off."""

    @staticmethod
    def forward(
        ctx,
        leaf: Tensor,
        x: Tensor,
        weights: tuple,
        queue: Queue,
    ) -> Tensor:
        ctx.weights, ctx.queue = weights, queue
        ctx.save_for_backward(x)
        # Nobody reads it, so it needs no memory.
        return x.new_empty(()).expand(*x.shape[:-1], len(weights[0]))

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        job = partial(_Products.apply, *ctx.weights, gradient, *_saved(ctx))
        ctx.queue.put(job)
        return None, None, None, None


class _Products(torch.autograd.Function):
    """A number whose backward is ∂W = ∂yᵀ · x and ∂b.

    Autograd goes on from there: hooks run, and what a weight was made of gets its part.
    """

    @staticmethod
    def forward(ctx, weight: Tensor, bias: Tensor | None, gradient: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(gradient, x)
        return torch.empty((), device=x.device)

    @staticmethod
    @once_differentiable
    def backward(ctx, _: Tensor) -> tuple:
        gradient, x = ctx.saved_tensors
        of_weight, of_bias, *_ = ctx.needs_input_grad
        rows = as_rows(gradient)
        return rows.T @ as_rows(x).conj() if of_weight else None, rows.sum(0) if of_bias else None, None, None
