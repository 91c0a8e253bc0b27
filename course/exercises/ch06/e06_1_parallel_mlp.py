"""06.1: a gated MLP whose output is normalised and added to its input: what comes before the all-reduce, what after."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.functional import linear, pad, rms_norm, silu

from course.check.exercise import AS_NEEDED, MORE, Data, Exercise, Mistake, everywhere, random
from course.check.listen import listen
from lib import comm, cost
from lib.mesh import Group

WIDTH, HIDDEN = 6, 8  # of x; of each rank: gathering them sends more than a sum of y
ARGUMENTS = ("x", "gate_up", "down", "down_bias", "scale")


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    replicated = {"x": random(generator, 2, WIDTH)}
    replicated |= {name: random(generator, WIDTH) for name in ("down_bias", "scale")}
    shapes = {"gate_up": (2 * HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
    return [replicated | {name: random(generator, *shape) for name, shape in shapes.items()} for _ in range(n)]


def body(answer: Callable, group: Group, given: Data) -> Data:
    heard, n = listen(), group.size
    y = answer(*(given[name].clone() for name in ARGUMENTS), group)
    much = heard.sent_bytes(n) > 1.2 * cost.wire_bytes("all_reduce", given["x"].nbytes, n)
    return {"y": y, "what was sent": MORE if much else AS_NEEDED}


def reference(given: list[Data]) -> list[Data]:
    x, same = given[0]["x"], given[0]
    gate, up = (torch.cat(parts) for parts in zip(*(g["gate_up"].split(HIDDEN) for g in given), strict=True))
    down = torch.cat([g["down"] for g in given], 1)
    y = linear(silu(x @ gate.T) * (x @ up.T), down, same["down_bias"])
    return everywhere({"y": x + normed(y, same["scale"]), "what was sent": AS_NEEDED}, given)


def normed(y: Tensor, scale: Tensor) -> Tensor:
    return rms_norm(y, scale.shape, scale)


# ---- right programs -------------------------------------------------------------------------------------------------


def gated(x, gate_up, group, act=lambda gate, up: silu(gate) * up, cut=lambda both: both.chunk(2, -1), of=None):
    """This rank's hidden features; `of` the outputs of the fused matrix."""
    both = x @ gate_up.T
    return act(*cut(of(both, group) if of else both))


def summed(term, bias, group, inside=0, outside=1):
    return comm.all_reduce(term + inside * bias, group) + outside * bias


def mlp(
    x,
    gate_up,
    down,
    down_bias,
    scale,
    group,
    hidden=gated,
    total=summed,
    end=lambda x, y, scale: x + normed(y, scale),
):
    return end(x, total(hidden(x, gate_up, group) @ down.T, down_bias, group), scale)


def mlp_by_torch_distributed(x, gate_up, down, down_bias, scale, group):
    gate, up = gate_up[: len(gate_up) // 2], gate_up[len(gate_up) // 2 :]
    y = linear(silu(linear(x, gate)) * linear(x, up), down, down_bias if dist.get_rank() == 0 else None)
    dist.all_reduce(y)
    return y / (y.square().mean(-1, keepdim=True) + torch.finfo(y.dtype).eps).sqrt() * scale + x


def mlp_in_two_halves(x, gate_up, down, down_bias, scale, group):
    term = torch.einsum("bf,df->bd", gated(x, gate_up, group), down).flatten()
    term = pad(term, (0, -len(term) % group.size))
    full = comm.all_gather(comm.reduce_scatter(term, group), group)
    return x + normed(full[: x.numel()].view(x.shape) + down_bias, scale)


# ---- wrong programs -------------------------------------------------------------------------------------------------


def norms_each_partial_sum(x, gate_up, down, down_bias, scale, group):
    y = normed(gated(x, gate_up, group) @ down.T + down_bias, scale)
    return x + comm.all_reduce(y, group)


def sums_at_the_very_end(x, gate_up, down, down_bias, scale, group):
    return comm.all_reduce(x + normed(gated(x, gate_up, group) @ down.T + down_bias, scale), group)


def norms_the_input(x, gate_up, down, down_bias, scale, group):
    return mlp(normed(x, scale), gate_up, down, down_bias, scale, group, end=lambda _, y, scale: x + y)


def gathers_the_hidden_features(x, gate_up, down, down_bias, scale, group):
    hidden = comm.all_gather(gated(x, gate_up, group), group, dim=1)
    return x + normed(hidden @ comm.all_gather(down, group, dim=1).T + down_bias, scale)


def mistake(hint: str, **wrong) -> Mistake:
    return Mistake(hint, partial(mlp, **wrong), about=("y",))


def features(**wrong) -> Callable:
    return partial(gated, **wrong)


EXERCISE = Exercise(
    id="06.1",
    title="parallel_mlp",
    points=2,
    body=body,
    inputs=inputs,
    reference=reference,
    right=(mlp, mlp_by_torch_distributed, mlp_in_two_halves),
    mistakes=(
        mistake(
            "Next to the partial sums, the bias of the last matrix counts once per rank. Either it is added before the "
            "all-reduce, or the all-reduce takes a mean (the norm hides the factor): sum, then add the bias once.",
            total=partial(summed, inside=1, outside=0),
        ),
        mistake(
            "Each rank goes on with its partial sum, of the right shape: nothing was summed over the ranks. The last "
            "matrix ends in an all-reduce.",
            total=lambda term, bias, group: term + bias,
        ),
        Mistake(
            "Each rank normalises its partial sum, and the all-reduce comes after the norm. The norm divides by the "
            "root mean square of y, which no rank knows before the sum: sum, add the bias, then normalise.",
            norms_each_partial_sum,
            about=("y",),
        ),
        Mistake(
            "The all-reduce is the last operation: x is in the sum once per rank, and each rank normalises its "
            "partial sum. Sum right after the last matrix.",
            sums_at_the_very_end,
            about=("y",),
        ),
        Mistake(
            "You normalise the input of the MLP, as Llama does. In this block the norm is applied to the output of "
            "the MLP.",
            norms_the_input,
            about=("y",),
        ),
        mistake(
            "You normalise x + MLP(x). The norm is for the MLP alone, and x is added after it.",
            end=lambda x, y, scale: normed(x + y, scale),
        ),
        mistake("The norm is missing.", end=lambda x, y, scale: x + y),
        mistake("x is missing: the block returns x + norm(MLP(x)).", end=lambda x, y, scale: normed(y, scale)),
        mistake(
            "You summed over the ranks before the gate, and again at the end. After the first matrix each rank has "
            "different hidden features, complete: nothing is to be summed there.",
            hidden=features(of=comm.all_reduce),
        ),
        mistake(
            "Your all-reduce is in the wrong place. Before the gate each rank has different hidden features, complete. "
            "Sum the partial sums after the last matrix.",
            hidden=features(of=comm.all_reduce),
            total=lambda term, bias, group: term + bias,
        ),
        mistake(
            "Gate and up are swapped. The first half of the rows of gate_up is the gate, and SiLU is applied to it.",
            hidden=features(act=lambda gate, up: gate * silu(up)),
        ),
        mistake(
            "You take every second row of gate_up for the gate. The rows of the gate come first, then all rows of up.",
            hidden=features(cut=lambda both: (both[:, ::2], both[:, 1::2])),
        ),
        mistake(
            "SiLU is applied to both halves, or to their product. It is applied to the gate alone, and the result is "
            "multiplied by up.",
            hidden=features(act=lambda gate, up: silu(gate) * silu(up)),
        ),
        mistake(
            "SiLU is applied to both halves, or to their product. It is applied to the gate alone, and the result is "
            "multiplied by up.",
            hidden=features(act=lambda gate, up: silu(gate * up)),
        ),
        mistake(
            "There is no SiLU: gate times up, without it.",
            hidden=features(act=lambda gate, up: gate * up),
        ),
        mistake("The bias of the last matrix is missing.", total=partial(summed, outside=0)),
        Mistake(
            "The output is right, but you send more than one all-reduce of it. No rank needs all hidden features, or "
            "full weights.",
            gathers_the_hidden_features,
        ),
    ),
)
