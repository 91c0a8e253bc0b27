"""Compare gradients, weights and layers with a single-process reference.

The problem: a parallel layer that sums once too often still trains, without an error. The idea: the same model on one
process, in float64. All tensors must agree to rounding; and backward must be the transpose of forward.
"""

import hashlib
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from lib import comm
from lib.mesh import Group
from lib.placement import Partial, Placement, Replicate, parts, shard, unshard, with_partial_gradients

_WHOLE = Replicate()


def largest_difference(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """max over tensors of ‖got − wanted‖ / ‖wanted‖: 0 where all are equal, about 1e-16 where float64 rounds.

    If a wanted tensor is zero, the absolute difference counts. NaN if any element is NaN.

    Raises:
        ValueError: the two do not have the same names and shapes, or are empty.
    """
    if not wanted and not got:
        raise ValueError("there is no tensor to compare; was backward() run?")
    if got.keys() != wanted.keys():
        odd = sorted(got.keys() ^ wanted.keys())
        raise ValueError(f"these tensors are only in one of the two: {', '.join(odd)}")
    largest = 0.0
    for name, want in wanted.items():
        if got[name].shape != want.shape:
            raise ValueError(f"{name} has shape {list(got[name].shape)} instead of {list(want.shape)}")
        have, want = (x.to(torch.promote_types(x.dtype, torch.float64)) for x in (got[name], want))
        apart = (have - want).norm().item() / (want.norm().item() or 1.0)
        if math.isnan(apart):
            return apart  # max(0, nan) would be 0
        largest = max(largest, apart)
    return largest


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Name → a copy of p.grad, for all parameters that have one."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Name → a copy of each parameter."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def replicas_equal(model: nn.Module, group: Group) -> bool:
    """Whether all ranks of the group hold the same weights, bit by bit; all must call it."""
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(p.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    mine = torch.tensor([int.from_bytes(digest.digest()[:7], "big")])
    device = next(model.parameters()).device
    return comm.all_gather(mine.to(device), group).unique().numel() == 1


# ---- parallel layers ------------------------------------------------------------------------------------------------


def assert_adjoint(
    op: Callable[[Tensor], Tensor], x: Tensor, group: Group, of: Placement, to: Placement, rel: float = 1e-12
) -> None:
    """Check ⟨op(x), y⟩ = ⟨x, op*(y)⟩ over all ranks together, where op* is the backward of op; else AssertionError.

    Args:
        op: a linear map of the tensors of all ranks.
        x: a tensor with shape and dtype of this rank's input; the values are drawn here.
        of: placement of x. A replicated tensor counts once.
        to: placement of the output: `Replicate()` if all ranks use it in the same way, else `Partial()`.
    """
    x = _drawn(x, of, group, 1).requires_grad_()
    out = op(x)
    y = _drawn(out, to, group, 2)
    (back,) = torch.autograd.grad(out, x, y)
    forth, back_too = _inner(out, y, to, group), _inner(x, back, of, group)
    scale = math.sqrt(_inner(out, out, to, group) * _inner(y, y, to, group))
    if not abs(forth - back_too) <= rel * scale:
        raise AssertionError(
            f"forward and backward are not transposes: ⟨op(x), y⟩ = {forth:.6g}, ⟨x, op*(y)⟩ = {back_too:.6g}"
        )


def _drawn(like: Tensor, placement: Placement, group: Group, seed: int) -> Tensor:
    """Random values, equal on all ranks if the tensor is replicated."""
    place = 0 if placement == _WHOLE else group.rank
    generator = torch.Generator().manual_seed(100 * seed + place)
    return torch.randn(like.shape, generator=generator, dtype=like.dtype).to(like.device)


def _inner(a: Tensor, b: Tensor, placement: Placement, group: Group) -> float:
    """⟨a, b⟩ of the full tensors over all ranks."""
    total = comm.all_reduce((a.detach() * b.detach()).sum(), group).item()
    return total / group.size if placement == _WHOLE else total


def assert_matches_serial(
    serial: nn.Module,
    parallel: nn.Module,
    inputs: Tensor,
    group: Group,
    rel: float = 1e-12,
    of: Placement = _WHOLE,
    to: Placement = _WHOLE,
) -> None:
    """Check output, input gradient and weight gradients of a parallel module against its serial version.

    Args:
        inputs: full inputs, equal on all ranks.
        rel: tolerance for each tensor, relative to the norm of the serial tensor.
        of, to: placement of input and output of the parallel module.

    Raises:
        AssertionError: they differ, or have different parameters; it names the tensor with the largest difference.
    """
    x, part = inputs.clone(), shard(inputs, of, group)
    if inputs.is_floating_point() or inputs.is_complex():
        x.requires_grad_(), part.requires_grad_()
    out, out_part = serial(x), parallel(part)
    y = _drawn(out, _WHOLE, group, 3)
    out.backward(y)
    out_part.backward(shard(y, to, group))
    wanted = {"output": out.detach()} | {f"gradient of {name}": g for name, g in gradients(serial).items()}
    got = {"output": unshard(out_part, to, group)}
    partial, placed = with_partial_gradients(parallel), parts(parallel)
    for name, gradient in gradients(parallel).items():
        p, placement = placed[name]
        got[f"gradient of {name}"] = unshard(gradient, Partial() if id(p) in partial else placement, group)
    if x.grad is not None:
        wanted["gradient of the input"], got["gradient of the input"] = x.grad, unshard(part.grad, of, group)
    if got.keys() != wanted.keys():
        raise AssertionError(f"only in one of the two: {', '.join(sorted(got.keys() ^ wanted.keys()))}")
    apart = {name: largest_difference({name: got[name]}, {name: want}) for name, want in wanted.items()}
    worst = max(apart, key=lambda name: (math.isnan(apart[name]), apart[name]))  # max alone may drop NaN
    if not apart[worst] <= rel:
        raise AssertionError(f"{worst} is {apart[worst]:.2g} of its norm away from the serial tensor")
