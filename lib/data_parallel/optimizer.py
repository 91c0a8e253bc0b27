"""The optimizer's step on what a rank owns, and the way back to everybody.

An optimizer steps pieces. Where gradients are all-reduced, the pieces are the parameters, and nothing is to be sent:
that is the plain optimizer. Where they are reduce-scattered, a piece is what this rank owns of a parameter, flat; then
each rank steps its own, and an all-gather tells the others.

Source: Rajbhandari et al., ZeRO, SC 2020, arXiv 1910.02054, section 5.1.
"""

from __future__ import annotations

import torch
from torch import nn

from lib import comm
from lib.data_parallel.bucketed_gradients import Gradients
from lib.data_parallel.buckets import Bucket
from lib.data_parallel.flat import MakeOptimizer
from lib.data_parallel.gradient_sums import GradientSums, State


class ShardedOptimizer:
    """Steps the pieces of some gradients' buckets.

    step: one all-gather per bucket of which each rank owns a part, (n−1)/n · Ψ elements per rank.

    Args:
        gradients: whose buckets have the pieces.
        optimizer: called with pairs of name and piece, such as `partial(torch.optim.AdamW, lr=3e-4)`.

    Raises:
        ValueError: pieces are parts of parameters, and this optimizer needs whole ones.
    """

    def __init__(self, gradients: Gradients, optimizer: MakeOptimizer) -> None:
        self.gradients = gradients
        pieces = [piece for bucket in gradients.buckets for piece in bucket.pieces.items()]
        if not all(isinstance(bucket, Bucket) for bucket in gradients.buckets):
            check_elementwise(optimizer, next((name for name, _ in pieces), ""))
        self.optimizer = optimizer(pieces or [("padding", nn.Parameter(torch.zeros(0)))])

    @torch.no_grad()
    def step(self) -> None:
        """Step what this rank owns, then let all have all.

        Raises:
            RuntimeError: there is no new gradient.
        """
        check_summed(self.gradients, "step()")
        self.gradients.state = State.IDLE
        for bucket in self.gradients.buckets:
            bucket.gradients_to_pieces()
        self.optimizer.step()
        for bucket in self.gradients.buckets:
            bucket.after_step()
        self.publish()

    def publish(self) -> None:
        """Let every rank see the new parameters."""
        with comm.label("parameters"):
            pending = [bucket.publish() for bucket in self.gradients.buckets]
        for one in pending:
            if one is not None:
                one.wait()


def check_summed(gradients: GradientSums, what: str) -> None:
    """Raises RuntimeError where sums are not there, or are used up."""
    if gradients.state is not State.SUMMED or gradients.begun:
        raise RuntimeError(
            f"{what} has no averaged gradient to work on: each step needs forward, backward() and finish() first"
        )


def check_elementwise(optimizer: MakeOptimizer, name: str = "") -> None:
    """Try the optimizer on a small matrix, and on its two halves, flat: the steps must be the same.

    Raises:
        ValueError: they are not, or it refuses: it needs whole parameters.
    """
    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(4, 4, 6, generator=generator)
    whole = nn.Parameter(start.clone())
    halves = [nn.Parameter(half.clone()) for half in start.flatten().split(12)]
    try:
        each = [optimizer([(name, one)]) for one in (whole, *halves)]  # halves are on different ranks
        places = [half.data_ptr() for half in halves]
        for gradient in gradients:
            whole.grad = gradient
            for half, part in zip(halves, gradient.flatten().split(12), strict=True):
                half.grad = part
            for one in each:
                one.step()
        same = torch.allclose(whole.detach().flatten(), torch.cat([half.detach() for half in halves]), rtol=1e-5)
        why = "its steps on two halves of a matrix are not its step on the matrix"
        if places != [half.data_ptr() for half in halves]:
            same, why = False, "it puts other tensors in the place of p.data, and does not write into it"
    except Exception as error:  # any error of another library's optimizer
        same, why = False, f"it says: {error}"
    if not same:
        raise ValueError(
            f"this optimizer cannot work on pieces of parameters ({why}); use one that treats each number by itself, "
            "such as SGD, Adam or AdamW"
        )
