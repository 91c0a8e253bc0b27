"""The whole GPT on several ranks, made from a serial one; and back.

The problem: what is between the ends of the model is cut by now, but the ends have the largest matrix: that of the
vocabulary. The idea: the same pair once more, around the whole model. The embedding is cut by words and its output
summed; the head is a column layer over words, whose output stays in parts, as the loss needs no more (`vocab.py`).

    model = TensorParallelGPT(GPT(config), mesh.group("tp"))
    loss = model.loss(model(tokens), targets)
    loss.backward()
    model.finish()                # sums what each rank has a term of; nothing to do without sequence parallelism
    optimizer.step()              # any optimizer, on this rank's parts

Every rank must be given the same tokens, and have the same seed where there is dropout.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lib.clip import scale_to_norm
from lib.layout import once, parts, unshard
from lib.mesh import Group
from lib.model import GPT, Embed, Head
from lib.tensor_parallel.block import SEQUENCE_DIM, ParallelBlock
from lib.tensor_parallel.linear import ColumnParallelLinear
from lib.tensor_parallel.sequence import dropout, replicated, slice_of_rank, sum_partial_gradients
from lib.tensor_parallel.vocab import VocabParallelEmbedding, vocab_parallel_cross_entropy

RECOMPUTE = ("none", "selective", "full")


class ParallelEmbed(nn.Module):
    """tokens[B, T] → x[B, T, D]; with sequence parallelism x[B, T/n, D]."""

    def __init__(self, serial: Embed, group: Group, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.context, self.group, self.sequence_parallel = serial.context, group, sequence_parallel
        dim = SEQUENCE_DIM if sequence_parallel else None
        self.token = VocabParallelEmbedding.from_serial(serial.token, group, sequence_dim=dim)
        self.position = replicated(serial.position, group, sequence_parallel)
        self.dropout = dropout(serial.dropout.p, group, sequence_parallel)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        length = tokens_BT.shape[1]
        if length > self.context:
            raise ValueError(f"{length} tokens do not fit context={self.context}")
        mine = slice_of_rank(length, self.group) if self.sequence_parallel else slice(length)
        positions = torch.arange(length, device=tokens_BT.device)[mine]
        return self.dropout(self.token(tokens_BT) + self.position(positions))


class ParallelHead(nn.Module):
    """x[B, T, D] → logits[B, T, V/n], of this rank's words; with sequence parallelism from x[B, T/n, D]."""

    def __init__(self, serial: Head, group: Group, sequence_parallel: bool = False) -> None:
        super().__init__()
        dim = SEQUENCE_DIM if sequence_parallel else None
        self.norm = replicated(serial.norm, group, sequence_parallel)
        self.linear = ColumnParallelLinear.from_serial(serial.linear, group, sequence_dim=dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.linear(self.norm(x_BTD))


class TensorParallelGPT(nn.Module):
    """The GPT in parts, with the parameters' names of the serial one. tokens[B, T] → logits[B, T, V/n].

    Args:
        serial: of which each rank keeps its part; the values are those of the group's rank 0.
        group: the tensor-parallel ranks.
        sequence_parallel: slices of the sequence between the parallel layers, see `sequence.py`.
        recompute: what backward computes again instead of keeping it: `none`; `selective`, what is between the
            projections of attention; `full`, each block, of which the input is kept.

    Raises:
        ValueError: something cannot be cut evenly.
    """

    def __init__(self, serial: GPT, group: Group, sequence_parallel: bool = False, recompute: str = "none") -> None:
        super().__init__()
        if recompute not in RECOMPUTE:
            raise ValueError(f"recompute={recompute!r} must be one of {', '.join(RECOMPUTE)}")
        self.config, self.group, self.recompute = serial.config, group, recompute
        self.embed = ParallelEmbed(serial.embed, group, sequence_parallel)
        self.blocks = nn.ModuleList(
            ParallelBlock(block, group, sequence_parallel, recompute == "selective") for block in serial.blocks
        )
        self.head = ParallelHead(serial.head, group, sequence_parallel)
        if serial.head.linear.weight is serial.embed.token.weight:
            self.head.linear.weight = self.embed.token.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            if self.recompute == "full" and torch.is_grad_enabled():
                x_BTD = checkpoint(block, x_BTD, use_reentrant=False)
            else:
                x_BTD = block(x_BTD)
        return self.head(x_BTD)

    def loss_sum_and_count(
        self, logits_BTv: Tensor, targets_BT: Tensor, ignore_index: int = -100
    ) -> tuple[Tensor, Tensor]:
        """As `lib.model.loss_sum_and_count`, from logits in parts; equal on all ranks."""
        losses = vocab_parallel_cross_entropy(logits_BTv, targets_BT, self.group, ignore_index)
        return losses.sum(), (targets_BT != ignore_index).sum()

    def loss(self, logits_BTv: Tensor, targets_BT: Tensor, ignore_index: int = -100) -> Tensor:
        """Mean cross-entropy in nats per counted token, shape [], equal on all ranks."""
        total, count = self.loss_sum_and_count(logits_BTv, targets_BT, ignore_index)
        return total / count.clamp(min=1)

    def finish(self) -> None:
        """After the last backward of a step: every gradient becomes that of this rank's part of the serial model."""
        sum_partial_gradients(self, self.group)

    @torch.no_grad()
    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale all gradients so that the norm of the whole model's is at most `max_norm`; return the norm it was.

        What several ranks have counts once. One all-reduce of a number.
        """
        own = {id(p): (p.grad, placement) for p, placement in parts(self).values() if p.grad is not None}
        squares = [once(grad.square(), placement, self.group) for grad, placement in own.values()]
        return scale_to_norm((grad for grad, _ in own.values()), torch.stack(squares).sum(), self.group, max_norm)

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """The serial model's `state_dict`, on every rank."""
        return {name: unshard(p, placement, self.group) for name, (p, placement) in parts(self).items()}
