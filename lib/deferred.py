"""Weight gradients later: backward in two halves.

The problem: backward of a linear layer computes two things. The gradient of its input, ∂x = ∂y · W, is what the layer
before waits for, and through it the rank before. The gradient of its weight, ∂W = ∂yᵀ · x, is wanted by nobody until
the optimizer steps. Autograd computes both before it goes on.
The naive way asks autograd twice, once for the input's gradient and once for the weights'. Then it goes back through
the whole stage twice.
The idea: inside of `DeferWeightGradients` a linear layer's backward computes the first, and puts the second into a
queue, with the two tensors that it needs. Whoever has the queue runs it when there is time. No layer has to know: the
mode is asked by `torch.nn.functional.linear` itself, and a layer with its own backward can ask, too (`queue_here`).

Norms, embeddings and what else has weights are done at once: they are cheap.
Read before: `lib/pipeline/schedules/zero_bubble.py`. Chapter 12 · Qi et al. 2024, section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

_OTHER_TENSORS = (
    "torch.utils.checkpoint has computed this layer again without deferring its weight gradient, and so has kept "
    "other tensors than the first time: give it context_fn=lambda: (nullcontext(), DeferWeightGradients(queue)) with "
    "the same queue, or let the stage do it, Stage(module, recompute=True)"
)


class Queue:
    """Weight gradients that are deferred.

    `run()` computes them and adds them to `.grad`, once.
    """

    def __init__(self) -> None:
        self._jobs: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def put(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)

    def run(self) -> None:
        while self._jobs:
            self._jobs.pop(0)()


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
        if func is linear and torch.is_grad_enabled():
            return _linear_later(self.queue, *args, **kwargs or {})
        return func(*args, **kwargs or {})


def queue_here() -> Queue | None:
    """Where weight gradients are deferred to just now, if they are: a layer with its own backward asks in forward."""
    return handle_torch_function(queue_here, ()) if has_torch_function((None,)) else None


def _linear_later(
    queue: Queue,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """A linear layer; with weights that want a gradient, it defers that."""
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        # Stand-ins, so that autograd goes past the weights and their makers.
        stand_ins = [w if w is None else _copy(w) for w in (weight, bias)]
        return _Linear.apply(x, *stand_ins, (weight, bias), queue)
    return linear(x, weight, bias)


def _copy(weight: Tensor) -> Tensor:
    """The same numbers, as a leaf of its own."""
    return weight.detach().requires_grad_(weight.requires_grad)


class _Linear(torch.autograd.Function):
    """x[…, D] · W[F, D]ᵀ + b[F] → y[…, F].

    `weights` are W and b themselves, hidden from autograd in a tuple.
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weights: tuple,
        queue: Queue,
    ) -> Tensor:
        ctx.weights, ctx.queue = weights, queue
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple:
        x, weight = ctx.saved_tensors
        mine = ctx.weights[0]
        if (weight.data_ptr(), weight.stride()) != (mine.data_ptr(), mine.stride()):
            raise RuntimeError(_OTHER_TENSORS)
        # Detached, as x would hold what it was made of until the queue is run.
        ctx.queue.put(partial(_go_back, *ctx.weights, gradient, x.detach()))
        of_x = gradient @ weight if ctx.needs_input_grad[0] else None
        return of_x, None, None, None, None


def _go_back(
    weight: Tensor,
    bias: Tensor | None,
    gradient: Tensor,
    x: Tensor,
) -> None:
    """∂W = ∂yᵀ · x and ∂b, and on from there.

    Hooks run, and what a weight was made of gets its part.
    """
    rows = gradient.flatten(0, -2)
    if weight.requires_grad:
        weight.backward(rows.T @ x.flatten(0, -2))
    if bias is not None and bias.requires_grad:
        bias.backward(rows.sum(0))
