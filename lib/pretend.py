"""A layer that takes as long as you like, and needs no processor for it.

The problem: what a cluster does in time cannot be shown on two cores, where eight ranks compute in turns. The idea:
eight ranks can sleep at once. A pretended layer sleeps where a real one would compute. Its parameters, activations and
gradients are real tensors, so that all hooks, schedules and messages around it are the real ones too.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn


class Pretend(nn.Module):
    """x → x + weight[0], and the gradient of each weight is 1.

    Args:
        num_parameters: of its only weight, [num_parameters].
        forward_s, backward_s: how long it sleeps.
    """

    def __init__(self, num_parameters: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_parameters))
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x, self.weight, self.forward_s, self.backward_s)


class Sleep(torch.autograd.Function):
    """x + weight[0], after a while; backward takes its time, too."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.size, ctx.backward_s = weight.shape, backward_s
        time.sleep(forward_s)
        return x + weight[0]

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        time.sleep(ctx.backward_s)
        return gradient, torch.ones(ctx.size), None, None
