"""Wrong use of the layers, each in a sentence with the shapes: a different layer, a shard where all is needed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lib.mesh import Group


def check_first(what: str, instead: str) -> None:
    """Raise RuntimeError in a backward that is itself differentiated.

    `once_differentiable` raises it only if the incoming gradient has a graph, and otherwise returns constants.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(f"{what} has no second derivative, which create_graph=True needs: use {instead}")


def check_kind(serial: nn.Module, kind: type[nn.Module], layer: str) -> None:
    """Raise TypeError for a serial layer that does not compute what the shards of `layer` would compute."""
    name = type(serial).__name__
    if not isinstance(serial, kind):
        raise TypeError(
            f"{layer} is a shard of an nn.{kind.__name__}, but got a {name}: keep it full on each rank, or "
            "write a layer that shards it, with `placements`"
        )
    if type(serial).forward is not kind.forward:
        raise TypeError(
            f"{name} is an nn.{kind.__name__} with a forward of its own, which {layer} would not call: keep "
            "it full on each rank, or write a layer that shards it, with `placements`"
        )


def check_whole(x: Tensor, features: int, group: Group) -> None:
    """Raise ValueError if the input is not the full x[…, features]."""
    if x.shape[-1] == features:
        return
    if x.shape[-1] * group.size == features:
        raise ValueError(
            f"x has {x.shape[-1]} features, a shard of {features} on {group.size} ranks, but this layer needs all: use "
            "RowParallelLinear instead, or lib.conjugate.all_gather_split before it"
        )
    raise ValueError(f"x has shape {list(x.shape)}, but this layer takes {features} features")


def check_part(x: Tensor, features: int, group: Group) -> None:
    """Raise ValueError if the input is not this rank's shard of x[…, features]."""
    if x.shape[-1] * group.size == features:
        return
    if x.shape[-1] == features:
        raise ValueError(
            f"x has all {features} features, but this rank works on {features // group.size} of them: use a "
            "ColumnParallelLinear before this layer, or lib.conjugate.split_all_gather"
        )
    part = features // group.size
    raise ValueError(f"x has shape {list(x.shape)}, but this rank takes {part} of {features} features")
