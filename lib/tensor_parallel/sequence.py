"""Sequence parallelism: between the parallel layers each rank works on its shard of the sequence.

The problem: norms, dropout and residual sums between attention and the MLP work on full activations, so every rank
computes and keeps the same: 10 of the 34 bytes that a layer keeps per element of its input.

The idea: these layers treat tokens independently, so each rank has a shard of the tokens there. The all-reduce after a
row layer is a reduce-scatter and an all-gather: do the first half there, and the second half before the next column
layer, which needs all tokens. The bytes are the same.

    replicated   norm → column … row → all-reduce → dropout → + → norm → column …
    sharded      norm → all-gather → column … row → reduce-scatter → dropout → + → norm → all-gather → column …

Two things change for layers in between. The gradient of a norm weight comes only from this rank's tokens, so it is a
partial sum (`partial_gradients`). And dropout must differ between ranks instead of being equal (`each_rank_its_own`).

Source: Korthikanti et al., 2022, arXiv 2205.05198, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lib.mesh import Group
from lib.placement import split_size


@contextmanager
def each_rank_its_own(group: Group) -> Iterator[None]:
    """Inside, random numbers differ between ranks; outside they are equal.

    The seed inside is a number drawn outside plus the rank: code that saves and restores the state of torch's
    generator, such as an activation checkpoint, gets the same numbers again.
    """
    seed = int(torch.randint(2**62, ()))
    with torch.random.fork_rng():
        torch.manual_seed(seed + group.rank)
        yield


class ShardedDropout(nn.Dropout):
    """Dropout of a sharded tensor: different random numbers on each rank."""

    def __init__(self, p: float, group: Group) -> None:
        super().__init__(p)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        with each_rank_its_own(self.group):
            return super().forward(x)


def dropout(p: float, group: Group, sequence_parallel: bool) -> nn.Dropout:
    """Dropout of a replicated tensor, equal on all ranks; or of shards, different on each."""
    return ShardedDropout(p, group) if sequence_parallel else nn.Dropout(p)


def mark_partial(module: nn.Module) -> None:
    """Mark a module between the parallel layers, and all modules in it: their gradients are partial sums.

    Call it before `tensor_parallel` for a custom layer that treats tokens independently, and draws random numbers only
    in `nn.Dropout`. A missing mark raises an error: `tensor_parallel` names each module that it does not know, and
    `facts_of` each module with parameters and no mark in a model that shards the sequence (`check_marks`). So no step
    needs to compare replicas. `module.partial_gradients = ()` marks a module that gets all tokens; with context
    parallelism none does, and each marked module computes random tokens, alone and among all (`tokenwise.py`).
    """
    for submodule in module.modules():
        if not hasattr(submodule, "placements"):  # a parallel layer has its own marks
            submodule.partial_gradients = tuple(name for name, _ in submodule.named_parameters(recurse=False))


see_slices = mark_partial  # its old name, for notebooks that have it


def check_marks(model: nn.Module) -> None:
    """Check that all modules of a model that shards the sequence state which of their gradients are partial sums.

    Raises:
        ValueError: a module trains parameters, and has no `partial_gradients` and no `placements`.
    """
    if all(getattr(submodule, "sequence_dim", None) is None for submodule in model.modules()):
        return
    for name, submodule in model.named_modules():
        is_marked = hasattr(submodule, "partial_gradients") or hasattr(submodule, "placements")
        if not is_marked and any(p.requires_grad for p in submodule.parameters(recurse=False)):
            raise ValueError(
                f"{name or 'the model'} ({type(submodule).__name__}) has parameters, and other layers of this model "
                "shard the sequence: call mark_partial(module) of lib/tensor_parallel/sequence.py if it gets a shard, "
                "so that its gradients are summed, or set module.partial_gradients = () if it gets all tokens"
            )


def slice_of_rank(length: int, group: Group) -> slice:
    """The tokens of a sequence in this rank's shard; ValueError if it cannot be split evenly."""
    part = split_size(length, group, "sequence")
    return slice(group.rank * part, (group.rank + 1) * part)
