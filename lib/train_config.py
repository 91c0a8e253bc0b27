"""What there is to say about a training run, before it starts: sizes, layout, numbers; and what makes no sense."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from lib.layout import Layout, whole_number
from lib.model import GPTConfig

DTYPES = {"float32": torch.float32, "float64": torch.float64}
COMPUTE_DTYPES = {"bfloat16": torch.bfloat16}  # float16 would need its loss scaled


@dataclass(frozen=True)
class TrainConfig:
    """One training run.

    Args:
        model: sizes of the GPT.
        layout: how it is spread over ranks.
        steps: of the optimizer.
        global_batch: sequences a step, over all ranks.
        lr: of AdamW.
        max_norm: of all gradients together, to which they are clipped.
        seed: of the weights, the data and dropout, the same in every layout.
        dtype: of the weights that the optimizer works on.
        compute_dtype: to compute and communicate in, with master weights in dtype; needs zero=1, 2 or 3.
        validate_every: steps between two measurements of the validation loss; 0 is never.
        bucket_bytes: of gradients that travel together; zero=3 sends a block at a time.

    Raises:
        ValueError: a number that makes no sense, or a model and a batch that cannot be split so.
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
    bucket_bytes: int = 4 * 2**20

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

    def tokens_per_step(self) -> int:
        return self.global_batch * self.model.context
