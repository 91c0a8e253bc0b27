"""ZeRO-1 and ZeRO-2: each rank keeps the optimizer state of 1/n of the parameters, and steps only those.

The problem: n data-parallel ranks hold n copies of the optimizer state, 12 of 16 bytes per parameter.
The idea: an all-reduce is a reduce-scatter and an all-gather. Between the two, each rank holds the final sum of 1/n of
the gradients, and steps its shard. The all-gather then sends parameters instead of gradients: the same bytes.

    ZeRO-1   backward makes all gradients; reduce-scatter; step; all-gather
    ZeRO-2   the same, but a bucket of gradients is freed as soon as it has been reduced

    model = ZeRO2(GPT(config), group, partial(torch.optim.AdamW, lr=3e-4))
    loss_of(model(inputs)).backward()         # reduce-scatters start in here
    model.finish()                            # now this rank holds its shard of the averaged gradient
    model.step()                              # the optimizer step on the shard, then the all-gather

`ZeRO1` and `ZeRO2` combine `Gradients` over flats (`flat.py`) with a `ShardedOptimizer`; `NaiveZeRO1` of
`book/trials/unbucketed.py` distributes full parameters.

Source: Rajbhandari et al., ZeRO, SC 2020, arXiv 1910.02054, sections 5.1, 5.2 and 7.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor, nn

from lib.cost.sizes import BUCKET_BYTES
from lib.data_parallel.bucketed_gradients import Gradients
from lib.data_parallel.check_optimizer import check_for_pieces
from lib.data_parallel.ddp import DataParallel, broadcast_weights, replicas
from lib.data_parallel.flat import Flat, MakeOptimizer
from lib.data_parallel.optimizer import ShardedOptimizer
from lib.data_parallel.placeholders import CONVERTED
from lib.data_parallel.state_dicts import StateDicts
from lib.facts import Fact
from lib.mesh import Group
from lib.placement import check_apart


class Sharded(DataParallel, StateDicts, ShardedOptimizer):
    """A module with sharded gradients and optimizer: `step` and `publish` are those of `ShardedOptimizer`.

    Args:
        module, group, gradients, optimizer: as for `DataParallel` and `ShardedOptimizer`.
        flats: all sharded parameters, including frozen ones. Default: the buckets.

    Attributes:
        stored: the tensors that hold parameters, for a memory tracker.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        gradients: Gradients,
        optimizer: MakeOptimizer,
        flats: Sequence[Flat] | None = None,
    ) -> None:
        DataParallel.__init__(self, module, group, gradients, counts_over=group)
        self._make(gradients, optimizer)  # checked by `check_can_be_sharded`, before the module was changed
        self.flats = list(flats or self.flats)
        self.stored = [x for flat in self.flats for x in (flat.whole, flat.shard)]  # for a memory tracker

    def _apply(self, fn: Callable, recurse: bool = True) -> NoReturn:
        """Refuse .to(), .double() and similar calls."""
        raise RuntimeError(CONVERTED.format("parameters would be"))


def check_can_be_sharded(module: nn.Module, optimizer: MakeOptimizer, dtype: torch.dtype | None) -> None:
    """Raise ValueError, before anything is changed, for an optimizer that needs full parameters, for parameters that
    share memory, and for a layer that cannot compute with weights of `dtype`.
    """
    check_apart(module)
    check_for_pieces(optimizer, ((name, p) for name, p in module.named_parameters() if p.requires_grad))
    if dtype is None:
        return
    check_range(dtype)
    for name, p in module.named_parameters():
        if p.requires_grad and p.is_complex() and not dtype.is_complex:
            raise ValueError(f"{name} is {str(p.dtype)[6:]}, and {str(dtype)[6:]} has no imaginary part: omit dtype")
    for name, submodule in module.named_modules():
        averages = getattr(submodule, "running_mean", None)
        if isinstance(averages, Tensor) and averages.dtype != dtype:
            raise ValueError(
                f"{name or 'the module'} is a {type(submodule).__name__}, whose averages stay "
                f"{str(averages.dtype)[6:]} and do not match {str(dtype)[6:]} weights: use a norm without averages "
                "(LayerNorm, GroupNorm), or omit dtype"
            )


def check_range(dtype: torch.dtype) -> None:
    """Raise ValueError for integers, and for a dtype in which small gradients are 0: nothing here scales the loss."""
    if not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"dtype={str(dtype)[6:]} has no gradients: use torch.bfloat16, or omit dtype")
    if torch.finfo(dtype).tiny > torch.finfo(torch.bfloat16).tiny:
        raise ValueError(
            f"dtype={str(dtype)[6:]} needs a GradScaler, which cannot see gradients that are sharded over ranks: use "
            "torch.bfloat16, which has the range of float32 and needs none"
        )


def kept_precise(module: nn.Module) -> set[int]:
    """The `id` of parameters that stay in full precision: those whose module names them in `full_precision`."""
    named = ((m, name) for m in module.modules() for name in getattr(m, "full_precision", ()))
    return {id(getattr(m, name)) for m, name in named if getattr(m, name) is not None}


def cast_frozen(module: nn.Module, trained: Set[torch.dtype], dtype: torch.dtype | None) -> None:
    """Cast frozen parameters to `dtype`, as trained ones of their dtype; indices and quantised weights stay.

    Those of `kept_precise` stay as well.
    """
    precise = kept_precise(module)
    for p in module.parameters():
        if dtype and not p.requires_grad and p.is_floating_point() and p.dtype in trained and id(p) not in precise:
            p.data = p.data.to(dtype)


class ZeRO1(Sharded):
    """Optimizer state sharded: half an all-reduce before the step, the other half after it.

    forward: no communication. backward: one reduce-scatter per bucket, as soon as its gradients exist. finish: waits.
    step: one all-gather per bucket. Together 2(n−1)/n · Ψ elements per rank (and padding, less than n per bucket).

    A rank keeps Ψ parameters and Ψ gradients, and 1/n of the optimizer state: in float32 with Adam 4Ψ + 4Ψ + 8Ψ/n
    bytes, with `dtype=torch.bfloat16` 2Ψ + 2Ψ + 12Ψ/n, including master weights.

    After finish() p.grad cannot be read: each rank holds its shard of the average, in `shard.grad` of each bucket.

    Args:
        module, group, op, bucket_bytes: as for `BucketedDDP`.
        optimizer: called with pairs of name and piece, such as `partial(torch.optim.AdamW, lr=3e-4)`. A piece is the
            part of a parameter that this rank owns, flat: an optimizer that needs full matrices cannot be used.
        dtype: dtype of computation, gradients and communication; the optimizer steps master weights in the parameters'
            original precision. None keeps that precision for all. Buffers do not change.

    Raises:
        TypeError: an optimizer instead of a function that makes one; a group of torch instead of a `Group`.
        ValueError: an optimizer that needs full parameters; a layer that cannot compute in `dtype`.

    Example:
        from functools import partial

        import torch
        from torch import nn

        from lib.data_parallel.zero import ZeRO1

        model = ZeRO1(nn.Linear(4, 1), world, partial(torch.optim.AdamW, lr=3e-4))
        model.optimizer.param_groups[0]["lr"] = 1e-4
        model.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        model.finish()
        model.step()
        state = model.full_state_dict()  # that of the nn.Linear, on rank 0
        assert state.keys() == ({"weight", "bias"} if world.rank == 0 else set())
    """

    stage = 1

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        optimizer: MakeOptimizer,
        op: str = "mean",
        bucket_bytes: int = BUCKET_BYTES,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_can_be_sharded(module, optimizer, dtype)
        broadcast_weights(module, group)
        gradients = sharded_gradients(replicas(module, group, group.size), self.stage, op, bucket_bytes, dtype)
        cast_frozen(module, {flat.master.dtype for flat in gradients.buckets}, dtype)
        super().__init__(module, group, gradients, optimizer)


class ZeRO2(ZeRO1):
    """Optimizer state and gradients sharded: a bucket is freed as soon as it is reduced.

    It sends the same messages as ZeRO-1. A rank keeps Ψ parameters and 1/n of gradients and optimizer state: in float32
    with Adam 4Ψ + 12Ψ/n bytes, in bfloat16 with master weights 2Ψ + 14Ψ/n, and temporarily the buckets in flight.

    With several microbatches, each backward reduces its gradients, (n−1)/n · Ψ each, and the shard adds them up; inside
    `no_sync()` nothing is sent or freed.
    """

    stage = 2


def sharded_gradients(
    facts: Iterable[Fact],
    stage: int,
    op: str = "sum",
    bucket_bytes: int = BUCKET_BYTES,
    dtype: torch.dtype | None = None,
) -> Gradients:
    """Reduce-scattered gradients: kept until the end of backward (stage 1), or freed as they are reduced (stage 2)."""
    make = partial(Flat.around, dtype=dtype, gradients_stay=stage == 1)
    return Gradients(facts, op, bucket_bytes, make, each=stage == 2, one_at_a_time=True)
