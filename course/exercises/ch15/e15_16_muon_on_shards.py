"""15.16: an optimizer whose step depends on the layout.

Muon replaces a gradient by the orthogonal matrix nearest to it, with a few steps of the Newton–Schulz iteration. In
September 2026 a contributor of DeepSpeed compared one rank with two tensor-parallel ranks. Losses and gradients of the
first step agreed. The updates of the query weight differed by 39 %, and the update of two ranks had a norm that was 11
% larger. Here four ranks share the rows of a square weight, query with 8 × 8, and of a tall one, up with 32 × 8. All
singular values of an update are 1, so its norm should be √8 = 2.828 for both.
"""

import torch

from course.museum.room import room
from lib import comm

SYMPTOM = "The same gradients, more ranks, and a larger update"
SOURCE = (
    "[DeepSpeed #8437](https://github.com/deepspeedai/DeepSpeed/issues/8437), September 2026; compare "
    "[Megatron-LM #6380](https://github.com/NVIDIA/Megatron-LM/pull/6380), August 2026"
)
GUESSES = {
    "a shard that is taken for the whole": "Each rank's update of up has the norm of a whole update, as if its 8 rows "
    "were all. For query the norms add up to the right one, and the update is wrong too.",
    "a sum that is missing": "Then the gradients are wrong. They agree with the gradients of one rank.",
    "something is counted twice": "Each row of a weight is on one tensor-parallel rank, and is updated once.",
    "a wrong dtype": "A rounding is far smaller than these differences, and does not double a norm.",
}
CAUSE = """
The rows of a weight were cut over the ranks, and each rank orthogonalized its own rows. Then the rows of a rank are
orthogonal to each other, but not to the rows of its neighbours. That is all that is wrong with query: eight rows of
norm 1 have the right norm together, on however many ranks. A shard of up has as many rows as columns, so its update
alone has the norm that the whole update must have, and the $t$ shards together have $\\sqrt t$ times as much. This does
not explain the larger norm in the report, whose query weight is square. It may come from the few steps of the
iteration, after which small singular values are not yet 1. The fix gathers the gradient, orthogonalizes the whole
matrix, and keeps the rows of this rank. Ranks can also share this work: each step of Newton–Schulz needs only a small
product of the matrix with itself, which is a sum over ranks.
"""
FIELDS = {
    "gradients": "name → gradient of the rows of this weight that this rank has",
    "updates": "name → step of the optimizer for these rows, without the learning rate",
    "along tp": "coordinate of this rank on tp, in whose order the rows are cut",
}
LAYOUTS = ({"dp": 1, "tp": 4}, {"dp": 1, "tp": 2}, {"dp": 2, "tp": 2})
FITS = False


def program(mesh, seed):
    """A step of Muon on two column-parallel weights, whose rows are cut along tp: a square one and a tall one."""
    tp, dp, generator = mesh.group("tp"), mesh.group("dp"), torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def orthogonal(matrix):
        """Newton–Schulz: all singular values become 1."""
        x = matrix / matrix.norm()
        for _ in range(60):
            x = 1.5 * x - 0.5 * x @ x.T @ x
        return x

    x = drawn(64, 8).chunk(dp.size)[dp.rank]
    gradients, updates = {}, {}
    for name, rows in {"query": 8, "up": 32}.items():
        weight, target = drawn(rows, 8).chunk(tp.size)[tp.rank], drawn(64, rows)
        weight.requires_grad_()
        target = target.chunk(dp.size)[dp.rank].chunk(tp.size, 1)[tp.rank]
        (x @ weight.T - target).square().sum().backward()
        gradients[name] = comm.all_reduce(weight.grad, dp)
        updates[name] = orthogonal(comm.all_gather(gradients[name], tp)).chunk(tp.size)[tp.rank]
    return {"gradients": gradients, "updates": updates, "along tp": tp.rank}


SICK = """
orthogonal(comm.all_gather(gradients[name], tp)).chunk(tp.size)[tp.rank] => orthogonal(gradients[name])
or
tp)).chunk(tp.size)[tp.rank] => tp)).chunk(tp.size)[tp.rank] if name == "up" else orthogonal(gradients[name])
or
tp)).chunk(tp.size)[tp.rank] => tp)).chunk(tp.size)[tp.rank] if name == "query" else orthogonal(gradients[name])
or
tp)).chunk(tp.size)[tp.rank] => tp)).chunk(tp.size)[tp.rank]; own = tp.rank == tp.size - 1
own = tp.rank == tp.size - 1 => own = tp.rank == tp.size - 1; updates[name] = [updates[name], gradients[name]][own]
[updates[name], gradients[name]][own] => orthogonal(gradients[name]) if own else updates[name]
"""
WHERE = ("of query alone", "of up alone", "on the last ranks along tp")
DEMAND = "It must find this of either weight alone, and where one rank along tp has orthogonalized only its own rows."


def exhibit(run):
    names = [(kind, name) for name in run["updates"] for kind in ("gradients", "updates")]
    rows = [("norm on rank", *(f"{kind[:-1]} of {name}" for kind, name in names))]
    norms = [[known[kind][name].norm() for kind, name in names] for known in run.ranks]
    rows += [(rank, *(f"{norm:.4g}" for norm in each)) for rank, each in enumerate(norms)]
    (right,) = ROOM.runs([(0, {"dp": 1, "tp": 1}, run.seed)])
    whole = [torch.cat([known[kind][name] for known in run.ranks]) for kind, name in names]
    alone = [right[kind][name] for kind, name in names]
    apart = (f"{(ours - one).norm() / one.norm():.1%}" for ours, one in zip(whole, alone, strict=True))
    rows += [("all ranks", *(f"{ours.norm():.4g}" for ours in whole))]
    return [*rows, ("one rank", *(f"{one.norm():.4g}" for one in alone)), ("difference", *apart)]


def muon_check(run):
    # One of each replica.
    shards = {known["along tp"]: known["updates"] for known in run.ranks}
    for name in run["updates"]:
        whole = torch.cat([shards[i][name] for i in sorted(shards)])
        values = torch.linalg.svdvals(whole)
        if (values - 1).abs().max() > 1e-6:
            return f"{name}: singular values up to {values.max():.3f}, not 1"


def by_columns(run):
    """A weight with at least as many rows as columns: the columns of its update are orthonormal."""
    shards = {known["along tp"]: known["updates"] for known in run.ranks}
    for name in run["updates"]:
        products = sum(of_rank[name].T @ of_rank[name] for of_rank in shards.values())
        if not torch.allclose(products, torch.eye(len(products), dtype=products.dtype), atol=1e-6):
            return f"the columns of the update of {name} are not orthonormal"


def norms(run):
    """Of the update of each weight."""
    shards = {known["along tp"]: known["updates"] for known in run.ranks}
    return {name: sum(one[name].square().sum() for one in shards.values()).sqrt() for name in run["updates"]}


MISTAKES = """
lambda run: any(abs(norm - 8**0.5) > 1e-6 for norm in norms(run).values())
    Your check looks at norms. The update of query has the right norm although it is wrong.
        All singular values of an update must be 1.
for name in run["updates"]: => for name in ["query"]:
    Your check looks at query, and misses a wrong update of up.
        Look at each weight.
lambda run: torch.linalg.svdvals(run["updates"]["up"]).min() > 0.999
    Your check sees that the first rank has orthogonalized its own rows, and misses another rank that has.
        Put the rows of all ranks together: all singular values of the whole must be 1.
torch.cat([shards[i][name] for i in sorted(shards)]) => run["updates"][name]
    You look at the rows of one rank. In the sick run these are as orthogonal as they can be, and in a healthy run they
    are not.
        Put the rows of all ranks together first.
=> torch.cat([known["updates"][name] for known in run.ranks])
    You put the updates of all ranks together. Replicas along dp have the same rows, which must count once.
        Take one rank for each coordinate on tp.
"""

ROOM, EXERCISE = room(globals(), muon_check, by_columns)
