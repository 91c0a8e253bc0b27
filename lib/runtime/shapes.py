"""Inputs and outputs of collectives: slices along any dim, a tensor for the result, and dtypes that backends support.

The problem: backends split contiguous tensors along dim 0 only, support few dtypes, and send the memory of a tensor,
which is not always its values: `x.conj()` has the memory of x, and a sparse tensor has none of its shape.
The idea: convert a tensor to the layout that they need, or raise one clear error.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parameter import UninitializedTensorMixin

from lib.runtime.group import Group

COUNTED = {  # dtypes that backends can add; all others move as bytes
    *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
}

_OPS = {  # of all ranks, as the backend calls it; of two tensors
    "sum": (dist.ReduceOp.SUM, torch.add),
    "mean": (dist.ReduceOp.SUM, torch.add),  # gloo has no mean: the sum is divided afterwards
    "max": (dist.ReduceOp.MAX, torch.maximum),
    "min": (dist.ReduceOp.MIN, torch.minimum),
}
_INSIDE = {  # class -> the tensor inside
    "AsyncCollectiveTensor": "x.wait()",
    "DTensor": "x.to_local(), or x.full_tensor()",
    "NestedTensor": "x.to_padded_tensor(0.0)",
}


def spec(x: object) -> str:
    """Dtype and shape as call table and errors print them: `float32[4, 2]`; the type if it is no tensor."""
    return _spec(x.dtype, x.shape) if isinstance(x, Tensor) else type(x).__name__


def spec_of_row(x: Tensor) -> str:
    """Dtype and shape of a slice of x along dim 0: `float32[2]` of a `float32[4, 2]`."""
    return _spec(x.dtype, x.shape[1:])


@lru_cache
def _spec(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype)[6:]}{list(shape)}"


def why_not_plain(x: object) -> str:
    """What x is, and what to use instead, if no message can carry it; "" for a tensor, also on the meta device.

    A message carries memory. `readable` makes memory of a view that torch computes only when it is read.
    """
    if not isinstance(x, Tensor):
        return f"{type(x).__name__}; use a torch.Tensor"
    name = type(x).__name__
    if isinstance(x, UninitializedTensorMixin):
        return f"{name}, which has no shape yet; run its module once before"
    if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"{name}, whose values are in other tensors; use {_INSIDE.get(name, 'the tensors inside')}"
    with torch._C.DisableTorchFunction():  # neither a subclass nor a mode is asked what a tensor is
        if torch._C._functorch.is_functorch_wrapped_tensor(x):
            return "a tensor inside a transform of torch.func, such as vmap; communicate outside"
        if x.is_nested:
            return f"a nested tensor of {x.dtype}; use {_INSIDE['NestedTensor']}"
        if x.layout is not torch.strided:
            return f"{str(x.layout)[6:]} {spec(x)}; use x.to_dense()"
        if x.is_quantized:
            return f"{spec(x)}, whose values need a scale; use x.dequantize()"
        if not x.is_meta and x.numel() and not (x._is_zerotensor() or x.data_ptr()):
            return f"{spec(x)}, whose memory was freed; gather it before"
    return ""


def check_plain(x: object) -> None:
    """Raise ValueError if no message can carry x."""
    if why := why_not_plain(x):
        raise ValueError(f"messages carry plain tensors, but got {why}")


def readable(x: Tensor) -> Tensor:
    """x detached, for a message: its memory, or a copy of a view whose memory is not its values, such as `x.conj()`.

    Raises:
        ValueError: no message can carry x.
    """
    check_plain(x)
    with torch._C.DisableTorchFunction():  # so a subclass becomes a Tensor
        if x.is_meta:
            raise ValueError(f"messages carry values, and {spec(x)} on the meta device has none: load it before")
        is_computed_when_read = x.is_conj() or x.is_neg() or x._is_zerotensor()
        return x.detach().clone() if is_computed_when_read else x.detach()


def writable(x: Tensor) -> Tensor:
    """x detached, to write to. Raises ValueError if no message can carry it, or torch refuses to write to it."""
    check_plain(x)
    with torch._C.DisableTorchFunction():  # so a subclass becomes a Tensor
        if _is_read_only(x):
            raise ValueError(f"{spec(x)} is read-only, and would be overwritten; use x.clone()")
        return x.detach()


def _is_read_only(x: Tensor) -> bool:
    """Whether torch refuses to write to x, as outside of `torch.inference_mode` to a tensor that was made inside."""
    return x._is_zerotensor() or x.is_inference() and not torch.is_inference_mode_enabled()


def as_bytes(x: Tensor) -> Tensor:
    """View a contiguous tensor in a dtype that every backend can move; slices along dim 0 stay slices."""
    if x.dtype in COUNTED:
        return x
    rows = x.shape[0] if x.dim() else 1
    return x.view(rows, x.numel() // max(rows, 1)).view(torch.uint8)


def out_like(x: Tensor, shape: Sequence[int], out: Tensor | None) -> Tensor:
    """`out` if it is contiguous and has this shape, and dtype and device of `x`; a new tensor if it is None."""
    if out is None:
        return torch.empty(shape, dtype=x.dtype, device=x.device)
    if why := why_not_plain(out):
        raise ValueError(f"out must be contiguous {str(x.dtype)[6:]}{list(shape)}, but is {why}")
    with torch._C.DisableTorchFunction():
        faults = {
            ", not contiguous": not out.is_contiguous(),
            ", a conjugate view": out.is_conj(),
            ", a negative view": out.is_neg(),
            f", on {out.device} instead of {x.device}": out.device != x.device,
            ", read-only": _is_read_only(out),
        }
        if out.shape != torch.Size(shape) or out.dtype != x.dtype or any(faults.values()):
            given = spec(out) + "".join(fault for fault, is_there in faults.items() if is_there)
            raise ValueError(f"out must be contiguous {str(x.dtype)[6:]}{list(shape)}, but is {given}")
    return out


def copy_over(out: Tensor, x: Tensor) -> None:
    """Copy x to `out`, which may be a different view of the same memory, such as x.T."""
    is_shared = out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    is_equal = out.data_ptr() == x.data_ptr() and out.stride() == x.stride()
    out.copy_(x.clone() if is_shared and not is_equal else x)


def front(x: Tensor, shape: Sequence[int], dim: int, out: Tensor | None) -> Tensor:
    """The tensor that a collective fills, with `dim` first: `out` if it has that layout."""
    if out is not None and dim != 0:
        raise ValueError(f"out= works only along dim 0, where slices are contiguous, but dim={dim}")
    return readable(out_like(x, shape, out))


def check_dim(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim={dim} does not exist in a tensor of shape {list(x.shape)}")
    return dim


def split(x: Tensor, group: Group, dim: int, what: str) -> Tensor:
    """x[…, D, …] → contiguous [n, D/n, …]: one slice per rank, with `dim` moved to the front."""
    front = x.movedim(check_dim(x, dim), 0)
    size, n = front.shape[0], group.size
    if size % n:
        raise ValueError(
            f"{what}: dim {dim} has size {size}, which cannot be split over {n} ranks; use a multiple of {n}"
        )
    return front.reshape(n, size // n, *front.shape[1:]).contiguous()


def join(part: Tensor, dim: int) -> Tensor:
    """[D, …] with `dim` first → `dim` in its own place."""
    return part.movedim(0, dim).contiguous()


def reduce_op_of(op: str, x: Tensor) -> tuple[dist.ReduceOp, Callable]:
    """The reduction of all ranks, as the backend calls it, and of two tensors; ValueError if x cannot be reduced so."""
    if op not in _OPS:
        raise ValueError(f"unknown op {op!r}; use one of {', '.join(_OPS)}")
    if op == "mean" and not (x.is_floating_point() or x.is_complex()):
        raise ValueError(f"the mean of {spec(x)} is not an integer; use x.float()")
    if op in ("max", "min") and x.is_complex():
        raise ValueError(f"{spec(x)} has no {op}, because complex numbers have no order; use x.abs()")
    if x.dtype not in COUNTED:
        wider = "float" if x.is_floating_point() else "cfloat" if x.is_complex() else "int"
        raise ValueError(f"no backend reduces {spec(x)}; use x.{wider}()")
    return _OPS["max" if x.dtype == torch.bool and op == "sum" else op]  # torch adds bools as any()


def ordered(x: Tensor, op: str) -> Tensor:
    """Floats as integers in the same order, with NaN at the end that `op` keeps: backends drop NaN, as no order has it.

    Backends have no 2-byte integers, so 2-byte floats become 4 bytes.
    """
    wide = x.double() if x.dtype == torch.float64 else x.float()
    bits = wide.view(torch.int64 if wide.dtype == torch.float64 else torch.int32)
    ends = torch.iinfo(bits.dtype)
    return _turned(bits).masked_fill(wide.isnan(), ends.max if op == "max" else ends.min)


def unordered(x: Tensor) -> Tensor:
    """The floats of `ordered`, after the reduction."""
    return _turned(x).view(torch.float64 if x.dtype == torch.int64 else torch.float32)


def _turned(bits: Tensor) -> Tensor:
    """Bits of floats as integers in their order, or the reverse: for a negative number all bits but the sign turn."""
    return bits ^ (bits >> 8 * bits.itemsize - 1 & torch.iinfo(bits.dtype).max)
