"""Activation recomputation (checkpointing): backward runs forward again, from the same buffers, and leaves them.

The problem: an activation checkpoint runs forward twice, so a batch norm counts each microbatch twice, and a spectral
norm has different weights the second time. The idea: the second forward works on copies of the buffers from before the
first. Dropout drops the same elements; other state, such as a counter in Python, changes twice.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def recomputed(
    module: nn.Module, compute: Callable, x: Tensor, again: AbstractContextManager | None = None
) -> Tensor:
    """compute(x), keeping only x for backward, which recomputes the rest.

    Args:
        module: `compute` is the module, or a method of it.
        again: entered around the second forward.
    """
    if not torch.is_grad_enabled():
        return compute(x)
    start, is_first = _copies(_buffers(module)), True

    def run(x: Tensor) -> Tensor:
        nonlocal is_first
        own, is_first = {} if is_first else _buffers(module), False
        try:
            for (owner, name), b in _copies({key: start.get(key, b) for key, b in own.items()}).items():
                owner._buffers[name] = b
            return compute(x)
        finally:
            for (owner, name), b in own.items():
                owner._buffers[name] = b

    return checkpoint(run, x, use_reentrant=False, context_fn=lambda: (nullcontext(), again or nullcontext()))


def _buffers(module: nn.Module) -> dict[tuple[nn.Module, str], Tensor | None]:
    every = {(owner, name): b for owner in module.modules() for name, b in owner._buffers.items()}
    return {key: b for key, b in every.items() if b is None or b.layout is torch.strided and not b.requires_grad}


def _copies(buffers: dict[tuple[nn.Module, str], Tensor | None]) -> dict[tuple[nn.Module, str], Tensor | None]:
    each = {id(b): b if b is None else b.clone() for b in buffers.values()}  # modules may share a buffer
    return {key: each[id(b)] for key, b in buffers.items()}
