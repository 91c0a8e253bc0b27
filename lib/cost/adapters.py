"""Low-rank adapters on a frozen base (LoRA), also on a base in 4 bit (QLoRA): their parameters, and bytes of the base.

The problem: 16 bytes per parameter of an 8B are 128 GB. The idea: freeze the matrices, and train next to each of them
two narrow ones; frozen weights need neither gradients nor states of an optimizer.

Source: Hu et al. 2021 (LoRA), section 4; Dettmers et al. 2023 (QLoRA), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from lib.cost.sizes import ModelShape, Recipe

# Bytes per weight of the matrices of a block: 4 bits, a scale of 8 bits for 64 weights, and a scale of 32 bits for 256
# scales: 4.127 bits (QLoRA, section 3, double quantization). Embedding, head and norms stay in 16 bit.
BASES = {"16bit": 2.0, "4bit": 0.5 + 1 / 64 + 4 / (64 * 256)}
ADAPTER_RECIPE = Recipe(4, 4, 0, 8)  # PEFT keeps adapters in float32: `autocast_adapter_dtype` (commit 5d602fd)


@dataclass(frozen=True)
class Adapters:
    """Adapters of a rank r on all matrices of the blocks: queries, keys, values, output, and those of the MLP.

    Args:
        rank: r; a matrix of m rows and n columns gets r(m + n) parameters.
        base: precision of the frozen matrices, of `BASES`.

    Raises:
        ValueError: a rank below 1, or no such precision.
    """

    rank: int
    base: str = "16bit"

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank={self.rank} must be at least 1, such as 16")
        if self.base not in BASES:
            raise ValueError(f"base={self.base!r} must be one of {', '.join(BASES)}")

    @property
    def base_bytes(self) -> float:
        """Bytes of a frozen weight, with its share of the scales."""
        return BASES[self.base]

    def block_parameters(self, shape: ModelShape, tp: int = 1) -> float:
        """Of a block on a tensor-parallel rank: the narrow side of an adapter is whole, the wide side is split."""
        h, queries, keys = shape.d_model, shape.d_q / tp, max(shape.d_kv / tp, shape.d_head)
        attention = (h + queries) + 2 * (h + keys) + (queries + h)
        mlp = (3 if shape.gated else 2) * (h + shape.mlp_width / tp)
        return self.rank * (attention + mlp)
