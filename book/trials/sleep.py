"""A layer that sleeps for a chosen time instead of computing.

The problem: the timing of a cluster cannot be shown on two cores, on which eight ranks compute in turn. The idea: eight
ranks can sleep at the same time. A `SleepLayer` sleeps where a real layer would compute. Its parameters, activations
and gradients are real tensors, so all hooks, schedules and messages around it are real as well.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from lib.deferred import queue_here


class SleepLayer(nn.Module):
    """x → x + weight[0], and the gradient of each weight is 1.

    Args:
        num_parameters: size of its only weight, [num_parameters].
        forward_s, backward_s: seconds that it sleeps.
        weight_s: additional seconds for the weight gradient, which can be deferred (`lib.deferred`).
    """

    def __init__(self, num_parameters: int, forward_s: float, backward_s: float, weight_s: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_parameters))
        self.forward_s, self.backward_s, self.weight_s = forward_s, backward_s, weight_s

    def forward(self, x: Tensor) -> Tensor:
        queue = queue_here()
        if queue is None:
            return SleepFunction.apply(x, self.weight, self.forward_s, self.backward_s + self.weight_s, None)
        later = partial(queue.put, self._later)
        return SleepFunction.apply(x, self.weight.detach(), self.forward_s, self.backward_s, later)

    def _later(self) -> Tensor:
        return SleepFunction.apply(torch.zeros(()), self.weight, 0.0, self.weight_s, None)


class SleepFunction(torch.autograd.Function):
    """x + weight[0], after a sleep; backward sleeps as well.

    Backward then calls `done`, if given.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, forward_s: float, backward_s: float, done: Callable[[], None] | None
    ) -> Tensor:
        ctx.size, ctx.backward_s, ctx.done = weight.shape, backward_s, done
        time.sleep(forward_s)
        return x + weight[0]

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        time.sleep(ctx.backward_s)
        if ctx.done:
            ctx.done()
        of_weight = torch.ones(ctx.size) if ctx.needs_input_grad[1] else None
        return gradient, of_weight, None, None, None
