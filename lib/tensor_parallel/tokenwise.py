"""Layers that get some tokens of each sequence: a mark says that one treats tokens independently, numbers check it.

The problem: a layer that mixes tokens is wrong where ranks share a sequence, and a mark is only a statement.
The idea: a layer that treats tokens independently computes a token alone as it does among all. So a copy of each custom
layer, and each custom activation, computes random tokens in both ways.

The copy has no attention, whose tokens are exchanged, no dropout and no capacity. Its parameters get noise, because a
layer that begins at zero would hide the rest. What reaches further than the context, or than the `_length` that a large
layer allows, is not seen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from torch.nn.modules.dropout import _DropoutNd

from lib.model import GPT, MLP, Attention, Embed, swiglu
from lib.moe import Experts, MoE
from lib.tensor_parallel.custom_layers import (
    BETWEEN,
    alike,
    is_right,
    is_tokenwise,
    name_of_layer,
    own_part,
    unsharded,
)

Computed = Callable[[Tensor], Tensor]
MARK = "first call mark_partial(module) of lib/tensor_parallel/sequence.py if it treats tokens independently"
MIXES_TOKENS = "mixes the tokens of a sequence, counts them, or draws random numbers"
MIXES_ROWS = "mixes the rows of an expert, which come from all sequences, or draws random numbers"
MIXES_SEQUENCES = "mixes the sequences of a batch, or draws random numbers"


def check_tokenwise(model: GPT) -> None:
    """Check, before anything changes, that all layers but attention treat the tokens of a sequence independently.

    Raises:
        ValueError: a custom layer without a mark; or one that mixes tokens, with a mark or without.
    """
    for name, module, _ in unsharded(model, 1):
        attends = isinstance(module, Attention)
        if not is_right(module, BETWEEN, 1) and (attends or not hasattr(module, "partial_gradients")):
            way = "use an Attention of lib/model.py as it is" if attends else MARK
            raise ValueError(
                f"{name_of_layer(name, module, 1)} would get some tokens of each sequence, with context parallelism: "
                f"{way}, or use cp=1"
            )
    context = model.config.context
    for name, module in _custom(model):
        size = 2, _length(context, sum(p.numel() for p in module.parameters()))
        of_tokens = name in ("", "embed")
        x = _drawn(*size, model.config.d_model) if not of_tokens else torch.randint(model.config.vocab_size, size)
        _check(name_of_layer(name, module, 1), module, x, _by_token, MIXES_TOKENS, "cp=1")
    for name, module in model.named_modules():
        if isinstance(module, MLP) and is_right(module, BETWEEN, 1) and _is_custom(module.act):
            wide = module.up.out_features
            _check(
                f"{name}.act", module.act, _drawn(2, _length(context, wide), wide), _by_token, MIXES_TOKENS, "cp=1"
            )


def check_expert_rows(model: nn.Module) -> None:
    """Check that a custom mixture computes each sequence independently, and the activation of experts each row.

    Raises:
        ValueError: it does not.
    """
    way = "one process and microbatches=1"
    for name, module in model.named_modules():
        if isinstance(module, Experts) and _is_custom(module.act):
            _check(f"{name}.act", module.act, _drawn(128, module.up.shape[1]), _by_row, MIXES_ROWS, way)
        if isinstance(module, MoE) and own_part(module, 1):
            x = _drawn(2, 64, module.router.weight.shape[1])
            _check(name_of_layer(name, module, 1), module, x, _by_sequence, MIXES_SEQUENCES, way)


def _custom(model: GPT) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of each outermost custom layer in a GPT, in a place whose input is known."""
    found: list[str] = []
    for name, module, _ in unsharded(model, 1):
        if is_right(module, BETWEEN, 1):
            continue
        while isinstance(parent := model.get_submodule(name.rpartition(".")[0]), (nn.Sequential, Embed)):
            name, module = name.rpartition(".")[0], parent
        if not any(not outer or f"{name}.".startswith(f"{outer}.") for outer in found):
            found.append(name)
            yield name, module


def _is_custom(act: Computed) -> bool:
    return act not in (gelu, swiglu) and not (isinstance(act, nn.Module) and is_tokenwise(act))


def _length(context: int, cost: int) -> int:
    """Tokens to compute with a layer of so many parameters or features: all of a sequence, or fewer if it is large."""
    return min(context, 2048, max(32, 2**28 // max(1, cost)))


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")


def _by_token(computed: Computed, x: Tensor) -> tuple[Tensor, Tensor]:
    return computed(x.clone())[0], computed(x[0, :, None].clone())[:, 0]


def _by_sequence(computed: Computed, x: Tensor) -> tuple[Tensor, Tensor]:
    return computed(x.clone())[0], computed(x[:1].clone())[0]


def _by_row(computed: Computed, x: Tensor) -> tuple[Tensor, Tensor]:
    return computed(x.clone()), torch.cat([computed(row.clone()) for row in x.split(1)])


def _check(
    what: str,
    layer: nn.Module | Computed,
    x: Tensor,
    compare: Callable[[Computed, Tensor], tuple[Tensor, Tensor]],
    fault: str,
    way: str,
) -> None:
    """Raise ValueError if a layer computes parts of x alone in another way than among all, or if this is not seen."""
    parameters = list(layer.parameters()) if isinstance(layer, nn.Module) else []
    like = next((p for p in parameters if p.is_floating_point()), torch.empty(()))
    x = x.to(like.device)
    for dtype in dict.fromkeys([torch.float64, like.dtype]):  # the second if it computes in no other
        try:
            with torch.no_grad(), torch.random.fork_rng([x.device] if x.is_cuda else []):
                given = x.to(dtype) if x.is_floating_point() else x
                among, alone = compare(_copied(layer, dtype, x.shape[1]), given)
        except Exception as error:  # of any layer
            why = f"raises {type(error).__name__} ({error})"
            continue
        if not among.isfinite().any():
            why = "gives no finite number"
        elif alike(among, alone):
            return
        else:
            raise ValueError(f"{what} {fault}: use {way}")
    raise ValueError(f"{what} {why} on random x{list(x.shape)}, so whether it mixes tokens is not seen: use {way}")


def _copied(layer: nn.Module | Computed, dtype: torch.dtype, length: int) -> Computed:
    """A copy to compute with; positions are those of a sequence, also for each of its tokens alone."""
    if not isinstance(layer, nn.Module):
        return layer
    places, generator = torch.arange(length), torch.Generator().manual_seed(1)
    made = copy.deepcopy(layer)
    made = made.double() if dtype == torch.float64 else made
    for module in list(made.modules()):
        module.training = not isinstance(module, (_DropoutNd, MoE))
        if isinstance(module, Embed):
            module._modules.pop("positions", None)  # those of a layer
            module.positions = lambda n, device=None: (places if n == length else places[:, None]).to(device)
        for name, child in module.named_children():
            if isinstance(child, Attention):
                setattr(module, name, nn.Identity())
    for p in made.parameters():
        if p.is_floating_point():
            p.data += 0.1 * torch.randn(p.shape, generator=generator).to(p)
    return made
