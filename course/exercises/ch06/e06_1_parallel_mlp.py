"""06.1: a gated MLP whose output is normalised and added to its input: what comes before the all-reduce, what after."""

import torch
from torch import distributed as dist
from torch.nn.functional import linear, pad, rms_norm, silu

from course.check.edits import exercise
from course.check.exercise import AS_NEEDED, drawn, everywhere
from course.check.listen import listen
from lib import comm, cost

EPS, SMALL = 1e-5, 0.01
WIDTH, HIDDEN = 6, 8  # of x; of each rank: gathering them sends more than a sum of y
ARGUMENTS = ("x", "gate_up", "down", "down_bias", "scale")
FACTS = {"what was sent": AS_NEEDED}


def inputs(generator, n):
    replicated = {"x": (2, WIDTH), "down_bias": (WIDTH,), "scale": (WIDTH,)}
    # As small as at the beginning of a training: next to EPS, the norm of a multiple is not the same.
    given = drawn(generator, n, replicated, {"gate_up": (2 * HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)})
    return [g | {name: g[name] * SMALL for name in ("down", "down_bias")} for g in given]


def body(answer, group, given):
    heard, n = listen(), group.size
    y = answer(*(given[name].clone() for name in ARGUMENTS), group)
    return {
        "y": y,
        "what was sent": heard.calls_if_more(n, 1.05 * cost.wire_bytes("all_reduce", given["x"].nbytes, n)),
    }


def reference(given):
    x, scale = given[0]["x"], given[0]["scale"]
    gate, up = (torch.cat(parts) for parts in zip(*(g["gate_up"].split(HIDDEN) for g in given), strict=True))
    down = torch.cat([g["down"] for g in given], 1)
    y = linear(silu(x @ gate.T) * (x @ up.T), down, given[0]["down_bias"])
    return everywhere({"y": x + rms_norm(y, scale.shape, scale, EPS)}, given)


def parallel_mlp(x, gate_up, down, down_bias, scale, group):
    gate, up = (x @ gate_up.T).chunk(2, dim=-1)
    partial_sum = (silu(gate) * up) @ down.T
    h = comm.all_reduce(partial_sum, group) + down_bias
    return x + rms_norm(h, scale.shape, scale, eps=1e-5)


def by_torch_distributed(x, gate_up, down, down_bias, scale, group):
    gate, up = gate_up[: len(gate_up) // 2], gate_up[len(gate_up) // 2 :]
    y = linear(silu(linear(x, gate)) * linear(x, up), down, down_bias if dist.get_rank() == 0 else None)
    dist.all_reduce(y)
    return y / (y.square().mean(-1, keepdim=True) + EPS).sqrt() * scale + x


def in_two_halves(x, gate_up, down, down_bias, scale, group):
    gate, up = linear(x, gate_up).split(len(gate_up) // 2, 1)
    term = torch.einsum("bf,df->bd", silu(gate) * up, down).flatten()
    term = pad(term, (0, -len(term) % group.size))
    full = comm.all_gather(comm.reduce_scatter(term, group), group)
    return x + rms_norm(full[: x.numel()].view(x.shape) + down_bias, scale.shape, scale, EPS)


def gathers_the_weights(x, gate_up, down, down_bias, scale, group):
    gate, up, down_t = (comm.all_gather(part, group) for part in (*gate_up.chunk(2), down.T.contiguous()))
    return x + rms_norm((silu(x @ gate.T) * (x @ up.T)) @ down_t + down_bias, scale.shape, scale, EPS)


MISTAKES = """
in y:
partial_sum, group) + down_bias => partial_sum + down_bias, group)
    Next to the partial sums, the bias of the last matrix counts once per rank.
        Sum, then add the bias once.
comm.all_reduce(partial_sum, group) => comm.all_reduce(partial_sum, group, op="mean")
    Next to the bias, the MLP is n times too small: your all-reduce takes a mean, and the norm nearly hides that.
        The partial sums are terms of one sum: add them up.
comm.all_reduce(partial_sum, group) + down_bias => (comm.all_reduce(partial_sum, group) + down_bias) / group.size
    The output of the MLP is n times too small: the norm nearly hides the factor.
        Neither the sum nor the bias is divided: the ranks hold terms of one sum, not copies.
comm.all_reduce(partial_sum, group) => partial_sum
    Each rank goes on with its partial sum: nothing was summed over the ranks.
        The last matrix ends in an all-reduce.
=> partial_sum
rms_norm(h, scale.shape, scale, eps=1e-5) => comm.all_reduce(rms_norm(h, scale.shape, scale, eps=1e-5), group)
or
comm.all_reduce(partial_sum, group) + down_bias => partial_sum + down_bias / group.size
rms_norm(h, scale.shape, scale, eps=1e-5) => comm.all_reduce(rms_norm(h, scale.shape, scale, eps=1e-5), group)
or
comm.all_reduce(partial_sum, group) + down_bias => partial_sum
return x + => x = x + down_bias; return x +
rms_norm(h, scale.shape, scale, eps=1e-5) => comm.all_reduce(rms_norm(h, scale.shape, scale, eps=1e-5), group)
or
comm.all_reduce(partial_sum, group) + down_bias => partial_sum + down_bias * (group.rank == 0)
rms_norm(h, scale.shape, scale, eps=1e-5) => comm.all_reduce(rms_norm(h, scale.shape, scale, eps=1e-5), group)
    Each rank normalises its partial sum, and the all-reduce comes after the norm.
        The norm divides by the root mean square of y, which no rank knows before the sum: sum, add the bias, then
        normalise.
comm.all_reduce(partial_sum, group) => partial_sum
returns comm.all_reduce(result, group)
    The all-reduce comes last: x is summed n times, and partial sums are normalised.
        Sum after the last matrix.
x @ gate_up.T => rms_norm(x, scale.shape, scale, EPS) @ gate_up.T
return x + rms_norm(h, scale.shape, scale, eps=1e-5) => return x + h
    You normalise the input of the MLP, as Llama does.
        In this block the norm is applied to the output of the MLP.
=> return rms_norm(x + h, scale.shape, scale, eps=1e-5)
    You normalise x + MLP(x).
        The norm is for the MLP alone, and x is added after it.
=> return x + rms_norm(h - down_bias, scale.shape, scale, eps=1e-5) + down_bias
    The bias is added after the norm.
        It belongs to the last matrix: sum, add the bias, then normalise.
=> return x + rms_norm(h, scale.shape, scale)
or => return x + rms_norm(h, scale.shape, scale, eps=1e-6)
or => return x + rms_norm(h, scale.shape, scale, eps=1e-8)
    The eps of your norm is not 1e-5: beside it a small h, as here, comes out of the norm with a different size.
        Without eps, rms_norm takes a much smaller one: give it eps=1e-5.
=> return x + rms_norm(h, scale.shape, eps=1e-5)
    The weight of the norm is missing.
        Multiply the normalised output by scale.
=> return x + torch.nn.functional.layer_norm(h, scale.shape, scale, eps=1e-5)
    You use LayerNorm, which subtracts the mean first.
        RMSNorm only divides by the root mean square.
=> return x + h
    The norm is missing.
        Normalise the output of the MLP, after the sum and the bias.
=> return rms_norm(h, scale.shape, scale, eps=1e-5)
    x is missing.
        The block returns x + norm(MLP(x)).
(x @ gate_up.T) => comm.all_reduce(x @ gate_up.T, group)
    You summed over the ranks before the gate, and again at the end.
        After the first matrix each rank has different hidden features, complete: nothing is to be summed there.
=> comm.all_reduce(x @ gate_up.T, group)
comm.all_reduce(partial_sum, group) => partial_sum
    Your all-reduce is in the wrong place.
        Hidden features are complete. Sum the partial sums after the last matrix.
silu(gate) * up => gate * silu(up)
    Gate and up are swapped.
        The first half of the rows of gate_up is the gate, and SiLU is applied to it.
(x @ gate_up.T).chunk(2, dim=-1) => x @ gate_up[::2].T, x @ gate_up[1::2].T
    You take every second row of gate_up for the gate.
        The rows of the gate come first, then all rows of up.
silu(gate) * up => silu(gate) * silu(up)
or => silu(gate * up)
    SiLU is applied to both halves, or to their product.
        Apply it to the gate alone, and multiply the result by up.
=> gate * up
    There is no SiLU: gate times up, without it.
        Apply it to the gate.
+ down_bias =>
    The bias of the last matrix is missing.
        Add it once, after the sum over the ranks.
in all:
(silu(gate) * up) @ down.T => comm.all_gather(silu(gate) * up, group, dim=1) @ down.T
@ down.T => @ comm.all_gather(down, group, dim=1).T
comm.all_reduce(partial_sum, group) => partial_sum
or
gathers_the_weights
    The output is right, but you gather hidden features, or weights: you send more than one all-reduce of the output.
        No rank needs all of them: each sums over its own, and the all-reduce adds the sums.
comm.all_reduce(partial_sum, group) => comm.all_gather(partial_sum[None], group).sum(0)
    The output is right, but you gather the partial sums of all ranks, and add them up: each rank sends n/2 times as
    much as in an all-reduce.
        comm.all_reduce adds on the way.
x @ gate_up.T => comm.all_reduce(x, group, op="mean") @ gate_up.T
or
returns comm.all_reduce(result, group, op="mean")
    The output is right, but you send two all-reduces of its size. What is equal on all ranks already needs none.
        Sum the partial sums of the last matrix, and nothing else.
"""

EXERCISE = exercise(globals(), points=2, right=(parallel_mlp, by_torch_distributed, in_two_halves))
