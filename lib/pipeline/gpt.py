"""The whole GPT on several ranks, each with some of its stages.

The problem: a step of a pipeline is no forward and a backward, but a schedule of many of both, in which only the last
stage knows the loss. Then a tied weight has two gradients, and the norm is on all ranks. A training loop should not
have to know. The idea: one object with what a loop needs, and nothing in it but calls of what is beside this file.

    model = PipelineGPT(GPT(config), one_f_one_b(4, 8), mesh.group("pp"))
    loss = model.forward_backward(tokens, targets)  # of the batch, on all ranks
    model.finish()                                  # one gradient for a tied weight
    model.clip_gradients(1.0)                       # by the norm of all stages
    optimizer.step()                                # any optimizer, on this rank's stages

Every rank must be given the same model, tokens and targets.
Read before: `lib/pipeline/execute.py`, `lib/pipeline/step.py`. Chapter 9.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lib.mesh import Group
from lib.model import GPT, loss_sum_and_count, mean_loss
from lib.pipeline.action import Schedule
from lib.pipeline.execute import execute
from lib.pipeline.lower import lower
from lib.pipeline.stage import check_shapes, cut, stages_of_rank
from lib.pipeline.step import clip_gradients, sum_tied_gradients


class PipelineGPT(nn.Module):
    """This rank's stages of a GPT. Its parameters are theirs, those of `serial`; the other ranks' are let go.

    Args:
        serial: the whole model, equal on all ranks.
        schedule: who does what when, with as many ranks as the group has.
        group: the ranks of the pipeline.

    Raises:
        ValueError: more stages than blocks and a head; a block whose output has another shape or dtype than its input.
    """

    def __init__(self, serial: GPT, schedule: Schedule, group: Group) -> None:
        super().__init__()
        config = serial.config
        row = torch.empty(1, config.context, dtype=torch.long, device="meta")
        check_shapes(cut(serial, schedule.num_stages), row, config.d_model)
        self.group, self.schedule, self.tied = group, lower(schedule), config.tied
        self.stages, _ = stages_of_rank(serial, schedule, group.rank)
        self.pieces = nn.ModuleList(stage.module for stage in self.stages.values())

    def forward_backward(
        self, tokens_BT: Tensor, targets_BT: Tensor, loss: Callable[[Tensor, Tensor], Tensor] = mean_loss
    ) -> Tensor:
        """A step up to the optimizer: adds the gradients of the mean over all tokens that count to `.grad`.

        Args:
            tokens_BT, targets_BT: [B, T], the same on all ranks.
            loss: (logits, targets) of a microbatch to its mean loss.

        Returns:
            The batch's mean loss, float64[], on all ranks.
        """
        return execute(self.schedule, self.stages, self.group, tokens_BT, targets_BT, loss, _counted).loss

    def evaluate(self, tokens_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        """As `lib.model.loss_sum_and_count`, forward only, on all ranks. B may be anything, also 0."""
        count = _counted(targets_BT)
        if not len(tokens_BT):
            return torch.zeros_like(count, dtype=torch.float64), count
        schedule = self.schedule.forward_only(min(len(tokens_BT), self.schedule.num_microbatches))
        loss_sum = lambda logits, targets: loss_sum_and_count(logits, targets)[0]  # noqa: E731
        return execute(schedule, self.stages, self.group, tokens_BT, targets_BT, loss_sum).losses.sum(), count

    def finish(self) -> None:
        """After the last backward of a step: both copies of a tied weight get the sum of their gradients."""
        if self.tied:
            sum_tied_gradients(self.stages, self.schedule, self.group)

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale all gradients so that the norm of the whole model's is at most `max_norm`; return the norm it was."""
        return clip_gradients(self.stages, self.schedule, self.group, max_norm, self.tied)


def _counted(targets_BT: Tensor) -> Tensor:
    """How many tokens `mean_loss` is the mean of."""
    return (targets_BT != -100).sum()
