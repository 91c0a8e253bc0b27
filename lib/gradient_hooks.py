"""Hooks on the gradients of parameters, where a gradient is a sum over ranks, microbatches or stages.

The problem: a hook runs in backward, and there gets a term of the gradient: of this rank's tokens, of one microbatch.
A hook that clamps then clamps each term, which is not the clamped sum.
The idea: only a linear hook, such as a mask or a factor, gives the same for terms and for their sum, and random
gradients of several sizes tell whether it is linear.
"""

import torch
from torch import Tensor, nn

from lib.layout import Layout


def check_linear_hooks(model: nn.Module, layout: Layout) -> None:
    """Check, before anything changes, that hooks on gradients give the same in this layout as in one process.

    Each is called nine times, with random gradients.

    Raises:
        ValueError: a hook that gets terms of a sum, and is not linear, or runs after the terms are added to `p.grad`.
    """
    if layout.dp * layout.cp * layout.pp * layout.microbatches == 1 and not layout.sequence_parallel:
        return
    for name, p in model.named_parameters():
        if p._post_accumulate_grad_hooks or (p._backward_hooks and not _are_linear(p)):
            kind = "on p.grad" if p._post_accumulate_grad_hooks else "that is not linear"
            raise ValueError(
                f"{name} has a hook {kind}, and here would get a term of the gradient, of some rows, tokens or stages: "
                "change gradients between backward() and update() of the parallel model, or use one process and "
                "microbatches=1"
            )


@torch.no_grad()
def _are_linear(p: nn.Parameter) -> bool:
    """Whether the hooks of a parameter together are linear, on random gradients."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(p.shape, generator=generator, dtype=torch.float32).to(p) for _ in range(2))
    for size in (1e-4, 1.0, 1e4):  # a clamp may be far from 1
        try:
            of_terms, of_sum = _hooked(p, size * a) + _hooked(p, size * b), _hooked(p, size * (a + b))
        except Exception:  # of any hook
            return False
        if not (of_terms - of_sum).abs().max() <= 16 * torch.finfo(p.dtype).eps * of_sum.abs().max():
            return False
    return True


def _hooked(p: nn.Parameter, gradient: Tensor) -> Tensor:
    for hook in list(p._backward_hooks.values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient
