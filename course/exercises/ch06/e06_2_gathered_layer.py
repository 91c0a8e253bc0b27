"""06.2: a column-parallel layer that gathers its output, with both autograd functions, in raw torch.distributed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch import distributed as dist

from course.check.exercise import AS_NEEDED, MORE, Data, Exercise, Mistake, random
from course.check.listen import listen, raw
from lib import cost
from lib.mesh import Group

ROWS, WIDTH, EACH = 2, 15, 5  # of x; features of each layer; of one rank
LAYERS = ("first", "second")


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    """Two layers: the second reads the gathered output of the first."""
    x, gradient = random(generator, ROWS, WIDTH), random(generator, ROWS, n * EACH)
    shapes = {"first": (EACH, WIDTH), "second": (EACH, n * EACH)}
    return [
        {"x": x, "gradient": gradient} | {name: random(generator, *shape) for name, shape in shapes.items()}
        for _ in range(n)
    ]


@raw
def body(answer: Callable, group: Group, given: Data) -> Data:
    n = group.size
    x, *weights = (given[name].clone().requires_grad_() for name in ("x", *LAYERS))
    waits: list[int] = []
    heard, y = listen(on_wait=lambda: waits.append(1)), x
    for weight in weights:
        y = answer(torch.tanh(y), weight, group)
        if not torch.is_tensor(y) or y.shape != (ROWS, n * EACH):
            return {"y": y}
    result = y.detach().clone()
    if not y.requires_grad:
        return {"y": result, "gradient of x": "none: y has no graph"}
    y.backward(given["gradient"])
    most = sum(
        cost.wire_bytes("all_gather", y.nbytes, n) + cost.wire_bytes("all_reduce", z.nbytes, n) for z in (x, y)
    )
    found = {f"gradient of the {name} weight": w.grad for name, w in zip(LAYERS, weights, strict=True)}
    return found | {
        "y": result,
        "gradient of x": torch.zeros_like(x) if x.grad is None else x.grad,
        "what was sent": MORE if heard.sent_bytes(n) > 1.05 * most else AS_NEEDED,
        "calls without wait": max(0, heard.collectives - len(waits)),
    }


def reference(given: list[Data]) -> list[Data]:
    x = given[0]["x"].clone().requires_grad_()
    first, second = (torch.cat([g[name] for g in given]).requires_grad_() for name in LAYERS)
    y = torch.tanh(torch.tanh(x) @ first.T) @ second.T
    y.backward(given[0]["gradient"])
    right = {"y": y.detach(), "gradient of x": x.grad, "what was sent": AS_NEEDED, "calls without wait": 0}
    pieces = zip(first.grad.split(EACH), second.grad.split(EACH), strict=True)
    return [right | {f"gradient of the {k} weight": g for k, g in zip(LAYERS, both, strict=True)} for both in pieces]


# ---- right programs -------------------------------------------------------------------------------------------------


def gathered(x: Tensor, dim: int = 1, wait: bool = True) -> Tensor:
    parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    work = dist.all_gather(parts, x.contiguous(), async_op=True)
    if wait:
        work.wait()
    return torch.cat(parts, dim)


def total(x: Tensor) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x)
    return x


def mine(gradient: Tensor) -> Tensor:
    return gradient.chunk(dist.get_world_size(), 1)[dist.get_rank()]


def same(x: Tensor) -> Tensor:
    return x.view_as(x)


def function(there: Callable, back: Callable) -> type:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return there(x)

        @staticmethod
        def backward(ctx, gradient):
            return back(gradient)

    return Function


def layer(before=(same, total), after=(gathered, mine)) -> Callable:
    def program(x, weight, group):
        x = function(*before).apply(x)
        return function(*after).apply(x @ weight.T)

    return program


def layer_that_puts_its_own_back(x, weight, group):
    """Shards of the other ranks are constants; a hook is the backward of Copy."""
    inside = x.view_as(x)
    inside.register_hook(total)
    y = inside @ weight.T
    parts = list(gathered(y.detach()).chunk(group.size, 1))
    parts[group.rank] = y
    return torch.cat(parts, 1)


# ---- wrong programs -------------------------------------------------------------------------------------------------


def mean(x: Tensor) -> Tensor:
    return total(x) / dist.get_world_size()


def by_rows(x: Tensor) -> Tensor:
    """The right shape, and the order of the buffer."""
    return gathered(x, dim=0).view(len(x), -1)


def summed_shards(gradient: Tensor) -> Tensor:
    return mine(total(gradient))


def gathers_by_a_sum(x: Tensor) -> Tensor:
    padded = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    padded[dist.get_rank()] = x
    return total(torch.cat(padded, 1))


def loses_the_graph(x, weight, group):
    x = function(same, total).apply(x)
    return gathered((x @ weight.T).detach())


EXERCISE = Exercise(
    id="06.2",
    title="gathered_layer",
    points=3,
    body=body,
    inputs=inputs,
    reference=reference,
    right=(layer(), layer_that_puts_its_own_back),
    mistakes=(
        Mistake(
            "The gradients of a layer are n times too large: backward of Gather sums over the ranks. After it all "
            "ranks compute the same, so each already has the full gradient: take your own columns of it. (A "
            "reduce-scatter is right only where each rank uses the gathered tensor differently.)",
            layer(after=(gathered, summed_shards)),
            about=("y", "gradient"),
        ),
        Mistake(
            "The second layer is right, and everything before it is wrong: the gradient of x is only the term of this "
            "rank. Backward of Copy must sum it over the ranks.",
            layer(before=(same, same)),
            about=("y", "gradient"),
        ),
        Mistake(
            "Backward of Copy takes the mean. Each rank has the term through its own outputs: add them up.",
            layer(before=(same, mean)),
            about=("y", "gradient"),
        ),
        Mistake(
            "Copy also sums in forward. There x is replicated, so the result is n times x. Sum only its gradient.",
            layer(before=(total, total)),
            about=("y", "gradient"),
        ),
        Mistake(
            "The columns are in a wrong order. all_gather receives the tensors of the ranks in the order of ranks, and "
            "a view of that memory as [B, out] mixes rows: concatenate them along dim 1.",
            layer(after=(by_rows, mine)),
            about=("y",),
        ),
        Mistake(
            "Backward of Gather returns the columns of rank 0 on all ranks. Each rank needs the columns that it "
            "computed.",
            layer(after=(gathered, lambda g: g.chunk(dist.get_world_size(), 1)[0])),
            about=("y", "gradient"),
        ),
        Mistake(
            "y has no graph: dist.all_gather writes into new tensors, and autograd does not differentiate it. Call it "
            "inside a Function.",
            loses_the_graph,
        ),
        Mistake(
            "All values are right, but you send twice as many bytes as necessary in forward: an all-reduce of tensors "
            "that are mostly zero. An all-gather sends each shard once.",
            layer(after=(gathers_by_a_sum, mine)),
        ),
        Mistake(
            "You do not wait for a collective that you started with async_op=True: its buffers may not be filled when "
            "you read them. Keep the returned work and call wait() first.",
            layer(after=(lambda x: gathered(x, wait=False), mine)),
            about=("without wait",),
        ),
    ),
)
