"""The twin of a layout: one process that takes the same steps, in plain PyTorch; and our pieces beside those of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lib.data_parallel.flat import MakeOptimizer
from lib.facts import Fact
from lib.lab.module_outputs import ModuleOutputs, Output
from lib.masks import drop_by_rows, row_seed
from lib.model import mean_loss
from lib.moe import update_biases
from lib.parallel_model import BatchLoss, ParallelModel

Batch = tuple[Tensor, Tensor]
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def mean_over_tokens(targets: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss of a GPT in one process, the mean over all tokens that count."""
    return mean_loss


class TwinStep(NamedTuple):
    """A step of one process: the loss, the norm, clipped gradients, and weights after the step, by name.

    Args:
        outputs: of its modules, in the order in which they end.
    """

    loss: Tensor
    norm: Tensor
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    outputs: dict[str, Output]


def twin_steps(
    twin: nn.Module,
    batches: Sequence[Batch],
    max_norm: float,
    make: MakeOptimizer = ADAMW,
    before_step: Callable[[Optimizer, int], None] = lambda *_: None,
    loss_of: BatchLoss = mean_over_tokens,
) -> Iterator[TwinStep]:
    """A step on each batch; the twin is trained. The arguments are those of `certify`."""
    optimizer = make(twin.named_parameters())
    drop_by_rows(twin)
    outputs = ModuleOutputs([twin])
    for number, (inputs, targets) in enumerate(batches):
        optimizer.zero_grad()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(row_seed(0, number, 0))
            loss = loss_of(targets)(twin(inputs), targets)
            loss.backward()
        norm = nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
        gradients = {name: p.grad.clone() for name, p in twin.named_parameters() if p.requires_grad}
        update_biases(twin)
        before_step(optimizer, number)
        optimizer.step()
        weights = {name: p.detach().clone() for name, p in twin.named_parameters()}
        yield TwinStep(loss.detach(), norm, gradients, weights, outputs.take())


class Beside(NamedTuple):
    """The elements of a parameter that this rank owns, and the same elements of the twin; both flat.

    Args:
        whole: the full tensor of the twin.
        size: its norm, or what stands for it: a gradient may be zero but for rounding, such as that of a bias of keys,
            and has no norm to compare with. A norm of less than a thousandth of that of all tensors counts as this
            thousandth.
    """

    fact: Fact
    span: slice
    mine: Tensor
    right: Tensor
    whole: Tensor
    size: Tensor


def beside(ours: ParallelModel, wanted: dict[str, Tensor], of: Callable[[nn.Parameter], Tensor]) -> Iterator[Beside]:
    """Each owned piece of this rank, such as its gradient, beside the same piece of the twin, if that has one."""
    least = torch.stack([whole.norm() for whole in wanted.values()]).norm() / 1000
    for fact, held, span in ours.pieces():
        if fact.name not in wanted:  # a frozen parameter has no gradient
            continue
        whole = wanted[fact.name]
        right = fact.part_of(whole).flatten()[span]
        yield Beside(fact, span, of(held).flatten(), right, whole, whole.norm().clamp(min=least))
