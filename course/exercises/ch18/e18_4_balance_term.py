"""18.4: the term of a rank of the balance loss, with a gradient that is right on every rank."""

import torch

from course.check.edits import exercise
from course.check.exercise import random, whole
from lib import comm

EXPERTS, CHOICES = 5, 2  # E and k
GRADIENT = "gradient of scores"


def inputs(generator, n):
    """Ranks have different numbers of tokens, and loads differ; one expert is never chosen."""
    idle = whole(generator, 0, EXPERTS)
    left = torch.tensor([e for e in range(EXPERTS) if e != idle])
    found = []
    for rank in range(n):
        tokens = 4 + 3 * rank
        scores = random(generator, tokens, EXPERTS).softmax(1)
        order = scores[:, left].topk(CHOICES).indices
        found.append({"scores": scores, "chosen": left[order]})
    return found


def body(answer, group, given):
    scores = given["scores"].requires_grad_()
    term = answer(scores, given["chosen"], group)
    if not torch.is_tensor(term) or term.shape != ():
        return {"the term": term}
    if not term.requires_grad:
        return {"the term": term, GRADIENT: "none: the term has no graph"}
    term.backward()
    return {"the term": term.item(), GRADIENT: torch.zeros_like(scores) if scores.grad is None else scores.grad}


def reference(given):
    """The loss of all tokens by its formula; a rank's term is the one of its scores."""
    parts = [one["scores"].clone().requires_grad_() for one in given]
    chosen = torch.cat([one["chosen"] for one in given])
    tokens = len(chosen)
    shares = [(chosen == e).sum().item() / chosen.numel() for e in range(EXPERTS)]
    terms = [EXPERTS * sum(f * part[:, e].sum() / tokens for e, f in enumerate(shares)) for part in parts]
    sum(terms).backward()
    return [{"the term": term.item(), GRADIENT: x.grad} for term, x in zip(terms, parts, strict=True)]


def balance_term(scores, chosen, group):
    num_experts = scores.shape[1]
    load = torch.bincount(chosen.flatten(), minlength=num_experts)
    load = load.to(scores.dtype)
    load = comm.all_reduce(load, group)
    tokens = load.sum() / chosen.shape[1]
    share, mean = load / load.sum(), scores.sum(0) / tokens
    return num_experts * (share * mean).sum()


def by_one_message(scores, chosen, group):
    """Shares before the sum, weighted by tokens; tokens are counted in the same message."""
    of_token = torch.zeros_like(scores).scatter(1, chosen, 1 / chosen.shape[1]).detach()
    counts = torch.cat([of_token.sum(0), of_token.new_tensor([len(scores)])])
    *load, tokens = comm.all_reduce(counts, group).unbind()
    return scores.shape[1] * (scores @ torch.stack(load)).sum() / tokens**2


def by_a_gather(scores, chosen, group):
    """The loads of all ranks, and the mean of this rank, weighted by its tokens."""
    loads = comm.all_gather(torch.nn.functional.one_hot(chosen, scores.shape[1]).sum((0, 1))[None], group)
    share = loads.sum(0).to(scores.dtype) / loads.sum()
    tokens = loads.sum() // chosen.shape[1]
    return (scores * share).mean(0).sum() * scores.shape[1] * len(scores) / tokens


MISTAKES = """
load = comm.all_reduce(load, group) =>
    Your term is the balance loss of this rank's tokens. Two ranks, each with all its tokens at one expert, have a loss
    of 2 each; together it is 1.
        Sum the counts over the ranks before they meet the scores, and divide by all tokens.
load = comm.all_reduce(load, group) =>
(share * mean).sum() => (share * mean).sum() / group.size
or load = comm.all_reduce(load, group) =>
tokens = load.sum() / chosen.shape[1] => tokens = comm.all_reduce(load, group).sum() / chosen.shape[1]
    Your terms add up to a mean of the ranks' own losses: shares of this rank meet scores of this rank. A mean of
    products is a different number.
        Sum the counts over the ranks before they meet the scores.
scores.sum(0) / tokens => scores.mean(0)
    You divide the scores by the tokens of this rank. Each rank then has a mean of its own, and their sum is about n
    times too large.
        Divide by the tokens of all ranks: load.sum() / k, after the sum.
scores.sum(0) / tokens => scores.sum(0) / (len(scores) * group.size)
or scores.sum(0) / tokens => scores.mean(0) / group.size
    You divide by n times the tokens of this rank. The ranks have different numbers of tokens.
        Count the tokens of all: load.sum() / k, after the sum.
scores.sum(0) / tokens => scores.sum(0) / load.sum()
    You divide the scores by the number of copies: k times too many.
        A mean score is over the tokens.
load / load.sum() => load / tokens
    You divide the counts by the tokens. Each token counts k times in them, so your shares have a sum of k.
        Divide by the number of copies.
share, mean = load / load.sum(), => share, mean = load,
    You forgot to divide the counts: they are no shares.
        Divide by the number of all copies.
return num_experts * (share * mean).sum() => return (share * mean).sum()
or (share * mean).sum() => (share * mean).mean()
    The factor E is missing. Even loads must have a loss of 1.
        Multiply by the number of experts.
chosen.flatten(), minlength => chosen[:, 0], minlength
    You count the first choice of each token.
        All k choices count.
(share * mean).sum() => (share * comm.all_reduce(mean.detach(), group)).sum()
    Your term has no gradient: the mean scores are outside the graph.
        Use this rank's scores in the graph. They need no sum over the ranks: the terms add up.
(share * mean).sum() => (share * (mean + comm.all_reduce(mean.detach(), group) - mean.detach())).sum()
    The gradient is right, and your term is the loss of all ranks. Added up over the ranks it is n times too large.
        Return the part of this rank's scores.
in the term: num_experts * (share * mean).sum() => num_experts * (share.square() * len(scores) / tokens).sum()
or num_experts * (share * mean).sum() => num_experts * (share.square()).sum() + 0 * mean.sum()
    You multiply shares by shares. Counts have no gradient, so the router would learn nothing.
        One factor is the mean score.
(share * mean).sum() => (comm.all_reduce(mean.detach(), group) * mean).sum()
    You multiply mean scores by mean scores. A load is a count of choices.
        One factor is the share of the choices, of all ranks.
comm.all_reduce(load, group) => comm.all_reduce(load, group, op="mean")
    Your counts are means over the ranks, and so are the tokens that you divide by. The terms add up to n losses.
        Sum the counts.
"""

EXERCISE = exercise(globals(), points=1, right=(balance_term, by_one_message, by_a_gather))
