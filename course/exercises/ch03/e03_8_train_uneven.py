"""03.8: a loop that hangs because ranks have different numbers of batches: find the mistake in its report."""

import torch
from torch.nn.functional import mse_loss

from course.check.edits import exercise
from course.check.exercise import DTYPE, everywhere, random, with_variants
from course.check.hung import hang_report
from course.exercises.ch03.corrupt import (
    EPOCHS,
    LR,
    batches_from,
    inputs_with_corrupt,
    reference_without_corrupt,
    trained,
    usable,
    weights_from,
)
from course.exercises.ch03.e03_4_accumulate import model_of
from lib import comm
from lib.runtime.hang import AwaitedCall


def inputs(generator, n):
    weights = weights_from(generator)
    counts = [4, 2, 3, 0][:n] if n < 5 else [*range(n)]  # of four ranks, one has no batch at all
    return [{"weights": weights, "batches": batches_from(generator, count)} for count in counts]


def body(answer, group, given):
    model = model_of(given["weights"])
    answer(model, given["batches"], group)
    return {"weights": [p.detach() for p in model.parameters()]}


def reference(given):
    most = max(len(g["batches"]) for g in given)
    steps = [[g["batches"][k] for g in given if k < len(g["batches"])] for k in range(most)]
    return everywhere({"weights": trained(given[0]["weights"], steps)}, given)


def train_uneven(model, batches, group):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = int(comm.all_reduce(torch.tensor(len(batches)), group, op="max"))
    for k in range(steps):
        optimizer.zero_grad(set_to_none=False)
        here = k < len(batches)
        if here:
            x, y = batches[k]
            mse_loss(model(x), y).backward()
        # of the ranks that have a batch
        num_ranks = comm.all_reduce(torch.tensor(float(here)), group)
        for p in model.parameters():
            mine = p.grad if here else torch.zeros_like(p)
            p.grad = comm.all_reduce(mine, group) / num_ranks
        optimizer.step()


def in_one_message(model, batches, group):
    """The gradients of a sum and the number of samples travel together; the step ends when nobody has any."""
    params = list(model.parameters())
    for k in range(10**6):
        sums, count = [torch.zeros_like(p) for p in params], 0
        if k < len(batches):
            x, y = batches[k]
            sums = torch.autograd.grad(mse_loss(model(x), y) * len(x), params)
            count = len(x)
        if not step_by_one_message(params, sums, count, group):
            return


def step_by_one_message(params, sums, count, group):
    """How many samples all ranks have; the step, unless there are none."""
    flat = torch.cat([*(g.flatten() for g in sums), torch.tensor([count], dtype=DTYPE)])
    *pieces, total = comm.all_reduce(flat, group).split([*(p.numel() for p in params), 1])
    if total:
        with torch.no_grad():
            for p, piece in zip(params, pieces, strict=True):
                p -= LR * piece.view_as(p) / total
    return total


def fewest(batches, group):
    return int(comm.all_reduce(torch.tensor(len(batches)), group, op="min"))


def repeated(batches, group):
    """As often as the longest rank needs; a rank without batches has zeros."""
    most = int(comm.all_reduce(torch.tensor(len(batches)), group, op="max"))
    nothing = [(torch.zeros(6, 4, dtype=DTYPE), torch.zeros(6, 2, dtype=DTYPE))]
    return [(batches or nothing)[k % max(len(batches), 1)] for k in range(most)]


def padded(batches, group):
    """As many as the longest rank has, the last one again and again; a rank without batches has zeros."""
    most = int(comm.all_reduce(torch.tensor(len(batches)), group, op="max"))
    nothing = [(torch.zeros(6, 4, dtype=DTYPE), torch.zeros(6, 2, dtype=DTYPE))]
    return [*batches, *((batches or nothing)[-1:] * (most - len(batches)))]


MISTAKES = """
hangs
steps = int(comm.all_reduce(torch.tensor(len(batches)), group, op="max")) => steps = len(batches)
    That is still the given loop: a rank with fewer batches leaves it, and the others wait for its all-reduce.
        All ranks must make the same number of steps. How do they find out how many?
steps = int(comm.all_reduce(torch.tensor(len(batches)), group, op="max")) => steps = fewest(batches, group)
    All ranks stop with the one that has the fewest batches, and the rest of the samples is never used.
        Go on until the rank with the most is done: the others take part in its all-reduces with zeros.
steps = int( => batches = padded(batches, group); steps = int(
    A rank that has run out repeats its last batch until the others are done: those samples count too much.
        A rank without a batch adds nothing to the sum, and does not count in the mean.
steps = int( => batches = repeated(batches, group); steps = int(
    A rank that has run out begins again with its first batch: those samples count too much.
        A rank without a batch adds nothing to the sum, and does not count in the mean.
optimizer.zero_grad(set_to_none=False) => pass
x, y = batches[k] => x, y = batches[k]; optimizer.zero_grad()
p.grad if here else => p.grad if p.grad is not None else
or
optimizer.zero_grad(set_to_none=False) => pass
x, y = batches[k] => x, y = batches[k]; optimizer.zero_grad()
p.grad if here else => p.grad if p.grad is not None else
/ num_ranks => / group.size
    A rank that has run out sends the gradient of the step before once more: its p.grad is not empty.
        Without a batch, send zeros.
/ num_ranks => / group.size
    You divide by all ranks, also where some have no batch: the last steps are too short.
        Divide by the number of ranks that have one. An all-reduce of 0 or 1 tells it.
"""

OF_BOTH = """
/ num_ranks =>
    The gradients are sums over the ranks, too large by as many as have {one}.
        Divide by the number of ranks that have one.
lr=0.1 => lr=0.01
or lr=0.1 => lr=0.001
    You train with another learning rate than 0.1.
        Pass lr=0.1: without lr=, SGD takes 0.001.
optimizer.zero_grad(set_to_none=False) =>
    Gradients are never emptied: backward adds to the mean of the step before.
        Empty them before each backward.
optimizer.step() => optimizer.step() if here else None
    A rank without {one} keeps its weights, while the others go on: the replicas differ at the end.
        It has the same mean as all: it steps too.
p.grad = comm.all_reduce(mine, group) / num_ranks => comm.all_reduce(mine, group)
    Each rank steps with its own gradient.
        all_reduce returns a new tensor: assign the mean to p.grad.
"""


# ---- row A: batches that each rank leaves out ------------------------------------------------------------------------


def body_of_epochs(answer, group, given):
    found = {}
    for name in EPOCHS:
        found[name] = body(answer, group, {"weights": given["weights"], "batches": given[name]})["weights"]
    return found


def train_finite(model, batches, group):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad(set_to_none=False)
        loss = mse_loss(model(x), y)
        here = torch.isfinite(loss)
        if here:
            loss.backward()
        # of the ranks whose loss is finite
        num_ranks = comm.all_reduce(here.double(), group)
        if num_ranks == 0:
            continue  # and so do all ranks
        for p in model.parameters():
            mine = p.grad if here else torch.zeros_like(p)
            p.grad = comm.all_reduce(mine, group) / num_ranks
        optimizer.step()


def finite_in_one_message(model, batches, group):
    """The gradients of a sum and the number of samples travel together; zeros and 0 where the loss is not finite."""
    params = list(model.parameters())
    for x, y in batches:
        loss = mse_loss(model(x), y) * len(x)
        sums, count = torch.autograd.grad(loss, params), len(x)
        if not loss.isfinite():
            sums, count = [torch.zeros_like(p) for p in params], 0
        step_by_one_message(params, sums, count, group)


def after_filter(model, batches, group):
    """The book's loop, with the batches that this rank can use."""
    train_uneven(model, usable(batches), group)


def finite_gradient(model, loss):
    """Runs backward: whether all elements of the gradient are finite."""
    loss.backward()
    return torch.tensor(all(p.grad.isfinite().all() for p in model.parameters()))


def loss_of_finite(model, x, y):
    """The mean over the samples of a batch whose loss is finite."""
    losses = (model(x) - y).square().mean(1)
    return losses[losses.isfinite()].mean()


ALSO_RIGHT_IN_A = """
if num_ranks == 0: => if False:
/ num_ranks => / max(num_ranks, 1)
    Where no loss is finite, the sum is zero, and a step of SGD with zeros changes nothing.
"""

MISTAKES_IN_A = """
hangs
if here: => if not here:
loss.backward() => continue
num_ranks = comm.all_reduce(here.double(), group) => loss.backward(); num_ranks = group.size
    That is still the given loop: a rank that leaves out a batch makes no all-reduce in this step, and its next ones
    meet those of the step that the others are in. The hang comes only at the end.
        A batch may be left out on one rank, but not the all-reduces of its step. What does this rank send in them?
if num_ranks == 0: => if num_ranks < group.size:
    All ranks leave out a step if one of them has a loss that is not finite: good batches are not used.
        Only the rank with this loss leaves out its batch: it sends zeros, and the mean is over the others.
continue  # and so do all ranks => break
or
if num_ranks == 0: => if num_ranks < group.size:
continue  # and so do all ranks => break
    The epoch ends at a loss that is not finite: later batches are not used.
        Leave out the batches of this one step, and go on with the next.
after_filter
    Each rank removes its corrupt batches first, so that later ones move forward: batches of different steps meet.
        A rank with a corrupt batch in step k has none in this step, and its next batch is for step k + 1.
optimizer.zero_grad(set_to_none=False) => pass
loss.backward() => optimizer.zero_grad(); loss.backward()
p.grad if here else => p.grad if p.grad is not None else
or
optimizer.zero_grad(set_to_none=False) => pass
loss.backward() => optimizer.zero_grad(); loss.backward()
p.grad if here else => p.grad if p.grad is not None else
/ num_ranks => / group.size
    A rank that leaves out its batch sends the gradient of the step before once more: its p.grad is not empty.
        Without a batch, send zeros.
/ num_ranks => / group.size
    You divide by all ranks, also where some leave out their batch: these steps are too short.
        Divide by the number of ranks whose loss is finite. An all-reduce of 0 or 1 tells it.
if num_ranks == 0: => if False:
    Where no rank has a finite loss you divide by 0, and all weights become NaN.
        Such a step changes nothing. All ranks know how many of them have a finite loss, so all can leave it out.
torch.isfinite(loss) => ~torch.isnan(loss)
or
loss.backward() => pass
torch.isfinite(loss) => finite_gradient(model, loss)
    A batch with an infinite loss was used: it is not NaN, and its gradient may be finite, but much too large.
        Test the loss, with torch.isfinite.
if here: => if True:
p.grad if here else torch.zeros_like(p) => p.grad * here
or
if here: => if True:
p.grad if here else torch.zeros_like(p) => p.grad * here
if num_ranks == 0: => if False:
    A gradient that is NaN arrives in the sum: 0 · NaN is NaN.
        Do not multiply by 0: send a new tensor of zeros.
if here: => if True:
p.grad if here else torch.zeros_like(p) => p.grad.nan_to_num(0, 0, 0)
or
if here: => if True:
p.grad if here else torch.zeros_like(p) => p.grad.nan_to_num(0, 0, 0)
/ num_ranks => / group.size
if num_ranks == 0: => if False:
    You replace the elements of a gradient that are not finite: the rest of this gradient still counts.
        All of it comes from a batch that is left out: send zeros for each parameter.
if here: => if True:
p.grad if here else torch.zeros_like(p) => p.grad
comm.all_reduce(mine, group) / num_ranks => (comm.all_reduce(mine, group) / num_ranks).nan_to_num(0, 0, 0)
    You replace NaN after the sum: there, the gradients of the other ranks are lost, too.
        Send zeros instead of a gradient that is not finite.
mse_loss(model(x), y) => loss_of_finite(model, x, y)
or mse_loss(model(x), y) => mse_loss(model(x), y.where(y.square().isfinite(), 0))
    You leave out or change the corrupt samples, and use the others of their batch.
        The loss of the batch is not finite: leave out the whole batch.
"""

TASK = """
All ranks have equally many batches, but the loss of some is not finite: each rank leaves out these batches, and all
others are used.

Such a batch is corrupt: one of its targets is NaN, or so large that its square is infinite. The loop skips it:

```python
def endless(model, batches, group):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        if not torch.isfinite(loss):
            continue
        loss.backward()
        for p in model.parameters():
            p.grad = comm.all_reduce(p.grad, group, op="mean")
        optimizer.step()
```

Each of three ranks had ten batches, and the fourth of rank 1 was corrupt. The runtime printed:

{report}

In which step does rank 0 wait, and in which steps did it train on the right mean? Write a loop, with the name
`train_uneven`, that ends.

- `batches`: this rank's pairs of `x` and `y`, all of one size, and equally many on all ranks.
- Step $k$ uses the $k$-th batch of every rank on which its loss is finite, and the gradient of the mean loss of all
  their samples. If there is no such rank, the step changes nothing.
- Use `torch.optim.SGD(model.parameters(), lr=0.1)`. At the end all ranks have the weights that one process gets from
  these steps.
"""

REDUCE = AwaitedCall(
    "all_reduce mean float32[2, 3]",
    'step.py, line 16, in endless: p.grad = comm.all_reduce(p.grad, group, op="mean")',
    peers=(0, 1, 2),
    late=(1,),
    for_s=2.1,
)

CORRUPT = {
    "inputs": inputs_with_corrupt,
    "body": body_of_epochs,
    "reference": reference_without_corrupt,
    "MISTAKES": MISTAKES_IN_A + OF_BOTH.format(one="a finite loss"),
    "ALSO_RIGHT": ALSO_RIGHT_IN_A,
}

EXERCISE = with_variants(
    exercise(
        globals() | {"MISTAKES": MISTAKES + OF_BOTH.format(one="a batch")},
        points=2,
        right=(train_uneven, in_one_message),
    ),
    exercise(
        globals() | CORRUPT,
        points=2,
        right=(train_finite, finite_in_one_message),
        title=train_uneven.__name__,
        task=TASK.format(report=hang_report({0: REDUCE, 2: REDUCE}, finished=[1])).strip(),
    ),
)
