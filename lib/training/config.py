"""Settings of a training run: model, layout and numbers, checked before it starts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from lib.cost.sizes import BUCKET_BYTES
from lib.layout import Layout, whole_number
from lib.model import GPTConfig

DTYPES = {"float32": torch.float32, "float64": torch.float64}
COMPUTE_DTYPES = {"bfloat16": torch.bfloat16}  # float16 would need loss scaling


@dataclass(frozen=True)
class TrainConfig:
    """One training run.

    Args:
        model: sizes of the GPT.
        layout: parallelism over ranks.
        steps: optimizer steps.
        global_batch: sequences per step, over all ranks.
        lr: learning rate of AdamW.
        max_norm: norm to which all gradients together are clipped.
        seed: seed of weights, data and dropout, equal in every layout.
        dtype: dtype of the weights that the optimizer steps.
        compute_dtype: dtype of computation and communication, with master weights in dtype; needs zero=1, 2 or 3.
        validate_every: steps between measurements of the validation loss; 0 is never.
        bucket_bytes: size of a gradient bucket; zero=3 sends one block at a time.

    Raises:
        ValueError: an invalid number, or a model and a batch that cannot be split.
    """

    model: GPTConfig = field(default_factory=GPTConfig)
    layout: Layout = field(default_factory=Layout)
    steps: int = 100
    global_batch: int = 16
    lr: float = 3e-3
    max_norm: float = 1.0
    seed: int = 0
    dtype: str = "float32"
    compute_dtype: str | None = None
    validate_every: int = 0
    bucket_bytes: int = BUCKET_BYTES

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("global_batch", 1), ("bucket_bytes", 1), ("validate_every", 0)):
            whole_number(name, getattr(self, name), least)
        for name in ("lr", "max_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be a number above 0")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} must be one of {', '.join(DTYPES)}")
        if self.compute_dtype not in (None, *COMPUTE_DTYPES):
            raise ValueError(f"compute_dtype={self.compute_dtype!r} must be None or {', '.join(COMPUTE_DTYPES)}")
        if self.compute_dtype and not self.layout.zero:
            raise ValueError(
                "compute_dtype needs master weights, which plain data parallelism does not keep; use zero=1"
            )
        if self.seed not in range(2**63):
            raise ValueError(f"seed={self.seed} must be a whole number from 0 to 2**63 - 1")
        self.layout.check(self.model, self.global_batch)
