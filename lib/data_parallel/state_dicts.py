"""State dicts of a sharded model: full parameters with the names of the plain model, or each rank its shards.

The problem: no rank holds the full state, and the shard boundaries depend on the number of ranks.
The idea: two forms. *Full*: gather one flat at a time, and keep the plain model on rank 0, for any number of ranks; and
the states of the optimizer likewise (`optimizer_states.py`).
*Sharded*: each rank saves its shards and optimizer state, without communication, for the same rank of the same number.
The module itself saves and loads the rest: buffers, extra state, what its hooks add.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from lib.data_parallel.optimizer_states import gather_states, scatter_states
from lib.data_parallel.placeholders import with_values
from lib.data_parallel.state_checks import check_keys, check_state, fitting


class StateDicts:
    """Saves and loads a wrapper with `module`, `group`, `flats` and `optimizer`, which can `settle` and `publish`."""

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Any]:
        """The `state_dict` of the plain module, in full precision, on rank 0; all must call it, the others get {}.

        It has no state of the optimizer: that is in `full_optimizer_state_dict()`.
        """
        self.settle()
        whole: dict[int, Tensor] = {}
        for flat in self.flats:
            collected = zip(flat.params, flat.collect().values(), strict=True)
            whole |= {id(p): x.clone() for p, x in collected if self.group.rank == 0}
        if self.group.rank > 0:
            return {}
        with with_values(self._sharded().values(), whole):  # hooks of the module must see full values
            state = self.module.state_dict(keep_vars=True)  # a tied parameter has an entry for each of its names
        for key, x in state.items():  # in place: torch keeps versions in an attribute
            state[key] = whole[id(x)] if id(x) in whole else _copied(x)
        return state

    @torch.no_grad()
    def load_full_state_dict(self, state: dict[str, Any]) -> None:
        """Load this rank's shards from a full state; each rank needs the dict, on the CPU, or mapped from a file.

        Raises:
            KeyError: a parameter or buffer is not in it.
            ValueError: it has other keys, or a value of a different shape or kind.
        """
        values = self._load(state, {})
        for flat in self.flats:
            for name, p in zip(flat.names, flat.params, strict=True):
                if id(p) in values:  # otherwise the module has its own way to load it
                    flat.load(name, values[id(p)])
        self.publish()

    def full_optimizer_state_dict(self) -> dict[str, Any]:
        """States and settings of the optimizer, by names of parameters, on rank 0; all must call it, the others get {}.

        For any number of ranks, and for a plain optimizer: see `optimizer_states.py`.
        """
        return gather_states(self.gradients.buckets, self.optimizer, self.group)

    def load_full_optimizer_state_dict(self, state: dict[str, Any]) -> None:
        """Load this rank's part of the states of the optimizer, of any number of ranks; each rank needs the dict.

        Raises:
            KeyError: a part is not in it.
            ValueError: it has groups of different parameters, or is of a different optimizer or model.
        """
        scatter_states(self.gradients.buckets, self.optimizer, state)

    def sharded_state_dict(self) -> dict[str, Any]:
        """This rank's shards, optimizer state, and everything that is not sharded; no communication."""
        self.settle()
        sharded = self._sharded()
        with with_values(sharded.values(), {}):  # for hooks of the module
            state = self.module.state_dict(keep_vars=True)
        for key, x in list(state.items()):
            if id(x) in sharded:
                del state[key]
            else:
                state[key] = _copied(x)
        return {
            "rank": self.group.rank,
            "ranks": self.group.size,
            "names": self._names(),
            "shards": [flat.master.detach().clone() for flat in self.flats],
            "replicated": state,
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
        }

    @torch.no_grad()
    def load_sharded_state_dict(self, state: dict[str, Any]) -> None:
        """Load the shards that the same rank of the same number of ranks saved.

        Raises:
            KeyError: a part, a buffer or optimizer state is not in it.
            ValueError: the shards are of a different rank, number of ranks, or set of parameters.
        """
        parts = {"rank", "ranks", "names", "shards", "replicated", "optimizer"}
        check_keys(parts - state.keys(), state.keys() - parts)
        saved, here = (state["rank"], state["ranks"]), (self.group.rank, self.group.size)
        if saved != here:
            raise ValueError(
                f"this is the shard of rank {saved[0]} of {saved[1]}, but this is rank {here[0]} of {here[1]}: its "
                "shards have different boundaries; use full_state_dict() and load_full_state_dict() and, for the state "
                "of the optimizer, full_optimizer_state_dict() and load_full_optimizer_state_dict()"
            )
        ours, theirs = ({name for some in names for name in some} for names in (self._names(), state["names"]))
        check_keys(ours - theirs, theirs - ours)
        if state["names"] != self._names():
            raise ValueError("these shards are of buckets of a different size: wrap with the same bucket_bytes")
        shards = list(zip(self.flats, state["shards"], strict=True))
        for flat, shard in shards:
            fitting(shard, f"the shard of {flat.names[0]}", flat.master)
        loaded = copy.copy(self.optimizer)
        loaded.load_state_dict(state["optimizer"])  # only to look at it
        names = {id(piece): name for flat in self.flats for name, piece in flat.pieces.items()}
        for group in loaded.param_groups:
            check_keys(loaded.defaults.keys() - group.keys())
            for p in group["params"]:
                check_state(loaded, p, names.get(id(p), ""), loaded.state.get(p, {}), p.shape)
        self._load(state["replicated"], self._sharded())
        for flat, shard in shards:
            flat.master.copy_(shard)
            flat.copy_master()
            increment_version(flat.params)  # the frozen ones, too
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.publish()

    def _names(self) -> list[list[str]]:
        return [flat.names for flat in self.flats]

    def _sharded(self) -> dict[int, nn.Parameter]:
        return {id(p): p for flat in self.flats for p in flat.params}

    def _load(self, state: dict[str, Any], elsewhere: dict[int, nn.Parameter]) -> dict[int, Tensor]:
        """Let the module load a state, except sharded parameters: return their values, by id.

        Those `elsewhere` need not be in it.
        """
        values, sharded = {}, self._sharded()

        def take(module: nn.Module, given: dict[str, Any], prefix: str, *_: object) -> None:
            for name, x in (*module._parameters.items(), *module._buffers.items()):
                if x is not None and (key := prefix + name) in given:
                    fitting(given[key], key, x)
                    if id(x) in sharded:
                        values[id(x)] = given.pop(key)

        # These hooks run after those of the module: they see what it would load.
        hooks = [submodule.register_load_state_dict_pre_hook(take) for submodule in self.module.modules()]
        try:
            missing, unexpected = self.module.load_state_dict(state, strict=False)
        finally:
            for hook in hooks:
                hook.remove()
        params = dict(self.module.named_parameters(remove_duplicate=False))
        loaded = elsewhere | values  # of two names of a tied parameter one is enough
        check_keys([key for key in missing if key not in params or id(params[key]) not in loaded], unexpected)
        return values


def _copied(x: object) -> object:
    return x.detach().clone() if isinstance(x, Tensor) else copy.deepcopy(x)
