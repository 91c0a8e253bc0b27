"""Sizes of a transformer, and what follows from them alone: its tensors, and the operations of a step.

The problem: "a 7B model" has 6.74 billion parameters, or 6.61 if its head shares a weight, and needs 4 to 18
bytes for each. The idea: a model is a few sizes, a recipe is four numbers of bytes, and `lib.cost` takes both.

Letters: b sequences of a microbatch, s tokens of a sequence, h width, l layers, V vocabulary size, t tensor-parallel
ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

BUCKET_BYTES = 4 * 2**20  # of gradients, unless a run asks for another size


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only transformer, from which its counts follow.

    Args:
        d_model, num_layers, num_heads, vocab_size, context: h, l, a, V, s.
        num_kv_heads: heads of keys and values; None means `num_heads`.
        d_mlp: width inside the MLP; None means 4h.
        head_dim: width of a head; None means h/a. Elsewhere queries and the output of attention are not h wide.
        gated: three MLP matrices instead of two.
        biases: of `all` linear layers, of `qkv`, or of `none`.
        rms_norm: norms with one vector instead of two.
        rotary: positions without parameters.
        dropout_masks: kept with the activations.
        tied: the head uses the token embedding's weight.

    The defaults are those of GPT-2; `LLAMA` has those of Touvron et al. 2023, section 2.2.

    Raises:
        ValueError: heads that do not fit together, or biases of something else.
    """

    d_model: int
    num_layers: int
    num_heads: int
    vocab_size: int
    context: int
    num_kv_heads: int | None = None
    d_mlp: int | None = None
    head_dim: int | None = None
    gated: bool = False
    biases: str = "all"
    rms_norm: bool = False
    rotary: bool = False
    dropout_masks: bool = True
    tied: bool = True

    def __post_init__(self) -> None:
        if self.biases not in BIASES:
            raise ValueError(f"biases={self.biases!r} must be one of {', '.join(BIASES)}")
        if self.head_dim is None and self.d_model % self.num_heads:
            raise ValueError(
                f"{self.num_heads} heads do not divide a width of {self.d_model}; use a number that does, or give "
                "the width of a head"
            )
        if self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_kv_heads} heads of keys and values do not divide {self.num_heads} heads; use a number "
                "that does"
            )

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """The shape of a `lib.model.GPTConfig`."""
        sizes = "d_model num_layers num_heads vocab_size context num_kv_heads d_mlp tied".split()
        kind = LLAMA if config.llama else {}
        return cls(**{name: getattr(config, name) for name in sizes}, **kind)

    @property
    def d_head(self) -> int:
        """Width of a head."""
        return self.head_dim or self.d_model // self.num_heads

    @property
    def d_q(self) -> int:
        """Width of all queries, and of what attention returns: h, unless heads have a width of their own."""
        return self.d_head * self.num_heads

    @property
    def d_kv(self) -> int:
        """Width of all keys, and of all values: that of the queries, less where query heads share them."""
        return self.d_head * (self.num_kv_heads or self.num_heads)

    @property
    def mlp_width(self) -> int:
        """f: `d_mlp`, or 4h."""
        return self.d_mlp or 4 * self.d_model

    @property
    def num_block_weights(self) -> int:
        """Elements of the matrices of one block: 12h² for a GPT."""
        attention = 2 * self.d_q + 2 * self.d_kv
        return self.d_model * (attention + (3 if self.gated else 2) * self.mlp_width)

    @property
    def num_block_parameters(self) -> int:
        """Parameters of one block: 12h² + 13h for a GPT."""
        qkv = self.d_q + 2 * self.d_kv
        rest = 2 * self.d_model + (2 if self.gated else 1) * self.mlp_width
        biases = {"all": qkv + rest, "qkv": qkv, "none": 0}[self.biases]
        return self.num_block_weights + biases + 2 * self._norm

    @property
    def num_parameters(self) -> int:
        """Parameters of the full model, a tied weight counted once."""
        tokens = self.vocab_size * self.d_model
        embed = tokens + (0 if self.rotary else self.context * self.d_model)
        return embed + self.num_layers * self.num_block_parameters + self._norm + (0 if self.tied else tokens)

    @property
    def _norm(self) -> int:
        return self.d_model if self.rms_norm else 2 * self.d_model


BIASES = ("all", "qkv", "none")
LLAMA = {"gated": True, "biases": "none", "rms_norm": True, "rotary": True, "dropout_masks": False}
_LLAMA2 = {"vocab_size": 32_000, "context": 4096, "tied": False} | LLAMA
MODELS = {  # Touvron et al. 2023 (Llama 2); Brown et al. 2020 (GPT-3), table 2.1; Llama 3 2024, table 3
    "7B": ModelShape(4096, 32, 32, d_mlp=11_008, **_LLAMA2),
    "13B": ModelShape(5120, 40, 40, d_mlp=13_824, **_LLAMA2),
    "70B": ModelShape(8192, 80, 64, num_kv_heads=8, d_mlp=28_672, **_LLAMA2),
    "175B": ModelShape(12_288, 96, 96, vocab_size=50_257, context=2048),
    "405B": ModelShape(16_384, 126, 128, 128_256, 8192, num_kv_heads=8, d_mlp=53_248, tied=False, **LLAMA),
}


@dataclass(frozen=True)
class Recipe:
    """Bytes that training keeps for each parameter: the weight that computes, its gradient, a more precise master
    copy that the optimizer updates (0: none), and optimizer states (8: the two float32 moments of Adam; SGD: 0)."""

    weight_bytes: int
    gradient_bytes: int
    master_bytes: int
    state_bytes: float

    @property
    def bytes_per_parameter(self) -> float:
        """Their sum."""
        return self.weight_bytes + self.gradient_bytes + self.master_bytes + self.state_bytes


RECIPES = {  # Rajbhandari et al. 2020, section 3.1; Megatron-LM's estimator keeps gradients in float32
    "bf16 SGD": Recipe(2, 2, 0, 0),
    "bf16 Adam": Recipe(2, 2, 0, 4),  # moments in the dtype of the weights, as torch.optim.AdamW makes them
    "bf16 Adam, no master": Recipe(2, 2, 0, 8),
    "fp32 Adam": Recipe(4, 4, 0, 8),
    "mixed Adam": Recipe(2, 2, 4, 8),
    "mixed Adam, fp32 gradients": Recipe(2, 4, 4, 8),
}

ADAM_8BIT = 2 * (1 + 4 / 256)  # two moments of a byte, and a float32 scale for each 256 (bitsandbytes at 95f9af3)
OPTIMIZERS = {  # bytes of the states of a parameter of a block, of the embedding, of the head
    "adam": (8, 8, 8),  # two float32 moments; Rajbhandari et al. 2020, section 3.1
    "adam-bf16": (4, 4, 4),  # moments in the dtype of 16-bit weights, as torch.optim.AdamW makes them
    "adam-8bit": (ADAM_8BIT, 8, ADAM_8BIT),  # Dettmers et al. 2022, section 2.3: the embedding stays in 32 bit
    "muon": (4, 8, 8),  # a float32 momentum; embedding and head by Adam: torch.optim.Muon (torch 2.13)
    "sgd": (0, 0, 0),
    "sgd-momentum": (4, 4, 4),
}


def recipe_of_optimizer(recipe: Recipe, optimizer: str) -> Recipe:
    """A recipe with the states that an optimizer of `OPTIMIZERS` keeps for a parameter of a block."""
    return replace(recipe, state_bytes=OPTIMIZERS[optimizer][0])


# ---- tensors, as a tensor-parallel rank holds them ------------------------------------------------------------------


class Weight(NamedTuple):
    """One parameter.

    Args:
        name: in the serial model.
        size: elements on one tensor-parallel rank.
        whole: every tensor-parallel rank holds all of it. With sequence parallelism its gradient is a partial sum.
        of_experts: those of a rank, which it shares with fewer ranks than all else.
        is_trained: it has a gradient.
    """

    name: str
    size: int
    whole: bool = False
    of_experts: bool = False
    is_trained: bool = True


def embed_weights(shape: ModelShape, tp: int = 1) -> list[Weight]:
    """V/t · h of the tokens (vocabulary-parallel); s · h of the positions of a GPT-2."""
    h = shape.d_model
    positions = [] if shape.rotary else [Weight("embed.position.weight", shape.context * h, True)]
    return [Weight("embed.token.weight", shape.vocab_size // tp * h), *positions]


def block_layers(shape: ModelShape, layer: int, tp: int = 1) -> list[list[Weight]]:
    """Weights of one block, by layers. Without grouped keys: 12h²/t + 13h, less for the biases that t divides."""
    h, qkv, mlp = shape.d_model, qkv_width(shape, tp), shape.mlp_width // tp
    up = 2 * mlp if shape.gated else mlp  # with the gate
    attention = ("attention.qkv", qkv * h, qkv, "weight, bias"), ("attention.out", h * h // tp, h, "weight")
    mlp = ("mlp.up", up * h, up, "weight, bias"), ("mlp.down", h * mlp, h, "weight")
    sizes = ("norm1", h, h), *attention, ("norm2", h, h), *mlp
    return [_layer(shape, f"blocks.{layer}.{name}", *rest) for name, *rest in sizes]


def _layer(shape: ModelShape, name: str, weight: int, bias: int, cut: str = "") -> list[Weight]:
    """The weight of a layer, and its bias in a GPT-2; `cut` names the sharded tensors."""
    both = [Weight(f"{name}.{what}", size, what not in cut) for what, size in (("weight", weight), ("bias", bias))]
    return both[:1] if shape.biases == "none" else both


def head_weights(shape: ModelShape, tp: int = 1) -> list[Weight]:
    """The last norm, and V/t · h of the head: the token embedding itself if the two are tied."""
    linear = "embed.token.weight" if shape.tied else "head.linear.weight"
    norm = _layer(shape, "head.norm", shape.d_model, shape.d_model)
    return [*norm, Weight(linear, shape.vocab_size // tp * shape.d_model)]


def qkv_width(shape: ModelShape, tp: int = 1) -> int:
    """Width of queries, keys and values of the heads of a rank: 3h/t; grouped keys and values have at least one."""
    return shape.d_q // tp + 2 * max(shape.d_kv // tp, shape.d_head)


def bucket_shares(sizes_bytes: list[int], bucket_bytes: int) -> list[range]:
    """Neighbours in buckets of equal shares of about `bucket_bytes`: which go into each."""
    total = sum(sizes_bytes)
    share = total / max(1, round(total / bucket_bytes))
    starts: list[int] = []
    room = 0.0
    for i, size in enumerate(sizes_bytes):
        if room <= 0:
            starts.append(i)
            room = share
        room -= size
    return [range(a, b) for a, b in zip(starts, [*starts[1:], len(sizes_bytes)], strict=True)]


# ---- operations -----------------------------------------------------------------------------------------------------


def forward_flops(shape: ModelShape, rows: int, causal: bool = False) -> int:
    """FLOPs of the matmuls of one forward; a multiply-add counts as two.

    24sbh²l(1 + s/6h + V/12hl) for a GPT: each token is multiplied with each weight once, and attention has two
    matmuls with s × s scores. Like the papers and the counter of PyTorch, it counts the scores above the diagonal,
    unless `causal`.

    Source: Korthikanti et al. 2022, appendix A.
    """
    block = shape.num_block_weights + (1 if causal else 2) * shape.context * shape.d_q
    head = shape.vocab_size * shape.d_model
    return 2 * rows * shape.context * (shape.num_layers * block + head)


def train_flops(shape: ModelShape, rows: int, recompute: str = "none", causal: bool = False) -> int:
    """Operations of one step: forward, a backward of twice as many, and recomputation.

    Without recomputation it counts the operations of the *model* (for MFU); with it, of the *hardware* (for HFU);
    `causal` as in `forward_flops`.

    Source: Korthikanti et al. 2022, appendix A (for `selective` it also counts a second backward, which does not run);
    Narayanan et al. 2021, section 5.1.
    """
    again = recomputed_products(shape, recompute, causal)
    return 3 * forward_flops(shape, rows, causal) + 2 * rows * shape.context * shape.num_layers * again


def recomputed_products(shape: ModelShape, recompute: str, causal: bool = False) -> int:
    """Multiplications of a block that backward repeats for each token: with weights, and both matmuls of attention."""
    scores = (1 if causal else 2) * shape.context * shape.d_q
    return recomputed_weights(shape, recompute) + (scores if recompute in ("selective", "full") else 0)


def recomputed_weights(shape: ModelShape, recompute: str) -> int:
    """Elements of the matrices of a block that backward multiplies again with each token.

    `ops` keeps the results of every second matmul. It recomputes keys, the output projection of attention, and the up
    projection of the MLP (without a gate: the down projection).

    Source: torchtitan, `_apply_ac_to_transformer_block` in `parallelize_llama.py` (commit 004b3148).
    """
    h, f = shape.d_model, shape.mlp_width
    again = {"none": 0, "selective": 0, "mlp": (3 if shape.gated else 2) * h * f, "full": shape.num_block_weights}
    return (again | {"ops": h * (shape.d_kv + shape.d_q + f)})[check_recompute(recompute, PLANNED_RECOMPUTE)]


def train_s(flops: float, peak_flops: float, utilisation: float, n: int = 1) -> float:
    """Seconds that `n` devices need for `flops` operations, about 6·parameters·tokens (Kaplan et al. 2020).

    Args:
        peak_flops: of one device, per second, dense.
        utilisation: fraction of the peak that is reached (MFU), above 0 and at most 1.
    """
    if not 0 < utilisation <= 1:
        raise ValueError(f"utilisation={utilisation} must be above 0 and at most 1, such as 0.4")
    return flops / (peak_flops * utilisation * n)


# ---- what can be chosen ---------------------------------------------------------------------------------------------

ZERO_STAGES = (0, 1, 2, 3)  # 0 is plain data parallelism
RECOMPUTE = ("none", "selective", "full")  # in backward: nothing, attention between its projections, blocks

PLANNED_RECOMPUTE = ("none", "selective", "mlp", "ops", "full")  # of published runs: the MLP, or some operations


def check_recompute(recompute: str, among: tuple[str, ...] = RECOMPUTE) -> str:
    """Return `recompute` if it is valid; otherwise raise a ValueError."""
    if recompute not in among:
        raise ValueError(f"recompute={recompute!r} must be one of {', '.join(among)}")
    return recompute


def check_kv_heads(kv_heads: int, n: int, axis: str = "tp") -> int:
    """Return the number of key and value heads if n divides it, or it divides n; otherwise raise a ValueError."""
    if kv_heads % n and n % kv_heads:
        raise ValueError(
            f"num_kv_heads={kv_heads} cannot be split over {axis}={n}, nor {n} ranks over {kv_heads} heads; "
            f"use num_kv_heads={n}, or {axis}={math.gcd(kv_heads, n)}"
        )
    return kv_heads


def heads_of_rank(shape: ModelShape, tp: int) -> tuple[int, int]:
    """Heads of queries, and heads of keys and values, on a tensor-parallel rank."""
    return shape.num_heads // tp, max(1, (shape.num_kv_heads or shape.num_heads) // tp)


def shares_heads(heads: int, kv_heads: int, n: int) -> bool:
    """Whether n ranks can share heads evenly: n divides them; of keys and values, each rank has some, or a copy."""
    return heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)


def check_zero(zero: int) -> int:
    """Return the stage if ZeRO has it; otherwise raise a ValueError."""
    if zero not in ZERO_STAGES:
        raise ValueError(f"zero={zero} is not a stage of ZeRO; use 0 (plain data parallelism), 1, 2 or 3")
    return zero
