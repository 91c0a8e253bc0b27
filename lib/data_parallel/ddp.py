"""Data parallelism: the same model on every rank, other rows of the batch, one averaged gradient.

The problem: g = (1/N) Σ gᵢ is one line of mathematics. Done in one line of code after backward, every rank sits idle
while all gradients travel, and a model of sixty tensors pays the latency of sixty messages.

The idea, in two steps. *Buckets*: copy gradients side by side into a few flat buffers and reduce a buffer at once.
*Overlap*: backward makes the last layer's gradients first, so the first bucket can travel while the rest is computed.

`NaiveDDP` is the line of mathematics, `BucketedDDP` the two steps. Both are used the same way:

    model = BucketedDDP(GPT(config), group)   # all ranks now have rank 0's weights
    loss_of(model(inputs)).backward()         # communication starts in here
    model.finish()                            # from here on p.grad is the average, equal on all ranks
    optimizer.step()

Source: Li et al., PyTorch Distributed, VLDB 2020, arXiv 2006.15704, sections 3.2 and 4.2.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lib import comm
from lib.mesh import Group

_averaged = weakref.WeakValueDictionary()  # the parameters that some wrapper averages, by id


class DataParallel(nn.Module):
    """What both forms share: equal weights at the start, one place where gradients become equal.

    Args:
        module: this rank's copy; its parameters and buffers are overwritten by those of the group's rank 0.
        group: the data-parallel ranks.
        op: `"mean"` where each rank's loss is a mean over its own rows, as many on each rank; `"sum"` where it has
            already been divided by the global count (`global_mean`). What `p.grad` held before is summed with it:
            start each step with `zero_grad()`.

    Raises:
        ValueError: unknown op, nothing to train, or a parameter that another wrapper averages already.
    """

    def __init__(self, module: nn.Module, group: Group, op: str = "mean") -> None:
        super().__init__()
        if op not in ("mean", "sum"):
            raise ValueError(f"op={op!r} must be 'mean' or 'sum'")
        self.module, self.group, self.op = module, group, op
        self.trained = [p for p in module.parameters() if p.requires_grad]  # a tied parameter comes once
        if not self.trained:
            raise ValueError("no parameter of this module requires a gradient, so there is nothing to average")
        if any(id(p) in _averaged for p in self.trained):
            raise ValueError(
                "another wrapper averages the gradients of this module already, and twice would be wrong; "
                "wrap a copy of it (copy.deepcopy)"
            )
        self.syncs = True
        self.own = False  # p.grad holds this rank's own gradients
        self.unfinished = False  # the step's last backward has begun: finish() must come next
        broadcast_weights(module, group)
        for p in self.trained:
            _averaged[id(p)] = p
            p.register_post_accumulate_grad_hook(self._gradient_is_there)

    def forward(self, *args, **kwargs):
        if self.unfinished and torch.is_grad_enabled():
            raise RuntimeError(
                "a backward was not followed by finish(): p.grad still holds this rank's own gradients. "
                "Call finish() before optimizer.step(), or wrap all but the last microbatch in no_sync()"
            )
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside only adds to p.grad: for all microbatches of a step but the last."""
        before, self.syncs = self.syncs, False
        try:
            yield
        finally:
            self.syncs = before

    def finish(self) -> None:
        """Return when p.grad is the averaged gradient on every rank; after it, replicas agree bit by bit.

        Call it before any other communication of this group, as ranks may differ in what they have sent so far. A
        parameter that took no part in this rank's loss counts as zero, and so it does if that holds on every rank.

        Raises:
            RuntimeError: a parameter got a gradient that nobody averages.
        """
        strangers = [p for p in self.module.parameters() if p.requires_grad and id(p) not in _averaged]
        if any(p.grad is not None for p in strangers):
            raise RuntimeError(
                "a parameter was added or unfrozen after the module was wrapped, so nobody averages its gradient; "
                "wrap a copy of the module as it is now (copy.deepcopy)"
            )
        self.own = self.unfinished = False

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their joint norm is at most `max_norm`, and return the norm it was.

        The norm is that of the averaged gradient. It is the same on every rank, so no communication is needed; but
        clipping before the average would be another algorithm.

        Raises:
            RuntimeError: the gradients are not averaged yet.
        """
        if self.own:
            raise RuntimeError(
                "clip_gradients() before finish() would clip this rank's own gradient, not the average"
            )
        return nn.utils.clip_grad_norm_(self.trained, max_norm)

    def _gradient_is_there(self, p: nn.Parameter) -> None:
        self.own, self.unfinished = True, self.unfinished or self.syncs


class NaiveDDP(DataParallel):
    """One all-reduce per parameter, all of them after backward.

    forward, backward: no communication. finish: one all-reduce per tensor, together 2(n−1)/n · Ψ elements per rank.
    """

    @torch.no_grad()
    def finish(self) -> None:
        for p in self.trained:
            if not p.requires_grad:
                continue  # frozen since
            if p.grad is None:
                p.grad = torch.zeros_like(p)  # it took no part here, yet perhaps on another rank
            with comm.label("gradient"):
                p.grad = comm.all_reduce(p.grad, self.group, self.op)
        super().finish()


class BucketedDDP(DataParallel):
    """All-reduces of whole buckets, started inside backward.

    forward: no communication. backward: one all-reduce per bucket, as soon as its gradients exist. finish: waits.
    Together 2(n−1)/n · Ψ elements per rank, as in `NaiveDDP`, in about Ψ/bucket messages instead of one per tensor.

    Buckets go from the last parameters to the first, which is about the order in which backward makes their
    gradients, and are sent in the same order on all ranks even where gradients come in another.

    Args:
        bucket_bytes: a bucket is closed once it holds so much; the last one holds what is left.
    """

    def __init__(self, module: nn.Module, group: Group, op: str = "mean", bucket_bytes: int = 4 * 2**20) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes} must be at least 1")
        super().__init__(module, group, op)
        self.buckets = [Bucket(params) for params in fill_buckets(self.trained[::-1], bucket_bytes)]
        self._bucket_of = {p: bucket for bucket in self.buckets for p in bucket.views}
        self._scale = 1 / group.size if op == "mean" else 1
        self._next = 0  # the bucket that must be sent next
        self._pending: list[comm.Pending] = []

    def _gradient_is_there(self, p: nn.Parameter) -> None:
        bucket = self._bucket_of[p]
        if self.unfinished and (p not in bucket.missing or not self.syncs):
            raise RuntimeError(
                "a second gradient came for a parameter whose first may be under way: between two finish() only the "
                "last backward may run outside no_sync()"
            )
        super()._gradient_is_there(p)
        bucket.put(p, self._scale if self.syncs else 1)
        if self.syncs:
            bucket.missing.remove(p)
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self._send_next()

    def _send_next(self) -> None:
        with comm.label(f"bucket {self._next}"):
            flat = self.buckets[self._next].flat
            self._pending.append(comm.all_reduce_start(flat, self.group, "sum", out=flat))
        self._next += 1

    @torch.no_grad()
    def finish(self) -> None:
        for bucket in self.buckets[self._next :]:  # some of its parameters took no part in this loss
            for p in bucket.missing:
                bucket.put(p, self._scale)
            self._send_next()
        super().finish()  # what it looks at is there already
        for pending in self._pending:
            pending.wait()
        for bucket in self.buckets:
            bucket.missing = set(bucket.views)
        self._pending, self._next = [], 0


class Bucket:
    """Gradients side by side in `flat`; p.grad becomes the parameter's view into it."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        sizes = [p.numel() for p in params]
        self.flat = params[0].new_zeros(sum(sizes))
        pieces = self.flat.split(sizes)
        self.views = {p: x.view_as(p) for p, x in zip(params, pieces, strict=True)}
        self.missing = set(params)

    def put(self, p: nn.Parameter, scale: float) -> None:
        """Move p.grad into the bucket, scaled on the way; zeros if there is none."""
        view = self.views[p]
        if p.grad is None:
            view.zero_()
        elif p.grad is not view or scale != 1:
            torch.mul(p.grad, scale, out=view)
        p.grad = view if p.requires_grad else None


def fill_buckets(params: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Neighbours of one dtype and device, in the order of `params`; a bucket is closed once it holds `bucket_bytes`."""
    buckets: list[list[nn.Parameter]] = []
    room, kind = 0, None
    for p in params:
        if (p.dtype, p.device) != kind or room <= 0:
            buckets.append([])
            room, kind = bucket_bytes, (p.dtype, p.device)
        buckets[-1].append(p)
        room -= p.numel() * p.element_size()
    return buckets


def broadcast_weights(module: nn.Module, group: Group) -> None:
    """Overwrite parameters and buffers by those of the group's rank 0.

    Averaged gradients keep replicas equal only if they start equal. Later changes of buffers (the running means of a
    batch norm) stay each rank's own.
    """
    with torch.no_grad():
        for x in (*module.parameters(), *module.buffers()):
            x.copy_(comm.broadcast(x, group, src=0))


def global_mean(loss_sum: Tensor, count: Tensor | int, group: Group) -> Tensor:
    """This rank's part of the mean over all ranks' tokens: Σ own losses / Σ_ranks count.

    The parts add up to the global mean, and so do their gradients: use `op="sum"`. With other numbers of tokens on
    each rank, a mean of means is another number.

    Args:
        loss_sum: sum of this rank's token losses, [].
        count: how many those are.

    Raises:
        ValueError: no rank has any token.
    """
    total = comm.all_reduce(torch.as_tensor(count, dtype=torch.int64, device=loss_sum.device), group)
    if total == 0:
        raise ValueError("no rank has a token that counts, so there is no mean loss")
    return loss_sum / total
