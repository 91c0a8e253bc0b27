"""The loop of the foreign programs: one class, whose small methods a planted mistake may replace."""

import contextlib
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from lib.doctor.numbers import watch
from tests.lib.foreign import layouts
from tests.lib.foreign.model import VOCABULARY, Llama

LENGTH = 16
COUNTED = [16, 15, 16, 4, 16, 9, 0, 13]  # of each row of a batch, so many tokens have a label
NO_LABEL = -100
LARGEST_NORM = 0.5
RATE = 1e-2


class Settings(NamedTuple):
    """What the run of one process and the run of many have in common.

    Attributes:
        dtype: "float64", "float32", "autocast" (float32 weights, bfloat16 compute), or "bf16": autocast too, but FSDP2
            has bfloat16 parameters, and float32 ones for the optimizer.
        optimizer: "adamw", "sgd", or "muon", which trains the matrices only.
        tied, fused, row_bias: of the model.
    """

    dtype: str = "float64"
    optimizer: str = "adamw"
    tied: bool = False
    fused: bool = False
    row_bias: bool = False
    microbatches: int = 1
    seed: int = 0


def global_batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels of a step [8, T]; all ranks draw the same."""
    draw = torch.Generator().manual_seed(100 + seed + 1000 * step)
    rows = torch.randint(VOCABULARY, (len(COUNTED), LENGTH + 1), generator=draw)
    x, y = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    for row, counted in zip(y, COUNTED, strict=True):
        row[counted:] = NO_LABEL
    return x, y


def tokens(y: Tensor) -> int:
    return (y != NO_LABEL).sum().item()


class Training:
    """A program that trains for some steps in one layout, while `watch` looks at it."""

    def __init__(self, layout: str, settings: Settings, folder: str | Path, steps: int = 2):
        self.layout, self.settings, self.folder, self.steps = layout, settings, folder, steps
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    def run(self) -> None:
        self.made = self.make(self.draw())
        self.net, self.dp, self.tp = self.made.net, self.made.dp, self.made.tp
        self.optimizer = self.make_optimizer()
        if self.made.stage:
            self.schedule = self.make_schedule()
        self.seen = watch(
            self.folder, self.made.call, self.optimizer, axes=self.made.axes, cut=self.made.cut, steps=self.steps
        )
        for step in range(self.steps):
            self.step(step)

    # Before the first step.

    def draw(self) -> Llama:
        """The same weights on every rank."""
        torch.manual_seed(self.settings.seed)
        net = Llama(self.settings.tied, self.settings.fused, self.settings.row_bias)
        return net.double() if self.settings.dtype == "float64" else net

    def make(self, net: Llama) -> layouts.Made:
        if self.settings.dtype == "bf16" and self.layout == "fsdp2":
            return layouts.fsdp2(net, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
        return layouts.LAYOUTS[self.layout](net)

    def make_optimizer(self) -> torch.optim.Optimizer:
        named = list(self.net.named_parameters())
        matrices = [p for name, p in named if not self.is_vector(name)]
        vectors = [p for name, p in named if self.is_vector(name)]
        if self.settings.optimizer == "muon":
            return torch.optim.Muon(matrices, lr=RATE)
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
        return kinds[self.settings.optimizer](groups, lr=RATE, foreach=False)

    def is_vector(self, name: str) -> bool:
        """By name: FSDP1 flattens matrices, too."""
        return "norm" in name or name.endswith("bias")

    def make_schedule(self) -> Schedule1F1B:
        """Of a loss that is the mean over microbatches."""
        return Schedule1F1B(self.made.stage, n_microbatches=2, loss_fn=self.stage_loss)

    # A step.

    def step(self, number: int) -> None:
        x, y = self.batch(number)
        self.denominator = self.count(y)
        self.clear()
        loss = self.through_stages(x, y) if self.made.stage else self.accumulate(x, y)
        self.sum_gradients()
        self.seen.backward(loss)
        self.seen.norm(self.clip())
        self.update()

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """The rows of this replica."""
        x, y = global_batch(self.settings.seed, number)
        return x.chunk(self.dp.size)[self.dp.index], y.chunk(self.dp.size)[self.dp.index]

    def count(self, y: Tensor) -> float:
        """What the loss is divided by: the tokens of all replicas; for each replica, as gradients are averaged."""
        counted = torch.tensor(tokens(y))
        if self.dp.group:
            dist.all_reduce(counted, group=self.dp.group)
        return counted.item() / self.dp.size

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def accumulate(self, x: Tensor, y: Tensor) -> Tensor:
        """Backward of all microbatches; returns the loss of this replica, whose mean over replicas is the loss."""
        total, parts = 0.0, self.settings.microbatches
        for x_part, y_part in zip(x.chunk(parts), y.chunk(parts), strict=True):
            self.seen.batch(x_part, y_part)
            with self.compute_type():
                logits = self.made.call(x_part)
            loss = self.loss(logits, y_part)
            self.run_backward(loss)
            total = total + loss.detach()
        return total

    def compute_type(self) -> contextlib.AbstractContextManager:
        if self.settings.dtype == "autocast" or (self.settings.dtype == "bf16" and self.layout != "fsdp2"):
            return torch.autocast("cpu", torch.bfloat16)
        return contextlib.nullcontext()

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """The sum over tokens, divided by their count in the whole batch: microbatches are added."""
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
        return cross_entropy(logits, y.flatten(), ignore_index=NO_LABEL, reduction="sum") / self.denominator

    def run_backward(self, loss: Tensor) -> None:
        loss.backward()

    def through_stages(self, x: Tensor, y: Tensor) -> Tensor | None:
        """Forward and backward of a pipeline; only its last stage has a loss."""
        self.seen.batch(x, y)
        losses = []
        with self.compute_type():
            if self.made.stage.is_first:
                self.schedule.step(x)
            else:
                self.schedule.step(target=y, losses=losses)
        return torch.stack(losses).mean() if losses else None

    def stage_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Of a microbatch: the schedule takes the mean over these."""
        return 2 * self.loss(logits, y)

    def sum_gradients(self) -> None:
        for one in self.made.sums:
            sum_over(self.net, one)

    def clip(self) -> Tensor:
        return self.made.clip(self.net, LARGEST_NORM)

    def update(self) -> None:
        self.optimizer.step()


@torch.no_grad()
def sum_over(net: nn.Module, wanted: layouts.GradientSum) -> None:
    """Sum some gradients over some ranks, and divide them."""
    for name, p in net.named_parameters():
        if wanted.of(name):
            if isinstance(p.grad, DTensor):
                p.grad = without_terms(p.grad)
            local = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            total = local.contiguous()
            dist.all_reduce(total, group=wanted.over.group)
            local.copy_(total / wanted.divided_by)


def without_terms(gradient: DTensor) -> DTensor:
    """A sum along an axis whose ranks have terms of it so far."""
    placements = [layouts.Replicate() if one.is_partial() else one for one in gradient.placements]
    return gradient.redistribute(placements=placements)
