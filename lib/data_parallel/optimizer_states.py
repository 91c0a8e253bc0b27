"""Optimizer states of a sharded model by the names of its parameters, for any number of ranks.

The problem: AdamW keeps two moments of each parameter, and each rank has those of its pieces. A run that continues on
another number of ranks cuts pieces elsewhere; without the moments it would begin again with those of a first step.
The idea: a state with one value per element is cut as its parameter, so the same all-gather recovers it. The result has
the form that `torch.distributed.checkpoint.state_dict.set_optimizer_state_dict` loads into a plain optimizer:

    {"state": {name: {"step": [], "exp_avg": [shape of the parameter], ...}}, "param_groups": [{"params": names, ...}]}
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lib import comm
from lib.data_parallel.flat import Flat
from lib.data_parallel.state_checks import check_keys, check_state
from lib.mesh import Group

ALIKE = "one value per element"  # what ranks say of a state instead of sending it


def gather_states(flats: Sequence[Flat], optimizer: Optimizer, group: Group) -> dict[str, Any]:
    """All states, on rank 0; all ranks of the group must call it, and the others get {}."""
    whole: dict[str, dict[str, Any]] = {}
    for flat in flats:
        own = {name: _described(optimizer.state.get(piece, {}), piece) for name, piece in flat.pieces.items()}
        known: dict[str, dict[str, Any]] = {}
        for of_rank in comm.all_gather_object(own, group):
            known |= of_rank
        whole |= known
        for key in sorted({key for states in known.values() for key, x in states.items() if _is_alike(x)}):
            for name, values in _gather_one(flat, optimizer, key, known).items():
                whole[name][key] = values.clone() if group.rank == 0 else None
    if group.rank:
        return {}
    state = {name: states for name, states in whole.items() if states}
    return {"state": state, "param_groups": _named_groups(flats, optimizer)}


def _described(states: Mapping[str, Any], piece: Tensor) -> dict[str, Any]:
    """The states of a piece; of those with a value for each element only their dtype."""
    return {key: (ALIKE, x.dtype) if _fits(x, piece) else copy.deepcopy(x) for key, x in states.items()}


def _fits(x: object, piece: Tensor) -> bool:
    return isinstance(x, Tensor) and x.shape == piece.shape


def _is_alike(x: object) -> bool:
    return isinstance(x, tuple) and x[0] == ALIKE


def _gather_one(flat: Flat, optimizer: Optimizer, key: str, known: dict[str, dict[str, Any]]) -> dict[str, Tensor]:
    """Name → one state of the full parameter, for all parameters that have it."""
    names = [name for name, states in known.items() if _is_alike(states.get(key))]
    _, dtype = known[names[0]][key]
    part = torch.zeros_like(flat.master, dtype=dtype)
    for name in names:
        if name in flat.pieces:
            _, here = flat.where[name]
            part[here] = optimizer.state[flat.pieces[name]][key]
    whole = dict(zip(flat.names, flat.cut(comm.all_gather(part, flat.group)), strict=True))
    return {name: whole[name] for name in names}


def _named_groups(flats: Sequence[Flat], optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of the optimizer, with names instead of pieces."""
    names = {id(piece): name for flat in flats for name, piece in flat.stepped.items()}
    groups = []
    for group in optimizer.param_groups:
        settings = {key: copy.deepcopy(x) for key, x in group.items() if key not in ("params", "param_names")}
        groups.append(settings | {"params": [names[id(p)] for p in group["params"] if id(p) in names]})
    return groups


@torch.no_grad()
def scatter_states(flats: Sequence[Flat], optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Give each piece of this rank its part of the states of `gather_states`, which each rank needs; no communication.

    Raises:
        KeyError: a part is not in it.
        ValueError: it has groups of different parameters, or states of a different optimizer or model.
    """
    parts = {"state", "param_groups"}
    check_keys(parts - state.keys(), state.keys() - parts)
    ours, theirs = _named_groups(flats, optimizer), state["param_groups"]
    for i, (here, there) in enumerate(zip(ours, theirs, strict=False)):
        check_keys(here.keys() - there.keys(), there.keys() - here.keys())
        if other := sorted({*here["params"]} ^ {*there["params"]}):
            raise ValueError(f"group {i} of this state has other parameters than group {i} here, such as {other[0]}")
    if len(ours) != len(theirs):
        raise ValueError(f"this state has {len(theirs)} groups of parameters, and this optimizer has {len(ours)}")
    check_keys((), state["state"].keys() - {name for flat in flats for name in flat.names})
    made: dict[nn.Parameter, dict[str, Any]] = {}
    for flat in flats:
        for name, p in zip(flat.names, flat.params, strict=True):
            if name in flat.pieces:
                piece, saved = flat.pieces[name], state["state"].get(name, {})
                like, (there, _) = check_state(optimizer, piece, name, saved, p.shape), flat.where[name]
                made[piece] = _part(saved, like, piece, p.shape, there)
    for piece, states in made.items():
        optimizer.state.pop(piece, None)
        if states:
            optimizer.state[piece] = states
    for group, there in zip(optimizer.param_groups, theirs, strict=True):
        group.update({key: copy.deepcopy(x) for key, x in there.items() if key != "params"})


def _part(
    saved: Mapping[str, Any], like: Mapping[str, Tensor] | None, piece: Tensor, shape: torch.Size, there: slice
) -> dict[str, Any]:
    """The states of a piece, from those of the full parameter."""
    part: dict[str, Any] = {}
    for key, x in saved.items():
        if not isinstance(x, Tensor):
            part[key] = copy.deepcopy(x)
            continue
        is_alike = like[key].shape == piece.shape if like else x.shape == shape  # of one element, shapes cannot tell
        part[key] = x.reshape(-1)[there].clone().to(piece.device) if is_alike else x.clone()
    return part
