"""15.9: tokens that know the future.

With context parallelism each rank gathers the keys and values of all ranks, and computes the attention of its tokens.
In May 2026 a reader of torchtitan's code saw that a refactoring had changed it. The thread names no run that failed,
but there is a rule that every causal attention obeys. Here the tensors of a rank have axes for tokens, heads and the
width of a head, and twelve heads of queries share one of keys and values.
"""

import torch

from course.museum.room import room
from lib import comm

SYMPTOM = "Tokens that depend on tokens after them"
SOURCE = "[torchtitan #3206](https://github.com/pytorch/torchtitan/pull/3206), May 2026"
GUESSES = {
    "a wrong dimension": "Token 0 depends on the first token of each rank, token 1 on the first two of each: the "
    "chunks lie side by side, as heads do, and not in sequence.",
    "a wrong order of elements": "Then token 0 would still depend on a single token.",
    "a sum that is missing": "Then tokens would depend on fewer tokens than they should.",
    "two ranks that read the same samples": "Then there would be tokens on which no output depends.",
}
CAUSE = """
Keys and values had the shape [batch, head, token, width], and were gathered along dimension 2. Since the refactoring
they had [batch, token, head, width] at this place, and dimension 2 was the heads. Grouped-query attention accepts
different numbers of heads, and the causal mask counts the tokens of a chunk. The fix writes 1 for 2.
"""
FIELDS = {
    "tokens": "places of this rank's tokens in the sequence",
    "depends": "[tokens of this rank, all tokens]: whether the first's output changes with the second's input",
}
LAYOUTS = ({"cp": 2}, {"cp": 3}, {"cp": 4})
FITS = False


def program(mesh, seed):
    """Causal grouped-query attention over a sequence that is cut along cp, with each token and without."""
    cp, generator = mesh.group("cp"), torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = drawn(12, 8).repeat(13, 1, 1)  # [sequence, token, width]
    x[range(12), range(12)] = 0  # sequence j is without token j, and the last has all
    tokens = torch.arange(12).chunk(cp.size)[cp.rank]
    heads = {"q": 12, "k": 1, "v": 1}  # the queries of twelve heads have the same keys and values
    q, k, v = (torch.einsum("stw,whd->sthd", x[:, tokens], drawn(8, h, 4) / 3) for h in heads.values())
    k, v = (comm.all_gather(one, cp, dim=1) for one in (k, v))
    k, v = (one.repeat_interleave(12 // one.shape[2], dim=2) for one in (k, v))
    scores = torch.einsum("sqhd,skhd->shqk", q, k) / 2
    later = torch.arange(k.shape[1]) > tokens[:, None]
    output = torch.einsum("shqk,skhd->sqhd", scores.masked_fill(later, -torch.inf).softmax(-1), v)
    changed = (output[:12] - output[12]).abs().amax((2, 3)) > 1e-12
    return {"tokens": tokens.tolist(), "depends": changed.T}


SICK = """
comm.all_gather(one, cp, dim=1) => comm.all_gather(one, cp, dim=2)
or
> tokens[:, None] => > tokens[:, None]; later[tokens == 1, 3] = False
or
> tokens[:, None] => > tokens[:, None]; later[tokens == 10, 11] = False
or
> tokens[:, None] => > tokens[:, None]; later[tokens == 1, 0], later[tokens == 1, 2] = True, False
"""
WHERE = ("in a token of the first rank", "in a token of the last rank", "in a token that sees as many as it may")
DEMAND = (
    "It must find a single token that depends on a single token after it, whichever they are, even if that token "
    "depends on one before it less."
)


def exhibit(run):
    each = len(run["tokens"])
    lines = ["A rank has, before it gathers keys and values:"]
    lines += [f"  queries          [{each} tokens, 12 heads, width 4]"]
    lines += [f"  keys and values  [{each} tokens,  1 head,  width 4]", ""]
    lines += ["rank  token   depends on token (x) or not (.)", f"{'':14}{' '.join(f'{k:2}' for k in range(12))}"]
    for rank, known in enumerate(run.ranks):
        for token, row in zip(known["tokens"], known["depends"].tolist(), strict=True):
            lines += [f"{rank:4}{token:7}   {' '.join(' x' if on else ' .' for on in row)}"]
    return "\n".join(lines)


def causal_check(run):
    for known in run.ranks:
        for token, row in zip(known["tokens"], known["depends"], strict=True):
            on = row.nonzero().flatten().tolist()
            if on != list(range(token + 1)):
                return f"token {token} depends on the tokens {on}"
    return ""


def by_triangle(run):
    """Above the diagonal of the whole table there is nothing."""
    whole = torch.zeros(12, 12, dtype=torch.bool)
    for known in run.ranks:
        whole[known["tokens"]] = known["depends"]
    return whole.triu(1).any().item()


MISTAKES = """
zip(known["tokens"], known["depends"], strict=True) => [*zip(known["tokens"], known["depends"], strict=True)][:1]
or lambda run: run["depends"][0].sum() > 1
or zip(known["tokens"], known["depends"], strict=True) => [*zip(known["tokens"], known["depends"], strict=True)][-1:]
    Your check looks at one token, of one rank or of each, and misses another one that depends on its future.
        Look at each row of each rank.
for known in run.ranks => for known in run.ranks[:1]
or for known in run.ranks => for known in run.ranks[-1:]
    Your check finds tokens of one rank, and misses those of another that depend on their future.
        Look at each rank.
lambda run: sum(known["depends"].sum().item() for known in run.ranks) != 78
    Your check counts how many tokens depend on others. It misses a token that depends on one after it, and on one
    before it less.
        Look where the entries of a row are: none may be behind the place of its own token.
lambda run: any(row[t + 1] for known in run.ranks for t, row in zip(known["tokens"], known["depends"]) if t < 11)
    Your check looks at the next token, and misses a token that depends on a later one.
        No entry of a row may be behind the place of its own token.
"""

ROOM, EXERCISE = room(globals(), causal_check, by_triangle)
