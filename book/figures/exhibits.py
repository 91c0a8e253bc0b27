"""The exhibit of each room of the museum as a picture: the numbers of the victims next to the right ones.

The problem: a table of four-digit numbers hides the pattern that names a bug.
The idea: the numbers become shares of the right ones, as in chapter 15, so that all that is right looks the same, and
only the pattern is left. Samples that are read and tokens that are seen are dots; calls are boxes with arrows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from book.figures.calls import draw_calls
from book.figures.dots import BAD, DOT, NOTHING, draw_dots
from book.figures.fingerprint import apart, draw_fingerprint
from book.figures.svg import Figure
from course.museum.room import RunSeen

EXACT = 1e-9  # of a number in float64: rounding is smaller, and each fault larger
FIRST_CALLS = 8  # of each rank in the exhibit of room 15.14: a few more than it comes to
Healthy = Callable[[], RunSeen]  # the healthy program of the room, with the same seed, on one rank


def share_of_right(ours: Tensor, right: Tensor) -> float:
    """How many times `right` is contained in `ours`, of the same shape: chapter 15's number."""
    return ((ours * right).sum() / right.square().sum()).item()


def shard_of(right: Tensor, shape: Sequence[int], rank: int) -> Tensor:
    """The part of a tensor that a rank has whose shard has this shape; the tensor itself for a replica."""
    for dim, (whole, mine) in enumerate(zip(right.shape, shape, strict=True)):
        if whole != mine:
            return right.chunk(whole // mine, dim)[rank]
    return right


def gradients_of_ranks(run: RunSeen, right: Mapping[str, Tensor], key: str = "gradients") -> dict[str, list[float]]:
    """Name of a gradient → of each rank, its share of the right gradient, or of its shard of that."""
    return {
        name: [
            share_of_right(known[key][name], shard_of(whole, known[key][name].shape, known.get("along tp", rank)))
            for rank, known in enumerate(run.ranks)
        ]
        for name, whole in right.items()
    }


def _token_count(run: RunSeen, healthy: Healthy) -> Figure:
    alone = run.alone
    rows = {
        "the loss": [known["loss"] / alone["loss"] for known in run.ranks],
        "the gradient": [share_of_right(known["gradient"], alone["gradient"]) for known in run.ranks],
        "tokens of the rank": [f"{known['tokens']}" for known in run.ranks],
    }
    return _shares(
        rows,
        "Two ranks and one process",
        "Each number is a share of the number in one process, which reads all the tokens. Both ranks agree.",
    )


def _replicas_in_norm(run: RunSeen, healthy: Healthy) -> Figure:
    right = healthy()
    rows = {"norm, as logged": [known["norm"] / right["norm"] for known in run.ranks]}
    rows |= {f"gradient of {name}": of for name, of in gradients_of_ranks(run, right["gradients"]).items()}
    note = "Of up and down a rank has a shard, of scale and bias a replica. Only the logged norm is wrong."
    return _shares(rows, "The logged norm and four gradients", note)


def _bias_on_each_rank(run: RunSeen, healthy: Healthy) -> Figure:
    apart_by = (run["output"] - run.alone["output"])[:4].tolist()
    return _shares(
        {f"sample {k}": values for k, values in enumerate(apart_by)},
        "The output, minus the output of one process",
        "A right output would have 0.00. Compare the numbers of a column, then the numbers of a row.",
        columns="feat.",
        right=0,
    )


def _router_gradient(run: RunSeen, healthy: Healthy) -> Figure:
    rows = {"the loss": [known["loss"] / run.alone["loss"] for known in run.ranks]}
    rows |= {f"gradient of {name}": of for name, of in gradients_of_ranks(run, run.alone["gradients"]).items()}
    note = (
        "Of up and down a rank has a shard; router, and scale, which comes before it, are on both ranks in full. Add "
        "the two numbers of a row: each row has its own two."
    )
    return _shares(rows, "The loss and four gradients", note)


def _late_gather(run: RunSeen, healthy: Healthy) -> Figure:
    rows = {
        f"the {name}": [ours / right for ours, right in zip(run[key], run.alone[key], strict=True)][:3]
        for name, key in (("loss", "loss"), ("norm of the gradient", "norm"))
    }
    note = "Each number is a share of the number without the option. See which step is the first that differs."
    return _shares(rows, "A run with the option, compared with a run without it", note, columns="step")


def _gather_of_heads(run: RunSeen, healthy: Healthy) -> Figure:
    rows = {}
    for rank, known in enumerate(run.ranks):
        for token, seen in zip(known["tokens"], known["depends"].tolist(), strict=True):
            rows[f"rank {rank}, token {token}"] = [_dot(on, later > token) for later, on in enumerate(seen)]
    each = len(run["tokens"])
    return draw_dots(
        rows,
        [f"{k}" for k in range(len(run.ranks) * each)],
        title="On which tokens does the output of each token depend?",
        alt=" ".join(
            f"Token {token} depends on {', '.join(f'{k}' for k, on in enumerate(seen) if on)}."
            for token, seen in zip(run["tokens"], run["depends"].tolist(), strict=True)
        )
        + f" {sum(BAD in places for places in rows.values())} of {len(rows)} tokens depend on a later one.",
        legend={DOT: "depends on it", BAD: "depends on a later token"},
        caption=f"Each of {len(run.ranks)} ranks has {each} tokens, with 12 heads of queries and one head of keys and "
        "values. It gathers the keys and values of all ranks, and the first rows show in which order it takes them.",
    )


def _fused_weight(run: RunSeen, healthy: Healthy) -> Figure:
    whole = torch.cat([run["saved"][name] for name in "qkv"])
    shards = torch.cat([known["qkv"] for known in run.ranks])
    rows = {
        "the loss": [known["loss"] / run.alone["loss"] for known in run.ranks],
        "norm of all shards of qkv": [(shards.norm() / whole.norm()).item()] * len(run.ranks),
        "shape of the shard": [" × ".join(map(str, known["qkv"].shape)) for known in run.ranks],
    }
    note = f"In one process qkv has {len(whole)} rows, as in the checkpoint. The loss is a multiple of the right one."
    return _shares(rows, "Two ranks with the loaded weights", note)


def _tied_embedding(run: RunSeen, healthy: Healthy) -> Figure:
    before, after = run["trained"], run["loaded"]
    ratios = [(weights["head"].norm() / weights["embedding"].norm()).item() for weights in (before, after)]
    rows = {
        "the loss": [1.0, "", run["losses"][-1] / run["losses"][-2]],
        "norm of the embedding": [1.0, 1.0, (after["embedding"].norm() / before["embedding"].norm()).item()],
        # Without a frame: it is right after the restart, and was wrong before.
        "norm of the head": ["1.00", "not in it", apart((after["head"].norm() / before["head"].norm()).item())],
        "head : embedding": [ratios[0], "", ratios[1]],
    }
    return _shares(
        rows,
        "Before the restart, in the file, and after it",
        "Losses and norms are shares of the number before the restart; a head that is the embedding has the same norm. "
        "Both ranks have these numbers, and the two losses are of the same batch.",
        columns=("before", "in the file", "after"),
    )


def _resume(run: RunSeen, healthy: Healthy) -> Figure:
    steps = [*zip(*(known["before"] for known in run.ranks), strict=True)]
    split = len(steps)
    steps += zip(*(known["after"] for known in run.ranks), strict=True)
    rows, lines, read = {}, [], set()
    for k, of_ranks in enumerate(steps):
        now = {*chain.from_iterable(of_ranks)}
        again = f", {len(now & read)} of them again" if now & read else ""
        lines.append(f"Step {k + 1} reads samples {min(now)} to {max(now)}{again}.")
        name = f"step {k + 1}" if k != split else f"restart, {k + 1}"
        rows[name] = [_dot(sample in now, sample in read) for sample in range(run["epoch"])]
        read |= now
    columns = [f"{k}" if k % 4 == 0 else "" for k in range(run["epoch"])]
    return draw_dots(
        rows,
        columns,
        title="Which samples does each step read?",
        alt=" ".join([*lines, f"The restart is before step {split + 1}."]),
        legend={DOT: "is read", BAD: "was read before"},
        caption=f"The epoch has samples 0 to {run['epoch'] - 1}. Before the restart four ranks read a sample each; "
        "after it two ranks along tp read the same two samples. Columns without a dark dot are never read.",
    )


def _bytes_sent(run: RunSeen, healthy: Healthy) -> Figure:
    n, shard = len(run.ranks), run["weights"].numel()
    # What a rank sends to each other rank: a float32, shards of 8 bits and of float64, a float64.
    plan = {"scale": 2 * 4 / n, "weights": shard, "gradients": 8 * shard, "loss": 2 * 8 / n}
    right = run.alone["weights"].chunk(n)
    rows: dict[str, list[float]] = {
        "the loss": [known["loss"] / run.alone["loss"] for known in run.ranks],
        "weights after the step": [
            share_of_right(known["weights"], mine) for known, mine in zip(run.ranks, right, strict=True)
        ],
    }
    for k, (what, each) in enumerate(plan.items()):
        rows[f"bytes: {what}"] = [calls[k].bytes / (each * (n - 1)) for calls in run.sent]
    note = "Loss and weights as shares of one process, bytes as shares of the plan: a shard of the weights in 8 bits."
    return _shares(rows, "Results and messages of a step", note)


def _deadlock(run: RunSeen, healthy: Healthy) -> Figure:
    calls = [known["calls"][:FIRST_CALLS] for known in run.ranks]
    received = {
        name: (rank, k) for rank, mine in enumerate(calls) for k, (kind, _, name) in enumerate(mine) if kind == "recv"
    }
    lines = [
        f"Call {k + 1} of rank {rank} sends to call {received[name][1] + 1} of rank {received[name][0]}."
        for rank, mine in enumerate(calls)
        for k, (kind, _, name) in enumerate(mine)
        if kind == "send" and name in received
    ]
    return draw_calls(
        calls,
        title="The first calls of a step",
        alt=" ".join(lines),
        caption="Each rank makes its calls from top to bottom. Play them: a send may wait until the other rank is in "
        "the receive at the tip of its arrow.",
    )


def _bubble_report(run: RunSeen, healthy: Healthy) -> Figure:
    step = max(known["end"] for known in run.ranks)
    rows = {
        "ticks busy": [f"{known['busy']}" for known in run.ranks],
        "ticks idle": [f"{step - known['busy']}" for known in run.ranks],
        "reported : counted share": [run["bubble"] / (1 - known["busy"] / step) for known in run.ranks],
    }
    note = "The counted idle share is idle ticks, divided by all ticks. The last row compares the report with it."
    return _shares(rows, "Four ranks that count", note)


def _muon_on_shards(run: RunSeen, healthy: Healthy) -> Figure:
    right = healthy()
    rows = {}
    for key in ("gradients", "updates"):
        for name, of in gradients_of_ranks(run, right[key], key).items():
            rows[f"{key[:-1]} of {name}"] = of
    for name, whole in right["updates"].items():
        ours = torch.cat([known["updates"][name] for known in run.ranks])
        rows[f"{name}: norms of shards"] = [f"{known['updates'][name].norm():.2f}" for known in run.ranks]
        rows[f"{name}: norm of all"] = [(ours.norm() / whole.norm()).item()] * len(run.ranks)
    note = (
        "Framed and pale numbers are shares of what one rank computes. Norms of a rank's shard of the update have no "
        "frame; the norm of all shards together follows."
    )
    return _shares(rows, "Gradients and updates of two weights", note)


def _late_shift(run: RunSeen, healthy: Healthy) -> Figure:
    right = healthy()["logprobs"].tolist()
    rows = {}
    for rank, known in enumerate(run.ranks):
        found = dict(zip(known["tokens"], known["logprobs"].tolist(), strict=True))
        half = len(found) // 2
        for chunk in (known["tokens"][:half], known["tokens"][half:]):
            shares = [found[token] / right[token] if right[token] else "none" for token in chunk]
            rows[f"rank {rank}, tokens {chunk[0]} to {chunk[-1]}"] = shares
    note = (
        "A row is a chunk. Each number is divided by that of one process; nothing follows the last token. "
        "See where the red ones are, and which last number is right."
    )
    return _shares(rows, "The log-probability after each token of a chunk", note, columns="place")


DRAWN: Mapping[str, Callable[[RunSeen, Healthy], Figure]] = {
    "15.4": _token_count,
    "15.5": _replicas_in_norm,
    "15.6": _bias_on_each_rank,
    "15.7": _router_gradient,
    "15.8": _late_gather,
    "15.9": _gather_of_heads,
    "15.10": _fused_weight,
    "15.11": _tied_embedding,
    "15.12": _resume,
    "15.13": _bytes_sent,
    "15.14": _deadlock,
    "15.15": _bubble_report,
    "15.16": _muon_on_shards,
    "15.20": _late_shift,
}


def _dot(on: bool, wrong: bool) -> str:
    return NOTHING if not on else BAD if wrong else DOT


def _shares(
    rows: Mapping[str, Sequence[float | str]],
    title: str,
    caption: str,
    columns: str | Sequence[str] = "rank",
    right: float = 1,
) -> Figure:
    """A fingerprint whose alternative text says each row."""
    said = {name: [x if isinstance(x, str) else _said(x, right) for x in values] for name, values in rows.items()}
    alike = {name: len({*words}) == 1 for name, words in said.items()}
    alt = "; ".join(
        f"{name}: {words[0]} everywhere" if alike[name] else f"{name}: {', '.join(filter(None, words))}"
        for name, words in said.items()
    )
    return draw_fingerprint(
        rows, title=title, alt=f"{title}. {alt}.", caption=caption, columns=columns, right=right, near=EXACT
    )


def _said(value: float, right: float) -> str:
    return f"{right:.2f}" if abs(value - right) < EXACT else apart(value, right)
