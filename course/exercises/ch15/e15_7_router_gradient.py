"""15.7: a router that trains, and not as in one process.

In August 2026 a user of torchtitan read the gradients of a [mixture of experts](18_experts.ipynb), parameter by
parameter, on one, two and four tensor-parallel ranks. Loss curves looked normal. The five worst gradients were those of
the five routers. In October 2025 a maintainer had fixed such a fault for the first time.
"""

import torch

from course.museum.room import room
from lib import comm
from lib.conjugate import all_reduce_identity, identity_all_reduce

SYMPTOM = "The loss is right, and the router is trained with a different gradient"
SOURCE = (
    "[torchtitan #4054](https://github.com/pytorch/torchtitan/pull/4054), August 2026; before it "
    "[#2387](https://github.com/pytorch/torchtitan/issues/2387), February 2026, and "
    "[#1805](https://github.com/pytorch/torchtitan/issues/1805), October 2025"
)
GUESSES = {
    "a sum that is missing": "Both ranks have the same router, and each has a different gradient for it: a share.",
    "a wrong denominator": "Then the gradients of the experts would be wrong by the same factor, and they are right.",
    "something is counted twice": "Then the ranks would agree on a gradient that is too large.",
    "the formula is wrong": "One process computes the same formula, and the loss is the same.",
}
CAUSE = """
The experts are cut along tp. Each rank computes with a part of them, and what it sends back to their input and to the
scores of the router is a partial sum. Forward needs no message there, but backward needs an all-reduce. torchtitan
declares how such gradients are laid out. The layout was declared, but it was passed on only with expert
parallelism, and the default says that each rank already has the full gradient. Now it is always passed on. A router has
[a second gradient](../chapters/18_experts.ipynb#whose-gradient-is-it), of the balance loss, which must not be summed.
"""
FIELDS = {
    "loss": "of the whole batch, as logged",
    "gradients": "name → gradient on this rank, before the sum along dp: of a shard or of a replica",
    "cut": "name → whether each rank along tp has a separate shard",
    "along dp": "coordinate of this rank on dp",
}
LAYOUTS = ({"dp": 1, "tp": 2}, {"dp": 1, "tp": 4}, {"dp": 2, "tp": 2})


def program(mesh, seed):
    """Forward and backward of a scale, a router, and two experts that are cut along tp."""
    tp, dp, generator = mesh.group("tp"), mesh.group("dp"), torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * (1, 1.5, 0.5)[seed % 3]

    x = drawn(8, 6).chunk(dp.size)[dp.rank]
    whole = {"scale": drawn(6), "router": drawn(6, 2), "up": drawn(2, 6, 8), "down": drawn(2, 8, 6)}
    dims = {"up": 2, "down": 1}  # along which a weight is cut
    mine = {name: w.chunk(tp.size, dims[name])[tp.rank] if name in dims else w for name, w in whole.items()}
    mine = {name: weight.clone().requires_grad_() for name, weight in mine.items()}
    h = x * mine["scale"]
    scores = (h @ mine["router"]).softmax(-1)  # [token, expert]
    hidden = torch.einsum("tw,ewf->tef", identity_all_reduce(h, tp), mine["up"]).relu()
    part = torch.einsum("te,tef,efw->tw", identity_all_reduce(scores, tp), hidden, mine["down"])
    y = all_reduce_identity(part, tp)
    loss = y.square().sum() / 96
    loss.backward()
    return {
        "loss": comm.all_reduce(loss.detach(), dp).item(),
        "gradients": {name: weight.grad for name, weight in mine.items()},
        "cut": {name: name in dims for name in mine},
        "along dp": dp.rank,
    }


SICK = """
identity_all_reduce(h, tp) => h
identity_all_reduce(scores, tp) => scores
or identity_all_reduce(scores, tp) => scores
or
loss.backward() => loss.backward(); mine["router"].grad[0] /= 1 + (tp.rank == max(1, tp.size // 2))
or
loss.backward() => loss.backward(); mine["router"].grad[5] /= 1 + (tp.rank == max(1, tp.size // 2))
"""
WHERE = ("at the scores alone", "in the first row on one rank", "in the last row on one rank")
DEMAND = "It must find a router whose gradient alone is wrong, on one rank only, in one row only."


def exhibit(run):
    rows = [("norm of the gradient", "one process", *(f"rank {k}" for k in range(len(run.ranks))), "both shards")]
    for name, cut in run["cut"].items():
        norms = [known["gradients"][name].norm().item() for known in (run.alone.ranks[0], *run.ranks)]
        together = f"{torch.tensor(norms[1:]).norm():.4f}" if cut else ""
        rows += [(f"of {name}", *(f"{norm:.4f}" for norm in norms), together)]
    return [*rows, ("(the loss)", *(f"{known['loss']:.4f}" for known in (run.alone.ranks[0], *run.ranks)), "")]


def replica_check(run):
    for rank, known in enumerate(run.ranks):
        dp = known["along dp"]
        same = [one for one in run.ranks if one["along dp"] == dp]
        replica = same[0]["gradients"]
        for name, gradient in known["gradients"].items():
            apart = (gradient - replica[name]).norm() / gradient.norm()
            if not known["cut"][name] and apart > 1e-9:
                return f"{name} on rank {rank}: {apart:.0%} from its replica"
    return ""


def by_router(run):
    """Each rank along tp has the full gradient of its samples: the sum over all ranks has each tp times."""
    total = sum(known["gradients"]["router"] for known in run.ranks) / run.layout["tp"]
    right = run.alone["gradients"]["router"]
    return "the gradient of the router is wrong" if (total - right).norm() > 1e-9 * right.norm() else ""


MISTAKES = """
one["along dp"] == dp => True
    Your check fires on healthy runs with dp. There ranks have different samples, and their gradients are equal, or
    those of one process, only after the sum along dp.
        Compare a rank with those that have the same coordinate on dp.
enumerate(run.ranks) => enumerate(run.ranks[:2])
    Your check compares two ranks, and misses a third whose replica has a different gradient.
        Compare all ranks with the same coordinate on dp.
if not known["cut"][name] => if name == "scale"
    Your check looks at scale, and misses a router that is trained with a wrong gradient while that of scale is right.
        All weights that are not cut are replicas.
(gradient - replica[name]).norm() => (gradient - replica[name]).view(-1)[0].abs()
    Your check misses a gradient that is wrong in another element than the one that it looks at.
        Compare all elements.
"""

ROOM, EXERCISE = room(globals(), replica_check, by_router)
