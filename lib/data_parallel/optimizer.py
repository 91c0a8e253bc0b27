"""The optimizer step on the parameters that a rank owns, and the all-gather after it.

If gradients are all-reduced, an optimizer steps the parameters. If they are reduce-scattered, it steps *pieces*: the
parts of parameters that this rank owns, flat; and an all-gather distributes the new values.

Source: Rajbhandari et al., ZeRO, SC 2020, arXiv 1910.02054, section 5.1.
"""

import torch
from torch import nn

from lib import comm
from lib.data_parallel.bucket import Bucket
from lib.data_parallel.bucketed_gradients import Gradients
from lib.data_parallel.check_optimizer import check_elementwise, check_for_pieces, check_owned  # noqa: F401 chapter 4
from lib.data_parallel.flat import Flat, MakeOptimizer


class ShardedOptimizer:
    """An optimizer that steps the pieces in gradient buckets.

    step: one all-gather per sharded bucket, (n−1)/n · Ψ elements per rank.

    Args:
        gradients: the gradients whose buckets hold the pieces.
        optimizer: called with pairs of name and piece, such as `partial(torch.optim.AdamW, lr=3e-4)`.

    Raises:
        ValueError: pieces are parts of parameters, and this optimizer needs full parameters.

    Attributes:
        optimizer: the torch optimizer on the pieces of this rank: its settings, such as the learning rate, may be set.
        flats: the sharded buckets; of FSDP, all sharded parameters.
    """

    def __init__(self, gradients: Gradients, optimizer: MakeOptimizer) -> None:
        if any(isinstance(bucket, Flat) for bucket in gradients.buckets):
            check_for_pieces(optimizer, ((fact.name, fact.parameter) for fact in gradients.facts.values()))
        self._make(gradients, optimizer)

    def _make(self, gradients: Gradients, optimizer: MakeOptimizer) -> None:
        """Make the optimizer, after its function was checked."""
        self.gradients = gradients
        self.flats = [bucket for bucket in gradients.buckets if isinstance(bucket, Flat)]
        # Pairs, and no dict: two stages on a rank may use the same names.
        stepped = [pair for bucket in gradients.buckets for pair in bucket.stepped.items()]
        # A rank may own nothing; torch refuses an empty list.
        stepped = stepped or [("nothing", nn.Parameter(torch.empty(0)))]
        self.optimizer, self._pieces = optimizer(stepped), [p for _, p in stepped]
        check_owned(self.optimizer, self._pieces)

    def finish(self) -> None:
        """Return when the sums have arrived."""
        self.gradients.finish()

    def zero_grad(self) -> None:
        """Drop all gradients, also those in flight; all ranks must call it."""
        self.gradients.give_up()

    @torch.no_grad()
    def step(self) -> None:
        """Step the pieces of this rank, then all-gather the parameters.

        Raises:
            RuntimeError: there is no new gradient.
            ValueError: the optimizer also holds other tensors.
        """
        check_owned(self.optimizer, self._pieces)
        self.gradients.use()
        for flat in self.flats:
            flat.hide_pieces()
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
        hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        own = type(optimizer).__module__.startswith("torch.optim.") and not hooks
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
        for gather in filter(None, pending):
            gather.wait()
