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
from lib.doctor.numbers.torch_insides import is_dtensor
from lib.doctor.numbers.whole_gradients import averages_gradients, whole_gradients, whole_tensor
from lib.mesh import Group
from lib.placement import Partial, Placement, Replicate, Shard, parts, shard, unshard, with_partial_gradients

_WHOLE = Replicate()
SUMMED_IS_RIGHT = (
    "; summed over the ranks it is right: the ranks' gradients are terms of a sum, which belongs to the step. Say so "
    "before the comparison: mark_partial(module) of lib/tensor_parallel/sequence.py"
)


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

    The parallel module is of own layers, or in a wrapper of torch: DistributedDataParallel, fully_shard,
    parallelize_module, or FSDP1 with `use_orig_params=True`. A DTensor that it returns counts as its full tensor. Where
    gradients are means over ranks, as in DDP and FSDP, give each rank its rows: `of=Shard(0), to=Shard(0)`; the loss of
    a rank then has the weight of a mean over its own rows. Without `of` and `to`, each rank computes all rows.

    Args:
        serial: that of one process; it shares no parameter with `parallel`. fully_shard and parallelize_module change
            a module in place, so give them a `copy.deepcopy`.
        inputs: full inputs, equal on all ranks.
        group: all ranks that the parallel module runs on.
        rel: tolerance for each tensor, relative to the norm of the serial tensor.
        of, to: placement of input and output of the parallel module. With tensor parallelism inside of data
            parallelism, neighbouring ranks read the same rows: `Shard(0, copies=tp)`.

    Raises:
        AssertionError: they differ, or have different parameters; it names the tensor with the largest difference.
        ValueError: what cannot be compared: no single tensor as output, an output that lies in another way than `to`
            says, a serial module that is wrapped or shares parameters, FSDP1 without `use_orig_params=True`.

    Example:
        import copy

        import torch
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        from lib.placement import Shard
        from lib.verify import assert_matches_serial

        torch.manual_seed(0)  # equal weights and inputs on all ranks
        serial, x = nn.Linear(4, 2).double(), torch.randn(8, 4).double()
        parallel = DistributedDataParallel(copy.deepcopy(serial))
        assert_matches_serial(serial, parallel, x, world, of=Shard(0), to=Shard(0))
    """
    _check_serial(serial, parallel)
    serial.zero_grad(), parallel.zero_grad()  # of an earlier comparison
    x, part = inputs.clone(), shard(inputs, of, group)
    if inputs.is_floating_point() or inputs.is_complex():
        x.requires_grad_(), part.requires_grad_()
    out, out_part = _output(serial, x, "serial"), whole_tensor(_output(parallel, part, "parallel"))
    y = _drawn(out, _WHOLE, group, 3)
    y_part = shard(y, to, group)
    if out_part.shape != y_part.shape:
        raise ValueError(
            f"the parallel module returns {list(out_part.shape)} on this rank, where to={to} of {list(y.shape)} is "
            f"{list(y_part.shape)}: say with of= and to= how inputs and output are split"
        )
    # The serial loss, ⟨out, y⟩, is a sum over rows, and a mean of n losses if each is n times the sum over its rows.
    n = group.size // of.copies if isinstance(of, Shard) and averages_gradients(parallel) else 1
    out.backward(y)
    out_part.backward(n * y_part)
    wanted = {"output": out.detach(), **{_of(name): g for name, (_, g) in whole_gradients(serial).items()}}
    found, sums = _gradients_over(group, parallel)
    got = {"output": unshard(out_part, to, group), **found}
    if x.grad is not None:
        wanted[_of("the input")], got[_of("the input")] = x.grad, unshard(whole_tensor(part.grad) / n, of, group)
    _check_same_parameters(serial, wanted, got)
    apart = {name: largest_difference({name: got[name]}, {name: want}) for name, want in wanted.items()}
    worst = max(apart, key=lambda name: (math.isnan(apart[name]), apart[name]))  # max alone may drop NaN
    if not apart[worst] <= rel:
        are_terms = worst in sums and largest_difference({worst: sums[worst]}, {worst: wanted[worst]}) <= rel
        raise AssertionError(
            f"{worst} is {apart[worst]:.2g} of its norm away from the serial tensor{are_terms * SUMMED_IS_RIGHT}"
        )


def _check_serial(serial: nn.Module, parallel: nn.Module) -> None:
    """Raise ValueError if the serial module is not alone: what both have in common would agree, right or wrong."""
    if averages_gradients(serial) or any(is_dtensor(p) for p in serial.parameters()):
        raise ValueError(
            "the serial module is wrapped, too: fully_shard and parallelize_module change a module in place, so give "
            "them copy.deepcopy(serial)"
        )
    others = {id(p) for p in parallel.parameters()}
    if shared := [name for name, p in serial.named_parameters() if id(p) in others and p.requires_grad]:
        raise ValueError(
            f"both modules have the same parameter {shared[0]}, and add up gradients in it: wrap copy.deepcopy(serial)"
        )


def _check_same_parameters(serial: nn.Module, wanted: dict[str, Tensor], got: dict[str, Tensor]) -> None:
    """Raise AssertionError if only one of the modules has the gradient of some parameter."""
    if odd := sorted(got.keys() ^ wanted.keys()):
        first, every = (dict(serial.named_parameters(remove_duplicate=once)) for once in (True, False))
        untied = [name for name in every if name not in first and _of(name) in got]
        why = [f"; {name} is tied to another parameter in the serial module alone" for name in untied]
        raise AssertionError(f"only in one of the two: {', '.join(odd)}{''.join(why)}")


def _gradients_over(group: Group, module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The whole gradients of a parallel module, and those of replicated weights as if they were terms of a sum.

    Torch says itself how it cuts, an own layer by its placements.
    """
    partial = with_partial_gradients(module)
    placed = {id(p): placement for p, placement in parts(module).values()}
    found, sums = {}, {}
    for name, (p, gradient) in whole_gradients(module).items():
        placement = Partial() if id(p) in partial else placed[id(p)]
        found[_of(name)] = unshard(gradient, placement, group)
        if placement == _WHOLE:
            sums[_of(name)] = unshard(gradient, Partial(), group)
    return found, sums


def _of(name: str) -> str:
    return f"gradient of {name}"


def _output(module: nn.Module, x: Tensor, which: str) -> Tensor:
    """What a module returns. Raises ValueError if it is not one tensor through which a gradient flows."""
    out = module(x)
    if not isinstance(out, Tensor):
        raise ValueError(
            f"the {which} module returns a {type(out).__name__}: only one tensor is compared, so wrap both modules in "
            "one whose forward returns it"
        )
    if not out.requires_grad:
        raise ValueError(f"no gradient flows through the {which} module: neither its inputs nor its weights need one")
    return out
