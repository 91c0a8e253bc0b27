"""08.4: the gradient of a batch out of microbatches of unequal size, one at a time."""

import weakref

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from course.check.edits import exercise
from course.check.exercise import DTYPE, random, whole
from lib.model import mean_loss

TOKENS, D, VOCABULARY, IGNORED = 6, 4, 7, -100
GRADIENT, LOSS, KEPT = "gradient of the", "the loss", "microbatches that wait for backward"
ONE, SEVERAL = "one at a time", "several at the same time"
AGAIN = """Each backward frees its graph. A sum of losses has all their graphs: run backward
with each microbatch's own loss, and add up numbers."""


def inputs(generator, n):
    weight, bias = random(generator, VOCABULARY, D), random(generator, VOCABULARY)
    return [{"weight": weight, "bias": bias, "batches": [batch(generator, count) for count in (3, 5)]}]


def batch(generator, count):
    """So many microbatches. In all 32, 64 or 128 tokens count: each share is exact, in float32 as well."""
    sizes = [(0, 0)]
    while sum(counted for _, counted in sizes) not in (32, 64, 128):
        rows = [whole(generator, 3, 8) for _ in range(count)]  # two microbatches are clearly more than the largest
        sizes = [(one, whole(generator, 1, one * TOKENS)) for one in rows]
    return [piece(generator, *one) for one in sizes]


def piece(generator, rows, counted):
    targets = torch.randint(VOCABULARY, (rows * TOKENS,), generator=generator)
    order = torch.randperm(len(targets), generator=generator)
    targets[order[counted:]] = IGNORED
    targets[order[0]] = whole(generator, 1, VOCABULARY)  # so that without token 0 there is one to count
    return random(generator, rows, TOKENS, D), targets.view(rows, TOKENS)


def body(answer, group, given):
    found = {}
    for pieces in given["batches"]:
        loss, (weight, bias), most = run(answer, given, pieces)
        alone = max(run(answer, given, [piece])[-1] for piece in pieces)
        facts = {f"{GRADIENT} weight": weight, f"{GRADIENT} bias": bias, LOSS: loss}
        facts |= {KEPT: SEVERAL if most > 1.2 * alone else ONE}
        found |= {f"{len(pieces)} microbatches: {what}": fact for what, fact in facts.items()}
    return found


def run(answer, given, pieces):
    """The loss, the gradients, and the most bytes that were saved for backward at any time."""
    model, saved = nn.Linear(D, VOCABULARY, dtype=DTYPE), Saved()
    model.load_state_dict({name: given[name] for name in ("weight", "bias")})
    try:
        with saved_tensors_hooks(saved.pack, lambda held: held.tensor):
            loss = answer(model, [(x.clone(), targets.clone()) for x, targets in pieces])
    except RuntimeError as error:
        if "second time" in str(error):
            error.add_note(AGAIN)
        raise
    return loss, [p.grad for p in model.parameters()], saved.most


class Held:
    """A tensor that a graph holds, for as long as it does."""

    def __init__(self, tensor):
        self.tensor = tensor.detach()  # not its history, which holds this


class Saved:
    """The bytes that graphs hold for backward now, and the most so far."""

    def __init__(self):
        self.now = self.most = 0

    def pack(self, tensor):
        held = Held(tensor)
        if not isinstance(tensor, nn.Parameter):
            self.add(tensor.nbytes)
            weakref.finalize(held, self.add, -tensor.nbytes)
        return held

    def add(self, n_bytes):
        self.now += n_bytes
        self.most = max(self.most, self.now)


def accumulate(model, microbatches):
    counts = [(targets != -100).sum().item() for _, targets in microbatches]
    total = 0.0
    for (x, targets), count in zip(microbatches, counts):  # noqa: B905
        loss = mean_loss(model(x), targets) * count / sum(counts)
        loss.backward()
        total += loss.item()
    return total


def sums_divided_at_the_end(model, microbatches):
    total, count = 0, 0
    for x, targets in microbatches:
        loss = cross_entropy(model(x).flatten(0, 1), targets.flatten(), reduction="sum")
        loss.backward()
        total, count = total + loss.detach(), count + (targets != IGNORED).sum()
    for p in model.parameters():
        p.grad /= count
    return total / count


def weighted_by_tensors(model, microbatches):
    """A quotient of whole numbers in tensors is float32."""
    counts = torch.stack([(targets != -100).sum() for _, targets in microbatches])
    total = 0
    for (x, targets), share in zip(microbatches, counts / counts.sum(), strict=True):
        loss = mean_loss(model(x), targets)
        loss.backward(share.to(loss.dtype))
        total = total + share * loss.detach()
    return total


def by_autograd_grad(model, microbatches):
    parameters, count = [*model.parameters()], sum((targets >= 0).sum() for _, targets in microbatches)
    total = torch.zeros((), dtype=torch.float64)
    for x, targets in microbatches:
        loss = -model(x).log_softmax(-1)[targets >= 0].gather(-1, targets[targets >= 0][:, None]).sum() / count
        for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = gradient if p.grad is None else p.grad + gradient
        total += loss.detach()
    return total


def with_a_look_before(model, microbatches):
    """All run forward once without a graph, and the loss is computed again at the end."""
    with torch.no_grad():
        assert {model(x).shape[-1] for x, _ in microbatches} == {model.out_features}
    accumulate(model, microbatches)
    with torch.no_grad():
        x, targets = (torch.cat(parts) for parts in zip(*microbatches, strict=True))
        return mean_loss(model(x), targets)


def one_behind(model, microbatches):
    """Backward of a microbatch after the next one's forward."""
    count, total, before = sum((targets >= 0).sum() for _, targets in microbatches), 0.0, None
    for x, targets in microbatches:
        loss = mean_loss(model(x), targets) * (targets >= 0).sum() / count
        if before is not None:
            before.backward()
        total, before = total + loss.item(), loss
    before.backward()
    return total


def divided_by_the_count_so_far(model, microbatches):
    total, so_far = 0.0, 0
    for x, targets in microbatches:
        count = (targets >= 0).sum().item()
        so_far += count
        loss = mean_loss(model(x), targets) * count / so_far
        loss.backward()
        total += loss.item()
    return total


def all_in_one(model, microbatches):
    x, targets = (torch.cat(parts) for parts in zip(*microbatches, strict=True))
    return accumulate(model, [(x, targets)])


MISTAKES = """
in gradient of the:
* count / sum(counts) =>
    You add the gradients up as they come: the sum of m means, about m times too large.
        Each counts with its share.
=> / len(counts)
    You divide by m: the mean of means.
        Right only if all microbatches have equally many tokens that count.
(targets != -100).sum().item() => len(targets)
    You weigh by sequences, in which few tokens may count.
        Count the targets that are not -100.
targets != -100 => targets > 0
    You count the targets above 0. Token 0 is an ordinary token.
        Only -100 does not count.
divided_by_the_count_so_far
    You divide by the tokens that counted so far, so the first microbatches weigh too much.
        Count all microbatches before the first backward, or divide the gradients at the end.
/ sum(counts) => / sum(t.numel() for _, t in microbatches)
    You divide the sum of the losses by all tokens. Those whose target is -100 are not in it.
        Do not count them.
loss = mean_loss(model(x), targets) => total = total + mean_loss(model(x), targets)
loss.backward() => total.backward(retain_graph=True)
total += loss.item() =>
    You run backward from the running total, so the gradient of the first microbatch comes in each time again.
        Run backward with each one's own loss, and add up numbers.
/ sum(counts) => / sum(counts) / len(counts)
    You divide twice. The shares add up to 1 already.
        Leave out 1/m.
/ sum(counts) =>
    That is the gradient of the sum over all tokens, not of their mean.
        Divide by how many count in the full batch.
loss.backward() => model.zero_grad(); loss.backward()
or
loss.backward() => model.zero_grad(); loss.backward()
* count / sum(counts) =>
or
loss.backward() => model.zero_grad(); loss.backward()
* count / sum(counts) => / len(counts)
    Only the last microbatch is in the gradient: it is emptied, or replaced, between them.
        Backward adds to .grad, and here that is needed; the optimizer empties it after the step.

in gradient of the, the loss:
total += loss.item() => total = loss.item()
or
total += loss.item() => total = loss.item() * sum(counts) / count
    The gradient is right, and the loss covers only the last microbatch.
        Add the losses up with the same shares.
total += loss.item() => total += loss.item() * sum(counts) / count / len(counts)
    The gradient is right, and the loss is the mean of the microbatches' losses.
        Add them up with the same shares.

in all:
all_in_one
or one_behind
    All numbers are right, but the graphs of several microbatches are kept at the same time.
        Run each backward before the next runs forward, and retain no graph: then memory holds one microbatch.
"""

ALSO_RIGHT = """
model(x) => checkpoint(model, x.requires_grad_(), use_reentrant=True)
total += loss.item() => total = total + loss  # with a history
    With recomputation.
"""

EQUIVALENT = """
(targets != -100).sum() => (2 * ((targets != -100).sum()))
or (targets != -100).sum() => (100 * ((targets != -100).sum()))
    Each count is divided by the sum of all.
"""

EXERCISE = exercise(
    globals(),
    points=2,
    right=(accumulate, sums_divided_at_the_end, weighted_by_tensors, by_autograd_grad, with_a_look_before),
    ranks=(1,),
)
