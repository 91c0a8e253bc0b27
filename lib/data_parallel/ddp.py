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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, nn

from lib import comm
from lib.mesh import Group

_ONE = torch.ones([], dtype=torch.float64)  # scales are tensors, as torch would make each number into one, each time
_SECOND = (
    "a second gradient came for a parameter whose first may be under way: between two finish() only the last backward "
    "may run outside no_sync()"
)
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
        self._added = False  # a backward in no_sync() may have added to p.grad
        self._start_equal()
        for p, hook in self._hooks():
            _averaged[id(p)] = p
            p.register_post_accumulate_grad_hook(hook)

    def forward(self, *args, **kwargs):
        if self._begun() and torch.is_grad_enabled():
            raise RuntimeError(
                "a backward was not followed by finish(): p.grad still holds this rank's own gradients. "
                "Call finish() before optimizer.step(), or wrap all but the last microbatch in no_sync()"
            )
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside only adds to p.grad: for all microbatches of a step but the last."""
        before, self.syncs, self._added = self.syncs, False, True
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
        self._added = False

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their joint norm is at most `max_norm`, and return the norm it was.

        The norm is that of the averaged gradient. It is the same on every rank, so no communication is needed; but
        clipping before the average would be another algorithm.

        Raises:
            RuntimeError: the gradients are not averaged yet.
        """
        if self._added or self._begun():
            raise RuntimeError(
                "clip_gradients() before finish() would clip this rank's own gradient, not the average"
            )
        return nn.utils.clip_grad_norm_(self.trained, max_norm)

    def _start_equal(self) -> None:
        """Averaged gradients keep replicas equal only if they start equal."""
        broadcast_weights(self.module, self.group)

    def _begun(self) -> bool:
        """Whether the step's last backward has begun, so that finish() must come next."""
        raise NotImplementedError

    def _hooks(self) -> Iterator[tuple[nn.Parameter, Callable[[nn.Parameter], None]]]:
        """Each trained parameter with what is to be called when backward has added to its gradient."""
        raise NotImplementedError


class NaiveDDP(DataParallel):
    """One all-reduce per parameter, all of them after backward.

    forward, backward: no communication. finish: one all-reduce per tensor, together 2(n−1)/n · Ψ elements per rank.
    """

    def _begun(self) -> bool:
        return self._own

    def _hooks(self) -> Iterator[tuple[nn.Parameter, Callable[[nn.Parameter], None]]]:
        self._own = False

        def note(p: nn.Parameter) -> None:
            self._own = self._own or self.syncs

        return ((p, note) for p in self.trained)

    @torch.no_grad()
    def finish(self) -> None:
        for p in self.trained:
            if not p.requires_grad:
                continue  # frozen since
            if p.grad is None:
                p.grad = torch.zeros_like(p)  # no part here, perhaps elsewhere
            with comm.label("gradient"):
                p.grad = comm.all_reduce(p.grad, self.group, self.op)
        super().finish()
        self._own = False


class BucketedDDP(DataParallel):
    """All-reduces of whole buckets, started inside backward.

    forward: no communication. backward: one all-reduce per bucket, as soon as its gradients exist. finish: waits.
    Together 2(n−1)/n · Ψ elements per rank, as in `NaiveDDP`, in about Ψ/bucket messages instead of one per tensor.

    Buckets go from the last parameters to the first, which is about the order in which backward makes their
    gradients, and are sent in the same order on all ranks even where gradients come in another.

    Args:
        bucket_bytes: about how much a bucket holds, see `fill_buckets`.
    """

    def __init__(self, module: nn.Module, group: Group, op: str = "mean", bucket_bytes: int = 4 * 2**20) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={bucket_bytes} must be at least 1")
        self.bucket_bytes = bucket_bytes
        super().__init__(module, group, op)

    def _hooks(self) -> Iterator[tuple[nn.Parameter, Callable[[nn.Parameter], None]]]:
        self.buckets = self._make_buckets()
        self._scale = _ONE / self.group.size if self.op == "mean" else _ONE
        self._next = 0  # the bucket that must be sent next
        self._pending: list[comm.Pending] = []
        for bucket in self.buckets:
            for i, p in enumerate(bucket.params):
                yield p, partial(self._gradient_is_there, bucket, i)

    def _make_buckets(self) -> list[Bucket]:
        return [Bucket(params) for params in fill_buckets(self.trained[::-1], self.bucket_bytes)]

    def _begun(self) -> bool:
        return any(len(bucket.missing) < len(bucket.params) for bucket in self.buckets)

    def _gradient_is_there(self, bucket: Bucket, i: int, p: nn.Parameter) -> None:
        if i not in bucket.missing:
            raise RuntimeError(_SECOND)
        if self.syncs:
            bucket.take(i, self._scale)
            bucket.missing.remove(i)
            if not bucket.missing:
                self._send_full_buckets()
        else:
            bucket.keep(i)

    def _send_full_buckets(self) -> None:
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            with comm.label(f"bucket {self._next}"):
                self._pending.append(self._send(self.buckets[self._next]))
            self._next += 1

    def _send(self, bucket: Bucket) -> comm.Pending:
        return comm.all_reduce_start(bucket.flat, self.group, "sum", out=bucket.flat)

    def _send_the_rest(self) -> None:
        """All buckets that backward has not filled, with what they have."""
        for bucket in self.buckets[self._next :]:
            for i in bucket.missing:
                p = bucket.params[i]
                if p.grad is None:
                    p.grad = torch.zeros_like(p)  # no part here, perhaps elsewhere
                bucket.take(i, self._scale)
                if not p.requires_grad:
                    p.grad = None  # frozen since
            bucket.missing.clear()
        self._send_full_buckets()

    @torch.no_grad()
    def finish(self) -> None:
        self._send_the_rest()
        super().finish()  # what it looks at is there already
        for pending in self._pending:
            pending.wait()
        for bucket in self.buckets:
            bucket.missing.update(range(len(bucket.params)))
        self._pending, self._next = [], 0


class Bucket:
    """Gradients side by side in `flat`; each p.grad becomes a view into it."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        sizes = [p.numel() for p in params]
        self.params = params
        self.flat = params[0].new_zeros(sum(sizes))
        pieces = self.flat.split(sizes)
        self.views = [x.view_as(p) for p, x in zip(params, pieces, strict=True)]
        self.missing = set(range(len(params)))  # no gradient yet

    def take(self, i: int, scale: Tensor) -> None:
        """Copy gradient i to its place in the bucket, scaled on the way."""
        torch.mul(self.params[i].grad, scale, out=self.views[i])
        self.params[i].grad = self.views[i]

    def keep(self, i: int) -> None:
        """Let gradient i grow further, as more microbatches come."""
        if self.params[i].grad is not self.views[i]:
            self.take(i, _ONE)


def fill_buckets(params: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Neighbours of one dtype and device, in the order of `params`, in equal shares of about `bucket_bytes`.

    So no small bucket is left over at the end, to pay for a message of its own.
    """
    buckets: list[list[nn.Parameter]] = []
    for _, neighbours in groupby(params, key=lambda p: (p.dtype, p.device)):
        alike = list(neighbours)
        total = sum(p.nbytes for p in alike)
        share = total / max(1, round(total / bucket_bytes))
        room = 0
        for p in alike:
            if room <= 0:
                buckets.append([])
                room = share
            buckets[-1].append(p)
            room -= p.nbytes
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
    """This rank's part of the mean over all tokens: Σ losses / Σ count.

    The parts add up to the global mean, and so do their gradients: use `op="sum"`. With other numbers of tokens on
    each rank, a mean of means is another number.

    Args:
        loss_sum: sum of this rank's token losses, [].
        count: how many those are.

    Raises:
        ValueError: no rank has any token.
    """
    own = torch.as_tensor(count, dtype=torch.int64, device=loss_sum.device)
    total = comm.all_reduce(own, group)
    if total == 0:
        raise ValueError("no rank has a token that counts, so there is no mean")
    return loss_sum / total
