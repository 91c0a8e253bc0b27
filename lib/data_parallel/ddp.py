"""Data parallelism: the same model on every rank, different rows of the batch, one averaged gradient.

Every rank starts with the weights of rank 0, computes the gradient of its own rows, and steps with the mean over all
ranks: replicas stay equal, and take one step on all rows. `BucketedDDP` sends buckets of gradients inside backward
(`bucketed_gradients.py`); `NaiveDDP` of `book/trials/unbucketed.py` sends each gradient after backward:

    model = BucketedDDP(GPT(config), group)   # all ranks now hold the weights of rank 0
    loss_of(model(inputs)).backward()         # communication starts in here
    model.finish()                            # from here on p.grad is the average, equal on all ranks
    optimizer.step()

Source: Li et al., PyTorch Distributed, VLDB 2020, arXiv 2006.15704, sections 3.2 and 4.2.
"""

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from lib import comm
from lib.cost.sizes import BUCKET_BYTES
from lib.data_parallel.bucketed_gradients import Gradients
from lib.data_parallel.gradient_sums import GradientSums
from lib.facts import Fact, check_trains
from lib.launch import device
from lib.mesh import Group, check_group
from lib.versions import unwritten


class DataParallel(nn.Module):
    """A module on its data-parallel ranks, with an object that sums its gradients.

    Args:
        module, group: the module on this rank, and the data-parallel ranks.
        gradients: sums the gradients of the module over the group.
        counts_over: ranks that shard the summed gradients. Default: each rank holds all of them.

    Raises:
        ValueError: experts whose loads are balanced, which these ranks would do each for itself.

    Attributes:
        trained: the parameters that get a gradient; a tied parameter once.
        gradients: sums them; an object for the `reduce` of `execute`.
    """

    def __init__(
        self, module: nn.Module, group: Group, gradients: GradientSums, counts_over: Group | None = None
    ) -> None:
        super().__init__()
        if group.size > 1:
            check_unbalanced(module)
        self.module, self.group, self.gradients, self.trained = module, group, gradients, gradients.trained
        self._counts_over = counts_over

    @property
    def buckets(self) -> list:
        """The gradient buckets, in the order in which they are sent."""
        return self.gradients.buckets

    @property
    def syncs(self) -> bool:
        """Whether the next backward is the last before finish(); False inside no_sync()."""
        return self.gradients.syncs

    @syncs.setter
    def syncs(self, value: bool) -> None:
        self.gradients.syncs = value

    def forward(self, *args, **kwargs):
        """Return what the module returns for these arguments: the rows of this rank.

        Raises:
            RuntimeError: the module writes into its parameters in forward.
        """
        if torch.is_grad_enabled():
            self.gradients.before_forward()
        with unwritten(self.module):
            output = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            self.gradients.after_forward(output)
        return output

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward inside only adds to p.grad: for all microbatches of a step but the last."""
        return self.gradients.no_sync()

    def finish(self) -> None:
        """Return when p.grad is the averaged gradient, equal bit by bit on every rank.

        Call it before any communication of this group, because ranks may have sent different buckets so far. A
        parameter that a rank's loss does not use counts as zero, also if no rank uses it.

        Raises:
            RuntimeError: a parameter got a gradient that is not averaged.
        """
        self.gradients.check_all_known(self.module)
        self.gradients.finish()

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale all gradients so that the norm of the averaged gradient is at most `max_norm`; return the norm before.

        Raises:
            RuntimeError: the gradients are not averaged yet: to clip each rank's own is a different algorithm.
        """
        if self._counts_over is not None:
            self.gradients.check_summed("clip_gradients()")
        return self.gradients.clip(self._counts_over or Group(), max_norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, including buckets in flight."""
        self.gradients.give_up()
        super().zero_grad(set_to_none)


def check_unbalanced(model: nn.Module) -> None:
    """Check that no module `balances_alone`, that is, compares the tokens of this process, where ranks have different.

    Raises:
        ValueError: one does.
    """
    for name, m in model.named_modules():
        if getattr(m, "balances_alone", False):
            raise ValueError(
                f"{name} balances loads over the tokens of all ranks, and only parallelize tells it which these are: "
                "use parallelize, or balance=0 and bias_rate=0"
            )


class BucketedDDP(DataParallel):
    """One all-reduce per bucket, started inside backward: `Gradients`.

    Together 2(n−1)/n · Ψ elements per rank, in about Ψ/bucket messages instead of one per tensor.

    Args:
        module: the module on this rank; its parameters and buffers are overwritten by those of rank 0 of the group.
        group: the data-parallel ranks.
        op: `"mean"` if the loss of each rank is a mean over its own rows, equally many on each rank; `"sum"` if it is
            already divided by the global count (`global_mean`). Start each step with `zero_grad()`: gradients in
            `p.grad` from before are summed too.
        bucket_bytes: about how much a bucket holds, see `fill_buckets`.

    Raises:
        TypeError: a group of torch instead of a `Group`.
        ValueError: unknown op, nothing to train, or a parameter that a different wrapper already averages.

    Example:
        import torch
        from torch import nn

        from lib.data_parallel.ddp import BucketedDDP

        model = BucketedDDP(nn.Linear(4, 1), world)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        rows = torch.randn(8, 4)  # this rank's rows of the batch
        model.zero_grad()
        model(rows).square().mean().backward()
        model.finish()
        model.clip_gradients(max_norm=1.0)
        optimizer.step()
    """

    def __init__(self, module: nn.Module, group: Group, op: str = "mean", bucket_bytes: int = BUCKET_BYTES) -> None:
        gradients = Gradients(replicas(module, group), op, bucket_bytes)
        broadcast_weights(module, group)
        super().__init__(module, group, gradients)


def replicas(module: nn.Module, group: Group, copies: int = 1) -> list[Fact]:
    """The facts of a module that is replicated on every rank of a group: its gradients are sums over the group.

    Args:
        copies: ranks with the same parameter among those over which a norm is summed.

    Raises:
        TypeError: a group of torch instead of a `Group`.
        ValueError: nothing to train.
    """
    check_group(group)
    facts = [Fact(name, p, group, copies=copies) for name, p in module.named_parameters()]
    check_trains(facts)
    return facts


@torch.no_grad()
def broadcast_weights(module: nn.Module, group: Group, parameters: bool = True) -> None:
    """Overwrite parameters and buffers (or buffers only) by those of rank 0: so replicas start equal.

    Later changes of buffers, such as the running means of a batch norm, stay local to a rank.

    Raises:
        ValueError: the module is still on the CPU, and its ranks send from GPUs.
    """
    tensors = dict(module.named_parameters() if parameters else ()) | dict(module.named_buffers())
    for name, x in tensors.items():
        if device().type == "cuda" and x.device.type == "cpu":
            raise ValueError(
                f"{name} is on the CPU, and NCCL sends from GPUs: call module.to(device()) first (lib.launch.device)"
            )
    comm.broadcast_coalesced(tensors.values(), group)


def global_mean(loss_sum: Tensor, count: Tensor | float, group: Group) -> Tensor:
    """This rank's term of the mean over all tokens: its losses / Σ count.

    Terms add up to the global mean, and so do their gradients: use `op="sum"`. A mean of means would be wrong if ranks
    hold different numbers of tokens.

    Args:
        loss_sum: sum of this rank's token losses, [].
        count: the number of these tokens, or the sum of the weights of their losses.

    Raises:
        ValueError: no rank has any token.
    """
    own = torch.as_tensor(count, dtype=torch.float64, device=loss_sum.device)  # counts up to 2⁵³ stay exact
    total = comm.all_reduce(own, group)
    if total == 0:
        raise ValueError("no rank has a token that counts, so there is no mean")
    return loss_sum / total.to(torch.promote_types(loss_sum.dtype, torch.float32))
