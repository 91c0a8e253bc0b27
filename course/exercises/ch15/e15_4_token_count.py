"""15.4: a loss that depends on who got the long sentences.

Until January 2026 the gradient of a batch in torchtitan could depend on the number of data-parallel ranks. The loss
went down. Sentences differ in length, and padding does not count as a token. Fifteen months earlier the same had been
found in transformers and torchtune, between microbatches.
"""

import math

import torch
from torch import nn

from course.museum.room import room
from lib import comm

SYMPTOM = "The same data on more ranks give a different gradient"
SOURCE = (
    "[torchtitan #2206](https://github.com/pytorch/torchtitan/pull/2206), January 2026; before it "
    "[transformers #34191](https://github.com/huggingface/transformers/pull/34191), October 2024"
)
GUESSES = {
    "a wrong denominator": "A mean of means is the mean only if all have the same count.",
    "a sum too many": "Then the gradient would be larger by a whole factor, equal for all data.",
    "a sum that is missing": "Then the two ranks would have different gradients.",
    "two ranks that read the same samples": "The tokens of the ranks add up to those of the batch.",
}
CAUSE = """
A rank divides by the number of its tokens, and the mean over ranks then gives each rank the same weight: a token
counts more on a rank with few of them. The repair counts the tokens of all ranks first, and each rank divides its
sum by that number.
"""
FIELDS = {
    "loss": "mean loss per token over the whole batch, as logged",
    "gradient": "of the weights, after the ranks have summed it",
    "tokens": "number of tokens that count on this rank",
}
LAYOUTS = ({"dp": 2}, {"dp": 3}, {"dp": 4})


def program(mesh, seed):
    """A step of data parallelism on sentences of different lengths."""
    dp, generator = mesh.group("dp"), torch.Generator().manual_seed(seed)
    x = torch.randn(12, 8, 5, generator=generator, dtype=torch.float64)
    target = torch.randn(12, 8, generator=generator, dtype=torch.float64) * (1, 10, 0.1)[seed % 3]
    lengths = torch.randint(1, 9, (12,), generator=generator).sort().values
    counts = torch.arange(8) < lengths[:, None]  # False: padding
    model = nn.Linear(5, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(model.weight, 0.1)
    mine = slice(12 * dp.rank // dp.size, 12 * (dp.rank + 1) // dp.size)
    errors = (model(x[mine]).squeeze(-1) - target[mine]).square()
    total = (errors * counts[mine]).sum()
    tokens = counts[mine].sum()
    loss = total / comm.all_reduce(tokens, dp)
    loss.backward()
    return {
        "loss": comm.all_reduce(loss.detach(), dp).item(),
        "gradient": comm.all_reduce(model.weight.grad, dp),
        "tokens": tokens.item(),
    }


SICK = """
loss = total / comm.all_reduce(tokens, dp) => loss = total / tokens / dp.size
or
loss = total / comm.all_reduce(tokens, dp) => loss = total / tokens / dp.size
comm.all_reduce(loss.detach(), dp) => comm.all_reduce(total.detach(), dp) / comm.all_reduce(tokens, dp)
or
total / comm.all_reduce(tokens, dp) => total / (comm.all_reduce(tokens, dp) + (dp.size > 1))
or
loss.backward() => loss.backward(); model.weight.grad[:, seed % 5] *= comm.all_reduce(tokens, dp) / tokens / dp.size
"""
WHERE = ("with the right loss in the log", "by one token", "in one weight")
DEMAND = (
    "It must find a wrong gradient even where the log has the right loss, where the denominator is off by a single "
    "token, and where only one weight has a wrong gradient."
)


def exhibit(run):
    rows = [("ranks", "loss", "norm of the gradient on each rank", "tokens of each rank")]
    for seen in (run.alone, run):
        counts = " ".join(str(known["tokens"]) for known in seen.ranks)
        norms = " ".join(f"{known['gradient'].norm():.4f}" for known in seen.ranks)
        rows += [(len(seen.ranks), f"{seen['loss']:.4f}", norms, counts)]
    return rows


def token_check(run):
    alone, ours = run.alone["gradient"], run["gradient"]
    apart = (ours - alone).norm() / alone.norm()
    if apart > 1e-9:
        return f"the gradient is {apart:.0%} away from one process"
    return ""


def by_elements(run):
    """Each weight, on each rank."""
    right = run.alone["gradient"].flatten().tolist()
    for rank, known in enumerate(run.ranks):
        for k, (ours, one) in enumerate(zip(known["gradient"].flatten().tolist(), right, strict=True)):
            if not math.isclose(ours, one, rel_tol=1e-7):
                return f"rank {rank} has {ours} for weight {k}, and one process has {one}"


MISTAKES = """
lambda run: abs(run["loss"] / run.alone["loss"] - 1) > 1e-9
    Your check sees this fault in the loss, and misses gradients that are wrong where the log is right.
        The log may divide by the right number although backward does not. Look at the gradient itself.
alone, ours = run.alone["gradient"], run["gradient"] => alone, ours = run.alone["gradient"][0, 0], run["gradient"][0, 0]
    Your check misses a gradient that is wrong in one weight.
        Compare all elements of the gradient.
apart > 1e-9 => apart > 0.05
    Your check misses a small fault: a denominator that is off by one token changes a gradient by one or two per cent.
        All is in float64, and ranks and one process differ by rounding alone: 1e-9 of the norm is far above that.
"""

ROOM, EXERCISE = room(globals(), token_check, by_elements)
