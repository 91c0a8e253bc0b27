"""15.6: an output that depends on the number of ranks.

In June 2026 a reader of MinivLLM, a small inference engine, computed one linear layer on two tensor-parallel ranks and
in one process. The outputs differed. In August torchtitan fixed the same in the experts of GPT-OSS.
"""

import torch

from course.museum.room import room
from lib import comm

SYMPTOM = "A layer whose output depends on the number of ranks"
SOURCE = (
    "[MinivLLM #80](https://github.com/Wenyueh/MinivLLM/issues/80), June 2026, and "
    "[#13](https://github.com/Wenyueh/MinivLLM/issues/13), January 2026; "
    "[torchtitan #4245](https://github.com/pytorch/torchtitan/pull/4245), August 2026"
)
GUESSES = {
    "a sum too many": "The difference is the same for each sample: something that no input changes is added again.",
    "a sum that is missing": "A partial sum depends on the sample, and then the difference would as well.",
    "a wrong denominator": "Then outputs would be wrong by a factor, and a larger output would be more wrong.",
    "a wrong order of elements": "Then the right outputs would appear in the wrong places.",
}
CAUSE = """
The bias is not cut, so each rank has all of it. A rank added it to its partial sum before the all-reduce, and the
result had $t$ biases. It must be added after the sum, or on a single rank, or as $b/t$ on each rank. torchtitan
divides. But it read $t$ from the weight if this was a DTensor, and with the new default backend weights are plain
parameters, so $t$ stayed 1. The division has a trap: autograd divides the gradient of the bias by $t$ too,
and each copy of the bias then steps with a fraction of its gradient. That separate fault was found in the row-parallel
layers a week later ([#4332](https://github.com/pytorch/torchtitan/pull/4332)).
"""
FIELDS = {
    "output": "of the layer, [samples of this rank, features]",
    "samples": "numbers of the samples of this rank",
    "loss": "mean squared error of the samples of this rank",
}
LAYOUTS = ({"dp": 1, "tp": 4}, {"dp": 1, "tp": 2}, {"dp": 2, "tp": 2})


def program(mesh, seed):
    """Forward of a column-parallel and a row-parallel layer with a bias."""
    tp, dp, generator = mesh.group("tp"), mesh.group("dp"), torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * (1, 4, 0.3)[seed % 3]

    x, target, up, down, bias = drawn(12, 6), drawn(12, 6), drawn(6, 8), drawn(8, 6), drawn(6)
    samples = list(range(12))[dp.rank :: dp.size]
    hidden = (x[samples] @ up.chunk(tp.size, 1)[tp.rank]).relu()
    part = hidden @ down.chunk(tp.size, 0)[tp.rank]
    output = comm.all_reduce(part, tp) + bias
    return {
        "output": output,
        "samples": samples,
        "loss": (output - target[samples]).square().mean().item(),
    }


SICK = """
comm.all_reduce(part, tp) + bias => comm.all_reduce(part + bias, tp)
or
+ bias => + bias * (1 + (tp.size > 1 and dp.rank * tp.size + tp.rank == seed % (dp.size * tp.size)))
or
+ bias => + bias; output[0, 0] += bias[0] * (tp.size > 1)
or
+ bias => + bias; output[-1, -1] += bias[-1] * (tp.size > 1)
"""
WHERE = ("on one rank", "in the first element", "in the last element")
DEMAND = "It must find a bias that is added again on one rank only, or in one element of the output only."


def exhibit(run):
    rows = [("sample", "feature", "one process", f"{len(run.ranks)} ranks", "difference")]
    for sample in range(3):
        for feature in range(2):
            alone, ours = (one["output"][sample, feature].item() for one in (run.alone, run))
            rows += [(sample, feature, f"{alone:.4f}", f"{ours:.4f}", f"{ours - alone:.4f}")]
    return rows


def output_check(run):
    for rank, known in enumerate(run.ranks):
        right = run.alone["output"][known["samples"]]
        apart = (known["output"] - right).norm() / right.norm()
        if apart > 1e-9:
            return f"rank {rank} is {apart:.0%} away from one process"
    return ""


def by_loss(run):
    """All ranks have equally many samples, so the mean of their losses is the loss of one process."""
    loss = sum(known["loss"] for known in run.ranks) / len(run.ranks)
    return f"loss {loss}" if abs(loss - run.alone["loss"]) > 1e-9 * run.alone["loss"] else ""


MISTAKES = """
enumerate(run.ranks) => [(0, run.ranks[0])]
    Your check misses an output that is wrong on another rank than the one that it looks at.
        Look at the output of each rank.
(known["output"] - right).norm() => (known["output"] - right)[0, 0].abs()
or (known["output"] - right).norm() => (known["output"] - right)[0].norm()
    Your check misses an output that is wrong in one element, in another place than the one that it looks at.
        Compare all samples and all features.
apart > 1e-9 => apart > 0.2
    Your check misses a small fault: a bias in a single element changes the norm of the output little.
        All is in float64, and ranks and one process differ by rounding alone: 1e-9 of the norm is far above that.
right = run.alone["output"][known["samples"]] => right = run.alone["output"][: len(known["samples"])]
or lambda run: "" if abs(run["loss"] / run.alone["loss"] - 1) < 1e-9 else "a wrong loss"
    You compare a rank with samples that are not its own: where dp divides the batch, each rank has a part of it.
        Its samples are rows of the output of one process. The mean of the losses of all ranks is the loss of the batch.
"""

ROOM, EXERCISE = room(globals(), output_check, by_loss)
