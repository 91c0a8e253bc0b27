"""Bytes that *our* layers keep between forward and backward, as PyTorch saves them, in closed form.

They are exact for `lib/model.py` on a CPU, and chapters measure each of them with `lib/memory.py`.

Letters of Korthikanti et al.: b sequences of a microbatch, s tokens of a sequence, h width, a heads.
"""

from __future__ import annotations

from lib.cost.sizes import ModelShape, check_recompute, qkv_width


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
