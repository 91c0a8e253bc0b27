"""The gradients of a module in one of torch's wrappers, as one process has them: with its names, and whole.

The problem: DDP and FSDP put prefixes before names, and FSDP and parallelize_module leave each rank a piece of a
gradient, or a term of it. The idea: torch can put them together itself, by public functions.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lib.doctor.numbers.names import Names
from lib.doctor.numbers.torch_insides import is_dtensor, loaded

_FSDP = "torch.distributed.fsdp"


def averages_gradients(model: nn.Module) -> bool:
    """Whether gradients are means over ranks, as in DDP and FSDP, in the whole model or a part of it."""
    return _has(model, DistributedDataParallel, _fsdp1(), loaded(_FSDP, "FSDPModule"))


def whole_tensor(x: Tensor) -> Tensor:
    """A copy of x; of a DTensor, the full tensor on every rank, in which terms are summed, and all ranks call it.

    Gradients flow through it.
    """
    return (x.full_tensor() if is_dtensor(x) else x).clone()  # a clone waits for communication that still fills x


def whole_gradients(model: nn.Module) -> dict[str, tuple[nn.Parameter, Tensor]]:
    """Name in one process → a parameter that has a gradient, and a copy of the gradient.

    What torch has cut is whole, and all ranks of the wrapper call it. A plain tensor is as this rank has it.

    Raises:
        ValueError: FSDP1 does not keep the original parameters.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    if not list(model.parameters()):
        return {}
    with _whole_in_fsdp1(model):
        found = {name: (p, p.grad) for name, p in Names([model]).parameters.items() if p.grad is not None}
        # While its pieces are together, FSDP1 gives frozen parameters a gradient as well, which no optimizer sees.
        return {name: (p, whole_tensor(gradient)) for name, (p, gradient) in found.items() if p.requires_grad}


def _whole_in_fsdp1(model: nn.Module) -> AbstractContextManager[None]:
    """Within it, parameters and gradients of FSDP1 are whole."""
    if not _has(model, _fsdp1()):
        return nullcontext()
    Names([model])  # it refuses a flat parameter in a sentence
    return _fsdp1().summon_full_params(model, writeback=False, with_grads=True)


def _fsdp1() -> Any:
    return loaded(_FSDP, "FullyShardedDataParallel")


def _has(model: nn.Module, *kinds: type | None) -> bool:
    """Whether a module inside is of one of these kinds; None is a kind that the program never loaded."""
    there = tuple(kind for kind in kinds if kind is not None)
    return any(isinstance(module, there) for module in model.modules())
