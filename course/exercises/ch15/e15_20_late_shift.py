"""15.20: a target that is wrong for a few tokens.

Reinforcement learning in verl needs the log-probability of each next token. In November 2025 a contributor plotted how
far apart these numbers are with context parallelism and without: one point was far from the others. Here two ranks have
24 tokens in [zig-zag order](17_context_parallelism.ipynb#a-triangle-of-work).
"""

import torch

from course.museum.room import room
from lib.context_parallel.attention import gather_attention
from lib.context_parallel.tokens import positions_of
from lib.cost.token_orders import tokens_of_rank

SYMPTOM = "The same log-probabilities, except for a few tokens"
SOURCE = (
    "[verl #4250](https://github.com/verl-project/verl/pull/4250), November 2025, and "
    "[BioNeMo recipes #1449](https://github.com/NVIDIA-BioNeMo/bionemo-recipes/pull/1449), February 2026"
)
GUESSES = {
    "two steps in the wrong order": "Wrong numbers end a chunk: the token after the cut was needed, and was "
    "not there any more.",
    "positions from 0 on each rank": "Then attention is wrong, and nearly all numbers of a rank are.",
    "a gather along a wrong dimension": "Then the numbers inside a row would be wrong as well.",
    "a wrong denominator": "Then all numbers would be wrong. Most are right.",
}
CAUSE = """
The target of a token is the next token. verl cut the sequence, and then each rank shifted the tokens that it had. Here
the last token of a chunk gets a wrong target: the first token of the rank's other chunk. Only the last chunk before the
middle is right, because the next one is on the same rank. The fix finds the targets by the order of the cut.
BioNeMo's shifts the full sequence, and cuts
[targets like tokens](../chapters/17_context_parallelism.ipynb#only-attention-mixes-tokens).
"""
FIELDS = {
    "tokens": "places of this rank's tokens in the sequence, in the order in which it has them",
    "ids": "word of each of them; no word comes twice in the sequence",
    "targets": "word that each of them is to predict; the one of the sequence's last token does not count",
    "logprobs": "log-probability of each target, 0 where it does not count",
}
LAYOUTS = ({"cp": 2}, {"cp": 3}, {"cp": 4})
FITS = False


def program(mesh, seed):
    """The log-probability of each next token, for a sequence that is cut in zig-zag order along cp."""
    cp, generator = mesh.group("cp"), torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    ids = torch.randperm(32, generator=generator)[:24]
    mine = positions_of(tokens_of_rank("zigzag", 24, cp.size, cp.rank))
    words, qkv, head = drawn(32, 8), drawn(3, 8, 8) / 3, drawn(8, 32) * (1, 0.1, 3)[seed % 3]
    q, k, v = words[ids[mine]] @ qkv
    y = gather_attention(*(x[None, None] for x in (q, k, v)), cp, "zigzag")[0, 0]
    targets = ids.roll(-1)[mine]
    logprobs = (y @ head).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    logprobs[mine == 23] = 0  # nothing follows the last token
    return {"tokens": mine.tolist(), "ids": ids[mine].tolist(), "targets": targets.tolist(), "logprobs": logprobs}


SICK = """
targets = ids.roll(-1)[mine] => targets = ids[mine].roll(-1)
or
targets = ids.roll(-1)[mine] => targets = ids[mine].roll(-1) if cp.rank == cp.size - 1 else ids.roll(-1)[mine]
or
targets = ids.roll(-1)[mine] => targets = ids.roll(-1)[mine]; targets[12 // cp.size - 1] = ids[mine[12 // cp.size]]
or
targets = ids.roll(-1)[mine] => targets = ids[mine].view(2, -1).roll(-1, 1).flatten()
or
targets = ids.roll(-1)[mine] => targets = ids.roll(-1)[mine]; targets[mine == 1] = ids[1]
"""
WHERE = ("on the last rank", "between the chunks of a rank", "in each chunk alone", "inside a chunk")
DEMAND = "It must find a single wrong target, on any rank, at the end of a chunk or inside it."


def exhibit(run):
    (healthy,) = ROOM.runs([(0, {"cp": 1}, run.seed)])
    right = healthy["logprobs"].tolist()
    rows = [["log-probability after token", "this run", "one rank"]]
    for rank, known in enumerate(run.ranks):
        for token, found in zip(known["tokens"], known["logprobs"].tolist(), strict=True):
            rows.append([f"{token}, on rank {rank}", f"{found:.4f}", f"{right[token]:.4f}"])
    return rows


def next_word_check(run):
    ids, targets = {}, {}
    for known in run.ranks:
        ids |= zip(known["tokens"], known["ids"], strict=True)
        targets |= zip(known["tokens"], known["targets"], strict=True)
    for token in range(len(ids) - 1):
        if targets[token] != ids[token + 1]:
            return f"the target of token {token} is not word {token + 1}"
    return ""


def by_pairs(run):
    """All words in the order of the sequence, and all targets in it: these are the words without the first."""
    rows = sorted(
        row for known in run.ranks for row in zip(known["tokens"], known["ids"], known["targets"], strict=True)
    )
    _, ids, targets = zip(*rows, strict=True)
    return targets[:-1] != ids[1:]


MISTAKES = """
for known in run.ranks => for known in run.ranks[:1]
range(len(ids) - 1) => [token for token in ids if token + 1 in ids]
    Your check looks at one rank, and the word after a chunk is on a different one.
        Put the words and the targets of all ranks together.
lambda run: any(a[1:] != b[:-1] for a, b in [(known["ids"], known["targets"]) for known in run.ranks])
    Your check compares a target with the next word that this rank has. With zig-zag order
    the next word of the sequence may be on a different rank, and the sick run makes the same mistake.
        Put the words of all ranks in the order of the sequence first.
lambda run: {*sum((known["ids"] for known in run.ranks), [])} != {*sum((known["targets"] for known in run.ranks), [])}
    Your check asks whether each word is a target once. It is, when each rank shifts the words that it has.
        Compare places: the target of token t is the word of token t + 1.
range(len(ids) - 1) => [known["tokens"][-1] for known in run.ranks if known["tokens"][-1] < len(ids) - 1]
    Your check looks at the last token of each rank, and misses a wrong target elsewhere.
        Look at each token.
lambda run: min(known["logprobs"].min().item() for known in run.ranks) < -4
    Your check calls a small log-probability wrong. How small they are depends on the weights.
        Look at the targets: they are right or wrong, whatever the weights are.
"""

ROOM, EXERCISE = room(globals(), next_word_check, by_pairs)
