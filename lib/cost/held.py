"""Bytes that a rank keeps: model states, and the activations of a layer between forward and backward.

The papers' counts of activations are for 16-bit kernels on a GPU. Those of *our* layers, as PyTorch saves them, are
exact for `lib/model.py` on a CPU, and a chapter measures each of them with `lib/memory.py`.

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


def block_saved_bytes(
    shape: ModelShape,
    rows: int,
    recompute: str = "none",
    *,
    tp: int = 1,
    sequence_parallel: bool = False,
    dropout: bool = False,
    itemsize: int = 4,
    fused: bool = True,
    regather: bool = True,
) -> int:
    """Bytes that one of *our* blocks keeps on a rank between forward and backward, on a CPU; tp=1 is the serial block.

    16h elements per token: the inputs of two norms and four matrices (h, h; h, h, h, 4h), queries, keys, values (3h),
    the input of GELU (4h). Each rank holds 4h of them unsharded, the means and deviations of the norms, and with
    dropout two masks of h; sequence parallelism shards these as well. Fused attention adds one element per token and
    head, and has no dropout on a CPU. The unfused kernel computes in float32 at least, and keeps copies of queries,
    keys and values (with one head per rank not of the values, whose storage stays) and s elements per token and head;
    with dropout 3s: before, mask, after.

    A Llama block keeps 3f elements in SwiGLU (gate, up, silu of the gate) instead of 4h. Each norm keeps its normalised
    input instead of means and deviations, in float32 at least. Once for all sequences a block keeps s angles for each
    element of a head, by which queries and keys are rotated.

    Args:
        recompute: of `none`; `selective`, attention between its projections; `full`, everything except the input.
        itemsize: bytes of an element, 4 in float32.
        regather: False keeps the gathered inputs of column layers.

    Raises:
        ValueError: heads or tokens that tp does not divide.

    Source: measured with `lib/memory.py`; Korthikanti et al. 2022, section 4.
    """
    h, heads, wide = shape.d_model, shape.num_heads, max(itemsize, 4)
    if heads % tp or (sequence_parallel and shape.context % tp):
        raise ValueError(f"{heads} heads and {shape.context} tokens cannot be split over tp={tp}")
    tokens = rows * shape.context
    mine = tokens // tp if sequence_parallel else tokens  # between the parallel layers
    norms_and_masks = 2 * mine * (_norm_bytes(shape, itemsize) + (itemsize * h if dropout else 0))
    if shape.rms_norm and itemsize < wide:  # the input of the block; its norm keeps a wider copy
        norms_and_masks += itemsize * mine * h
    into_columns = (mine if regather else tokens) * 2 * h
    into_rows = tokens * (h + (4 if shape.gated else 2) * shape.mlp_width) // tp
    kept = norms_and_masks + itemsize * (into_columns + into_rows)
    qkv = itemsize * tokens * qkv_width(shape, tp)
    if dropout or not fused:
        copies = 5 * h if heads == tp and itemsize == wide else 3 * h
        attention = wide * tokens * (copies + (3 if dropout else 1) * heads * shape.context) // tp
    else:
        attention = qkv + wide * tokens * heads // tp
    attention += wide * shape.context * h // heads if shape.rotary else 0
    of = {"none": kept + attention, "selective": kept + qkv, "full": itemsize * mine * h}
    return of[check_recompute(recompute)]


def _norm_bytes(shape: ModelShape, itemsize: int) -> int:
    """Per token: input and two statistics; for RMSNorm input, normalised input and a root, in float32 at least."""
    return max(itemsize, 4) * (2 * shape.d_model + 1) if shape.rms_norm else itemsize * (shape.d_model + 2)


def gpt_saved_bytes(shape: ModelShape, rows: int, *, fused: bool = True, recompute: bool = False) -> int:
    """Bytes alive between forward and backward of `lib/model.py`'s GPT in float32, without its parameters or dropout.

    Its blocks (`block_saved_bytes`; `recompute` keeps only the input of each block), and its head.

    Source: measured with `lib/memory.py`; Korthikanti et al. 2022, section 4.1, counts the same in bytes.
    """
    tokens = rows * shape.context
    blocks = shape.num_layers * block_saved_bytes(shape, rows, "full" if recompute else "none", fused=fused)
    head = tokens * (_norm_bytes(shape, 4) + 4 * shape.d_model + 4 * shape.vocab_size)  # and log-probabilities
    positions = 0 if shape.rotary else shape.context
    return blocks + head + 8 * (2 * tokens + positions + 2)  # tokens, targets; loss and its weight, count of tokens
