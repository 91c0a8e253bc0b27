"""Bytes that a block keeps for backward, on a rank of a training."""

from __future__ import annotations

from functools import lru_cache

from lib.cost.held import activation_bytes
from lib.planner.context import more_kept_bytes
from lib.planner.training import Training


@lru_cache(maxsize=4096)
def block_kept_bytes(
    training: Training, tp: int, cp: int, rows: int, slices: bool, recompute: str, every: int = 1, way: str = ""
) -> float:
    """Bytes of a microbatch that a block keeps for backward; the mean over blocks if not every block is recomputed."""
    if every > 1:
        whole, kept = (block_kept_bytes(training, tp, cp, rows, slices, how, 1, way) for how in ("none", recompute))
        return whole + (kept - whole) / every
    more = more_kept_bytes(training, way or training.stack.cp_attention, tp, cp, rows, recompute)
    return kept_of_own_tokens(training, tp, cp, rows, slices, recompute) + more


def kept_of_own_tokens(training: Training, tp: int, cp: int, rows: int, slices: bool, recompute: str) -> float:
    """The part of a rank's own tokens, for which attention over ranks needs nothing more."""
    fused = {"fused_attention": training.stack.fused_attention, "fused_swiglu": training.stack.fused_swiglu}
    return activation_bytes(training.model, rows, recompute, tp=tp, sequence_parallel=slices, **fused) / cp
