"""Bytes that a rank keeps: model states, and the activations of a layer as the papers count them.

Letters of Korthikanti et al.: b sequences of a microbatch, s tokens of a sequence, h width, a heads.
"""

from __future__ import annotations

from lib.cost.sizes import ModelShape, Recipe, check_recompute, check_zero
from lib.cost.tensors import qkv_width


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
    shape: ModelShape, rows: int, recompute: str = "none", *, tp: int = 1, sequence_parallel: bool = False
) -> float:
    """Bytes that one layer keeps for backward, in 16 bit: sbh(34 + 5as/h) for a GPT with dropout on one rank.

    `selective` recomputes the attention matrix, which removes the second term; `full` keeps only the input, 2sbh.
    Tensor parallelism leaves 10sbh on every rank unless the sequence is also split. With fewer heads of keys and values
    than ranks, a rank keeps a copy of one such head, like the layers of `lib.tensor_parallel`.

    A Llama block has no dropout and therefore two masks less, fewer keys and values, and three times the width of its
    MLP instead of twice: 8sbh, and sb(4h + 4h_kv + 6f), again 34sbh for Llama 3 8B.

    Source: Korthikanti et al. 2022, table 2; for a Llama block the same count.
    """
    tokens, h = rows * shape.context, shape.d_model
    norms_and_inputs, masks = 8 * h, 0 if shape.llama else 2 * h
    whole, inside = norms_and_inputs + masks, 2 * h + (6 if shape.llama else 4) * shape.mlp_width
    if sequence_parallel:
        whole, inside = 0, whole + inside
    matrix = (2 if shape.llama else 5) * shape.num_heads * shape.context / tp
    linear = whole + inside / tp + 2 * qkv_width(shape, tp)
    kept = {"none": linear + matrix, "selective": linear, "full": 2 * h}
    return tokens * kept[check_recompute(recompute)]
