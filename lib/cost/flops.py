"""Operations of a step, and how long devices need for them.

Letters: b sequences of a microbatch, s tokens of a sequence, h width, l layers, V vocabulary size.
"""

from __future__ import annotations

from lib.cost.sizes import ModelShape, check_recompute


def forward_flops(shape: ModelShape, rows: int) -> int:
    """FLOPs of the matmuls of one forward; a multiply-add counts as two.

    24sbh²l(1 + s/6h + V/12hl) for a GPT: each token is multiplied with each weight once, and attention has two
    matmuls with s × s scores. Like the papers and the counter of PyTorch, it counts the scores above the diagonal.

    Source: Korthikanti et al. 2022, appendix A.
    """
    block = shape.num_block_weights + 2 * shape.context * shape.d_model
    head = shape.vocab_size * shape.d_model
    return 2 * rows * shape.context * (shape.num_layers * block + head)


def train_flops(shape: ModelShape, rows: int, recompute: str = "none") -> int:
    """Operations of one step: forward, a backward of twice as many, and recomputation.

    Without recomputation it counts the operations of the *model* (for MFU); with it, of the *hardware* (for HFU).

    Source: Korthikanti et al. 2022, appendix A (for `selective` it also counts a second backward, which does not run);
    Narayanan et al. 2021, section 5.1.
    """
    tokens, forward = rows * shape.context, forward_flops(shape, rows)
    again = {
        "none": 0,
        "selective": 4 * tokens * shape.context * shape.d_model * shape.num_layers,  # both matmuls of attention
        "full": forward - 2 * tokens * shape.vocab_size * shape.d_model,  # the layers, not the head
    }
    return 3 * forward + again[check_recompute(recompute)]


def train_s(flops: float, peak_flops: float, utilisation: float, n: int = 1) -> float:
    """Seconds that `n` devices need for `flops` operations, about 6·parameters·tokens (Kaplan et al. 2020).

    Args:
        peak_flops: of one device, per second, dense.
        utilisation: fraction of the peak that is reached (MFU), above 0 and at most 1.
    """
    if not 0 < utilisation <= 1:
        raise ValueError(f"utilisation={utilisation} must be above 0 and at most 1, such as 0.4")
    return flops / (peak_flops * utilisation * n)
