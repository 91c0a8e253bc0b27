"""Save and load a sharded model: full parameters with the names of the plain model, or each rank its shards.

The problem: no rank holds the full state, and the shard boundaries depend on the number of ranks.
The idea: two forms. *Full*: gather one flat at a time, and keep the tensors of the plain model on rank 0; any number of
ranks can load them, but optimizer state is not included. *Sharded*: each rank saves its shards and optimizer state,
without communication; only the same rank of the same number of ranks can load them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from lib.data_parallel.flat import Flat
from lib.mesh import Group


class SavedState:
    """Saves and loads a module whose state is in flats.

    Args:
        module: the module whose names and buffers are saved.
        group: the ranks that shard the flats.
        flats: all sharded parameters.
        optimizer: the optimizer of the pieces.
        publish: sends new parameters to all ranks, after loading.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        flats: Sequence[Flat],
        optimizer: Optimizer,
        publish: Callable[[], None],
    ) -> None:
        self.module, self.group, self.flats, self.optimizer, self._publish = module, group, flats, optimizer, publish

    @torch.no_grad()
    def full(self) -> dict[str, Tensor]:
        """Full parameters and buffers by name, in full precision, as `load_state_dict` of the plain module expects
        them.

        All ranks must call it; rank 0 of the group gets them, the others an empty dict. One flat at a time is
        unsharded.
        """
        whole = {}
        for flat in self.flats:
            collected = flat.collect()
            if self.group.rank == 0:
                whole |= {name: view.clone() for name, view in collected.items()}
        if self.group.rank > 0:
            return {}
        names = {id(p): name for name, p in self.module.named_parameters()}
        state = self.module.state_dict(keep_vars=True)  # a tied parameter has an entry for each of its names
        here = ((key, names.get(id(x), ""), x) for key, x in state.items())
        return {key: whole[name] if name in whole else x.detach().clone() for key, name, x in here}

    @torch.no_grad()
    def load_full(self, state: dict[str, Tensor]) -> None:
        """Load this rank's shards from full parameters; each rank needs the dict, on the CPU, or mapped from a file.

        Raises:
            KeyError: a parameter or buffer is not in it.
            ValueError: one has a different shape.
        """
        for name, x in self._replicated().items():
            x.copy_(of_shape(x.shape, name, state[name]))
        for flat in self.flats:
            for name, p in zip(flat.names, flat.params, strict=True):
                flat.load(name, of_shape(p.shape, name, state[name]))
        self._publish()

    def sharded(self) -> dict[str, Any]:
        """This rank's shards, optimizer state, and unsharded tensors; no communication."""
        return {
            "rank": self.group.rank,
            "ranks": self.group.size,
            "names": [flat.names for flat in self.flats],
            "shards": [flat.master.detach().clone() for flat in self.flats],
            "replicated": {key: x.detach().clone() for key, x in self._replicated().items()},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
        }

    @torch.no_grad()
    def load_sharded(self, state: dict[str, Any]) -> None:
        """Load the shards that the same rank of the same number of ranks saved.

        Raises:
            ValueError: the shards are of a different rank, number of ranks, or set of parameters.
        """
        saved, here = (state["rank"], state["ranks"]), (self.group.rank, self.group.size)
        if saved != here:
            raise ValueError(
                f"this is the shard of rank {saved[0]} of {saved[1]}, but this is rank {here[0]} of {here[1]}: its "
                "shards have different boundaries; use full_state_dict() and load_full_state_dict()"
            )
        if state["names"] != (names := [flat.names for flat in self.flats]):
            theirs, ours = ({name for some in each for name in some} for each in (state["names"], names))
            other = sorted(theirs ^ ours)
            raise ValueError(
                f"these shards are of different parameters ({', '.join(other[:3])}{', …' if len(other) > 3 else ''})"
                if other
                else "these shards were cut from buckets of a different size: wrap with the same bucket_bytes"
            )
        for key, x in self._replicated().items():
            x.copy_(state["replicated"][key])
        for flat, shard in zip(self.flats, state["shards"], strict=True):
            flat.master.copy_(shard)
            flat.after_step()
            increment_version(flat.params)  # the frozen ones, too
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self._publish()

    def _replicated(self) -> dict[str, Tensor]:
        """The part of the state that every rank holds in full: buffers, and parameters that are not trained."""
        sharded = {id(p) for flat in self.flats for p in flat.params}
        return {key: x for key, x in self.module.state_dict(keep_vars=True).items() if id(x) not in sharded}


def of_shape(shape: torch.Size, name: str, x: Tensor) -> Tensor:
    """The tensor, or a ValueError if its shape differs."""
    if x.shape != shape:
        raise ValueError(f"{name} has shape {list(x.shape)} instead of {list(shape)}")
    return x
