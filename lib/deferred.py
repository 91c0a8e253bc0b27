"""Defer weight gradients: backward in two halves.

The problem: backward of a linear layer computes two gradients. The previous layer, and through it the previous rank,
waits for the input gradient ∂x = ∂y · W. The weight gradient ∂W = ∂yᵀ · x is not needed before the optimizer step.
Autograd computes both before it continues; calling it twice traverses the stage twice.
The idea: inside `DeferWeightGradients`, backward of a linear layer computes the input gradient, and puts the weight
gradient into a queue, which its owner runs later. Layers do not change: `torch.nn.functional.linear` calls the mode,
and a layer with its own backward can use `queue_here`.

Only gradients of an `nn.Parameter` are deferred, because only the optimizer needs them. Autograd computes all others
immediately: of weights computed from other tensors (an adapter, a weight norm, the output of a network), whose
gradients may be needed sooner; of linear layers under `torch.autocast`; and of norms and embeddings, which are cheap.
Inside forward, `torch.autograd.grad` is right for all tensors except a deferred weight, which it reports as unused.

Source: Qi et al. 2024, section 2.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function
from torch.utils.checkpoint import CheckpointError

_OTHER_TENSORS = (
    "torch.utils.checkpoint recomputed this layer without deferring its weight gradient, and so kept "
    "other tensors than the first time: give it context_fn=lambda: (nullcontext(), DeferWeightGradients(queue)) with "
    "the same queue, or use Stage(module, recompute=True)"
)
_LEAF = torch.empty((), requires_grad=True)  # every graph of autograd ends in a leaf


class Queue:
    """Deferred weight gradients. `run()` computes them in one backward: hooks get the full gradient of a weight."""

    def __init__(self) -> None:
        self._jobs: list[Callable[[], Tensor]] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def put(self, job: Callable[[], Tensor]) -> None:
        """Add a job: it returns a scalar whose backward computes the gradients."""
        self._jobs.append(job)

    def run(self) -> None:
        ends = []
        with torch.enable_grad():
            while self._jobs:  # in reverse: autograd begins with the last tensor that was made
                ends.append(self._jobs.pop()())
        if ends:
            torch.autograd.backward(ends)


class DeferWeightGradients(TorchFunctionMode):
    """Inside, linear layers put the gradients of weight and bias into a queue:

        queue = Queue()
        with DeferWeightGradients(queue):
            y = stage(x)
        y.backward(gradient)  # x.grad exists
        queue.run()

    Until it is run, weights have no .grad.
    """

    def __init__(self, queue: Queue) -> None:
        super().__init__()
        self.queue = queue

    def __torch_function__(
        self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if func is queue_here:
            return self.queue
        if func is linear:
            return _linear(self.queue, *args, **kwargs or {})
        return func(*args, **kwargs or {})


def queue_here() -> Queue | None:
    """The current queue, or None; a layer with its own backward calls this in forward."""
    return handle_torch_function(queue_here, ()) if has_torch_function((None,)) else None


def _linear(queue: Queue, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, with deferred weight gradients if only the optimizer needs them."""
    made = any(w is not None and w.requires_grad and not isinstance(w, nn.Parameter) for w in (weight, bias))
    return linear(input, weight, bias) if made else linear_later(queue, input, weight, bias)


def linear_later(queue: Queue, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x · Wᵀ + b with deferred gradients of the weights, and of what they were made of: none is needed earlier."""
    trains = torch.is_grad_enabled() and any(w is not None and w.requires_grad for w in (weight, bias))
    if not trains or weight.dim() < 2 or torch.is_autocast_enabled(x.device.type):
        return linear(x, weight, bias)
    zero = _Later.apply(_LEAF, x.detach(), (weight, bias), queue)
    return _Linear.apply(x, zero, (weight, bias))


def weight_gradients(gradient: Tensor, x: Tensor, of_weight: bool, of_bias: bool) -> tuple[Tensor | None, ...]:
    """∂W = ∂yᵀ · x and ∂b = Σ ∂y of a linear layer, from ∂y[…, F] and x[…, D]; None where it is not wanted."""
    rows, x_rows = (tensor.flatten(0, -2) if tensor.dim() > 1 else tensor.unsqueeze(0) for tensor in (gradient, x))
    return rows.T @ x_rows.conj() if of_weight else None, rows.sum(0) if of_bias else None


class _Linear(torch.autograd.Function):
    """x[…, D] · W[F, D]ᵀ + b[F] + 0 → y[…, F].

    `weights` are W and b, hidden from autograd in a tuple. `zero` takes their place in the graph: its backward gets ∂y.
    """

    @staticmethod
    def forward(ctx, x: Tensor, zero: Tensor, weights: tuple) -> Tensor:
        ctx.weights = weights
        ctx.save_for_backward(weights[0])
        # Without a base, or it could not be changed in place.
        return linear(x, *weights).detach()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        (kept,), own = _saved(ctx), ctx.weights[0]
        if kept.data_ptr() != own.data_ptr() or kept.stride() != own.stride():
            raise RuntimeError(_OTHER_TENSORS)
        of_x = gradient @ own.conj() if ctx.needs_input_grad[0] else None
        return of_x, gradient, None


def _saved(ctx) -> tuple[Tensor, ...]:
    """The tensors saved by forward, also if an activation checkpoint recomputed them."""
    try:
        return ctx.saved_tensors
    except CheckpointError as error:
        raise RuntimeError(_OTHER_TENSORS) from error


class _Later(torch.autograd.Function):
    """A zero like y[…, F]; its backward defers the weight gradients."""

    @staticmethod
    def forward(ctx, leaf: Tensor, x: Tensor, weights: tuple, queue: Queue) -> Tensor:
        ctx.weights, ctx.queue = weights, queue
        ctx.save_for_backward(x)
        # It is never read, so it needs no memory.
        return x.new_empty(()).expand(*x.shape[:-1], len(weights[0]))

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        ctx.queue.put(partial(_Products.apply, *ctx.weights, gradient, *_saved(ctx)))
        return None, None, None, None


class _Products(torch.autograd.Function):
    """A scalar whose backward computes ∂W = ∂yᵀ · x and ∂b.

    Autograd continues from there: hooks run, and tensors that a weight was computed from get their gradients.
    """

    @staticmethod
    def forward(ctx, weight: Tensor, bias: Tensor | None, gradient: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(gradient, x)
        return torch.empty((), device=x.device)

    @staticmethod
    @once_differentiable
    def backward(ctx, _: Tensor) -> tuple:
        return *weight_gradients(*ctx.saved_tensors, *ctx.needs_input_grad[:2]), None, None
