"""15.5: a gradient norm that grows with the number of tensor-parallel ranks.

Two models with multi-head latent attention were trained on eight tensor-parallel ranks. Their logged gradient norms
were 1.52 and 1.36 times the right ones, in each step. The loss was almost the same: gradients are clipped by this norm,
and Adam hardly notices. But people choose the clipping threshold by it.
"""

import torch

from course.museum.room import room
from lib import comm

SYMPTOM = "A gradient norm with a constant factor"
SOURCE = "[ROCm/TransformerEngine #715](https://github.com/ROCm/TransformerEngine/pull/715), August 2026"
GUESSES = {
    "something is counted twice": "Ranks that hold the same weight have the same gradient, and each of them adds it.",
    "a wrong denominator": "Then the gradients would be wrong by this factor. They are those of one process.",
    "a sum that is missing": "Then the logged norm would be too small, or scale and bias would differ between ranks.",
    "overlap that reads too early": "Then the gradients would be wrong: each rank has those of one process.",
}
CAUSE = """
The norm of all gradients is a sum of squares over ranks, so a rank marks each weight: is this a shard, or a replica
that only one rank may add? Some replicated weights carried the mark of a shard, and each of the $t$ ranks added them.
Without the mark, or with each square divided by the number of its copies, the norm is right.
"""
FIELDS = {
    "norm": "norm of all gradients of the model, as logged",
    "gradients": "name → gradient on this rank: a shard or a replica",
    "cut": "name → whether it is cut along tp",
    "along tp": "coordinate of this rank on tp",
}
LAYOUTS = ({"dp": 1, "tp": 4}, {"dp": 1, "tp": 2}, {"dp": 2, "tp": 2})
FITS = False


def program(mesh, seed):
    """Backward of a norm, a column-parallel and a row-parallel layer, and the norm of all gradients."""
    tp, dp, generator = mesh.group("tp"), mesh.group("dp"), torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return (0.3, 0.6, 0.45)[seed % 3] * torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = drawn(6, 8).chunk(dp.size)[dp.rank]
    whole = {"scale": drawn(8), "up": drawn(8, 8), "down": drawn(8, 8), "bias": drawn(8)}
    dims = {"up": 1, "down": 0}  # along which a weight is cut
    mine = {name: w.chunk(tp.size, dims[name])[tp.rank] if name in dims else w for name, w in whole.items()}
    mine = {name: weight.clone().requires_grad_() for name, weight in mine.items()}
    part = (x * mine["scale"]) @ mine["up"] @ mine["down"]
    y = comm.all_reduce(part.detach(), tp) + mine["bias"]
    part.backward(y.detach())  # of half the sum of squares of y
    y.backward(y.detach())
    grads = {name: comm.all_reduce(weight.grad, dp) for name, weight in mine.items()}
    grads["scale"] = comm.all_reduce(grads["scale"], tp)  # each rank has what its columns give
    counted = [gradient for name, gradient in grads.items() if name in dims or tp.rank == 0]
    square = sum(gradient.square().sum() for gradient in counted)
    return {
        "norm": comm.all_reduce(square, tp).sqrt().item(),
        "gradients": grads,
        "cut": {name: name in dims for name in grads},
        "along tp": tp.rank,
    }


SICK = """
[gradient for name, gradient in grads.items() if name in dims or tp.rank == 0] => list(grads.values())
or
if name in dims or tp.rank == 0 => if name in dims or name == "scale" or tp.rank == 0
or
if name in dims or tp.rank == 0 => if name in dims or name == "bias" or tp.rank == 0
"""
WHERE = ("in scale alone", "in bias alone")
DEMAND = "It must find a norm that counts a single weight too often, whichever it is."


def exhibit(run):
    (right,) = ROOM.runs([(0, {"dp": 1, "tp": 1}, run.seed)])
    cut = run["cut"]
    rows = [("rank", "norm, as logged", *(f"norm of {name}" for name in cut))]
    for rank, seen in [*enumerate(run.ranks), ("one process", right.ranks[0])]:
        rows += [(rank, f"{seen['norm']:.3f}", *(f"{g.norm():.3f}" for g in seen["gradients"].values()))]
    shards = {name: torch.cat([known["gradients"][name].flatten() for known in run.ranks]) for name in cut}
    whole = (f"{shards[name].norm():.3f} (shards)" if cut[name] else "(copies)" for name in cut)
    return [*rows[:-1], ("together", "", *whole), rows[-1]]


def norm_check(run):
    # One rank for each coordinate on tp.
    replica = {known["along tp"]: known for known in run.ranks}
    square = 0
    for i, known in replica.items():
        for name, gradient in known["gradients"].items():
            if known["cut"][name] or i == 0:
                square += gradient.square().sum().item()
    apart = abs(run["norm"] / square**0.5 - 1)
    if apart > 1e-9:
        return f"norm {run['norm']:.4f} is logged, and is {square**0.5:.4f}"
    return ""


def by_whole(run):
    """Put the shards together first."""
    shards = {known["along tp"]: known["gradients"] for known in run.ranks}
    whole = [
        torch.cat([one[name].flatten() for one in shards.values()]) if cut else shards[0][name]
        for name, cut in run["cut"].items()
    ]
    norm = torch.cat([one.flatten() for one in whole]).norm().item()
    return "the norm is wrong" if abs(norm - run["norm"]) > 1e-9 * norm else ""


def whole_tp(run):
    """The gradients of one rank for each coordinate on tp."""
    return {known["along tp"]: known["gradients"] for known in run.ranks}.values()


MISTAKES = """
replica.items() => enumerate(run.ranks)
    You add the gradients of all ranks. Replicas along dp hold the same gradients, and in a healthy layout with dp you
    count them once for each.
        Take one rank for each coordinate on tp.
known["cut"][name] or i == 0 => True
    Your norm counts a replicated weight once for each rank along tp: it has the fault that it looks for.
        A shard counts on each rank along tp, a replica on one of them.
lambda run: abs(sum(x.square().sum() for r in whole_tp(run) for x in r.values()) / run["norm"] ** 2 - 1) < 1e-9
    Your check knows one wrong norm, that of the exhibit, in which all replicas count on each rank. It misses a norm in
    which only some do.
        Compute the right norm from the gradients, and compare with that.
apart > 1e-9 => apart > 0.2
    Your check misses a small fault: one weight that is counted too often changes the norm by a few per cent.
        The gradients are in float64, and a norm of them differs by rounding alone: 1e-9 is far above that.
"""

ROOM, EXERCISE = room(globals(), norm_check, by_whole)
