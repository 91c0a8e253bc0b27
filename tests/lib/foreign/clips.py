"""How users clip gradients: each function scales them to a largest norm, and returns the norm that they had."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def by_torch(net: nn.Module, largest: float) -> Tensor:
    """torch sums over the ranks where the gradients are DTensors, all on one mesh."""
    norm = nn.utils.clip_grad_norm_(net.parameters(), largest, foreach=False)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def of_full(net: nn.Module, largest: float) -> Tensor:
    """Where some gradients are DTensors and others are not."""
    gradients = [p.grad for p in net.parameters()]
    full = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
    return scale(net, largest, sum(map(square, full)))


def by_hand(copies: Callable[[str], int], group: dist.ProcessGroup) -> Callable[[nn.Module, float], Tensor]:
    """For gradients of which each rank of a group has shards, and `copies(name)` ranks have the same."""

    def clip(net: nn.Module, largest: float) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for name, p in net.named_parameters():
            if p.grad is not None:
                total += square(p.grad) / copies(name)
        dist.all_reduce(total, group=group)
        return scale(net, largest, total)

    return clip


def square(gradient: Tensor) -> Tensor:
    return gradient.double().square().sum()


def scale(net: nn.Module, largest: float, total: Tensor) -> Tensor:
    norm = total.sqrt()
    factor = min(1.0, largest / (norm.item() + 1e-6))
    for p in net.parameters():
        if p.grad is not None:
            p.grad.mul_(factor)
    return norm
