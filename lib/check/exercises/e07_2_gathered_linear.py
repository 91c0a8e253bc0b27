"""07.2: a column-parallel layer that keeps only this rank's tokens, in torch.distributed itself."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd.graph import saved_tensors_hooks

from lib.check.exercise import Data, Exercise, Mistake, random
from lib.check.listen import Heard, listen, raw
from lib.mesh import Group

FORWARD, BACKWARD, KEPT, WAITED = "sent in forward", "sent in backward", "kept for backward", "waited for"
UNITS = ("nothing", "1 unit", "2 units", "3 units", "4 units")
OWN, MORE = "this rank's tokens", "more than this rank's tokens"
ALL, SOME = "every call", "not every call"


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    rows, tokens, d, f = n, n, 2 * n, 3  # n divides each: along whichever dim one cuts, it gives something
    return [
        {
            "x": random(generator, rows, tokens, d),
            "W": random(generator, f, d),
            "b": random(generator, f),
            "gradient": random(generator, rows, n * tokens, f),
        }
        for _ in range(n)
    ]


@raw
def body(answer: Any, group: Group, given: Data) -> Data:
    if not hasattr(answer, "apply"):
        raise TypeError("GatheredLinear is to be a class, a torch.autograd.Function with forward and backward")
    x = given["x"].requires_grad_()
    W, b = (nn.Parameter(given[name]) for name in ("W", "b"))
    waits: list[None] = []
    heard, kept = listen(on_wait=lambda: waits.append(None)), Kept(W, b)
    with saved_tensors_hooks(kept.add, lambda tensor: tensor):
        y = watched(answer, x.shape).apply(x, W, b)
    if not torch.is_tensor(y) or y.shape != given["gradient"].shape:
        return {"y": y}
    found = {"y": y.detach().clone(), FORWARD: units(heard, group.size, x), KEPT: kept.verdict(y, x)}
    calls = heard.collectives
    heard.forget()
    y.backward(given["gradient"])
    found |= {"gradient of x": SEEN_BY.x if SEEN_BY.x is not None else x.grad}
    found |= {"gradient of W": W.grad, "gradient of b": b.grad, BACKWARD: units(heard, group.size, x)}
    return found | {WAITED: ALL if len(waits) >= calls + heard.collectives else SOME}


def units(heard: Heard, n: int, x: Tensor) -> str:
    """In all-gathers of x, a rank's shard, rounded up."""
    count = heard.sent_bytes(n) / ((n - 1) * x.nbytes)
    return next((words for most, words in enumerate(UNITS) if count < most + 0.1), "more than 4 units")


SEEN_BY = SimpleNamespace(x=None)  # the gradient of x that backward returned, of any shape


def watched(function: Any, shape: torch.Size) -> Any:
    """The same autograd function. It notes the gradient of x, and lets only one of the right shape pass."""
    SEEN_BY.x = None
    if not isinstance(function, type) or not issubclass(function, torch.autograd.Function):
        return function

    def backward(ctx: Any, gradient: Tensor) -> tuple:
        result = function.backward(ctx, gradient)
        of_x, *others = result if isinstance(result, tuple) else (result,)
        SEEN_BY.x = of_x
        return (of_x if getattr(of_x, "shape", None) == shape else None, *others)

    return type(function)(function.__name__, (function,), {"backward": staticmethod(backward)})


class Kept:
    """The storages that a graph holds, without parameters."""

    def __init__(self, *parameters: Tensor) -> None:
        self.bytes: dict[int, int] = {}
        self.parameters = {p.untyped_storage().data_ptr() for p in parameters}

    def add(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.parameters:
            self.bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    def verdict(self, y: Tensor, x: Tensor) -> str:
        """Also of tensors that were put on ctx without save_for_backward."""
        for value in vars(y.grad_fn).values() if hasattr(y.grad_fn, "__dict__") else ():
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if torch.is_tensor(tensor):
                    self.add(tensor)
        return MORE if sum(self.bytes.values()) > x.nbytes else OWN


def reference(given: list[Data]) -> list[Data]:
    n, x = len(given), torch.cat([g["x"] for g in given], 1)
    of_x = sum(g["gradient"] @ g["W"] for g in given).chunk(n, 1)
    right = {FORWARD: UNITS[1], BACKWARD: UNITS[2], KEPT: OWN, WAITED: ALL}
    return [
        right
        | {
            "y": x @ g["W"].T + g["b"],
            "gradient of x": of_x[r],
            "gradient of W": g["gradient"].flatten(0, 1).T @ x.flatten(0, 1),
            "gradient of b": g["gradient"].sum((0, 1)),
        }
        for r, g in enumerate(given)
    ]


# ---- the layer, right and wrong -------------------------------------------------------------------------------------


def gather(x: Tensor, dim: int = 1) -> Tensor:
    shards = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, x)
    return torch.cat(shards, dim)


def scatter(dx: Tensor, op: Any = dist.ReduceOp.SUM, dim: int = 1) -> Tensor:
    shards = [shard.contiguous() for shard in dx.chunk(dist.get_world_size(), dim)]
    mine = torch.empty_like(shards[0])
    dist.reduce_scatter(mine, shards, op=op)
    return mine


def cut(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size(), 1)[dist.get_rank()]


def all_reduce(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def all_reduce_of_shards(x: Tensor) -> Tensor:
    shards = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    shards[dist.get_rank()] = x
    return all_reduce(torch.cat(shards, 1))


def of_weight(dy: Tensor, x: Tensor) -> Tensor:
    return dy.flatten(0, 1).T @ x.flatten(0, 1)


def layer(
    forward: Callable = gather,
    backward: Callable = lambda dy, W: scatter(dy @ W),
    again: Callable | None = None,
    of_parameters: Callable = lambda dy, x: (of_weight(dy, x), dy.sum((0, 1))),
    keeps: str = "shard",
) -> Any:
    """The layer, with a place for each mistake."""

    class GatheredLinear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, W, b):
            full = forward(x)
            ctx.save_for_backward(full if keeps == "full" else x, W)
            if keeps == "attribute":
                ctx.full = full
            return full @ W.T + b

        @staticmethod
        def backward(ctx, dy):
            x, W = ctx.saved_tensors
            full = x if keeps == "full" else ctx.full if keeps == "attribute" else (again or forward)(x)
            return backward(dy, W), *of_parameters(dy, full)

    return GatheredLinear


class Overlapping(torch.autograd.Function):
    """Both messages of backward are in flight during a matmul."""

    @staticmethod
    def forward(x, W, b):
        full = x.new_empty(len(x), dist.get_world_size() * x.shape[1], x.shape[2])
        dist.all_gather(list(full.chunk(dist.get_world_size(), 1)), x)
        return nn.functional.linear(full, W, b)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx, dy):
        x, W = ctx.saved_tensors
        shards = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        gathering = dist.all_gather(shards, x, async_op=True)
        parts = torch.stack((dy @ W).chunk(dist.get_world_size(), 1))
        got = torch.empty_like(parts)
        scattering = dist.all_to_all_single(got, parts, async_op=True)
        gathering.wait()
        of_w = torch.einsum("btf,btd->fd", dy, torch.cat(shards, 1))
        scattering.wait()
        return got.sum(0), of_w, dy.sum((0, 1))


def not_waited(x: Tensor) -> Tensor:
    shards = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, x, async_op=True)
    return torch.cat(shards, 1)


EXERCISE = Exercise(
    id="07.2",
    title="GatheredLinear",
    points=2,
    body=body,
    inputs=inputs,
    reference=reference,
    right=(layer(), Overlapping),
    mistakes=(
        Mistake(
            "You started a call with async_op=True and did not wait for it. Until handle.wait() returns, its buffers "
            "hold anything: keep the handle, and wait before you read them.",
            layer(not_waited),
            about=(WAITED,),
        ),
        *(
            Mistake(
                "All numbers are right, and every rank keeps all tokens for backward. Save this rank's tokens, and "
                "gather the others again in backward.",
                layer(keeps=where),
            )
            for where in ("full", "attribute")
        ),
        Mistake(
            "All numbers are right, but backward sends 3 units: an all-reduce gives every rank the gradient of all "
            "tokens, and you keep yours. A reduce-scatter sends half of that.",
            layer(backward=lambda dy, W: cut(all_reduce(dy @ W))),
        ),
        Mistake(
            "All numbers are right, but backward sends every rank's gradient of all tokens to every rank. They are "
            "partial sums, and each rank needs the sum for its own tokens: reduce-scatter.",
            layer(backward=lambda dy, W: cut(sum(gather((dy @ W)[None], 0)))),
        ),
        Mistake(
            "All numbers are right, but forward sends 2 units: an all-reduce adds up zeros of all ranks but one. An "
            "all-gather sends each shard as it is.",
            layer(all_reduce_of_shards, again=gather),
        ),
        Mistake(
            "The gradient of x is this rank's partial sum: backward only cuts. Every rank used your tokens with its "
            "own columns of W, so there are n partial sums to add: reduce-scatter.",
            layer(backward=lambda dy, W: cut(dy @ W)),
        ),
        Mistake(
            "Backward adds up and does not cut: it returns the gradient of all tokens, and x has some of them. A "
            "reduce-scatter along dim 1 does both.",
            layer(backward=lambda dy, W: all_reduce(dy @ W)),
        ),
        Mistake(
            "You averaged the gradient of x over the ranks. They used the same tokens with different columns of one "
            "layer: the gradient is the sum, ReduceOp.SUM.",
            layer(backward=lambda dy, W: scatter(dy @ W, dist.ReduceOp.AVG)),
        ),
        Mistake(
            "You reduce-scattered the gradient of y, and multiplied by W afterwards. Each rank's gradient of y belongs "
            "to its own columns: multiply by W first, then there are partial sums of one thing.",
            layer(backward=lambda dy, W: scatter(dy) @ W),
        ),
        Mistake(
            "Backward cuts along dim 0, the sequences, where forward put tokens together. reduce_scatter takes a list: "
            "make it with chunk(n, dim=1), of contiguous tensors.",
            layer(backward=lambda dy, W: scatter(dy @ W, dim=0)),
        ),
        Mistake(
            "For the gradient of x, backward gathers. The transpose of a gather is a reduce-scatter: copies of a token "
            "went to all ranks, and their gradients are added up.",
            layer(backward=lambda dy, W: gather(dy @ W)),
        ),
        Mistake(
            "Forward put the shards together along dim 0, as more sequences. They are shards of the sequence: "
            "torch.cat(shards, dim=1).",
            layer(lambda x: gather(x, 0)),
        ),
        Mistake(
            "Backward put the gathered shards together along dim 0. The tokens are in the wrong order there, and the "
            "gradient of W pairs each with the gradient of a different token: dim=1, as in forward.",
            layer(again=lambda x: gather(x, 0).reshape(x.shape[0], -1, x.shape[2])),
        ),
        Mistake(
            "The gradient of W comes from this rank's tokens alone. Its columns met all tokens: gather x again.",
            layer(of_parameters=lambda dy, x: (of_weight(cut(dy), cut(x)), dy.sum((0, 1)))),
        ),
        Mistake(
            "You summed the gradients of W and b over the ranks. Each rank has its own columns and multiplied them "
            "with all tokens: those gradients are complete.",
            layer(of_parameters=lambda dy, x: (all_reduce(of_weight(dy, x)), all_reduce(dy.sum((0, 1))))),
            about=("gradient",),
        ),
    ),
)
