"""ZeRO-1 and ZeRO-2: each rank keeps the optimizer's state of one n-th of the model, and steps only that.

The problem: n data-parallel ranks hold the same optimizer state n times, and it is most of what they hold: 12 of 16
bytes a parameter. All of them work out the same step.
The idea: an all-reduce is a reduce-scatter and an all-gather. Between the two, each rank holds the finished sum of one
n-th of the gradients. That is where the step belongs: each rank steps its n-th, and the all-gather then carries
parameters instead of gradients. The same bytes travel, and the state is kept once.

    ZeRO-1   backward makes all gradients; reduce-scatter; step; all-gather
    ZeRO-2   the same, but a bucket of gradients is freed as soon as it has been reduced

    model = ZeRO2(GPT(config), group, partial(torch.optim.AdamW, lr=3e-4))
    loss_of(model(inputs)).backward()         # reduce-scatters start in here
    model.finish()                            # from here on this rank has its n-th of the averaged gradient
    model.step()                              # the optimizer's step on the shard, then the all-gather

`NaiveZeRO1` comes first: it shares out whole parameters.

Source: Rajbhandari et al., ZeRO, SC 2020, arXiv 1910.02054, sections 5.1, 5.2 and 7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from lib import comm
from lib.data_parallel.ddp import BucketedDDP, DataParallel, NaiveDDP, fill_buckets
from lib.data_parallel.flat import Flat, MakeOptimizer, check_elementwise, clip_shards
from lib.data_parallel.saving import Saves
from lib.mesh import Group

# ---- whole parameters -----------------------------------------------------------------------------------------------


class NaiveZeRO1(NaiveDDP):
    """ZeRO-1 by whole parameters: each has one owner, which alone keeps its optimizer state and steps it.

    finish: each gradient is reduced to its owner. step: the owner steps, and broadcasts the parameter. Together
    2(n−1)/n · Ψ elements per rank, the mean over the ranks; but a rank that owns a large parameter keeps and sends
    more than the others, and two messages are sent for each parameter.

    Args:
        optimizer: called with this rank's parameters, as pairs of name and parameter.
    """

    def __init__(self, module: nn.Module, group: Group, optimizer: MakeOptimizer, op: str = "mean") -> None:
        super().__init__(module, group, op)
        self.owners = share_out([p.numel() for p in self.trained], group.size)
        names = {id(p): name for name, p in module.named_parameters()}
        owned = zip(self.trained, self.owners, strict=True)
        mine = [(names[id(p)], p) for p, owner in owned if owner == group.rank]
        self.optimizer = optimizer(mine) if mine else None  # more ranks than parameters
        self._ready = False  # the gradients are averaged, and not used up

    @torch.no_grad()
    def finish(self) -> None:
        """Return when the owner of each parameter has its averaged gradient; p.grad is None on the others."""
        for p, owner in zip(self.trained, self.owners, strict=True):
            if not p.requires_grad:
                continue  # frozen since
            if p.grad is None:
                p.grad = torch.zeros_like(p)  # no part here, perhaps elsewhere
            with comm.label("gradient"):
                p.grad = comm.reduce(p.grad, self.group, owner, self.op)
        DataParallel.finish(self)
        self._own, self._ready = False, True

    def clip_gradients(self, max_norm: float) -> Tensor:
        """As `ZeRO1.clip_gradients`."""
        _check_averaged(self._may_step(), "clip_gradients()")
        return clip_shards([p.new_zeros(0) if p.grad is None else p.grad for p in self.trained], self.group, max_norm)

    @torch.no_grad()
    def step(self) -> None:
        """The owners step, and everyone gets their parameters.

        Raises:
            RuntimeError: there is no new gradient.
        """
        _check_averaged(self._may_step(), "step()")
        self._ready = False
        if self.optimizer is not None:
            self.optimizer.step()
        for p, owner in zip(self.trained, self.owners, strict=True):
            p.grad = None
            with comm.label("parameter"):
                p.copy_(comm.broadcast(p, self.group, owner))

    def _may_step(self) -> bool:
        return self._ready and not self._added and not self._begun()


def share_out(sizes: Sequence[int], n: int) -> list[int]:
    """An owner for each size: the largest first, to whoever has least."""
    owners, held = [0] * len(sizes), [0] * n
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = held.index(min(held))
        held[owners[i]] += sizes[i]
    return owners


def _check_averaged(ready: bool, what: str) -> None:
    if not ready:
        raise RuntimeError(
            f"{what} has no averaged gradient to work on: each step needs forward, backward() and finish() first"
        )


# ---- shards of flat parameters --------------------------------------------------------------------------------------


class ZeRO1(Saves, BucketedDDP):
    """Optimizer state sharded: half an all-reduce before the step, the other half after it.

    forward: no communication. backward: one reduce-scatter per bucket, as soon as its gradients exist. finish: waits.
    step: one all-gather per bucket. Together 2(n−1)/n · Ψ elements per rank (and padding, less than n a bucket).

    A rank keeps Ψ parameters and Ψ gradients, and Ψ/n of the optimizer's state. In float32 with Adam that is
    4Ψ + 4Ψ + 8Ψ/n bytes, with `dtype=torch.bfloat16` 2Ψ + 2Ψ + 12Ψ/n: the 12 has master weights in it.

    Args:
        module, group, op, bucket_bytes: as for `BucketedDDP`.
        optimizer: called with pairs of name and piece, such as `partial(torch.optim.AdamW, lr=3e-4)`. A piece is what
            this rank owns of a parameter, flat: an optimizer that wants to see whole matrices cannot be used.
        dtype: to compute, to keep gradients and to communicate in; the optimizer works on master weights in the
            parameters' own precision. None computes in that, too. Buffers stay as they are.

    Raises:
        ValueError: an optimizer that needs whole parameters.
    """

    gradients_stay = True

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        optimizer: MakeOptimizer,
        op: str = "mean",
        bucket_bytes: int = 4 * 2**20,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_elementwise(optimizer, next((name for name, p in module.named_parameters() if p.requires_grad), ""))
        self.dtype = dtype
        self._ready = False  # the shards of the gradients are averaged, and not used up
        super().__init__(module, group, op, bucket_bytes)
        self.wholes = nn.ParameterList(flat.whole for flat in self.buckets)  # so that a memory tracker finds them
        self.shards = nn.ParameterList(flat.shard for flat in self.buckets)
        pieces = [piece for flat in self.buckets for piece in flat.pieces.items()]
        self.optimizer = optimizer(pieces or [("padding", nn.Parameter(torch.zeros(0)))])

    def forward(self, *args, **kwargs):
        self._ready = self._ready and not torch.is_grad_enabled()
        return super().forward(*args, **kwargs)

    def _flats(self) -> list[Flat]:
        """All that is sharded."""
        return self.buckets

    @torch.no_grad()
    def _make_buckets(self) -> list[Flat]:
        names = {id(p): name for name, p in self.module.named_parameters()}
        flats = []
        for params in fill_buckets(self.trained[::-1], self.bucket_bytes):
            flat = Flat({names[id(p)]: p for p in params}, self.group, self.dtype, self.gradients_stay)
            for name, p, view in zip(flat.names, params, flat.views, strict=True):
                flat.load(name, p)
                p.data = view.copy_(p)
            flats.append(flat)
        if self.dtype is not None:
            for p in self.module.parameters():
                p.data = p.data.to(self.dtype)  # those that are not trained
        return flats

    def _send(self, flat: Flat) -> comm.Pending:
        if self._pending:  # memory to receive one bucket at a time
            self._pending[-1].wait()
        return self._reduce(flat)

    def _reduce(self, flat: Flat) -> comm.Pending:
        gradients, mine = flat.whole.grad, flat.whole.grad[flat.mine]
        return comm.reduce_scatter_start(gradients, self.group, out=mine)

    def finish(self) -> None:
        """Return when this rank has its shard of the averaged gradient, in `shard.grad` of each of `buckets`.

        p.grad holds nothing of use then: each rank has another part of the average. Once a step: what an earlier call
        gave is overwritten, unless there is nothing new.
        """
        if self._ready and not self._added and not self._begun():
            return
        super().finish()
        for flat in self.buckets:
            flat.shard.grad = flat.whole.grad[flat.mine]
            for p in flat.params:
                p.grad = None
        self._ready = True

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their joint norm is at most `max_norm`, and return the norm it was.

        Raises:
            RuntimeError: the gradients are not averaged yet.
        """
        _check_averaged(self._ready, "clip_gradients()")
        return clip_shards([flat.shard.grad for flat in self.buckets], self.group, max_norm)

    @torch.no_grad()
    def step(self) -> None:
        """Step this rank's shard, then collect those of the others.

        Raises:
            RuntimeError: there is no new gradient.
        """
        _check_averaged(self._ready, "step()")
        self._ready = False
        for flat in self.buckets:
            flat.lend()
        self.optimizer.step()
        for flat in self.buckets:
            flat.settle()
        self._publish()

    def _publish(self) -> None:
        """Let every rank see the new parameters."""
        with comm.label("parameters"):
            pending = [comm.all_gather_start(flat.shard, self.group, out=flat.whole) for flat in self.buckets]
        for one in pending:
            one.wait()


class ZeRO2(ZeRO1):
    """Gradients sharded, too: a bucket is freed as soon as it has been reduced.

    The same messages as in ZeRO-1. A rank keeps Ψ parameters and Ψ/n of gradients and optimizer state: in float32 with
    Adam 4Ψ + 12Ψ/n bytes, in bfloat16 with master weights 2Ψ + 14Ψ/n; and for a moment the buckets on their way.

    Several microbatches: each backward reduces its gradients, and the shard adds them up: (n−1)/n · Ψ for each
    microbatch, and never all gradients in memory. Inside `no_sync()` nothing travels and nothing is freed: the traffic
    of one backward, and the memory of ZeRO-1. Choose.
    """

    gradients_stay = False

    def _hooks(self) -> Iterator[tuple[nn.Parameter, Callable[[nn.Parameter], None]]]:
        self._sent = False  # anything since the last finish()
        return super()._hooks()

    def forward(self, *args, **kwargs):
        if torch.is_grad_enabled() and (self._next or self._begun()):
            self._send_the_rest()  # of a microbatch that did not use all parameters
        return super().forward(*args, **kwargs)

    def _reduce(self, flat: Flat) -> comm.Pending:
        reduced = comm.reduce_scatter_start(flat.give_away(), self.group)

        def add() -> None:
            part, so_far = reduced.wait(), flat.shard.grad
            flat.shard.grad = part if so_far is None else so_far.add_(part)

        return comm.Pending(add)

    def _send_full_buckets(self) -> None:
        super()._send_full_buckets()
        if self._next == len(self.buckets):  # ready for another microbatch
            self._next, self._sent, self._added = 0, True, False
            del self._pending[:-1]  # the others have arrived
            for flat in self.buckets:
                flat.missing.update(range(len(flat.params)))

    @torch.no_grad()
    def finish(self) -> None:
        """Return when this rank has its shard of the averaged gradient, summed over the microbatches."""
        if self._next or self._begun() or self._added or not self._sent:
            self._send_the_rest()
        DataParallel.finish(self)
        for pending in self._pending:
            pending.wait()
        self._pending, self._sent, self._ready = [], False, True
