"""Custom layers in a GPT: which layers tensor parallelism shards, and what it requires of all others.

The problem: a model may contain any layer. A layer that mixes tokens is wrong on a shard of the sequence. A layer that
treats tokens independently is right there, but its gradients are partial sums: unless they are summed, the replicas
drift apart while the loss falls. A module does not state which of the two it is.

The idea: a layer that is not exactly a layer of `lib/model.py` stays full on each rank. Then its input decides:

    between the pairs            full x[B, T, D]            any layer: all ranks compute the same, also gradients
    … with sequence parallelism  a shard of the sequence    a layer in `TOKENWISE`, or a marked layer
    around the head              a shard of the logits      a marked layer

A mark is a statement by the user: the attribute `partial_gradients`, a tuple of parameter names, as `mark_partial` sets
it. With context parallelism it is tried on random numbers, too (`tokenwise.py`). A layer without a mark is refused, by
name, before anything changes.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from lib.model import GPT, MLP, Attention, Block, Embed, Head, Heads, swiglu
from lib.moe import Experts, MoE, Router
from lib.tensor_parallel.vocab import USUAL

BETWEEN, AROUND = "between the pairs", "around the head"
TOKENWISE = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity, nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh)
SHARDED = (Embed, Attention, MLP, MoE, Head)
KNOWN = (*SHARDED, Block, GPT, nn.Sequential, nn.ModuleList, nn.ModuleDict)
METHODS = {Block: ("forward", "_add"), Heads: ("forward", "_attend", "attention")}  # all others: forward


def is_shardable(module: nn.Module, n: int) -> bool:
    """Whether a module is exactly a layer of `lib/model.py`, which n ranks can shard."""
    return isinstance(module, SHARDED) and not custom_part(module, n)


def custom_part(module: nn.Module, n: int) -> str:
    """The first custom part of a module of a known class: `forward`, or the name of a child; empty if none."""
    kind = next(kind for kind in KNOWN if isinstance(module, kind))
    if not _has_methods(module, kind):
        return "forward"
    match module:
        case Embed():
            as_made = {"token": is_table(module.token)}
        case Attention():
            as_made = {"qkv": _is_plain(module.qkv, nn.Linear), "out": _is_plain(module.out, nn.Linear)}
            as_made["heads"] = _has_methods(module.heads, Heads) and _is_stateless(module.heads)
        case MLP():
            as_made = {"up": _is_plain(module.up, nn.Linear), "down": _is_plain(module.down, nn.Linear)}
            as_made["act"] = all(as_made.values()) and _acts_on_shards(
                module.act, module.up.out_features, module.down.in_features, n
            )
        case Head():
            as_made = {"linear": _is_plain(module.linear, nn.Linear)}
        case MoE():
            as_made = {name: _is_unchanged(getattr(module, name)) for name in ("router", "experts")}
        case _:
            as_made = {}
    return next((name for name, same in as_made.items() if not same), "")


def unsharded(module: nn.Module, n: int) -> list[tuple[str, nn.Module, str]]:
    """Name, module and place of all modules that shards do not replace, the module itself first."""
    has_head = any(isinstance(submodule, (GPT, Head)) for submodule in module.modules())
    return list(_walk("", module, AROUND if has_head else BETWEEN, n))


def _walk(name: str, module: nn.Module, place: str, n: int) -> Iterator[tuple[str, nn.Module, str]]:
    yield name, module, place
    replaced: tuple[str, ...] = ()
    if is_shardable(module, n):
        match module:
            case Embed():
                replaced = ("token", "position") if is_table(module.position) else ("token",)
            case Attention():
                replaced = ("qkv", "heads", "out")
            case MLP():
                replaced = ("up", "act", "down")
            case Head():
                replaced = ("linear",)
            case MoE():
                replaced = ("router", "experts")  # by `expert_parallel`
    for child, inside in module.named_children():
        if child not in replaced:
            of_gpt = isinstance(module, GPT) and child in ("embed", "blocks")
            is_between = of_gpt or replaced or isinstance(module, (Embed, Block, Attention, MLP, MoE))
            yield from _walk(f"{name}.{child}".lstrip("."), inside, BETWEEN if is_between else place, n)


def _is_plain(module: nn.Module | None, *kinds: type[nn.Module]) -> bool:
    """Whether a module is exactly of one of these classes: without subclass, parametrization, hooks or additions."""
    if type(module) not in kinds or "forward" in vars(module) or _has_hooks(module):
        return False
    if module._modules or module._buffers or not module._parameters.keys() <= {"weight", "bias"}:
        return False
    return not _has_gradient_hooks(module) and all(type(p) is nn.Parameter for p in module.parameters())


def is_table(module: nn.Module | None) -> bool:
    """Whether a module is an embedding without options, which need the full table."""
    return _is_plain(module, nn.Embedding) and all(getattr(module, name) is value for name, value in USUAL.items())


def is_tokenwise(module: nn.Module) -> bool:
    """Whether a module is a layer of torch that treats tokens x[…, D] independently."""
    return _is_plain(module, *TOKENWISE) and len(getattr(module, "normalized_shape", (1,))) == 1


def _has_hooks(module: nn.Module) -> bool:
    """Whether hooks run with the module."""
    return any(hooks for name, hooks in vars(module).items() if name.endswith("_hooks"))


def _has_gradient_hooks(module: nn.Module) -> bool:
    """Whether hooks run with the gradients of its parameters."""
    return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in module.parameters())


def _has_methods(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module computes with the methods of this class."""
    return isinstance(module, kind) and not _changed(module, kind, METHODS.get(kind, ("forward",)))


def _changed(module: nn.Module, kind: type[nn.Module], methods: Iterable[str]) -> list[str]:
    """Of these methods of a class, those that a module of it has of its own."""
    return [name for name in methods if getattr(getattr(module, name), "__func__", None) is not getattr(kind, name)]


def _is_stateless(module: nn.Module) -> bool:
    return not [*module.parameters(), *module.buffers()] and not any(map(_has_hooks, module.modules()))


def _is_unchanged(module: nn.Module) -> bool:
    """Whether a module is exactly of a class of `lib/moe.py`."""
    if type(module) not in (Router, Experts) or "forward" in vars(module) or _has_hooks(module):
        return False
    return type(module) is Router or not _has_gradient_hooks(module)  # a router stays as it is


def own_part(mixture: MoE, n: int) -> str:
    """The part of a mixture that is none of `lib/moe.py`, and that ranks which share experts would lose; or empty.

    Its router and its shared MLP stay what they are.
    """
    methods = [name for name, value in vars(MoE).items() if inspect.isfunction(value) and not name.startswith("__")]
    changed = _changed(mixture, MoE, methods)
    if changed or _has_hooks(mixture):
        return f"a {changed[0]}()" if changed else "hooks"
    experts = mixture.experts
    if not _is_unchanged(experts):
        return "gradient hooks on experts" if _has_gradient_hooks(experts) else "experts"
    slices = n == 1 or _acts_on_shards(experts.act, experts.up.shape[1], experts.down.shape[2], n)
    return "" if slices else "an activation that mixes features"


def _acts_on_shards(act: Callable[[Tensor], Tensor], wide: int, width: int, n: int) -> bool:
    """Whether the activation of a shard of the features is a shard of the activation, on random numbers.

    Args:
        wide, width: features before it, twice as many with a gate, and after it.
    """
    if wide not in (width, 2 * width):
        return False
    if act in (gelu, swiglu):
        return True
    if isinstance(act, nn.Module):
        if not _is_stateless(act):
            return False
        act = copy.deepcopy(act).train()  # so that dropout shows
    x = torch.randn(2, 3, wide, generator=torch.Generator().manual_seed(0), device="cpu")
    shards = [part.flatten(2).clone() for part in x.unflatten(2, (-1, width)).chunk(n, dim=3)]  # of gate and up, each
    try:
        with torch.random.fork_rng(devices=[]):
            full, parts = act(x), torch.cat([act(part) for part in shards], dim=2)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
    return not full.requires_grad and alike(full, parts)


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether two results are equal up to the rounding of float32, in which a layer may compute.

    A short vector may be rounded in another way than a long one, so the largest element is the measure.
    """
    if a.shape != b.shape:
        return False
    largest = a.detach().nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    return torch.allclose(a.double(), b.double(), rtol=0.0, atol=1e-5 * largest, equal_nan=True)


# ---- wrong use ------------------------------------------------------------------------------------------------------


def is_sharded(model: nn.Module) -> bool:
    """Whether a model has layers that tensor_parallel has changed."""
    return any(hasattr(submodule, "placements") for submodule in model.modules())


def check_full(model: nn.Module) -> None:
    """Raise ValueError for a model that is already sharded."""
    if is_sharded(model):
        raise ValueError("this model is already sharded: give a full model, such as GPT(config)")


def check_layers(model: nn.Module, n: int, sequence_parallel: bool) -> None:
    """Check, before anything changes, that all layers of a model are right on n tensor-parallel ranks.

    Raises:
        ValueError: the model is already sharded, has no layer to shard, or has a layer that may be wrong on shards.
    """
    check_full(model)
    if not any(isinstance(submodule, GPT) or is_shardable(submodule, n) for submodule in model.modules()):
        raise ValueError(
            f"{type(model).__name__} has no layer that tensor_parallel can shard: use Embed, Attention, MLP or Head "
            "of lib/model.py, unchanged, or build the model from ColumnParallelLinear and RowParallelLinear of "
            "lib/tensor_parallel/linear.py"
        )
    for name, module, place in unsharded(model, n) if n > 1 else ():
        marks = getattr(module, "partial_gradients", None)
        if place == BETWEEN and not sequence_parallel:
            if marks:
                raise ValueError(
                    f"{name_of_layer(name, module, n)} is marked by mark_partial, but without sequence_parallel it "
                    f"works on the full sequence, so its gradients would be summed {n} times: mark it only with "
                    "sequence_parallel=True"
                )
        elif place == BETWEEN and isinstance(module, Attention) and custom_part(module, n) not in ("", "forward"):
            raise ValueError(
                f"{name_of_layer(name, module, n)} mixes tokens, and would get a shard of the sequence: use "
                "sequence_parallel=False, or an unchanged Attention of lib/model.py"
            )
        elif marks is None and not is_right(module, place, n):
            raise ValueError(f"{name_of_layer(name, module, n)} {_WHY[place]}")


_WHY = {
    BETWEEN: "would get a shard of the sequence, and its partial gradients would never be summed: first call "
    "mark_partial(module) of lib/tensor_parallel/sequence.py if it treats tokens independently, or use "
    "sequence_parallel=False",
    AROUND: "may get shards of the logits, [B, T, V/n], or should return them: if it does so, state which of its "
    "gradients are partial sums, module.partial_gradients = () if none, or a tuple of names; else use an unchanged GPT "
    "and Head of lib/model.py, or one tensor-parallel rank",
}


def is_right(module: nn.Module, place: str, n: int) -> bool:
    """Whether a module without a mark is right on shards."""
    if place == BETWEEN and is_tokenwise(module):
        return True
    is_known = isinstance(module, KNOWN) and not custom_part(module, n)
    return is_known and not _has_hooks(module) and not module._parameters


def name_of_layer(name: str, module: nn.Module, n: int) -> str:
    """Name, class and custom part of a module: `blocks.0.mlp (MLP with its own act)`."""
    own = ""
    if isinstance(module, KNOWN):
        own = custom_part(module, n) or next(iter(module._parameters), "hook" if _has_hooks(module) else "")
    return f"{name or 'the model'} ({type(module).__name__}{f' with its own {own}' if own else ''})"
