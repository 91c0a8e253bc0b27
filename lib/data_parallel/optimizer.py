"""The optimizer step on the parameters that a rank owns, and the all-gather after it.

If gradients are all-reduced, an optimizer steps the parameters. If they are reduce-scattered, it steps *pieces*: the
parts of parameters that this rank owns, flat; and an all-gather distributes the new values.

Source: Rajbhandari et al., ZeRO, SC 2020, arXiv 1910.02054, section 5.1.
"""

import re
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from lib import comm
from lib.data_parallel.bucketed_gradients import Gradients
from lib.data_parallel.flat import Bucket, Flat, MakeOptimizer


class ShardedOptimizer:
    """An optimizer that steps the pieces in gradient buckets.

    step: one all-gather per sharded bucket, (n−1)/n · Ψ elements per rank.

    Args:
        gradients: the gradients whose buckets hold the pieces.
        optimizer: called with pairs of name and piece, such as `partial(torch.optim.AdamW, lr=3e-4)`.

    Raises:
        ValueError: pieces are parts of parameters, and this optimizer needs full parameters.

    Attributes:
        flats: the sharded buckets.
    """

    def __init__(self, gradients: Gradients, optimizer: MakeOptimizer) -> None:
        self.gradients = gradients
        self.flats = [bucket for bucket in gradients.buckets if isinstance(bucket, Flat)]
        if self.flats:
            check_elementwise(optimizer, ((fact.name, fact.parameter) for fact in gradients.facts.values()))
        pieces = [piece for bucket in gradients.buckets for piece in bucket.named_pieces()]
        # A rank may own nothing; torch refuses an empty list.
        self.optimizer = optimizer(pieces or [("nothing", nn.Parameter(torch.empty(0)))])

    def finish(self) -> None:
        """Return when the sums have arrived."""
        self.gradients.finish()

    @torch.no_grad()
    def step(self) -> None:
        """Step the pieces of this rank, then all-gather the parameters.

        Raises:
            RuntimeError: there is no new gradient.
        """
        self.gradients.use()
        for buckets in self._together():
            for bucket in buckets:
                bucket.gradients_to_pieces()
            self.optimizer.step()
            for bucket in buckets:
                bucket.after_step()
        self.publish()

    def _together(self) -> list[list[Bucket]]:
        """The buckets of each call of the optimizer.

        With master weights each bucket has its own call, so that only its gradients exist in their precision. PyTorch's
        optimizers skip what has no gradient, and count steps per parameter; others, and hooks, get one call per step.
        """
        buckets, optimizer = self.gradients.buckets, self.optimizer
        for piece in (piece for flat in self.flats for piece in flat.pieces.values()):
            piece.grad = None
        added = any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
        hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        own = type(optimizer).__module__.startswith("torch.optim.") and not hooks and not added
        return [[bucket] for bucket in buckets] if own and any(flat.has_master for flat in self.flats) else [buckets]

    def settle(self) -> None:
        """Take over values that were written into the parameters since the last step, before they are saved."""
        for flat in self.flats:
            flat.check_in_place()
            flat.settle()

    def publish(self) -> None:
        """Send the new parameters to all ranks."""
        with comm.label("parameters"):
            pending = [bucket.publish() for bucket in self.gradients.buckets]
        for one in filter(None, pending):
            one.wait()


def check_elementwise(optimizer: MakeOptimizer, named: Iterable[tuple[str, Tensor]]) -> None:
    """Check that an optimizer is elementwise: on small parameters, and on their two flat halves, updates must be equal.

    They have the names and numbers of dims of the real parameters, one for each kind of name (`blocks.0.up.weight` and
    `blocks.7.up.weight` are one kind). The learning rate is 0.1, because a small rate would hide differences.

    Args:
        named: the parameters that it will step.

    Raises:
        ValueError: updates differ, or the optimizer raises an error: it needs full parameters.
    """
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, dtype=torch.float64, generator=generator)
    kinds = {(re.sub(r"\d+", "", name), p.dim()): name for name, p in named}
    start = [(name, draw((2, 2, *[1] * (dim - 2))[:dim])) for (_, dim), name in kinds.items()]
    if not start:
        return
    ways = (torch.clone, partial(_half, 0), partial(_half, 1))  # the halves are on different ranks
    sides = [[(name, nn.Parameter(way(x))) for name, x in start] for way in ways]
    places = [p.data_ptr() for side in sides for _, p in side]
    why = ""
    try:
        each = [optimizer(side) for side in sides]
        for group in (group for one in each for group in one.param_groups if "lr" in group):
            group["lr"] = torch.full_like(group["lr"], 0.1) if isinstance(group["lr"], Tensor) else 0.1
        for _ in range(2):
            gradients = [draw(x.shape) for _, x in start]
            for way, side, one in zip(ways, sides, each, strict=True):
                for (_, p), gradient in zip(side, gradients, strict=True):
                    p.grad = way(gradient)
                one.step()
        for (name, before), (_, whole), (_, first), (_, second) in zip(start, *sides, strict=True):
            update = (whole.detach() - before).flatten()
            of_halves = torch.cat([first.detach(), second.detach()]) - before.flatten()
            if not (update - of_halves).norm() <= 1e-5 * update.norm():  # some optimizers compute in float32
                why = f"its steps on two halves of {name} differ from its step on the full tensor"
        if places != [p.data_ptr() for side in sides for _, p in side]:
            why = "it replaces p.data by a new tensor instead of writing into it"
    except Exception as error:  # any error of an optimizer from a different library
        why = f"it raised: {error}"
    if why:
        raise ValueError(
            f"this optimizer cannot work on pieces of parameters ({why}); use an elementwise optimizer, "
            "such as SGD, Adam or AdamW; make groups by name, because all pieces are flat"
        )


def _half(i: int, x: Tensor) -> Tensor:
    return x.flatten().tensor_split(2)[i].clone()
