"""07.1: a sequence-parallel attention block with mistakes that raise no error, to be corrected."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from torch.nn.functional import scaled_dot_product_attention as attend

from course.check.exercise import Data, Exercise, Mistake, random
from lib import comm
from lib.conjugate import all_gather_reduce_scatter, reduce_scatter_all_gather
from lib.mesh import Group

ROWS, TOKENS, HEAD = 2, 3, 4  # TOKENS for each rank, features of a head
REPLICATED = ("norm", "bias")


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    d = n * HEAD  # a head for each rank
    full = {name: random(generator, d, d) / d**0.5 for name in ("q", "k", "v", "out")}
    alike = {name: 1 + random(generator, d) for name in REPLICATED}
    ranks = []
    for r in range(n):
        qkv = torch.cat([full[name].chunk(n)[r] for name in "qkv"])
        mine = {"qkv": qkv, "out": full["out"].chunk(n, dim=1)[r]}
        tokens = {name: random(generator, ROWS, TOKENS, d) for name in ("x", "goal")}
        ranks.append(tokens | {"W": alike | mine})
    return ranks


def body(answer: Callable, group: Group, given: Data) -> Data:
    x, W = given["x"].requires_grad_(), {name: nn.Parameter(p) for name, p in given["W"].items()}
    loss = answer(x, given["goal"], W, group)
    found = {"the loss": loss.detach() if torch.is_tensor(loss) else loss, "gradient of x": x.grad}
    return found | {f"gradient of {name}": p.grad for name, p in W.items()}


def reference(given: list[Data]) -> list[Data]:
    n = len(given)
    x, goal = (torch.cat([g[name] for g in given], 1) for name in ("x", "goal"))
    qkv = torch.cat([g["W"]["qkv"].unflatten(0, (3, -1)) for g in given], 1).flatten(0, 1)
    out = torch.cat([g["W"]["out"] for g in given], 1)
    x, qkv, out, norm, bias = (p.clone().requires_grad_() for p in (x, qkv, out, *map(given[0]["W"].get, REPLICATED)))
    y = x + attention(rms_norm(x, norm.shape, norm) @ qkv.T) @ out.T + bias
    losses = (y - goal).square().sum((0, 2)).view(n, TOKENS).sum(1)
    losses.sum().backward()
    of_qkv = qkv.grad.unflatten(0, (3, n, HEAD))
    alike = {"gradient of norm": norm.grad, "gradient of bias": bias.grad}
    return [
        alike
        | {
            "the loss": losses[r].item(),
            "gradient of x": x.grad.chunk(n, 1)[r],
            "gradient of qkv": of_qkv[:, r].flatten(0, 1),
            "gradient of out": out.grad.chunk(n, 1)[r],
        }
        for r in range(n)
    ]


def attention(qkv: Tensor) -> Tensor:
    q, k, v = qkv.unflatten(-1, (3, -1, HEAD)).permute(2, 0, 3, 1, 4)
    return attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


# ---- the program, right and wrong -----------------------------------------------------------------------------------


def late(y: Tensor, bias: Tensor, scatter: Callable, group: Group) -> Tensor:
    return scatter(y) + bias


def early(y: Tensor, bias: Tensor, scatter: Callable, group: Group) -> Tensor:
    return scatter(y + bias)


def in_parts(y: Tensor, bias: Tensor, scatter: Callable, group: Group) -> Tensor:
    return scatter(y + bias / group.size)


def on_one_rank(y: Tensor, bias: Tensor, scatter: Callable, group: Group) -> Tensor:
    return scatter(y + bias * (group.rank == 0))


def left_out(y: Tensor, bias: Tensor, scatter: Callable, group: Group) -> Tensor:
    return scatter(y) + 0 * bias


def step(add: Callable = late, dim: int = 1, sums: tuple[str, ...] = REPLICATED, op: str = "sum") -> Callable:
    """The program, with the way in which it adds the bias, the dim of its shards, and the gradients that it sums."""

    def program(x, goal, W, group):
        tokens = all_gather_reduce_scatter(rms_norm(x, W["norm"].shape, W["norm"]), group, dim)
        partial_sum = attention(tokens @ W["qkv"].T) @ W["out"].T
        y = x + add(partial_sum, W["bias"], lambda y: reduce_scatter_all_gather(y, group, dim), group)
        loss = (y - goal).square().sum()
        loss.backward()
        for name in sums:
            W[name].grad = comm.all_reduce(W[name].grad, group, op=op)
        return loss

    return program


def in_one_message(x, goal, W, group):
    """The sums in one all-reduce, of a loss as a number."""
    loss = step(sums=())(x, goal, W, group)
    both = comm.all_reduce(torch.stack([W[name].grad for name in REPLICATED]), group)
    for name, summed in zip(REPLICATED, both, strict=True):
        W[name].grad.copy_(summed)
    return loss.item()


ROWS_GATHERED = (
    "Shards are still put together along dim 0, as more sequences: attention is then within the tokens of one rank. An "
    "MLP would still be right. They are shards of the sequence: dim=1, in the gather and in the scatter."
)
TWO_SUMS = (
    "The output is right, and the gradient of the bias is now a partial gradient: after the reduce-scatter each rank "
    "adds the bias to its own tokens. Sum it over the ranks, like the gradient of the norm."
)

EXERCISE = Exercise(
    id="07.1",
    title="corrected_step",
    points=2,
    body=body,
    inputs=inputs,
    reference=reference,
    right=(step(), step(in_parts), in_one_message),
    mistakes=(
        *(
            Mistake(ROWS_GATHERED, step(add, dim=0, sums=sums))
            for add in (early, late, in_parts)
            for sums in (("norm",), REPLICATED)
        ),
        Mistake(
            "The bias is in the output n times: each rank adds it to its partial sum, and the reduce-scatter adds up "
            "the partial sums. Add it afterwards.",
            step(early, sums=("norm",)),
        ),
        Mistake(
            "The bias is still added before the reduce-scatter, so it is in the output n times. Added there, its "
            "gradient already comes from all tokens; sum it only when each rank adds it to its own tokens.",
            step(early),
        ),
        Mistake(TWO_SUMS, step(sums=("norm",))),
        Mistake(
            "The output is right. Each rank adds 1/n of the bias, so each finds 1/n of its gradient. Sum that as well, "
            "or add the full bias after the reduce-scatter.",
            step(in_parts, sums=("norm",)),
        ),
        Mistake(
            "The output is right, but only one rank adds the bias, so only that rank has its gradient: the replicas "
            "would drift apart. Add it on every rank, after the reduce-scatter.",
            step(on_one_rank, sums=("norm",)),
        ),
        Mistake("The bias is gone. Add it, once per token: after the reduce-scatter.", step(left_out)),
        Mistake(
            "The gradient of the norm is no longer summed. It was right in the program that you were given: the norm "
            "multiplies only the tokens of this rank.",
            step(sums=("bias",)),
        ),
        Mistake(
            "Neither of the two replicated parameters has its full gradient. The norm and the bias each meet only the "
            "tokens of this rank: sum both over the ranks.",
            step(sums=()),
        ),
        Mistake(
            "You averaged the gradients of norm and bias. The ranks have different tokens of the same sequences, and "
            'the loss is a sum over all of them: op="sum".',
            step(op="mean"),
        ),
        Mistake(
            "You summed the gradients of the matrices as well. A rank has its own heads, and the gather and the "
            "scatter give it all tokens: no other rank has a part of its gradient.",
            step(sums=(*REPLICATED, "qkv", "out")),
        ),
    ),
)
