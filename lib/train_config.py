"""What there is to say about a training run, before it starts: sizes, layout, numbers; and what makes no sense."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from lib.mesh import MeshShape
from lib.model import RECOMPUTE, GPTConfig
from lib.parallel import check_layout
from lib.pipeline.balance import layers_of_stages
from lib.pipeline.schedules.action import Schedule
from lib.pipeline.schedules.gpipe import gpipe, naive
from lib.pipeline.schedules.interleaved import interleaved
from lib.pipeline.schedules.one_f_one_b import one_f_one_b
from lib.pipeline.schedules.zero_bubble import zb_h1, zb_h2, zb_v

DTYPES = {"float32": torch.float32, "float64": torch.float64}
COMPUTE_DTYPES = {"bfloat16": torch.bfloat16}  # float16 would need its loss scaled
STAGES = (0, 1, 2, 3)  # of ZeRO; 0 is plain data parallelism
SCHEDULES = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
}


@dataclass(frozen=True)
class TrainConfig:
    """One training run.

    Args:
        model: sizes of the GPT.
        dp: data-parallel ranks; under torchrun, all that are left.
        pp: ranks of a pipeline: each has some of the layers.
        schedule: of a pipeline.
        stages_per_rank: of a pipeline: 2 or more with interleaved, 2 with zb-v, otherwise 1.
        tp: tensor-parallel ranks, neighbours that work on the same rows: each has a part of every matrix.
        sequence_parallel: those have a slice of the sequence each between the parallel layers.
        zero: what data-parallel ranks share out: 0 nothing, 1 the optimizer's state, 2 gradients as well, 3
            parameters, too.
        recompute: what backward computes again instead of keeping it.
        steps: of the optimizer.
        global_batch: sequences a step, over all ranks.
        microbatches: pieces of a rank's rows, gradients added up; zero=2 and zero=3 send those of each piece: more
            bytes, less memory. In a pipeline, what passes through the layers one behind the other.
        lr: of AdamW.
        max_norm: of all gradients together, to which they are clipped.
        seed: of the weights and the data, the same whatever the layout.
        dtype: of the weights that the optimizer works on.
        compute_dtype: to compute and communicate in, with master weights in dtype; needs zero=1, 2 or 3.
        validate_every: steps between two measurements of the validation loss; 0 is never.
        bucket_bytes: of gradients that travel together; zero=3 sends a block at a time.

    Raises:
        ValueError: a number that makes no sense, or a batch that cannot be split over the ranks and microbatches.
    """

    model: GPTConfig = field(default_factory=GPTConfig)
    dp: int = 1
    pp: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    zero: int = 0
    recompute: str = "none"
    steps: int = 100
    global_batch: int = 16
    microbatches: int = 1
    lr: float = 3e-3
    max_norm: float = 1.0
    seed: int = 0
    dtype: str = "float32"
    compute_dtype: str | None = None
    validate_every: int = 0
    bucket_bytes: int = 4 * 2**20

    def __post_init__(self) -> None:
        MeshShape(dp=self.dp, pp=self.pp, tp=self.tp)
        for name, least in (
            ("steps", 1),
            ("global_batch", 1),
            ("microbatches", 1),
            ("bucket_bytes", 1),
            ("stages_per_rank", 1),
            ("validate_every", 0),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r} must be a whole number of at least {least}")
        for name in ("lr", "max_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be a number above 0")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} must be one of {', '.join(DTYPES)}")
        if self.recompute not in RECOMPUTE:
            raise ValueError(f"recompute={self.recompute!r} must be one of {', '.join(RECOMPUTE)}")
        if self.zero not in STAGES:
            raise ValueError(f"zero={self.zero} is no stage of ZeRO; use 0 (plain data parallelism), 1, 2 or 3")
        if self.compute_dtype not in (None, *COMPUTE_DTYPES):
            raise ValueError(f"compute_dtype={self.compute_dtype!r} must be None or {', '.join(COMPUTE_DTYPES)}")
        if self.seed not in range(2**63):
            raise ValueError(f"seed={self.seed} must be a whole number from 0 to 2**63 - 1")
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel needs ranks to cut the sequence for: use tp=2 or more")
        for name in ("num_heads", "vocab_size") + (("context",) if self.sequence_parallel else ()):
            size = getattr(self.model, name)
            if size % self.tp:
                raise ValueError(f"{name}={size} cannot be split over tp={self.tp}; use a multiple of {self.tp}")
        self._check_pipeline()
        pieces = self.dp * self.microbatches
        if self.global_batch % pieces:
            each = f"dp={self.dp}" + (f" x microbatches={self.microbatches}" if self.microbatches > 1 else "")
            fits = (self.global_batch // pieces + 1) * pieces
            raise ValueError(
                f"global_batch={self.global_batch} cannot be split over {each}; use a multiple of {pieces}, such as "
                f"{fits}"
            )

    def _check_pipeline(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r} must be one of {', '.join(SCHEDULES)}")
        if self.pp == 1 and (self.schedule != "1f1b" or self.stages_per_rank > 1):
            raise ValueError(
                f"schedule={self.schedule} with stages_per_rank={self.stages_per_rank} needs ranks to cut the layers "
                "for: use pp=2 or more"
            )
        per_rank = self.stages_per_rank
        if not {"interleaved": per_rank > 1, "zb-v": per_rank == 2}.get(self.schedule, per_rank == 1):
            raise ValueError(
                f"schedule={self.schedule} and stages_per_rank={per_rank}: use interleaved with 2 or more, zb-v with "
                "2, and all others with 1"
            )
        # What is made here is made again on each rank: now it says what cannot be done.
        layers_of_stages(self.model, self.pp * self.stages_per_rank)
        check_layout(self.make_schedule(), self.tp, self.zero, self.recompute, self.compute_dtype is not None)

    def make_schedule(self) -> Schedule:
        """What each rank of the pipeline does, in order."""
        more = (self.stages_per_rank,) if self.schedule == "interleaved" else ()
        return SCHEDULES[self.schedule](self.pp, self.microbatches, *more)

    def tokens_per_step(self) -> int:
        return self.global_batch * self.model.context
