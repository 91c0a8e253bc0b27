"""Where a layout first differs from one process, and in which pattern: a sentence or two.

The problem: three distances say that a layout is wrong, and not where. The idea: a step is a chain, loss, gradients,
norm, update, and a mistake shows from its link on, so the first link that differs says most. The layout takes its steps
once more, watched, until there. Which tensors differ, on which ranks and by which factor is a pattern, and the rules
that know patterns are those of `lib/doctor/numbers/patterns.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lib import comm
from lib.doctor.numbers.patterns import Pattern, said_of
from lib.doctor.numbers.share import Copy, Share, copies_along
from lib.lab.module_outputs import ModuleOutputs, Output, first_other_output
from lib.lab.twin import Batch, TwinStep, beside
from lib.parallel_model import BatchLoss, ParallelModel
from lib.placement import sections
from lib.runtime.words import counted

EXACT = 1e-12  # of a loss and of a gradient: more is not rounding
OF_WEIGHTS = 1e-8  # AdamW divides by small numbers
ZERO = 1e-9  # of the norm of all tensors: a gradient that is rounding alone, such as the gradient of a bias of keys
CHANCE = (
    "watched in a second run, no step differs by more than rounding: is it chance, as of a race, or of random numbers "
    "without a seed?"
)


class _Part(NamedTuple):
    """A piece of a rank compared with the same piece of the twin, as a `Share` says it."""

    name: str
    region: Hashable
    share: float
    apart: float
    rest: float
    is_finite: bool
    is_zero: bool


@dataclass
class _Seen:
    """A step of a rank.

    `told`: how many targets count, of all that the loss of a batch is made for; `terms`: of all that it is computed of.
    Gradients are from before the clip.
    """

    told: int = 0
    terms: int = 0
    loss: float = 0.0
    norm: float = 0.0
    gradients: list[_Part] = field(default_factory=list)
    updates: list[_Part] = field(default_factory=list)
    outputs: dict[str, Output] = field(default_factory=dict)


def first_difference(
    ours: ParallelModel,
    batches: Sequence[Batch],
    max_norm: float,
    weights: dict[str, Tensor],
    steps: Sequence[TwinStep],
    before_step: Callable[[Optimizer, int], None],
) -> str:
    """The first link of the first step that differs, and its pattern; equal on all ranks, which all call it.

    Args:
        ours: before its first step; it is trained.
        weights: of one process before its first step, by name.
        steps: of one process, on the same batches.
    """
    watched = _Watched(ours, max_norm)
    for number, (batch, right) in enumerate(zip(batches, steps, strict=True)):
        before_step(ours.optimizer, number)
        ranks = comm.all_gather_object(watched.step(batch, number, weights, right), ours.mesh.world)
        if said := _said(_Step(ours, number, ranks, right, _count(batch[1]))):
            return f"step {number + 1}: {said}"
        weights = right.weights
    return CHANCE


class _Watched:
    """A layout whose steps are watched."""

    def __init__(self, ours: ParallelModel, max_norm: float) -> None:
        self.ours, self.max_norm = ours, max_norm
        self._outputs = ModuleOutputs(stage.module for stage in ours.stages.values())
        ours.watch_loss(partial(self._loss, ours.loss))
        ours.optimizer.register_step_pre_hook(self._before)

    def _loss(self, loss: BatchLoss, targets: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        self._seen.told = _count(targets)
        of_rows = loss(targets)

        def counting(output: Tensor, rows: Tensor) -> Tensor:
            self._seen.terms += _count(rows)
            return of_rows(output, rows)

        return counting

    def step(self, batch: Batch, number: int, weights: dict[str, Tensor], right: TwinStep) -> _Seen:
        """One step of the layout, from `weights` in one process."""
        self._seen, self._right = _Seen(), right
        before = {id(held): held.detach().clone() for _, held, _ in self.ours.pieces()}
        loss = self.ours.step(*batch, self.max_norm, number)
        wanted = {name: after - weights[name] for name, after in right.weights.items()}
        self._seen.updates = self._parts(wanted, lambda held: held.detach() - before[id(held)], OF_WEIGHTS)
        self._seen.loss, self._seen.norm = loss.item(), self.ours.norm.item()
        self._seen.outputs = self._outputs.take()
        return self._seen

    def _before(self, *_) -> None:
        """The optimizer is about to step. Before the clip a gradient was the clipped one, divided by its factor."""
        if self._seen.gradients:
            return
        mine, twin = (_factor(norm, self.max_norm) for norm in (self.ours.norm, self._right.norm))
        wanted = {name: gradient / twin for name, gradient in self._right.gradients.items()}
        self._seen.gradients = self._parts(wanted, lambda held: held.grad / mine, EXACT)

    def _parts(self, wanted: dict[str, Tensor], of: Callable[[nn.Parameter], Tensor], allowed: float) -> list[_Part]:
        found, all_tensors = [], torch.stack([whole.norm() for whole in wanted.values()]).norm()
        for fact, span, mine, right, whole, size in beside(self.ours, wanted, of):
            if not len(mine):
                continue
            square = (right @ right).item()
            share = (mine @ right).item() / square if square else math.nan
            apart = ((mine - right).norm() / size).item()
            usual = size * math.sqrt(len(mine) / whole.numel())  # of a piece that is a part of the tensor
            rest = ((mine - (share if square else 0.0) * right).norm() / usual).item()
            places = (fact.experts_over.rank, *sections(fact.placement, fact.parameter.shape, fact.cut_over))
            is_zero = bool(whole.norm() <= ZERO * all_tensors) and apart <= allowed
            region = (places, span.start, span.stop)
            found.append(_Part(fact.name, region, share, apart, rest, bool(mine.isfinite().all()), is_zero))
        return found


def _count(targets: Tensor) -> int:
    """How many targets count in a loss."""
    return targets.numel() if targets.is_floating_point() else int((targets != -100).sum())


def _factor(norm: Tensor, max_norm: float) -> Tensor:
    """By which the clip multiplies gradients of this norm."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


class _Step(NamedTuple):
    """A step of all ranks, and of one process; `count` of its targets count."""

    ours: ParallelModel
    number: int
    ranks: list[_Seen]
    right: TwinStep
    count: int


def _said(step: _Step) -> str:
    """The sentences for the first link that differs; empty if none does."""
    loss, wanted = step.ranks[0].loss, step.right.loss.item()
    of_gradients = _pattern(step, "gradients", [rank.gradients for rank in step.ranks], EXACT)
    if not abs(loss - wanted) < EXACT * abs(wanted):
        end = f"; of the gradients {of_gradients}" if of_gradients else "; the gradients are right"
        return f"the loss is {wanted:.6g} in one process, and {loss:.6g} here: {_why_loss(step)}{end}"
    if of_gradients:
        return f"the loss is right, so forward is, and of the gradients {of_gradients}"
    ratios = [rank.norm / step.right.norm.item() for rank in step.ranks]
    if any(not abs(ratio - 1) < EXACT for ratio in ratios):
        return f"loss and gradients are right, and the norm that clips is not: {_why_norm(ratios)}"
    of_updates = _pattern(step, "updates", [rank.updates for rank in step.ranks], OF_WEIGHTS)
    return of_updates and f"loss, gradients and norm are right, and of the updates {of_updates}"


def _why_loss(step: _Step) -> str:
    """A count of targets that differs, or the first module whose output does."""
    told = [rank.told for rank in step.ranks]
    if len({*told}) > 1:
        counts = ", ".join(map(str, told[:8])) + ", …" * (len(told) > 8)
        return f"its count of targets is {step.count}, and on the ranks {counts}: each divides by a count of its own"
    copies = len(step.ranks) / (step.ours.over_tokens.size * step.ours.pp.size)  # ranks that compute the same terms
    terms = sum(rank.terms for rank in step.ranks) / copies
    for number, what in ((told[0], "its count of targets is"), (terms, "the number of its terms is")):
        if number != step.count:
            how = "are lost" if number < step.count else "count twice"
            return f"{what} {number:g} instead of {step.count}: some targets {how}"
    name, compared = first_other_output([rank.outputs for rank in step.ranks], step.right.outputs)
    if name:
        return f"the first module with a different output is {name}, so forward computes something else there"
    return f"the outputs of {counted(compared, 'module')} are right, so its targets, or the loss itself, are not"


def _why_norm(ratios: list[float]) -> str:
    """The norms of the ranks, as fractions of the norm of one process."""
    if max(ratios) - min(ratios) > EXACT:
        listed = ", ".join(f"{ratio:.4g}" for ratio in ratios[:8]) + ", …" * (len(ratios) > 8)
        return f"ranks have {listed} of the right one, so each takes the norm of a part of the tensors"
    why = "copies are counted several times" if ratios[0] > 1 else "some shards, or terms of a sum, are left out"
    return f"it is {ratios[0]:.4g} of the right one: {why}"


def _pattern(step: _Step, kind: str, found: list[list[_Part]], allowed: float) -> str:
    """What the rules say of the parts of all ranks; and after which tensor all is right."""
    mesh = step.ours.mesh.shape
    axes = [{axis: (i, mesh.sizes[axis]) for axis, i in mesh.coordinates(rank).items()} for rank in range(mesh.size)]
    parts = [(rank, part) for rank, of_rank in enumerate(found) for part in of_rank if not part.is_zero]
    # Copies are equal to nine digits: a GPU may add in any order.
    copies = [Copy(r, part.name, part.region, f"{part.share:.9f} {part.apart:.9f}") for r, part in parts]
    shares = [
        Share(
            rank=rank,
            name=part.name,
            own_name=part.name,
            share=part.share,
            apart=part.apart,
            rest=part.rest,
            allowed=allowed,
            is_finite=part.is_finite,
            copies_differ=differ,
            copies=same,
        )
        for (rank, part), differ, same in zip(parts, *copies_along(axes, copies), strict=True)
    ]
    pattern = Pattern(kind, shares, names=list(step.right.weights), axes=axes, step=step.number)
    if not (said := said_of(pattern)):
        return ""
    [(cause, words)] = said
    if cause == "wrong terms":  # the loss has said which
        words = f"all {len(pattern.order)} tensors differ, without a common factor"
    after = pattern.order[pattern.order.index(pattern.bad[-1]) + 1 :]
    return f"{words}; from {after[0]} on all are right" if after else words
