"""18.1: the experts that tokens choose, and the weights of their outputs, with a bias that only chooses."""

import torch

from course.check.edits import exercise
from course.check.exercise import drawn, kind, several
from lib.moe import ExpertOptions, Router

TOKENS, WIDTH = 60, 6
SIZES = ((8, 2), (5, 3))  # E and k
GRADIENT = "gradient of router"


def inputs(generator, n):
    """Biases as large as scores, so that they change choices; new tokens for each number of experts."""
    given = {}
    for experts, k in SIZES:
        shapes = {"x": (TOKENS, WIDTH), "router": (experts, WIDTH), "bias": (experts,), "gradient": (TOKENS, experts)}
        (one,) = drawn(generator, 1, {}, shapes)
        given[f"{experts} experts, k = {k}"] = one | {"bias": one["bias"].abs() / 2, "k": k}
    return [given] * n


def body(answer, group, given):
    """By expert: the order of the choices of a token is the answer's."""
    found = {}
    for title, one in given.items():
        router, experts = one["router"].clone().requires_grad_(), len(one["router"])
        result = answer(one["x"].clone(), router, one["bias"].clone(), one["k"])
        chosen, gates = several(result, 2)
        found[f"{title}: what was returned"] = kind(result)
        if not fits(chosen, one["k"], experts) or getattr(gates, "shape", None) != chosen.shape:
            found |= {f"{title}: chosen": chosen, f"{title}: gates": gates}
            continue
        of_all = gates.new_zeros(TOKENS, experts).scatter_add(1, chosen, gates)
        if of_all.requires_grad and of_all.dtype == one["gradient"].dtype:
            of_all.backward(one["gradient"])
        found[f"{title}: chosen"] = torch.zeros(TOKENS, experts).scatter_add(1, chosen, torch.ones(chosen.shape))
        found[f"{title}: gates"] = of_all.detach()
        found[f"{title}: {GRADIENT}"] = torch.zeros_like(router) if router.grad is None else router.grad
    return found


def fits(chosen, k, experts):
    """Whether these are numbers of experts, k for each token."""
    if not torch.is_tensor(chosen) or chosen.dtype != torch.int64 or chosen.shape != (TOKENS, k):
        return False
    return bool(chosen.min() >= 0 and chosen.max() < experts)


def reference(given):
    """In a loop over tokens."""
    found = {}
    for title, one in given[0].items():
        router = one["router"].clone().requires_grad_()
        scores = (one["x"] @ router.T).exp()
        scores = scores / scores.sum(1, keepdim=True)
        is_chosen = torch.zeros(scores.shape)
        for token, of_token in enumerate((scores.detach() + one["bias"]).tolist()):
            best = sorted(range(len(of_token)), key=of_token.__getitem__)[-one["k"] :]
            is_chosen[token, best] = 1
        gates = scores * is_chosen
        gates = gates / gates.sum(1, keepdim=True)
        gates.backward(one["gradient"])
        found |= {f"{title}: what was returned": "2 results", f"{title}: chosen": is_chosen}
        found |= {f"{title}: gates": gates.detach(), f"{title}: {GRADIENT}": router.grad}
    return [found] * len(given)


def route(x, router, bias, k):
    scores = (x @ router.T).softmax(-1)
    chosen = (scores + bias).topk(k).indices
    gates = scores.gather(-1, chosen)
    return chosen, gates / gates.sum(-1, keepdim=True)


def by_logits(x, router, bias, k):
    """A softmax over the chosen logits, as Mixtral has it: the sum over all scores cancels. By a sort, worst first."""
    logits = x @ router.T
    chosen = (logits.softmax(1) + bias).argsort(1)[:, -k:]
    return chosen, torch.take_along_dim(logits, chosen, 1).softmax(1)


def by_mask(x, router, bias, k):
    """Everything that was not chosen is masked before the softmax."""
    logits = x @ router.T
    left_out = (torch.log_softmax(logits, -1).exp() + bias).argsort(-1, descending=True)[:, k:]
    gates = logits.scatter(1, left_out, -torch.inf).softmax(-1)
    chosen = gates.detach().topk(k).indices
    return chosen, gates[torch.arange(len(x))[:, None], chosen]


def by_the_library(x, router, bias, k):
    of_library = Router(ExpertOptions(experts=len(router), top_k=k, bias_rate=1.0), router.shape[1]).double()
    del of_library.weight
    of_library.weight, of_library.bias.data = router, bias
    said = of_library(x)
    return said.chosen, said.gates


MISTAKES = """
gates = scores.gather(-1, chosen) => gates = (scores + bias).gather(-1, chosen)
or chosen = (scores + bias).topk(k).indices => gates, chosen = (scores + bias).topk(k)
gates = scores.gather(-1, chosen) =>
    Your gates have the bias in them. It is to move choices, and not outputs: so the weights of experts follow their
    loads.
        Choose by scores + bias, and take the gates from the scores alone.
gates = scores.gather(-1, chosen) => gates = scores.topk(k).values
    Your gates are the k highest scores. With a bias they are not always those of the chosen experts.
        Take the scores of the chosen: gather.
gates = scores.gather(-1, chosen) => gates = scores.gather(-1, chosen).sort(-1, descending=True).values
    You sorted the gates, and not the choices: a gate belongs to a different expert of its token.
        Keep both in the same order.
gates / gates.sum(-1, keepdim=True) => gates
or (x @ router.T).softmax(-1) => (x @ router.T).softmax(-1); scores = scores / scores.sum(-1, keepdim=True)
gates / gates.sum(-1, keepdim=True) => gates
    The choices are right, and the gates of a token do not have the sum of 1. Scores of all experts have this sum, and
    you chose k of them after that.
        Divide by the sum of the k chosen scores.
gates / gates.sum(-1, keepdim=True) => gates.softmax(-1)
    You have two softmaxes, one of scores, and one of gates: the gates are then almost equal.
        Divide the scores by their sum, or take the softmax of the chosen logits alone.
gates / gates.sum(-1, keepdim=True) => gates / gates.mean(-1, keepdim=True)
    The gates of a token have a sum of k.
        Divide by their sum, and not by their mean.
gates / gates.sum(-1, keepdim=True) => torch.full_like(gates, 1 / k)
    Your gates are equal for all chosen experts. The router then has no gradient, and learns nothing.
        An expert counts by its score.
gates / gates.sum(-1, keepdim=True) => gates / gates.sum(0)
    You divide by a sum over the tokens.
        The sum goes over the k experts of a token.
(scores + bias).topk(k) => scores.topk(k)
    Your choice does not use the bias.
        Choose the k highest of scores + bias.
(scores + bias).topk(k) => (scores - bias).topk(k)
    Your bias has the wrong sign: a high bias must make an expert be chosen more.
        Choose the k highest of scores + bias.
(scores + bias).topk(k) => (x @ router.T + bias).topk(k)
or (scores + bias).topk(k) => (x @ router.T + bias).softmax(-1).topk(k)
    You add the bias to the logits. It is an amount that is added to the score, after the softmax.
        Choose the k highest of scores + bias.
scores = (x @ router.T).softmax(-1) => scores = (x @ router.T + bias).softmax(-1)
(scores + bias).topk(k) => scores.topk(k)
    You add the bias to the logits, in front of the softmax. So it is in the choice and in the gates.
        Add it to the scores, for the choice alone.
(scores + bias).topk(k) => (scores + bias).topk(k, largest=False)
    You choose the lowest scores.
        The k highest are chosen.
(x @ router.T).softmax(-1) => (x @ router.T).softmax(0)
    Your softmax goes over the tokens.
        It goes over the experts: dim -1.
(x @ router.T).softmax(-1) => (x @ router.T).sigmoid()
    Your scores are sigmoids. A score is then independent of the remaining experts.
        The router of this chapter has a softmax over the experts.
in gradient of router:
scores = (x @ router.T).softmax(-1) => scores = (x @ router.T).softmax(-1).detach()
or gates = scores.gather(-1, chosen) => gates = scores.gather(-1, chosen).detach()
    Choices and gates are right, and no gradient reaches the router: the gates are detached.
        Only the choice has no gradient. The router learns through the gates.
gates / gates.sum(-1, keepdim=True) => gates / gates.sum(-1, keepdim=True).detach()
    Choices and gates are right, and the gradient treats the sum of the k scores as a constant.
        If one score rises, the gates of the remaining experts fall: do not detach the sum.
in all:
returns result[::-1]
    Your two results are in the reverse order.
        Return the chosen experts first.
"""

EQUIVALENT = """
chosen = (scores + bias).topk(k).indices => chosen = ((2 * (scores + bias))).topk(k).indices
or chosen = (scores + bias).topk(k).indices => chosen = ((100 * (scores + bias))).topk(k).indices
    Scores are compared, and only their order counts.
"""

EXERCISE = exercise(globals(), points=1, right=(route, by_logits, by_mask, by_the_library), ranks=(1,))
