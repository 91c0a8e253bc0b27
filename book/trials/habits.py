"""Habits of training loops: those that work with a wrapper as in one process, and those that are refused.

The page *Loops that work, and what is refused* shows both tables. Code is in backticks, `model` is a wrapper, and
`module` the module in it. `tests/lib/test_loops.py` runs every row with every wrapper that it names: what works has the
weights of one process, and what is refused has this sentence in its error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from book.trials.loops import CLEAR, WRAPPERS, Loop, Wrapped, run_loop
from book.trials.loops_of_two import run_loop_of_two
from book.trials.net_of_loops import Net, rows_of
from lib.mesh import Group

DDP, ZERO, FSDP_ALONE = ("BucketedDDP",), ("ZeRO1", "ZeRO2"), ("FSDP",)
SHARDED, ALL = (*ZERO, *FSDP_ALONE), (*DDP, *ZERO, *FSDP_ALONE)
SGD = partial(torch.optim.SGD, lr=0.1)

BACKWARD = "backward", "sends"
AVERAGED: Loop = [BACKWARD, ("finish",)]
STEP: Loop = [*AVERAGED, ("step",)]


@dataclass(frozen=True)
class Works:
    """A habit that works: each of `loops` equals one process.

    Args:
        wrappers: with which it works.
        compared: runs a loop beside one process, as `run_loop` does.
    """

    habit: str
    write: str
    loops: list[Loop]
    wrappers: tuple[str, ...] = ALL
    compared: Callable[..., float | str] = run_loop


WORKS = [
    Works(
        "take a step",
        "`loss.backward()`, `model.finish()`, `model.step()`; with DDP `optimizer.step()`",
        [STEP * 3],
    ),
    Works(
        "clear gradients, before or after forward",
        "`optimizer.zero_grad()`, with `set_to_none=False` or without; `model.zero_grad()`; `p.grad = None`; "
        "`p.grad.zero_()`",
        [[*AVERAGED, ("clear", way), *AVERAGED, ("backward", "sends", way), ("finish",), ("step",)] for way in CLEAR],
    ),
    Works("clip", "`model.clip_gradients(1.0)` after `finish()`", [[*AVERAGED, ("clip", 0.1), ("step",)] * 2]),
    Works(
        "skip a step whose norm is NaN",
        "`if model.clip_gradients(1.0).isfinite(): model.step()`",
        [
            [("backward", "sends", None, True), ("finish",), ("clip_and_step_if_finite", 1.0, way), *STEP]
            for way in CLEAR
        ],
    ),
    Works(
        "accumulate over microbatches",
        "`with model.no_sync():` for all but the last; or `finish()` after each",
        [[("backward", "no_sync"), ("backward", "no_sync"), *STEP], [*AVERAGED, *AVERAGED, *STEP]],
    ),
    Works(
        "drop the microbatches of an unfinished step",
        "`optimizer.zero_grad()`",
        [[("backward", "no_sync"), ("clear", way), *STEP] for way in CLEAR],
    ),
    Works(
        "evaluate between `finish()` and the step",
        "`with torch.no_grad(): model(x)`, on all ranks",
        [[*AVERAGED, ("look",), ("step",), *STEP]],
    ),
    Works(
        "freeze parameters, and unfreeze them",
        "`p.requires_grad_(False)`, later `True`",
        [[*STEP, ("freeze", 0, True), *STEP, ("freeze", 0, False), *STEP]],
    ),
    Works(
        "make groups by name or attribute",
        "`lambda named: AdamW([{…}, {…}])`, from pairs of name and tensor",
        [STEP * 2],  # all rows run with `by_marks`, whose groups are by attribute
    ),
    Works(
        "schedule the learning rate, change a group",
        "`ExponentialLR(optimizer, 0.9)`, `group['lr'] *= 0.5`; with ZeRO and FSDP of `model.optimizer`",
        [[*STEP, ("schedule",), *STEP, ("rate", 0.5), *STEP]],
    ),
    Works(
        "penalise a gradient",
        "`torch.autograd.grad(loss, x, create_graph=True)`, then `backward()` without it",
        [[("penalty",), ("finish",), ("step",), *STEP]],
        compared=run_loop_of_two,
    ),
    Works(
        "train two models against each other (GAN)",
        "a wrapper for each; `critic.zero_grad()` before the critic's backward",
        [[("clear", way), ("play", way), ("finish",), ("step",)] * 2 for way in ("p.grad = None", "p.grad.zero_()")],
        compared=run_loop_of_two,
    ),
    Works(
        "average weights (EMA), and swap them in",
        "`model.full_state_dict()`, `model.load_full_state_dict(average)`; with DDP those of `module`",
        [[*STEP, ("update_average",), *STEP, ("update_average",), ("swap",), *STEP]],
    ),
    Works(
        "write parameters in place",
        "`p.clamp_(-0.3, 0.3)`, `average.lerp_(p, 0.1)`",
        [[*STEP, ("clamp",), ("average_in_place",), *STEP, ("swap",), *STEP]],
        (*DDP, *ZERO),
    ),
    Works(
        "save, and continue on as many ranks",
        "`model.sharded_state_dict()`, `model.load_sharded_state_dict(state)`; with DDP as in one process",
        [[*STEP, ("save",), *STEP, ("load",), *STEP]],
    ),
]


# ---- what is refused ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refused:
    """A habit that is refused: `trial`, called with a group and the name of a wrapper, raises an error with `sentence`.

    Args:
        write: the code to write instead.
        wrappers: those that refuse; with the rest it works as in one process.
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


def converted(world: Group, kind: str) -> None:
    wrap(world, kind, Net()).double()(rows_of(0, world.rank))


def twice_differentiable(world: Group, kind: str) -> None:
    wrap(world, kind, Net().double())(rows_of(0, world.rank)).sum().backward(create_graph=True)


REFUSED = [
    Refused(
        "a step without `finish()`",
        "`model.finish()` before it",
        of_loop([BACKWARD, ("step",)]),
        "call finish() before",
        DDP,
    ),
    Refused(
        "a step without `finish()`",
        "`model.finish()` before it",
        of_loop([BACKWARD, ("step",)]),
        "each step needs forward, backward() and finish() first",
    ),
    Refused(
        "a second backward before `finish()`",
        "`with model.no_sync():` for all but the last",
        of_loop([BACKWARD, BACKWARD]),
        "wrap all but the last microbatch in no_sync()",
        (*DDP, "ZeRO1"),
    ),
    Refused(
        "freeze a parameter that has a gradient, and skip before `finish()`",
        "`p.grad = None` where you freeze it",
        of_loop([*AVERAGED, ("freeze", 2, True), BACKWARD, ("clear", "p.grad.zero_()"), ("finish",)]),
        "was frozen while it had a gradient",
        ("BucketedDDP", "ZeRO1", "ZeRO2", "FSDP"),
    ),
    Refused(
        "clip before `finish()`", "`model.finish()`, then clip", of_loop([BACKWARD, ("clip", 1.0)]), "finish() ", ALL
    ),
    Refused(
        "`clip_grad_norm_(…)`, or any use of `p.grad`",
        "`model.clip_gradients(1.0)`, which returns the norm",
        of_loop([*AVERAGED, ("torch_clip", 1.0)]),
        "clip_gradients(max_norm) and step() of the wrapper instead of clip_grad_norm_",
    ),
    Refused(
        "`optimizer.step()`",
        "`model.step()`",
        of_loop([*AVERAGED, ("torch_step",)]),
        "step() of the wrapper instead of clip_grad_norm_, a GradScaler or optimizer.step()",
    ),
    Refused(
        "float16 with a `GradScaler`",
        "`dtype=torch.bfloat16`, which needs no scaler",
        lambda world, kind: wrap(world, kind, Net(), dtype=torch.float16),
        "use torch.bfloat16",
    ),
    Refused(
        "an optimizer of `model.parameters()`",
        "`partial(AdamW, lr=3e-4)`: the wrapper calls it with its shards",
        of_module_itself,
        "make it, and groups that are added later, from the pairs of name and piece",
    ),
    Refused(
        "`add_param_group()` with new tensors",
        "all groups in the function for the optimizer",
        of_loop([("foreign_group",), *STEP]),
        "make it, and groups that are added later, from the pairs of name and piece",
    ),
    Refused(
        "groups by `id(p)`, `p.ndim` or `p.shape`",
        "by name, or by an attribute that you set on `p`",
        by_identity,
        "make groups by name or by attribute",
    ),
    Refused(
        "an optimizer of full matrices (Muon, Shampoo, LBFGS)",
        "an elementwise one (SGD, Adam, AdamW), or DDP",
        with_optimizer(lambda named: torch.optim.LBFGS([p for _, p in named])),
        "use an elementwise optimizer",
    ),
    Refused(
        "a forward that writes weights: `Embedding(max_norm=1)`",
        "write them after `step()`, equally on all ranks",
        renormed,
        "Write it after step(), equally on all ranks",
        ALL,
    ),
    Refused(
        "read or write `p`: clamp, initialise, average in place",
        "`model.full_state_dict()`, `model.load_full_state_dict(state)`",
        of_loop([*STEP, ("clamp",)]),
        "full_state_dict() gathers them, and load_full_state_dict() shards them",
        FSDP_ALONE,
    ),
    Refused(
        "`module.state_dict()`",
        "`model.full_state_dict()`, called on all ranks",
        lambda world, kind: wrap(world, kind, Net()).module.state_dict(),
        "full_state_dict() gathers them",
        FSDP_ALONE,
    ),
    Refused(
        "load shards of a different number of ranks",
        "`full_state_dict()` and `full_optimizer_state_dict()`, and `load_…` of both",
        on_other_ranks,
        "full_optimizer_state_dict() and load_full_optimizer_state_dict()",
    ),
    Refused(
        "`.to()`, `.double()` after wrapping",
        "convert the model, then wrap it",
        converted,
        "convert the model first, then wrap it",
        ALL,
    ),
    Refused(
        "unfreeze a parameter that was frozen when wrapped",
        "wrap a copy of the module as it is now",
        unfrozen_later,
        "wrap a copy of the module as it is now",
        ALL,
    ),
    Refused(
        "`loss.backward(create_graph=True)`",
        "`torch.autograd.grad(…, create_graph=True)` for the inner gradient",
        twice_differentiable,
        "torch.autograd.grad(..., create_graph=True)",
        ALL,
    ),
    Refused(
        "`copy.deepcopy(model)`",
        "wrap `copy.deepcopy(module)`",
        lambda world, kind: copy.deepcopy(wrap(world, kind, Net())),
        "wrap a copy of its module",
        (*DDP, *ZERO),
    ),
    Refused(
        "`copy.deepcopy(model)`",
        "load `model.full_state_dict()` into a second module",
        lambda world, kind: copy.deepcopy(wrap(world, kind, Net())),
        "full_state_dict() gathers them",
        FSDP_ALONE,
    ),
]
