"""Bytes that a rank keeps: model states, and the activations of a layer between forward and backward.

The papers' counts of activations are for 16-bit kernels on a GPU. Of *our* layers `lib/cost/live.py` has the peak, and
`book/trials/saved.py` in closed form what PyTorch saves.

Letters of Korthikanti et al.: b sequences of a microbatch, s tokens of a sequence, h width, a heads.
"""

from __future__ import annotations

from lib.cost.sizes import PLANNED_RECOMPUTE, ModelShape, Recipe, check_recompute, check_zero, qkv_width


def state_bytes(
    num_parameters: float, recipe: Recipe, *, zero: int = 0, dp: int = 1, tp: int = 1, pp: int = 1
) -> dict[str, float]:
    """Bytes of parameters, gradients and optimizer states (master copy included) that one rank keeps.

    Tensor and pipeline parallelism divide all three by tp·pp; data parallelism alone divides nothing. ZeRO shards
    over dp: stage 1 optimizer states, stage 2 also gradients, stage 3 all three.
    The formula assumes an even split, and omits the parameters that ZeRO-3 gathers temporarily.

    Raises:
        ValueError: no such stage, or a degree that is not a positive integer.

    Source: Rajbhandari et al. 2020 (ZeRO), section 5.
    """
    check_zero(zero)
    for name, degree in (("dp", dp), ("tp", tp), ("pp", pp)):
        if degree < 1 or degree != int(degree):
            raise ValueError(f"{name}={degree} cannot be a number of ranks; use 1 or more")
    held = num_parameters / (tp * pp)
    return {
        "parameter": held * recipe.weight_bytes / (dp if zero >= 3 else 1),
        "gradient": held * recipe.gradient_bytes / (dp if zero >= 2 else 1),
        "optimizer": held * (recipe.master_bytes + recipe.state_bytes) / (dp if zero >= 1 else 1),
    }


def activation_bytes(
    shape: ModelShape,
    rows: int,
    recompute: str = "none",
    *,
    tp: int = 1,
    sequence_parallel: bool = False,
    fused_attention: bool = False,
    fused_swiglu: bool = True,
) -> float:
    """Bytes that one layer keeps for backward, in 16 bit: sbh(34 + 5as/h) for a GPT with dropout on one rank.

    `selective` recomputes the attention matrix, which removes the second term; fused attention never has it. `mlp`
    keeps only the input of the MLP; `ops` the input of the block, queries, values, the result of attention, half of the
    MLP's up projections and the result of a gated MLP; `full` only the input, 2sbh. Tensor parallelism leaves 10sbh on
    every rank unless the sequence is also split. With fewer heads of keys and values than ranks, a rank keeps a copy of
    one such head, like the layers of `lib.tensor_parallel`.

    A Llama block has no dropout and therefore two masks less, fewer keys and values, and three times the width of its
    MLP instead of twice: 8sbh, and sb(4h + 4h_kv + 6f), again 34sbh for Llama 3 8B. That is with a SwiGLU in one
    kernel, which keeps gate, up and their product; from separate operations PyTorch also keeps silu(gate): 8f.

    Source: Korthikanti et al. 2022, table 2; for a Llama block the same count; for `ops` torchtitan (commit 004b3148),
    `_apply_ac_to_transformer_block`; 8f measured on one H100 (`book/published/h100.json`).
    """
    h, f, gated = shape.d_model, shape.mlp_width, shape.gated
    whole = 8 * h + (2 * h if shape.dropout_masks else 0)  # two norms, inputs of four matrices, masks
    inside = 2 * shape.d_q + (4 if not gated else 6 if fused_swiglu else 8) * f
    qkv, of_keys = 2 * qkv_width(shape, tp), 2 * max(shape.d_kv // tp, shape.d_head)
    matrix = 0 if fused_attention else (5 if shape.dropout_masks else 2) * shape.num_heads * shape.context / tp
    kept = {  # outside of the parallel layers, inside, of the heads of this rank
        "none": (whole, inside, qkv + matrix),
        "selective": (whole, inside, qkv),
        "mlp": (whole, 2 * shape.d_q, qkv + matrix),
        "ops": (4 * h if gated else 2 * h, 2 * shape.d_q + 2 * f, qkv - of_keys),
        "full": (2 * h, 0, 0),
    }
    outside, split, heads = kept[check_recompute(recompute, PLANNED_RECOMPUTE)]
    return rows * shape.context * (outside / (tp if sequence_parallel else 1) + split / tp + heads)
