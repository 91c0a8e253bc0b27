"""Chapter 8's two functions of a rank, forward and backward of a microbatch, for the chapters after it.

Chapter 9 needs them to write 1F1B in three loops, and looks into the tray. `lib.pipeline.stage.Stage` with
`lib.pipeline.execute.execute` is the complete version.
Read before: `lib/comm.py`. Chapter 8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lib import comm
from lib.mesh import Group
from lib.model import mean_loss

Kept = dict[int, tuple[Tensor, Tensor]]  # by microbatch: input and output of the stage, with the graph between them


def one_stage(
    stage: nn.Module, pieces: Sequence[tuple[Tensor, Tensor]], world: Group, width: int
) -> tuple[Callable[[int], None], Callable[[int], None], Kept, list[comm.Pending]]:
    """Forward and backward of microbatch k on this rank, the tray, and the sends that were started.

    Args:
        stage: of this rank; one on each rank, in their order.
        pieces: inputs[b, s] and targets[b, s] of each microbatch.
        width: D of the tensors between stages, float64[b, s, D].
    """
    r, last, kept, sends = world.rank, world.size - 1, {}, []
    rows = sum(len(x) for x, _ in pieces)

    def forward(k: int) -> None:
        x, expected = pieces[k]
        if r > 0:
            like = torch.empty(*x.shape, width).double()
            x = comm.recv(like, world, src=r - 1).wait().requires_grad_()
        y = stage(x)
        if r == last:
            y = mean_loss(y, expected) * len(expected) / rows
        else:
            sends.append(comm.send(y, world, dst=r + 1))
        kept[k] = x, y

    def backward(k: int) -> None:
        x, y = kept.pop(k)
        if r == last:
            y.backward()  # y is the loss
        else:
            y.backward(comm.recv(y, world, src=r + 1).wait())
        if r > 0:
            sends.append(comm.send(x.grad, world, dst=r - 1))

    return forward, backward, kept, sends
