"""15.8: two curves that part after the first step.

With ZeRO-1 each rank steps a shard of the weights, and all-gathers bring it to the others. Megatron-LM has an option
with which a step waits less for them. It must not change any value. In July 2024 a user told how to see that values
change: train a hundred steps on four data-parallel ranks with it, then without, and compare the losses.
"""

import torch

from course.museum.room import room
from lib import comm

SYMPTOM = "An option that should only save time changes the loss"
SOURCE = "[Megatron-LM #950](https://github.com/NVIDIA/Megatron-LM/issues/950), July 2024"
GUESSES = {
    "overlap that reads too early": "Step 0 needs no gather, and is right. Step 1 computes with stale weights.",
    "a sum that is missing": "Then the gradient of step 0 would be wrong.",
    "two ranks that read the same samples": "Then the loss of step 0 would be wrong.",
    "a wrong dtype": "A gather in 16 bits would spare step 0 too. But bfloat16 changes a weight by at most 0.4 %, and "
    "this loss is 4 % off.",
}
CAUSE = """
The gathers run while forward computes. Forward waits for the gather of a bucket, and then starts that of the next one
in the buffer: a, b, c. But the model uses c before b. When forward came to c, no gather of c was in flight, so forward
did not wait. It computed with the shard of this rank, which was new, and with shards of the previous step from all
other ranks. The fix is to order buckets as forward uses them. Megatron-LM also starts a gather when forward needs it
and no rank has started it.
"""
FIELDS = {
    "loss": "of the whole batch, by step",
    "norm": "of the gradient of the whole batch, by step",
    "weights": "name → norm of the weight with which forward computed on this rank, by step",
}
LAYOUTS = ({"dp": 2}, {"dp": 3}, {"dp": 4})


def program(mesh, seed):
    """Three steps of ZeRO-1: each bucket has a weight, and is gathered while forward computes with another."""
    dp, generator = mesh.group("dp"), torch.Generator().manual_seed(seed)
    x, target = torch.randn(2, 12, 12, generator=generator, dtype=torch.float64) * (1, 1.5, 0.5)[seed % 3]
    drawn = torch.randn(3, 12, 12, generator=generator, dtype=torch.float64) / 3
    weights = {name: weight.clone().requires_grad_() for name, weight in zip("abc", drawn, strict=True)}
    order = ["a", "c", "b"]  # in which forward needs them
    mine = slice(12 * dp.rank // dp.size, 12 * (dp.rank + 1) // dp.size)  # rows of the batch, and of each weight
    waiting, started = [], {}
    seen = {"loss": [], "norm": [], "weights": {name: [] for name in weights}}

    def start_next():
        if waiting:
            name = waiting.pop(0)
            started[name] = comm.all_gather_start(weights[name].data[mine], dp)

    def finish(name):
        if name in started:
            weights[name].data.copy_(started.pop(name).wait())
            start_next()

    for step in range(3):
        h = x[mine]
        for name in order:
            finish(name)
            seen["weights"][name].append(weights[name].norm().item())
            h = (h @ weights[name]).tanh()
        loss = (h - target[mine]).square().sum() / 12
        gradients = torch.autograd.grad(loss, list(weights.values()))
        shards = [comm.reduce_scatter(gradient, dp) for gradient in gradients]
        seen["loss"].append(comm.all_reduce(loss.detach(), dp).item())
        seen["norm"].append(comm.all_reduce(torch.stack(shards).square().sum(), dp).sqrt().item())
        for name, shard in zip(weights, shards, strict=True):
            finish(name)
            weights[name].data[mine] -= 0.1 * shard
        waiting += order if step < 2 else []
        start_next()
    return seen


SICK = """
waiting += order => waiting += sorted(order)
or
waiting += order => waiting += order[:2]
or
waiting += order => waiting += order if step < 1 else sorted(order)
or
weights[name].data.copy_(started.pop(name).wait()) => new, n = started.pop(name).wait(), 12 - (name == "b")
12 - (name == "b") => 12 - (name == "b"); weights[name].data[:n] = new[:n]
"""
WHERE = ("in another weight", "from step 2 on", "in one row")
DEMAND = (
    "It must find this in any of the weights, also if it begins only in step 2, and also if a single row of a weight "
    "is stale."
)


def exhibit(run):
    rows = [("step", "loss without", "loss with it", "norm of the gradient without", "norm with it")]
    for step in range(3):
        rows += [(step, *(f"{one[name][step]:.6f}" for name in ("loss", "norm") for one in (run.alone, run)))]
    return rows


def loss_check(run):
    losses = zip(run["loss"], run.alone["loss"], strict=True)
    for step, (ours, right) in enumerate(losses):
        if abs(ours - right) > 1e-9 * right:
            return f"step {step}: loss {ours:.6f}, alone {right:.6f}"
    return ""


def by_weights(run):
    """All ranks compute with the same weights. This needs no other run."""
    for name, norms in run["weights"].items():
        for known in run.ranks:
            apart = (torch.tensor(norms) - torch.tensor(known["weights"][name])).abs().max()
            if apart > 1e-9 * norms[0]:
                return f"ranks compute with different weights {name}"


MISTAKES = """
lambda run: abs(run["loss"][1] / run.alone["loss"][1] - 1) > 1e-9
    Your check misses a fault that begins in a later step.
        Compare the losses of all steps.
lambda run: any(abs(r["weights"]["c"][k] / run["weights"]["c"][k] - 1) > 1e-9 for r in run.ranks for k in (1, 2))
    Your check looks at the weight that was stale in the exhibit, and misses another one.
        Look at all weights, or at the loss, which depends on all of them.
abs(ours - right) > 1e-9 * right => abs(ours - right) > 0.03 * right
    Your check misses a small fault: a stale row differs from a new one by a step of the optimizer.
        All is in float64, and ranks and one process differ by rounding alone: 1e-9 is far above that.
"""

ROOM, EXERCISE = room(globals(), loss_check, by_weights)
