"""What we measured on one H100, next to the planner: blocks of the book's own model, forward and backward."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import NamedTuple

from book.published import ONE_H100
from lib.cost.sizes import LLAMA, ModelShape
from lib.planner.kept_of_block import block_kept_bytes
from lib.planner.seconds import block_s
from lib.planner.training import GPUS, Cluster, Training, stack_for


class Measured(NamedTuple):
    """A block, its microbatch, and both pairs of numbers; bytes are those kept between forward and backward."""

    kind: str
    d_model: int
    rows: int
    tokens: int  # of a sequence
    measured_s: float
    predicted_s: float
    measured_bytes: float
    predicted_bytes: float


def blocks_on_one_card() -> list[Measured]:
    """All blocks whose time was measured; the bytes of some were measured in the same sizes."""
    card = json.loads(ONE_H100.read_text(encoding="utf-8"))
    size = "llama", "d_model", "sequences", "tokens"
    kept = {tuple(row[name] for name in size): row["kept_by_a_block_MB"] for row in card["activations"]}
    # PyTorch runs the book's SwiGLU as separate operations, and keeps silu(gate).
    stack = replace(stack_for("megatron", "h100"), fused_swiglu=False)
    found = []
    for row in card["blocks"]:
        llama, width, rows, tokens = key = tuple(row[name] for name in size)
        inside = {"num_kv_heads": row["kv_heads"], "d_mlp": row["ffn"]}
        shape = ModelShape(width, 1, row["heads"], 1, tokens, **inside, **(LLAMA if llama else {}))
        run = Training(shape, Cluster(GPUS["h100"], 1), stack, rows)
        how = run, 1, 1, rows, False, "none"
        times = row["forward_and_backward_ms"] / 1e3, block_s(*how).computation_s
        found.append(
            Measured(
                "Llama" if llama else "GPT", width, rows, tokens, *times, kept[key] * 1e6, block_kept_bytes(*how)
            )
        )
    return found
