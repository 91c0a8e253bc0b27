"""Recompute: backward runs forward again, from the same buffers, and leaves them as they are.

The problem: an activation checkpoint runs forward twice. Then a batch norm counts each microbatch twice, and a spectral
norm, which improves an estimate in each forward, has different weights the second time. The idea: the second forward
works on copies of the buffers from before the first. Other state that forward changes, such as a counter in Python,
changes twice; dropout drops the same elements.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

_latest = WeakTensorKeyDictionary()  # buffer → its copy, which all forwards share until the buffer changes


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
    start = {(id(buffers), name): _copy(b) for buffers, name, b in _buffers(module)}
    is_first = True

    def run(x: Tensor) -> Tensor:
        nonlocal is_first
        own, fresh, is_first = [] if is_first else _buffers(module), {}, False
        try:
            for buffers, name, b in own:
                b = start.get((id(buffers), name), b)
                buffers[name] = fresh.setdefault(id(b), b if b is None else b.clone())  # modules may share a buffer
            return compute(x)
        finally:
            for buffers, name, b in own:
                buffers[name] = b

    return checkpoint(run, x, use_reentrant=False, context_fn=lambda: (nullcontext(), again or nullcontext()))


def _buffers(module: nn.Module) -> list[tuple[dict, str, Tensor | None]]:
    every = [(one._buffers, name, b) for one in module.modules() for name, b in one._buffers.items()]
    return [x for x in every if x[2] is None or x[2].layout is torch.strided and not x[2].requires_grad]


def _copy(buffer: Tensor | None) -> Tensor | None:
    if buffer is None:
        return None
    if buffer not in _latest or not torch.equal(_latest[buffer], buffer):
        _latest[buffer] = buffer.clone()
    return _latest[buffer]
