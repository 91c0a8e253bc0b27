"""Classic mistakes of context parallelism, planted on purpose. Each of them trains, and the loss falls.

    with planted("positions from 0 on each rank", CONTEXT_MISTAKES):
        certify(world, layouts, model, batches, max_norm=0.1)

Where they were met: ring-flash-attention issues (positions), LlamaFactory RFC 10475 (targets), Megatron-LM 673 and 906
(gradients), diffusers 14265 and Automodel 3157 (backward of the ring).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor

from lib import comm, parallel
from lib.context_parallel import ring
from lib.cost.token_orders import tokens_of_rank
from lib.mesh import Group
from lib.model import GPT, Embed, Heads
from lib.parallel_model import ParallelModel

_CONTEXT, _CLIP, _TERM = parallel.context_parallel, ParallelModel.clip, ParallelModel.term_of
_BACKWARD, _RING_BACKWARD = ParallelModel.backward, ring._Ring.backward


def _cp(model: ParallelModel) -> Group:
    return model.mesh.group_of_some("cp")


def _from_0(model: GPT, group: Group, *how: str) -> GPT:
    for module in _CONTEXT(model, group, *how).modules():
        if isinstance(module, (Embed, Heads)):
            module.positions = torch.arange
    return model


def _shifted_inside(model: ParallelModel, inputs: Tensor, targets: Tensor, *more: int) -> Tensor:
    """A rank takes the next token that it has as the target: the last has none, and at a gap it is wrong."""
    cp, order, length = _cp(model), model.part_of.keywords["order"], inputs.shape[1]
    shifted = torch.full_like(targets, -100)
    for rank in range(cp.size):
        mine = torch.tensor([t for part in tokens_of_rank(order, length, cp.size, rank) for t in part])
        shifted[:, mine[:-1]] = torch.where(targets[:, mine[:-1]] == -100, -100, inputs[:, mine[1:]])
    return _BACKWARD(model, inputs, shifted, *more)


def _mean_over_own_tokens(model: ParallelModel, targets: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    return _TERM(model, model.part_of(targets).repeat(1, _cp(model).size))


def _averaged_over_cp(model: ParallelModel, max_norm: float) -> Tensor:
    for _, held, _ in model.pieces():
        if held.grad is not None:
            held.grad /= _cp(model).size
    return _CLIP(model, max_norm)


def _merged_as_means(o: Tensor, lse: Tensor, part: Tensor, lse_part: Tensor) -> None:
    is_first = lse.isinf()[..., None]
    o.copy_(torch.where(is_first, part, (o + part) / 2))
    lse.copy_(torch.logaddexp(lse, lse_part))


def _stale_keys(ctx: SimpleNamespace, d_o: Tensor) -> tuple:
    """Backward begins with the keys and values that arrived last in forward, those of the next rank."""
    q, k, v, o, lse = ctx.saved_tensors
    for _ in range(ctx.group.size - 1):
        k, v = comm.shift(k, ctx.group), comm.shift(v, ctx.group)
    stale = SimpleNamespace(saved_tensors=(q, k, v, o, lse), group=ctx.group, order=ctx.order, masks=ctx.masks)
    return _RING_BACKWARD(stale, d_o)


# Description of a mistake → the object to patch, the name of its attribute, the replacement.
CONTEXT_MISTAKES: dict[str, list[tuple]] = {
    "positions from 0 on each rank": [(parallel, "context_parallel", _from_0)],
    "targets shifted inside the rank": [(ParallelModel, "backward", _shifted_inside)],
    "loss divided by the count of the rank": [(ParallelModel, "term_of", _mean_over_own_tokens)],
    "gradients averaged over cp": [(ParallelModel, "clip", _averaged_over_cp)],
    "blocks averaged, not merged": [(ring, "_merge", _merged_as_means)],
    "stale keys and values in backward": [(ring._Ring, "backward", staticmethod(_stale_keys))],
}
