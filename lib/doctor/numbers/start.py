"""One process takes the step of a parallel run: its weights and its batch, out of the shards of any layout."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from lib.doctor.numbers.links import has_parts, own_place
from lib.doctor.numbers.names import Names
from lib.doctor.numbers.recorded_numbers import Numbers, read_numbers
from lib.doctor.numbers.side_by_side import Side, names_of_ties
from lib.doctor.numbers.torch_insides import is_dtensor
from lib.runtime.words import counted


def start_from(folder: str | Path, model: nn.Module, steps: int | None = None) -> list[tuple[Tensor, ...]]:
    """Give a model in one process the weights with which a recorded run began, and return that run's batches.

    Args:
        folder: of the parallel run, which called `batch`.
        model: in one process, with the names of whole tensors; weights are copied into it, and small buffers.
        steps: of how many steps; by default of all that were recorded.

    Returns:
        The global batch of each step: what was given to `batch`, from all replicas, rows along the first dimension.

    Raises:
        ValueError: the run has no batches, or only sums; its rows are cut; the model is another one.
    """
    run = read_numbers(folder)
    if not run.whole:
        raise ValueError(f"{folder} has sums, not elements: start both runs from one checkpoint")
    if steps is not None and steps > run.steps:
        raise ValueError(f"{folder} has {counted(run.steps, 'step')}, not {steps}")
    _load(run, model)
    return [_global_batch(run, step) for step in range(steps or run.steps)]


@torch.no_grad()
def _load(run: Numbers, model: nn.Module) -> None:
    names = Names([model])
    aliases = names_of_ties([names.aliases, *(rank.aliases for rank in run.ranks)], list(names.parameters))
    weights = Side(run, 0, aliases).vectors("weights")
    parameters = {aliases.get(name, name): parameter for name, parameter in names.parameters.items()}
    if odd := sorted(parameters.keys() ^ weights.keys()):
        raise ValueError(
            f"{run.folder} and the model differ in {', '.join(odd[:3])}: a different model, or different names"
        )
    for name, parameter in parameters.items():
        if is_dtensor(parameter) or weights[name].numel() != parameter.numel():
            raise ValueError(
                f"{name} has {list(parameter.shape)} in the model and {weights[name].numel()} elements in "
                f"{run.folder}: a different model, or not one process"
            )
        parameter.copy_(weights[name].view(parameter.shape))
    recorded = {name: buffer for rank in reversed(run.ranks) for name, buffer in rank.buffers.items()}
    for name, buffer in names.buffers.items():
        if name in recorded and recorded[name].shape == buffer.shape:
            buffer.copy_(recorded[name])


def _global_batch(run: Numbers, step: int) -> tuple[Tensor, ...]:
    """The rows of all replicas, in the order of their ranks; ranks that read the same count once."""
    replicas: dict[tuple[int, ...], list[tuple[Tensor, ...]]] = {}
    for rank in run.ranks:
        if has_parts(rank):
            raise ValueError(
                f"{run.folder}: ranks have parts of rows, in an order that only the program knows: give one process "
                "its batch yourself"
            )
        if batch := rank.steps[step].batch:
            replicas.setdefault(own_place(rank), batch)
    if not replicas:
        raise ValueError(f"{run.folder} has no batch of step {step + 1}: call batch() in the program")
    batches = [batch for one in replicas.values() for batch in one]
    shapes = {tuple(tuple(tensor.shape[1:]) for tensor in batch) for batch in batches}
    if len(shapes) > 1:
        raise ValueError(
            f"{run.folder}: batches of step {step + 1} have rows of different shapes ({len(shapes)}), which cannot be "
            "one batch: pad them to one length"
        )
    return tuple(torch.cat(column) for column in zip(*batches, strict=True))
