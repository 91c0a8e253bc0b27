"""08.2: several microbatches forward and backward through a chain of stages, in torch.distributed itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd import grad

from lib.check.exercise import DTYPE, Data, Exercise, Mistake, random
from lib.check.listen import listen, raw
from lib.mesh import Group
from lib.runtime import calls
from lib.runtime.calls import Listener

ROWS, D, MICROBATCHES = 3, 5, 4
LOSS, SENT, WAITED, BACK = "the loss", "what was sent", "waited for", "sent backward"
ASKS, AFTER = "inputs of the stage that ask for a gradient", "weights of the stage"
PARAMETERS = ("weight", "bias")
AS_NEEDED, MORE, ALL, SOME, AS_GIVEN, CHANGED = (
    "as needed",
    "more",
    "every call",
    "not every call",
    "as given",
    "others",
)
LEAF = """If this is about the gradient of the tensor that came in: dist.recv fills a tensor without history. Declare it
a leaf before your stage computes with it."""
ENDS = """Only the last rank has a loss to begin with. The others begin at their output, with the gradient that came:
y.backward(gradient)."""


def inputs(generator: torch.Generator, n: int) -> list[Data]:
    alike = {name: [random(generator, ROWS, D) for _ in range(MICROBATCHES)] for name in ("inputs", "targets")}
    return [alike | {"weight": random(generator, D, D), "bias": random(generator, D, 1)} for _ in range(n)]


class FeaturesFirst(nn.Module):
    """tanh(W xᵀ + b)ᵀ, as some kernels lay it out: its output is not contiguous."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.weight @ x.T + self.bias).T


@raw
def body(answer: Callable, group: Group, given: Data) -> Data:
    stage, heard, counts = FeaturesFirst(given["weight"], given["bias"]), listen(), Counter()
    calls.listeners.append(Listener(lambda call: counts.update(["starts"]), lambda call: counts.update(["waits"])))
    asks: list[bool] = []
    stage.register_forward_pre_hook(lambda module, given: asks.append(given[0].requires_grad))
    try:
        loss = answer(stage, given["inputs"], given["targets"])
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        if "attribute 'backward'" in str(error):
            error.add_note(ENDS)
        elif "NoneType" in str(error) or "does not require grad" in str(error):
            error.add_note(LEAF)
        raise
    neighbours = (group.rank > 0) + (group.rank < group.size - 1)
    more = heard.sent_bytes(group.size) > neighbours * MICROBATCHES * given["inputs"][0].nbytes
    parameters = {name: stage.get_parameter(name) for name in PARAMETERS}
    found = {LOSS: "None" if loss is None else loss.detach() if torch.is_tensor(loss) else loss}
    found |= {
        f"gradient of the {name}": torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()
    }
    found[AFTER] = AS_GIVEN if all(torch.equal(p, given[name]) for name, p in parameters.items()) else CHANGED
    found[WAITED] = ALL if counts["waits"] >= counts["starts"] else SOME
    found |= {SENT: MORE if more else AS_NEEDED, BACK: any(dst == group.rank - 1 for dst, _ in heard.sent)}
    return found | ({ASKS: ALL if all(asks) else SOME} if group.rank else {})


def reference(given: list[Data]) -> list[Data]:
    stages = [FeaturesFirst(g["weight"], g["bias"]) for g in given]
    x, targets = (torch.cat(given[0][name]) for name in ("inputs", "targets"))
    loss = nn.functional.mse_loss(nn.Sequential(*stages)(x), targets)
    loss.backward()
    right = {LOSS: "None", AFTER: AS_GIVEN, WAITED: ALL, SENT: AS_NEEDED}
    ranks = [
        right | {BACK: r > 0} | {f"gradient of the {name}": stage.get_parameter(name).grad for name in PARAMETERS}
        for r, stage in enumerate(stages)
    ]
    return [*ranks[:-1], ranks[-1] | {LOSS: loss.item()}]


# ---- the step, right and wrong --------------------------------------------------------------------------------------


def by_backward(x: Tensor, y: Tensor, end: Tensor, of_y: Tensor | None, rank: int) -> Tensor | None:
    """From the end of this rank's graph, with the gradient that came; the gradient to be sent."""
    end.backward(of_y)
    return x.grad


def step(
    into: Callable = lambda x, buffer: torch.empty_like(x),  # for a message
    uses: Callable = lambda got, x: got,
    leaf: bool = True,
    comes_back: bool = True,
    starts: Callable = lambda of_y, y, target: of_y,
    runs: Callable = by_backward,
    share: Callable = lambda m: 1 / m,
    order: Callable = lambda m, last: range(m),
    empty: bool = False,
    waits: bool = True,
    loss_of: Callable = sum,
) -> Callable:
    """The answer, with a place for each mistake."""

    def program(stage, inputs, targets):
        rank, last, m = dist.get_rank(), dist.get_world_size() - 1, len(inputs)
        kept, sends, losses, buffer = [], [], [], torch.empty_like(inputs[0])

        def send(x, dst):
            x = x.detach().clone(memory_format=torch.contiguous_format)
            sends.append((dist.isend(x, dst), x))

        for x, target in zip(inputs, targets, strict=True):
            if rank:
                got = into(x, buffer)
                dist.recv(got, rank - 1)
                x = uses(got, x)
            x.requires_grad_(leaf)
            y = end = stage(x)
            y.retain_grad()
            if rank == last:
                end = (y - target).square().mean() * share(m)
                losses.append(end.item())
            else:
                send(y, rank + 1)
            kept.append((x, y, end, target))
        for k in order(m, rank == last) if comes_back or rank == last else ():
            x, y, end, target = kept[k]
            of_y = None
            if rank < last:
                of_y = torch.empty_like(inputs[0])
                dist.recv(of_y, rank + 1)
                of_y = starts(of_y, y, target)
            if empty:
                stage.zero_grad()
            of_x = runs(x, y, end, of_y, rank)
            if rank and comes_back:
                send(torch.zeros_like(x) if of_x is None else of_x, rank - 1)
        [handle.wait() for handle, _ in sends if waits]
        return loss_of(losses) if rank == last else None

    return program


def all_receives_first(stage, inputs, targets):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    m, total, sends = len(inputs), 0, []
    came = [torch.empty_like(x) if rank else x for x in inputs]
    of_ys = [torch.empty_like(x) for x in inputs]
    forward = [dist.irecv(x, rank - 1) for x in came] if rank else []
    backward = [dist.irecv(g, rank + 1) for g in of_ys] if rank < last else []
    ys = []
    for k, x in enumerate(came):
        if rank:
            forward[k].wait()
        ys.append(stage(x.requires_grad_()))
        if rank < last:
            sends.append(dist.isend(ys[-1].detach().contiguous(), rank + 1))
    for k, (x, y) in enumerate(zip(came, ys, strict=True)):
        if rank < last:
            backward[k].wait()
            y.backward(of_ys[k])
        else:
            loss = nn.functional.mse_loss(y, targets[k]) / m
            loss.backward()
            total = total + loss.detach()
        if rank:
            sends.append(dist.isend(x.grad, rank - 1))
    [handle.wait() for handle in sends]
    return total if rank == last else None


def by_grad(is_without: Callable) -> Callable:
    """autograd.grad on these ranks, by rank and number of ranks: their weights get nothing."""

    def runs(x, y, end, of_y, rank):
        without = is_without(rank, dist.get_world_size())
        return grad(end, x, of_y)[0] if without else by_backward(x, y, end, of_y, rank)

    return step(runs=runs)


def of_own_loss(of_y: Tensor, y: Tensor, target: Tensor) -> Tensor:
    return grad((y - target).square().mean() / MICROBATCHES, y, retain_graph=True)[0]


def twice(sends_first: bool) -> Callable:
    def runs(x, y, end, of_y, rank):
        end.backward(of_y, retain_graph=True)
        first = x.grad.clone()
        end.backward(of_y)
        return first if sends_first else x.grad

    return step(runs=runs)


def of_output(x, y, end, of_y, rank):
    by_backward(x, y, end, of_y, rank)
    return y.grad


def hands_the_loss_round(stage, inputs, targets):
    loss = torch.tensor(step()(stage, inputs, targets) or 0.0, dtype=DTYPE)
    dist.broadcast(loss, dist.get_world_size() - 1)
    return loss


def then(more: Callable) -> Callable:
    """The right step, and more with the stage."""
    return lambda stage, *given: (step()(stage, *given), more(stage))[0]


def updates(stage):
    torch.optim.SGD(stage.parameters(), lr=0.1).step()


def broadcasts(stage):
    dist.broadcast(stage.weight.detach().clone(), 0)


GRADIENTS = ("gradient",)
TWICE = (
    "You run backward through the same graph twice, and .grad adds up: the gradients of the weights are twice too "
    "large. One backward gives those and the gradient of the tensor that came in."
)
BUFFER = (
    "You receive every microbatch into the same tensor. The graphs of the earlier ones still need it for backward, "
    "and now hold the last microbatch; no error is raised. Receive each into a new tensor."
)

EXERCISE = Exercise(
    id="08.2",
    title="step",
    points=3,
    body=body,
    inputs=inputs,
    reference=reference,
    right=(step(), all_receives_first, step(order=lambda m, last: reversed(range(m)))),
    mistakes=(
        Mistake(
            "All numbers are right, but you did not wait for every isend or irecv. Until handle.wait() returns, the "
            "tensor may not be freed or changed, and a step may not end: keep the handles, and wait at the end.",
            step(waits=False),
        ),
        Mistake(
            "Only the last stage is trained: zeros are sent backward. A tensor that dist.recv filled has no history "
            "and requires no gradient. Declare it a leaf before your stage computes with it.",
            step(leaf=False),
            about=(*GRADIENTS, ASKS),
        ),
        *(
            Mistake(
                "The gradients that you send are right, and weights get none: autograd.grad returns gradients and "
                "leaves none in .grad. Let y.backward(gradient) do both, on every rank.",
                by_grad(is_without),
            )
            for is_without in (
                lambda rank, ranks: True,
                lambda rank, ranks: rank < ranks - 1,
                lambda rank, ranks: 0 < rank < ranks - 1,
            )
        ),
        Mistake(
            "Only the last stage is trained, and no gradient is sent. Autograd does not record messages: the graph "
            "ends at a send. Send the gradient of the tensor that came in, and let backward start with it.",
            step(comes_back=False),
            about=(*GRADIENTS, BACK),
        ),
        Mistake(
            "Stages before the last begin backward with ones, the gradient of the sum of their output. Begin with the "
            "gradient that the next stage sent.",
            step(starts=lambda of_y, y, target: torch.ones_like(of_y)),
            GRADIENTS,
        ),
        Mistake(
            "Every stage compares its own output with the targets. Only the last stage has a loss; the others begin "
            "backward with the gradient that the next stage sent.",
            step(starts=of_own_loss),
            GRADIENTS,
        ),
        Mistake(
            "You send the gradient of your output. The previous stage needs the gradient of the tensor that it sent: "
            "of your *input*.",
            step(runs=of_output),
            GRADIENTS,
        ),
        Mistake(
            "The tensor that was received is not used: each stage computes with its inputs. Only the first stage takes "
            "those; on the others they show the shape of the tensor that comes.",
            step(uses=lambda got, x: x),
            GRADIENTS,
        ),
        *(
            Mistake(BUFFER, step(into=lambda x, buffer: buffer, uses=uses), GRADIENTS)
            for uses in (lambda got, x: got, lambda got, x: got.detach())
        ),
        Mistake(
            "The last rank runs backward from the last microbatch to the first, the others from the first to the last. "
            "Messages of equal shape arrive in the order in which they were sent: each rank used the gradient of a "
            "different microbatch. Use one order on all ranks.",
            step(order=lambda m, last: range(m)[:: -1 if last else 1]),
            GRADIENTS,
        ),
        *(Mistake(TWICE, twice(sends_first), GRADIENTS) for sends_first in (True, False)),
        Mistake(
            "Your gradients are m times too large: the loss is the mean over the batch, so each microbatch counts 1/m.",
            step(share=lambda m: 1),
            GRADIENTS,
        ),
        Mistake(
            "Only one microbatch is in the gradients: they are emptied before each backward. Backward adds to .grad, "
            "and here that is needed.",
            step(empty=True),
            GRADIENTS,
        ),
        Mistake(
            "The gradients are right, and the loss covers only the last microbatch. Add up the losses of all.",
            step(loss_of=lambda losses: losses[-1]),
            about=(*GRADIENTS, LOSS),
        ),
        Mistake(
            "Every rank returns the loss. Only the last rank has it: return None on the others. No rank has to send "
            "it.",
            hands_the_loss_round,
            about=(*GRADIENTS, LOSS),
        ),
        Mistake(
            "All gradients are right, but the weights changed. Leave them: an optimizer step is no part of this.",
            then(updates),
        ),
        Mistake(
            "All numbers are right, but you send more than an activation forward and a gradient backward per "
            "microbatch. A rank sends only to its neighbours.",
            then(broadcasts),
        ),
    ),
)
