"""Bytes that a rank keeps: the model's state, and a layer's activations as the papers count them.

Letters of Korthikanti et al.: b rows of a microbatch, s tokens of a row, h width, a heads.
"""

from __future__ import annotations

from lib.cost.sizes import ModelShape, Recipe, check_recompute, check_zero


def state_bytes(
    num_parameters: float, recipe: Recipe, *, zero: int = 0, dp: int = 1, tp: int = 1, pp: int = 1
) -> dict[str, float]:
    """Bytes of parameters, gradients and optimizer state (master copy included) that one rank keeps.

    Tensor and pipeline parallelism divide all three by tp·pp; data parallelism divides nothing by itself. ZeRO
    divides over dp what it shards: stage 1 the optimizer's state, stage 2 the gradients too, stage 3 all three.
    An even split is taken for granted; what ZeRO-3 gathers for a moment is not in it.

    Raises:
        ValueError: no such stage, or a degree that is no positive whole number.

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
    shape: ModelShape, rows: int, recompute: str = "none", *, tp: int = 1, sequence_parallel: bool = False
) -> float:
    """Bytes that one layer keeps for backward, in 16 bit: sbh(34 + 5as/h) for a GPT with dropout on one rank.

    `selective` recomputes the attention matrix, and the second term goes; `full` keeps the layer's input only, 2sbh.
    Tensor parallelism leaves 10sbh on every rank unless the sequence is split too.

    A Llama block has no dropout and so two masks less, fewer keys and values, and three times its MLP's width in
    place of twice: 8sbh, and sb(4h + 4h_kv + 6f), which comes to 34sbh for Llama 3 8B as well.

    Source: Korthikanti et al. 2022, table 2; for a Llama block the same count.
    """
    tokens, h, kv, f = rows * shape.context, shape.d_model, shape.d_kv, shape.mlp_width
    norms_and_inputs, masks = 8 * h, 0 if shape.llama else 2 * h
    whole, inside = norms_and_inputs + masks, 4 * h + 4 * kv + (6 if shape.llama else 4) * f
    if sequence_parallel:
        whole, inside = 0, whole + inside
    matrix = (2 if shape.llama else 5) * shape.num_heads * shape.context
    kept = {"none": whole + (inside + matrix) / tp, "selective": whole + inside / tp, "full": 2 * h}
    return tokens * kept[check_recompute(recompute)]
