"""Habits of training loops: those that work with a wrapper as in one process, and those that are refused.

The page *Loops that work* shows both tables. `tests/lib/test_loops.py` runs every row with every wrapper that it names:
what works has the weights of one process, what is refused has the sentence that stands here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from book.trials.loops import CLEAR, WRAPPERS, Loop, Net, Wrapped, rows_of
from lib.mesh import Group

DDP, ZERO, FSDP_ALONE = ("BucketedDDP",), ("ZeRO1", "ZeRO2"), ("FSDP",)
SHARDED, ALL = (*ZERO, *FSDP_ALONE), (*DDP, *ZERO, *FSDP_ALONE)
SGD = partial(torch.optim.SGD, lr=0.1)

AVERAGED: Loop = [("backward", "sends"), ("finish",)]
STEP: Loop = [*AVERAGED, ("step",)]


@dataclass(frozen=True)
class Works:
    """A habit that works: each of `loops` equals one process."""

    habit: str
    write: str
    loops: list[Loop]
    wrappers: tuple[str, ...] = ALL


WORKS = [
    Works("a step", "loss.backward(); model.finish(); then model.step(), with DDP optimizer.step()", [STEP * 3]),
    Works(
        "clear gradients, in any way, before or after forward",
        "optimizer.zero_grad(), also with set_to_none=False; model.zero_grad(); p.grad = None; p.grad.zero_()",
        [[*AVERAGED, ("clear", way), *AVERAGED, ("backward", "sends", way), ("finish",), ("step",)] for way in CLEAR],
    ),
    Works(
        "skip a step whose norm is NaN or huge",
        "if model.clip_gradients(1.0).isfinite(): model.step()",
        [
            [("backward", "sends", None, True), ("finish",), ("clip_and_step_if_finite", 1.0, way), *STEP]
            for way in CLEAR
        ],
    ),
    Works("clip", "model.clip_gradients(1.0), after finish()", [[*AVERAGED, ("clip", 0.1), ("step",)] * 2]),
    Works(
        "accumulate over microbatches",
        "with model.no_sync(): … for all but the last; or finish() after each",
        [[("backward", "no_sync"), ("backward", "no_sync"), *STEP], [*AVERAGED, *AVERAGED, *STEP]],
    ),
    Works(
        "drop the microbatches that the end of an epoch cuts off",
        "optimizer.zero_grad()",
        [[("backward", "no_sync"), ("clear", way), *STEP] for way in CLEAR],
    ),
    Works(
        "look at the loss in between", "with torch.no_grad(): model(x)", [[*AVERAGED, ("look",), ("step",), *STEP]]
    ),
    Works(
        "freeze parameters, and unfreeze them",
        "p.requires_grad_(False)",
        [[*STEP, ("freeze", 0, True), *STEP, ("freeze", 0, False), *STEP]],
    ),
    Works(
        "schedule the learning rate, change a group",
        "ExponentialLR(optimizer, …); group['lr'] *= 0.5; with ZeRO and FSDP, optimizer = model.optimizer",
        [[*STEP, ("schedule",), *STEP, ("rate", 0.5), *STEP]],
    ),
    Works(
        "average the weights, and swap them in (EMA)",
        "state = model.full_state_dict(), on rank 0; model.load_full_state_dict(average)",
        [[*STEP, ("update_average",), *STEP, ("update_average",), ("swap",), *STEP]],
    ),
    Works(
        "write into parameters (clamp, EMA in place)",
        "p.clamp_(-0.3, 0.3); average.lerp_(p, 0.1)",
        [[*STEP, ("clamp",), ("average_in_place",), *STEP, ("swap",), *STEP]],
        (*DDP, *ZERO),
    ),
    Works(
        "save, and go on from there",
        "model.sharded_state_dict() and load_sharded_state_dict(), for each rank its part",
        [[*STEP, ("save",), *STEP, ("load",), *STEP]],
    ),
]


# ---- what is refused ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refused:
    """A habit that is refused: `trial`, called with a group and the name of a wrapper, raises an error with `sentence`.

    Args:
        write: what to write instead.
    """

    habit: str
    write: str
    trial: Callable[[Group, str], object]
    sentence: str
    wrappers: tuple[str, ...] = SHARDED


def wrap(world: Group, kind: str, module: nn.Module, optimizer: Callable = SGD, **options: object) -> nn.Module:
    """The module in a wrapper of this kind."""
    if kind in DDP:
        return WRAPPERS[kind](module, world, **options)
    return WRAPPERS[kind](module, world, optimizer, **options)


def of_loop(loop: Loop) -> Callable[[Group, str], None]:
    """A trial that runs a loop."""

    def trial(world: Group, kind: str) -> None:
        side = Wrapped(world, kind, "SGD")
        for name, *given in loop:
            getattr(side, name)(*given)

    return trial


def with_optimizer(optimizer: Callable) -> Callable[[Group, str], object]:
    """A trial that wraps with this function for the optimizer."""
    return lambda world, kind: wrap(world, kind, Net(), optimizer)


def of_module_itself(world: Group, kind: str) -> None:
    module = Net()
    wrap(world, kind, module, lambda named: torch.optim.SGD(module.parameters(), lr=0.1))


def by_identity(world: Group, kind: str) -> None:
    module = Net()
    biases = {id(p) for name, p in module.named_parameters() if name.endswith("bias")}

    def groups(named: list) -> torch.optim.Optimizer:
        decay = [{"params": [p], "weight_decay": 0.0 if id(p) in biases else 0.1} for _, p in named]
        return torch.optim.AdamW(decay, lr=0.1)

    wrap(world, kind, module, groups)


def renormed(world: Group, kind: str) -> None:
    module = nn.Sequential(nn.Embedding(4, 2, max_norm=0.1), nn.Linear(2, 1))
    wrap(world, kind, module)(torch.arange(4))


def unfrozen_later(world: Group, kind: str) -> None:
    module = Net().double()
    module.head.bias.requires_grad_(False)
    model = wrap(world, kind, module)
    module.head.bias.requires_grad_(True)
    model(rows_of(0, world.rank)).sum().backward()
    model.finish()


def on_other_ranks(world: Group, kind: str) -> None:
    model = wrap(world, kind, Net())
    model.load_sharded_state_dict(model.sharded_state_dict() | {"ranks": world.size + 1})


def twice_differentiable(world: Group, kind: str) -> None:
    wrap(world, kind, Net().double())(rows_of(0, world.rank)).sum().backward(create_graph=True)


REFUSED = [
    Refused(
        "step without finish()",
        "model.finish() before the step",
        of_loop([("backward", "sends"), ("torch_step",)]),
        "call finish() before",
        DDP,
    ),
    Refused(
        "a second backward before finish()",
        "with model.no_sync(): … for all but the last microbatch",
        of_loop([("backward", "sends"), ("backward", "sends")]),
        "wrap all but the last microbatch in no_sync()",
        (*DDP, "ZeRO1"),
    ),
    Refused(
        "clip before finish()",
        "finish() first: a rank's own gradient has another norm",
        of_loop([("backward", "sends"), ("clip", 1.0)]),
        "finish() ",
        ALL,
    ),
    Refused(
        "clip_grad_norm_(model.parameters(), 1.0), or any use of p.grad",
        "model.clip_gradients(1.0)",
        of_loop([*AVERAGED, ("torch_clip", 1.0)]),
        "clip_gradients(max_norm) and step() of the wrapper instead of clip_grad_norm_",
    ),
    Refused(
        "optimizer.step()",
        "model.step()",
        of_loop([*AVERAGED, ("torch_step",)]),
        "step() of the wrapper instead of clip_grad_norm_, a GradScaler or optimizer.step()",
    ),
    Refused(
        "GradScaler with float16",
        "dtype=torch.bfloat16, which needs no scaler",
        lambda world, kind: wrap(world, kind, Net(), dtype=torch.float16),
        "use torch.bfloat16",
    ),
    Refused(
        "an optimizer of model.parameters()",
        "lambda named: AdamW([p for name, p in named]), or partial(AdamW, lr=…)",
        of_module_itself,
        "make it, and groups that are added later, from the pairs of name and piece",
    ),
    Refused(
        "add_param_group() with other tensors",
        "all groups in the function for the optimizer",
        of_loop([("foreign_group",), *STEP]),
        "make it, and groups that are added later, from the pairs of name and piece",
    ),
    Refused(
        "groups by id(p), p.ndim or p.shape",
        "by name, or by an attribute such as p._no_weight_decay, which pieces have too",
        by_identity,
        "make groups by name or by attribute",
    ),
    Refused(
        "an optimizer that needs full matrices (Muon, Shampoo, LBFGS)",
        "an elementwise one: SGD, Adam, AdamW; or DDP",
        with_optimizer(lambda named: torch.optim.LBFGS([p for _, p in named])),
        "use an elementwise optimizer",
    ),
    Refused(
        "a forward that writes its weights, as Embedding(max_norm=…)",
        "write them after step(), equally on all ranks",
        renormed,
        "Write it after step(), equally on all ranks",
        ALL,
    ),
    Refused(
        "read or write p: clamp, init, EMA in place",
        "full_state_dict() and load_full_state_dict()",
        of_loop([*STEP, ("clamp",)]),
        "full_state_dict() gathers them, and load_full_state_dict() shards them",
        FSDP_ALONE,
    ),
    Refused(
        "module.state_dict()",
        "model.full_state_dict()",
        lambda world, kind: wrap(world, kind, Net()).module.state_dict(),
        "full_state_dict() gathers them",
        FSDP_ALONE,
    ),
    Refused(
        "load the shards of another number of ranks",
        "full_state_dict() and full_optimizer_state_dict(), and load_… of both",
        on_other_ranks,
        "full_optimizer_state_dict() and load_full_optimizer_state_dict()",
    ),
    Refused(
        ".to(), .double() after wrapping",
        "convert the model, then wrap it",
        lambda world, kind: wrap(world, kind, Net()).double(),
        "convert the model first, then wrap it",
    ),
    Refused(
        "unfreeze what was frozen when it was wrapped",
        "wrap a copy of the module as it is now",
        unfrozen_later,
        "wrap a copy of the module as it is now",
        ALL,
    ),
    Refused(
        "backward(create_graph=True)",
        "torch.autograd.grad(…, create_graph=True) for the inner part",
        twice_differentiable,
        "torch.autograd.grad(..., create_graph=True)",
        ALL,
    ),
    Refused(
        "copy.deepcopy(model)",
        "copy.deepcopy(module), or save its state",
        lambda world, kind: copy.deepcopy(wrap(world, kind, Net())),
        "wrap a copy of its module",
        (*DDP, *ZERO),
    ),
]
