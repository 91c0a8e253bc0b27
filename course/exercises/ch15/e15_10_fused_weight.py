"""15.10: a checkpoint that loads without an error, and a model that has forgotten everything.

In February 2025 a model was trained with ROCm's Megatron on eight GPUs, to a loss of about 2. On eight GPUs it went on
from its checkpoint. On a different number of GPUs the checkpoint loaded too, but the loss began at about 10, and the
model wrote gibberish. Compared with the saved weights, all were right, except one in each layer. A year later the
attention of NeMo AutoModel was silently wrong with tensor parallelism. In both, every shape fitted.
"""

import torch

from course.museum.room import room
from lib import comm

SYMPTOM = "Loaded without an error, and the loss is that of an untrained model"
SOURCE = (
    "[ROCm Megatron-LM #63](https://github.com/ROCm/Megatron-LM/pull/63), February 2025; "
    "[NeMo AutoModel #1324](https://github.com/NVIDIA-NeMo/Automodel/pull/1324), February 2026"
)
GUESSES = {
    "a wrong order of elements": "The shards have the norm of the checkpoint: all elements arrived, but not where "
    "the layer needs them.",
    "two copies where there should be one": "Then the shards together would have a larger norm than the checkpoint.",
    "a sum that is missing": "Then the ranks along tp would have different losses.",
    "a wrong dtype": "Then the norm would be rounded as well, and the loss would change much less.",
}
CAUSE = """
Queries, keys and values are one weight, one below the next, and loading cut it into equal shards, as it does any
matrix. Of two ranks the first got queries and keys, the second keys and values, and each took a third of its rows for
queries. In ROCm's Megatron it was the fused gate and up projection of the MLP. The fix is to cut each of the three and
then fuse the shards, or to store the rows in an order in which equal shards are whole heads. The same order misleads
readers of activations: [nnsight #719](https://github.com/ndif-team/nnsight/pull/719), September 2026, gathered the
output of such a layer rank by rank, and a cut into gate and up gave a part of both.
"""
FIELDS = {
    "loss": "mean square of the output's errors, over the whole batch",
    "output": "of the layer, for the sequences of this rank: [sequences, tokens, hidden]",
    "qkv": "the fused weight on this rank: queries, keys and values of its heads, one below the other",
    "saved": "name → unsharded weight as in the checkpoint: q, k, v and o",
    "along tp": "coordinate of this rank on tp",
}
LAYOUTS = ({"dp": 1, "tp": 2}, {"dp": 1, "tp": 4}, {"dp": 2, "tp": 2})


def program(mesh, seed):
    """Load attention with four heads onto tensor-parallel ranks, and compute the loss."""
    tp, dp, generator = mesh.group("tp"), mesh.group("dp"), torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def attend(x, qkv, o, heads):  # x[B, N, D], qkv[3·heads·2, D], o[D, heads·2] → [B, N, D]
        q, k, v = (x @ qkv.T).unflatten(-1, (3, heads, 2)).permute(2, 0, 3, 1, 4)  # each [B, heads, N, 2]
        seen = torch.softmax(q @ k.mT, dim=-1) @ v
        return seen.transpose(1, 2).flatten(2) @ o.T

    saved = {name: drawn(8, 8) / 8**0.5 for name in "qkvo"}
    x = drawn(4, 5, 8)
    trained = attend(x, torch.cat([saved[name] for name in "qkv"]), saved["o"], heads=4)
    target = trained + (0.1, 1, 10)[seed % 3] * drawn(4, 5, 8)  # the loss of the trained model
    qkv = torch.cat([saved[name].chunk(tp.size)[tp.rank] for name in "qkv"])
    o = saved["o"].chunk(tp.size, dim=1)[tp.rank]
    mine = slice(4 * dp.rank // dp.size, 4 * (dp.rank + 1) // dp.size)
    output = comm.all_reduce(attend(x[mine], qkv, o, heads=4 // tp.size), tp)
    loss = comm.all_reduce((output - target[mine]).square().mean(), dp, op="mean")
    return {"loss": loss.item(), "output": output, "qkv": qkv, "saved": saved, "along tp": tp.rank}


SICK = """
saved[name].chunk(tp.size)[tp.rank] for name in "qkv"]) => saved[name] for name in "qkv"]).chunk(tp.size)[tp.rank]
or
[tp.rank] for name in "qkv"]) => [tp.rank] for name in "qkv"]); one = qkv.view(3, -1, 8)[seed % 3]
one = qkv.view(3, -1, 8)[seed % 3] => one = qkv.view(3, -1, 8)[seed % 3]; moved = dp.rank + tp.rank == 0 < tp.size - 1
0 < tp.size - 1 => 0 < tp.size - 1; one[:] = one.roll(int(moved), 0)
or
[tp.rank] for name in "qkv"]) => [tp.rank] for name in "qkv"]); one = qkv.view(3, -1, 8)[seed % 3]; last = world
last = world => last = dp.size * tp.size; moved = (dp.rank + 1) * (tp.rank + 1) == last > 1
== last > 1 => == last > 1; one[:] = one.roll(int(moved), 0)
"""
WHERE = ("in one weight of the first rank", "in one weight of the last rank")
DEMAND = "It must find rows in a wrong order in any one of the three weights, and on any one rank."


def exhibit(run):
    rows = [("rank", "loss", "shape of qkv", "norm of all shards", "norm in the checkpoint")]
    whole = torch.cat([run["saved"][name] for name in "qkv"])
    shards = torch.cat([known["qkv"] for known in run.ranks])
    for rank, known in enumerate(run.ranks):
        shape = " × ".join(map(str, known["qkv"].shape))
        rows += [(rank, f"{known['loss']:.4f}", shape, f"{shards.norm():.4f}", f"{whole.norm():.4f}")]
    loss = run.alone["loss"]
    return [*rows, ("in one process", f"{loss:.4f}", " × ".join(map(str, whole.shape)), "", "")]


def heads_check(run):
    for rank, known in enumerate(run.ranks):
        for name, rows in zip("qkv", known["qkv"].chunk(3), strict=True):
            shards = run["saved"][name].chunk(run.layout["tp"])
            moved = (rows != shards[known["along tp"]]).any(dim=1).sum()
            if moved:
                return f"rank {rank} has {moved} wrong rows of {name}"
    return ""


def below(run):
    """The shards of one replica, one below the other."""
    shards = {known["along tp"]: known["qkv"] for known in run.ranks}
    return torch.cat([shards[rank] for rank in sorted(shards)])


def by_loss(run):
    """The loss of one process has whole heads."""
    alone, ours = run.alone["loss"], run["loss"]
    return f"loss {ours:.4f}, and {alone:.4f} in one process" if abs(ours - alone) > 1e-9 * alone else ""


MISTAKES = """
lambda run: not torch.equal(below(run), torch.cat([run["saved"][name] for name in "qkv"]))
    You compare the shards as they lie, one below the other, with the weights of the checkpoint.
        A healthy shard has queries, keys and values. Take each of the three from all ranks, and put these together.
enumerate(run.ranks) => [(0, run.ranks[0])]
    Your check misses rows that are wrong on another rank than the one that it looks at.
        Look at the shard of each rank.
enumerate(run.ranks) => {known["along tp"]: known for known in run.ranks}.items()
    Your check looks at one rank for each coordinate on tp, and misses a replica whose rows are wrong.
        Each rank has loaded its own shard: look at each.
zip("qkv", known["qkv"].chunk(3), strict=True) => [("q", known["qkv"].chunk(3)[0])]
    Your check looks at one of the three weights, and misses the other two.
        Compare queries, keys and values.
lambda run: run["loss"] > 0.1
    Your check compares the loss with a number, and a healthy run may have a larger loss, a sick one a smaller.
        Compare the loss with that of one process, or the weights with those of the checkpoint.
"""

ROOM, EXERCISE = room(globals(), heads_check, by_loss)
