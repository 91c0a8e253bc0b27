"""The names of a model's tensors as one process has them, without the prefixes of wrappers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from lib.doctor.numbers.torch_insides import CannotSee

_WRAPPERS = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\.")


class Names:
    """Parameters and buffers of the modules of a rank, by the names that one process would have.

    Attributes:
        parameters: each once, by its first name.
        aliases: a second name of a tied parameter → its first.
        modules: those of this rank.
        left_out: frozen parameters of integers, which are not recorded.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        self.aliases: dict[str, str] = {}
        self.buffers: dict[str, Tensor] = {}
        self.modules = list(modules)
        self.left_out: list[str] = []
        first: dict[int, str] = {}
        for module in modules:
            for name, parameter in _named(module, "parameters"):
                if "_flat_param" in name:
                    raise CannotSee(
                        "FSDP1 without use_orig_params has one flat parameter in place of yours, and their gradients "
                        "have no names: wrap with FullyShardedDataParallel(..., use_orig_params=True)"
                    )
                if not parameter.is_floating_point() and not parameter.requires_grad:
                    self.left_out.append(name)  # as the packed weights of QLoRA
                    continue
                if id(parameter) in first:
                    self.aliases[name] = first[id(parameter)]
                    continue
                if name in self.parameters:
                    raise CannotSee(
                        f"two modules of this rank have a parameter called {name}: give watch() one nn.Module with "
                        "both, in which each name is that of one process"
                    )
                first[id(parameter)] = name
                self.parameters[name] = parameter
            self.buffers |= dict(_named(module, "buffers"))
        if not self.parameters:
            raise CannotSee("the model has no parameters on this rank: there is nothing to record")


def plain_name(name: str) -> str:
    """A name without the prefixes of wrappers inside it."""
    return _WRAPPERS.sub("", name)


def _named(module: nn.Module, kind: str) -> Iterator[tuple[str, Tensor]]:
    """Parameters or buffers, also those that have two names. A wrapper such as DDP has all its module's in `module`."""
    named = list(getattr(module, f"named_{kind}")(remove_duplicate=False))
    outer = getattr(module, "_orig_mod", module)  # torch.compile may be around the wrapper
    children = [name for name, _ in outer.named_children()]
    for name, tensor in named:
        name = plain_name(name)
        yield (name.removeprefix("module.") if children == ["module"] else name), tensor
