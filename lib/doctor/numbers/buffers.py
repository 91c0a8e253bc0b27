"""Running statistics, tables, masks: a few sums of each."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor

from lib.doctor.numbers.sketch import mixed

HUGE = 1e30  # the -inf of a mask would swallow all others


def buffer_sums(buffer: Tensor) -> dict[str, Any]:
    """Shape and sums of a buffer: a few elements in the wrong place change the signed one.

    Returns:
        shape, sum, "signed" sum with a sign drawn for each place, "size" with all magnitudes; whether it is "floating".
    """
    buffer = buffer.detach().cpu()
    values = (torch.view_as_real(buffer) if buffer.is_complex() else buffer).double().flatten()
    values = torch.where(values.abs() > HUGE, values.sign(), values).nan_to_num(nan=0.5)
    signs = 1 - 2 * (mixed(torch.arange(len(values)) + zlib.crc32(b"buffer")) & 1)
    return {
        "shape": list(buffer.shape),
        "sum": values.sum().item(),
        "signed": (values * signs).sum().item(),
        "size": values.abs().sum().item(),
        "floating": buffer.is_floating_point() or buffer.is_complex(),
    }
