"""Inputs and outputs of collectives: slices along any dim, a tensor for the result, and dtypes that backends support.

The problem: backends split contiguous tensors along dim 0 only, and support few dtypes.
The idea: convert a tensor to the layout that they need, or raise one clear error.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from lib.mesh import Group

COUNTED = {  # dtypes that backends can add; all others move as bytes
    *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
}


def spec(x: object) -> str:
    """Dtype and shape as call table and errors print them: `float32[4, 2]`; the type if it is no tensor."""
    return _spec(x.dtype, x.shape) if isinstance(x, Tensor) else type(x).__name__


@lru_cache
def _spec(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype)[6:]}{list(shape)}"


def as_bytes(x: Tensor) -> Tensor:
    """View a contiguous tensor in a dtype that every backend can move; slices along dim 0 stay slices."""
    if x.dtype in COUNTED or not x.numel():
        return x
    return x.view(x.shape[0] if x.dim() else 1, -1).view(torch.uint8)


def out_like(x: Tensor, shape: Sequence[int], out: Tensor | None) -> Tensor:
    """`out` if it is contiguous and has this shape and the dtype of `x`; a new tensor if it is None."""
    if out is None:
        return torch.empty(shape, dtype=x.dtype, device=x.device)
    if out.shape != torch.Size(shape) or out.dtype != x.dtype or not out.is_contiguous():
        layout = "" if out.is_contiguous() else ", not contiguous"
        raise ValueError(f"out must be contiguous {str(x.dtype)[6:]}{list(shape)}, but is {spec(out)}{layout}")
    return out


def front(x: Tensor, shape: Sequence[int], dim: int, out: Tensor | None) -> Tensor:
    """The tensor that a collective fills, with `dim` first: `out` if it has that layout."""
    if out is not None and dim != 0:
        raise ValueError(f"out= works only along dim 0, where slices are contiguous, but dim={dim}")
    return out_like(x, shape, out).detach()


def check_dim(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim={dim} does not exist in a tensor of shape {list(x.shape)}")
    return dim


def split(x: Tensor, group: Group, dim: int, what: str) -> Tensor:
    """x[…, D, …] → contiguous [n, D/n, …]: one slice per rank, with `dim` moved to the front."""
    front = x.detach().movedim(check_dim(x, dim), 0)
    size, n = front.shape[0], group.size
    if size % n:
        raise ValueError(
            f"{what}: dim {dim} has size {size}, which cannot be split over {n} ranks; use a multiple of {n}"
        )
    return front.reshape(n, size // n, *front.shape[1:]).contiguous()


def join(part: Tensor, dim: int) -> Tensor:
    """[D, …] with `dim` first → `dim` in its own place."""
    return part.movedim(0, dim).contiguous()


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
