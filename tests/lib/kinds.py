"""Tensors whose memory is not simply their elements: those that arrive as their values, and those that are refused."""

import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from lib.mesh import Group


class OwnType(Tensor):
    """A subclass without more, as `as_subclass` makes it."""


class Deaf(Tensor):
    """A subclass that has a shape, and lets nobody compute with it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function.__name__ not in ("__get__", "numel"):
            raise TypeError(f"{function.__name__} is not for a Deaf")
        return super().__torch_function__(function, types, args, kwargs or {})


def numbers(rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """[12, 3] of small whole numbers, so that their sums are exact; the same wherever they are made."""
    generator = torch.Generator().manual_seed(rank)
    real, imaginary = torch.randint(-9, 10, (2, 12, 3), generator=generator).double()
    return torch.complex(real, imaginary).to(dtype) if dtype.is_complex else real.to(dtype)


def arriving(rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Kind → (a tensor of this rank, its values)."""
    x, z = numbers(rank), numbers(rank, torch.complex128)
    minus, bar = -x, torch.complex(z.real, -z.imag)
    with torch.inference_mode():
        of_inference = z.clone().conj()
    return {
        "conjugate": (z.conj(), bar),
        "conjugate, 8 bytes": (z.to(torch.complex64).conj(), bar.to(torch.complex64)),
        "conjugate, transposed": (z.T.contiguous().mH, bar),
        "conjugate, expanded": (z[:1].conj().expand(12, 3), bar[:1].repeat(12, 1)),
        "conjugate, empty": (z[:, :0].conj(), bar[:, :0]),
        "conjugate, not a leaf": ((z.clone().requires_grad_() * 1).conj(), bar),
        "conjugate parameter": (nn.Parameter(z.conj()), bar),
        "conjugate, of an inference": (of_inference, bar),
        "negative": (torch._neg_view(x), minus),
        "negative, transposed": (torch._neg_view(x.T.contiguous().T), minus),
        "negative, of a conjugate": (z.conj().imag, -z.imag),
        "negative and conjugate": (torch._neg_view(z.conj()), -bar),
        "zeros without memory": (torch._efficientzerotensor((12, 3), dtype=torch.float64), torch.zeros_like(x)),
        "own type": (x.as_subclass(OwnType), x),
        "own type, conjugate": (z.conj().as_subclass(OwnType), bar),
        "deaf": (x.as_subclass(Deaf), x),
        "columns of one": (x[:, :1].expand(12, 3), x[:, :1].repeat(1, 3)),
    }


def refused(n: int) -> dict[str, tuple[object, str]]:
    """Kind → (what no message can carry, the end of the sentence)."""
    x, freed = numbers(0), numbers(0)
    freed.untyped_storage().resize_(0)
    dense, inside = "; use x.to_dense()", "whose values are in other tensors; use "
    scale, rows = "whose values need a scale; use x.dequantize()", "use x.to_padded_tensor(0.0)"
    ragged, zeros = [x[0], x[1, :2]], torch.zeros(12, dtype=torch.int32)
    return {
        "COO": (x.to_sparse(), "got sparse_coo float64[12, 3]" + dense),
        "CSR": (x.to_sparse_csr(), "got sparse_csr float64[12, 3]" + dense),
        "BSR": (x.to_sparse_bsr((1, 1)), "got sparse_bsr float64[12, 3]" + dense),
        "mkldnn": (x.float().to_mkldnn(), "got _mkldnn float32[12, 3]" + dense),
        "quantized": (torch.quantize_per_tensor(x.float(), 0.5, 0, torch.qint8), "got qint8[12, 3], " + scale),
        "by rows": (torch.quantize_per_channel(x.float(), zeros + 0.5, zeros, 0, torch.quint8), scale),
        "nested": (torch.nested.nested_tensor(ragged), "got a nested tensor of torch.float64; " + rows),
        "jagged": (torch.nested.nested_tensor(ragged, layout=torch.jagged), f"got NestedTensor, {inside}{rows[4:]}"),
        "two in one": (TwoTensor(x, x), f"got TwoTensor, {inside}the tensors inside"),
        "a parameter of two": (nn.Parameter(TwoTensor(x, x)), f"got TwoTensor, {inside}the tensors inside"),
        "without a shape": (nn.UninitializedParameter(), "got UninitializedParameter, which has no shape yet; run"),
        "freed": (freed, "got float64[12, 3], whose memory was freed; gather it before"),
        "a list": (x.tolist(), "got list; use a torch.Tensor"),
        "an array": (x.numpy(), "got ndarray; use a torch.Tensor"),
        "nothing": (None, "got NoneType; use a torch.Tensor"),
        "distributed": (_distributed(x, n), f"got DTensor, {inside}x.to_local(), or x.full_tensor()"),
    }


def _distributed(x: Tensor, n: int) -> Tensor:
    """A DTensor of PyTorch; every rank must call it."""
    from torch.distributed.tensor import DTensor, init_device_mesh

    return DTensor.from_local(x, init_device_mesh("cpu", (n,)), run_check=False)


def values(x: Tensor | None) -> Tensor | None:
    """The elements of a result, whatever it is a view of."""
    with torch._C.DisableTorchFunction():
        return (
            None
            if x is None
            else x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        )


def wrong(got: Tensor | None, wanted: Tensor | None) -> str:
    """How a result differs from what it should be, in words; "" if it does not."""
    if got is None or wanted is None:
        return "" if got is wanted else f"{got} instead of {wanted}"
    lazy = got.is_conj() or got.is_neg() or got._is_zerotensor()
    if lazy or type(got) not in (Tensor, nn.Parameter):
        return f"a view that is computed later, or a {type(got).__name__}"
    alike = got.shape == wanted.shape and got.dtype == wanted.dtype
    return "" if alike and torch.equal(got, wanted) else f"{got} instead of {wanted}"


def right_of(world: Group, kind: str) -> list[Tensor]:
    """The values of all ranks."""
    return [arriving(rank)[kind][1] for rank in range(world.size)]
