"""The mean square of the output of each module: a number that does not depend on the layout.

The problem: a rank computes some rows, some tokens, a microbatch at a time, or a copy of the same, so the output of a
module is nowhere a tensor that one process has. The idea: all ranks together compute each element equally often, and
the mean over all elements is then that of one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

NEAR = 1e-9  # by this fraction rounding may change a mean, through all layers


class Output(NamedTuple):
    """The outputs of a module together: the sum of their squares, how many elements, and the size of the last dim."""

    square: float
    elements: int
    width: int


class ModuleOutputs:
    """Notes the outputs of all modules inside some models, by name; not of the models themselves."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._found: dict[str, Output] = {}
        for name, module in (named for model in models for named in model.named_modules()):
            if name:
                module.register_forward_hook(partial(self._note, name))

    def _note(self, name: str, module: nn.Module, inputs: object, output: object) -> None:
        if not isinstance(output, Tensor) or not output.is_floating_point() or not output.numel():
            return
        square, elements, _ = self._found.get(name, (0.0, 0, 0))
        square += output.detach().double().square().sum().item()
        self._found[name] = Output(square, elements + output.numel(), output.shape[-1] if output.ndim else 1)

    def take(self) -> dict[str, Output]:
        """The outputs since the last call, in the order in which modules first ended."""
        found, self._found = self._found, {}
        return found


def first_other_output(ranks: Sequence[dict[str, Output]], twin: dict[str, Output]) -> tuple[str | None, int]:
    """The first module whose mean differs from the twin's, None if none does; and how many could be compared.

    An output with a part of the last dim, as of a column-parallel layer, is left out: ranks may share its heads.
    """
    compared = 0
    for name, right in twin.items():
        mine = [of_rank[name] for of_rank in ranks if name in of_rank]
        if not mine or any(output.width != right.width for output in mine):
            continue
        compared += 1
        mean = sum(output.square for output in mine) / sum(output.elements for output in mine)
        wanted = right.square / right.elements
        if not abs(mean - wanted) <= NEAR * wanted:
            return name, compared
    return None, compared
