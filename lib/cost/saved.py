"""Bytes that *our* layers keep between forward and backward, in what PyTorch stores.

The papers' counts (`lib/cost/memory.py`) are of 16-bit kernels on a GPU. These are exact for `lib/model.py` on a CPU,
and a chapter measures each of them. Letters: h width, s tokens of a row.
"""

from __future__ import annotations

from lib.cost.sizes import ModelShape, check_recompute


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
    """Bytes that one of *our* blocks keeps on a rank between forward and backward, on a CPU; tp=1 is the serial one.

    The count of `activation_bytes`, in what PyTorch stores. For each token 16h numbers: the inputs of two norms and
    four matrices (h, h; h, h, h, 4h), queries, keys, values (3h), what enters GELU (4h). Whole on each rank are 4h of
    them, the norms' means and deviations, and with dropout two masks of h. Sequence parallelism divides these, too.
    Attention adds a number for each token and head if it is fused. A CPU's fused kernel knows no dropout; the other one
    works in float32 at least, on copies of queries, keys and values (of a rank's only head it does not copy values, and
    what they are a part of stays) and on s numbers for each token and head, with dropout 3s: before, mask, after.

    A Llama's block keeps in SwiGLU 3f numbers in the place of the 4h that enter GELU (gate, up, silu of the gate); of
    each norm what it came to before its weight, in the place of means and deviations, and all in float32 at least; and
    once for all rows s numbers for each of a head, the points that queries and keys are turned by.

    Args:
        recompute: `none`; `selective`, what is between the projections of attention; `full`, all but the input.
        itemsize: bytes of a number, 4 in float32.
        regather: False keeps what the column layers collect.

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
    if shape.llama and itemsize < wide:  # the block's input, of which its norm keeps a wider copy
        norms_and_masks += itemsize * mine * h
    into_columns = (mine if regather else tokens) * 2 * h
    into_rows = tokens * (h + (4 if shape.llama else 2) * shape.mlp_width) // tp
    kept = norms_and_masks + itemsize * (into_columns + into_rows)
    qkv = itemsize * tokens * (h // tp + 2 * max(shape.d_kv // tp, h // heads))
    if dropout or not fused:
        copies = 5 * h if heads == tp and itemsize == wide else 3 * h
        attention = wide * tokens * (copies + (3 if dropout else 1) * heads * shape.context) // tp
    else:
        attention = qkv + wide * tokens * heads // tp
    attention += wide * shape.context * h // heads if shape.llama else 0
    of = {"none": kept + attention, "selective": kept + qkv, "full": itemsize * mine * h}
    return of[check_recompute(recompute)]


def _norm_bytes(shape: ModelShape, itemsize: int) -> int:
    """For a token: the input and two statistics; RMSNorm's input and what it came to, and one, in float32 at least."""
    return max(itemsize, 4) * (2 * shape.d_model + 1) if shape.llama else itemsize * (shape.d_model + 2)


def gpt_saved_bytes(shape: ModelShape, rows: int, *, fused: bool = True, recompute: bool = False) -> int:
    """Bytes alive between forward and backward of `lib/model.py`'s GPT in float32, without its parameters or dropout.

    Its blocks (`block_saved_bytes`; `recompute` keeps each block's input only), and its head.

    Source: measured with `lib/memory.py`; Korthikanti et al. 2022, section 4.1, counts the same in bytes.
    """
    tokens = rows * shape.context
    blocks = shape.num_layers * block_saved_bytes(shape, rows, "full" if recompute else "none", fused=fused)
    head = tokens * (_norm_bytes(shape, 4) + 4 * shape.d_model + 4 * shape.vocab_size)  # and log-probabilities
    positions = 0 if shape.llama else shape.context
    return blocks + head + 8 * (2 * tokens + positions + 2)  # tokens, targets; loss and its weight, count of tokens
