"""A small GPT on one device: the serial twin.

The problem: a parallel layer can be wrong and still train. Comparing it with itself on a group of one proves nothing:
the mistake may be in both.
The idea: a single-process reference, in plain `torch.nn`. Every parallel version in this book starts from its weights
and must reproduce its loss, its gradients and its weights after the step.

The model is a list: `embed`, then each of `blocks`, then `head`. A pipeline stage is a slice of it, and tensor
parallelism replaces `qkv`, `out`, `up` and `down` by parallel layers of the same name. Two families share the names:

                  GPT-2                                Llama, and most models today
    norm          mean 0, deviation 1: LayerNorm       root mean square 1: RMSNorm
    MLP           up, GELU, down                       gate and up, silu(gate) · up, down: SwiGLU
    positions     learned, added to the tokens         queries and keys rotated: RoPE
    biases        everywhere except the head           none
    head          the embedding weight                 a separate weight

Shapes, as suffixes: B sequences in the batch, T tokens per sequence, D model width, H heads, K heads of keys and values
(K = H unless grouped), E width of a head (D = H·E), F width inside the MLP, V vocabulary. In formulas B, T, D and H are
b, s, h and a.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

from lib.losses import loss_sum_and_count, loss_term, mean_loss  # noqa: F401 a caller finds them here
from lib.moe import ExpertOptions, MoE


@dataclass(frozen=True)
class GPTConfig(ExpertOptions):
    """Sizes of a GPT. Options of experts come by name alone: `lib.moe.ExpertOptions`.

    Args:
        vocab_size: number of different tokens, V (256: a token is a byte).
        context: longest sequence, in tokens.
        d_model: width of the residual stream, D.
        num_layers: number of blocks, l.
        num_heads: attention heads, H; each is `d_head` = D/H wide.
        tied: the head uses the weight of the token embedding, so one parameter has two uses; None: the default of the
            family.
        dropout: probability of dropping an element, after the embedding, in attention and after each sub-layer.
        num_kv_heads: heads of keys and values, K; None means H. Fewer is grouped-query attention: each serves H/K
            query heads.
        d_mlp: width inside the MLP, F; None means 4·D.
        document_end: the token that ends a document, if a token attends to its own document alone.
        llama: the Llama family: RMSNorm, SwiGLU, RoPE, no biases, an untied head. False: the GPT-2 family.

    Raises:
        ValueError: a size is not a positive integer, or one does not divide another.

    Source: Radford et al. 2019 (GPT-2), section 2.3; Touvron et al. 2023 (Llama), section 2.2; Ainslie et al. 2023
    (grouped-query attention), section 2.2.
    """

    vocab_size: int = 256
    context: int = 64
    d_model: int = 64
    num_layers: int = 2
    num_heads: int = 4
    tied: bool | None = None
    dropout: float = 0.0
    num_kv_heads: int | None = None
    d_mlp: int | None = None
    llama: bool = False
    document_end: int | None = None

    def __post_init__(self) -> None:
        if self.tied is None:
            object.__setattr__(self, "tied", not self.llama)
        for name in ("vocab_size", "context", "d_model", "num_layers", "num_heads", "kv_heads", "mlp_width"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}={size!r} is not a positive integer; use 1 or more")
        for name, by_name in (("d_model", "num_heads"), ("num_heads", "num_kv_heads")):
            size, by = getattr(self, name), getattr(self, by_name) or 1
            if fits := -size % by:
                numbers = f"{name}={size} cannot be split over {by_name}={by}"
                raise ValueError(f"{numbers}; use a multiple of {by}, such as {size + fits}")
        if self.llama and self.d_head % 2:
            raise ValueError(f"d_head={self.d_head}: RoPE turns pairs; use d_model={self.d_model + self.num_heads}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout} is not a probability; use 0 <= dropout < 1, such as 0.1")
        if (end := self.document_end) is not None and not 0 <= end < self.vocab_size:
            raise ValueError(f"document_end={end} is no token: use 0 to {self.vocab_size - 1}, or leave it out")
        super().__post_init__()
        if self.experts and self.expert_every > self.num_layers:
            raise ValueError(
                f"expert_every={self.expert_every} leaves num_layers={self.num_layers} without experts: use "
                f"{self.num_layers} or less"
            )

    @property
    def d_head(self) -> int:
        """Width of one head, E = D/H."""
        return self.d_model // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values, K: `num_kv_heads`, or H."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def mlp_width(self) -> int:
        """Width inside the MLP, F: `d_mlp`, or 4·D."""
        return 4 * self.d_model if self.d_mlp is None else self.d_mlp

    @property
    def expert_width(self) -> int:
        """Width inside an expert: `d_expert`, or that of the MLP."""
        return self.mlp_width if self.d_expert is None else self.d_expert

    @property
    def num_block_parameters(self) -> int:
        """Parameters of the last block, counted: 12·D² + 13·D for GPT-2, without grouped queries and experts."""
        return _count(Block, self, self.num_layers - 1)

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, counted; a tied weight once."""
        return _count(GPT, self)


def _count(part: type[nn.Module], *how: GPTConfig | int) -> int:
    with torch.device("meta"), torch.random.fork_rng(devices=[]):  # a GPT draws its seed
        return sum(p.numel() for p in part(*how).parameters())


def _norm(config: GPTConfig) -> nn.Module:
    return nn.RMSNorm(config.d_model, eps=1e-5) if config.llama else nn.LayerNorm(config.d_model)


class Embed(nn.Module):
    """Token embedding, and for GPT-2 position embedding. tokens[B, T] → x[B, T, D]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.context = config.context
        self.token = nn.Embedding(config.vocab_size, config.d_model)
        self.position = None if config.llama else nn.Embedding(config.context, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.positions = torch.arange  # of the tokens that it gets; with context parallelism those of a rank
        self.parts = 1  # of a sequence, of which it gets one: with context parallelism several

    def forward(self, tokens_BT: Tensor) -> Tensor:
        if tokens_BT.dim() != 2:
            raise ValueError(f"tokens have shape {tuple(tokens_BT.shape)}; the model takes [B, T]: use tokens[None]")
        length = tokens_BT.shape[1] * self.parts
        if length > self.context:
            raise ValueError(f"{length} tokens do not fit context={self.context}; use fewer, or context={length}")
        x_BTD = self.token(tokens_BT)
        if self.position is not None:
            x_BTD = x_BTD + self.position(self.positions(tokens_BT.shape[1], device=tokens_BT.device))
        return self.dropout(x_BTD)


class Heads(nn.Module):
    """Causal attention of all heads. [B, T, queries, keys and values side by side] → y[B, T, H·E].

    Args:
        widths: of queries, keys and values of all heads on this rank: [H·E, K·E, K·E].
        turns: rotate queries and keys by their positions (`rotary`).
    """

    def __init__(self, widths: Sequence[int], d_head: int, dropout: float = 0.0, turns: bool = False) -> None:
        super().__init__()
        self.widths, self.d_head, self.p = list(widths), d_head, dropout
        self.turns, self.recompute = turns, None
        self.positions = torch.arange  # as in `Embed`
        self.documents: Tensor | None = None  # [B, T], of the present rows

    def forward(self, qkv: Tensor) -> Tensor:
        return self.recompute(self, self._attend, qkv) if self.recompute else self._attend(qkv)

    def _attend(self, qkv: Tensor) -> Tensor:
        if self.turns:  # into a new qkv, so that the old one is not kept for backward
            qk, v = qkv.split([self.widths[0] + self.widths[1], self.widths[2]], dim=-1)
            positions_T = self.positions(qkv.shape[1], device=qkv.device)
            qkv = torch.cat([rotary(qk.unflatten(-1, (-1, self.d_head)), positions_T).flatten(2), v], dim=-1)
        parts = qkv.split(self.widths, dim=-1)
        q_BHTE, k_BKTE, v_BKTE = (part.unflatten(-1, (-1, self.d_head)).transpose(1, 2) for part in parts)
        return self.attention(q_BHTE, k_BKTE, v_BKTE).transpose(1, 2).flatten(2)

    def attention(self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor) -> Tensor:
        """Softmax(q · kᵀ/√E) · v with a causal mask. → y[B, H, T, E]."""
        drop, grouped = self.p if self.training else 0.0, self.widths[0] != self.widths[1]
        numbers, seen = self.documents, None
        if numbers is not None:
            seen = (numbers[:, None, :, None] == numbers[:, None, None]).tril()  # [B, 1, T, T]
        how = {"attn_mask": seen, "is_causal": seen is None, "enable_gqa": grouped}
        return scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, dropout_p=drop, **how)


def rotary(x_BTHE: Tensor, positions_T: Tensor, base: float = 10_000.0) -> Tensor:
    """RoPE: rotate elements 2i and 2i + 1 of a head, as a point in a plane, by position · base^(−2i/E).

    The product of a query and a key then depends only on their distance. x[B, T, H, E] → x[B, T, H, E].

    Source: Su et al. 2021 (RoFormer), section 3.4.2.
    """
    wide = torch.promote_types(x_BTHE.dtype, torch.float32)
    pairs = torch.arange(0, x_BTHE.shape[-1], 2, dtype=wide, device=x_BTHE.device)
    angles = positions_T[:, None, None] * base ** -(pairs / x_BTHE.shape[-1])
    points = torch.view_as_complex(x_BTHE.to(wide).unflatten(-1, (-1, 2)))
    return torch.view_as_real(points * torch.polar(torch.ones_like(angles), angles)).flatten(-2).to(x_BTHE.dtype)


turned = rotary  # its old name, for notebooks that have it


class Attention(nn.Module):
    """Causal self-attention with one fused projection. x[B, T, D] → y[B, T, D].

    `qkv` computes queries, keys and values side by side, [q: H·E | k: K·E | v: K·E]; `out` mixes the heads.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        widths = [config.d_model, config.kv_heads * config.d_head, config.kv_heads * config.d_head]
        self.qkv = nn.Linear(config.d_model, sum(widths), bias=not config.llama)
        self.heads = Heads(widths, config.d_head, config.dropout, turns=config.llama)
        self.out = nn.Linear(config.d_model, config.d_model, bias=not config.llama)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.dropout(self.out(self.heads(self.qkv(x_BTD))))


class MLP(nn.Module):
    """x[B, T, D] · up[D, F] → GELU → · down[F, D] → y[B, T, D]. For Llama, `up` is [gate: F | up: F] with SwiGLU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.d_model, (2 if config.llama else 1) * config.mlp_width, bias=not config.llama)
        self.act = swiglu if config.llama else gelu
        self.down = nn.Linear(config.mlp_width, config.d_model, bias=not config.llama)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.dropout(self.down(self.act(self.up(x_BTD))))


def swiglu(x: Tensor) -> Tensor:
    """[gate: F | up: F] → silu(gate) · up, F wide: one half scales the other (Shazeer 2020)."""
    gate, up = x.chunk(2, dim=-1)
    return silu(gate) * up


def _mixture(config: GPTConfig) -> MoE:
    """Experts, and perhaps an MLP beside them that every token goes through."""
    shared = MLP(replace(config, d_mlp=config.d_shared, dropout=0.0)) if config.d_shared else None
    act = swiglu if config.llama else gelu
    how = {"gated": config.llama, "dropout": config.dropout, "shared": shared}
    return MoE(config, config.d_model, config.expert_width, act, **how)


class Block(nn.Module):
    """One pre-norm transformer layer: x + attention(norm1(x)), then x + mlp(norm2(x)). x[B, T, D] → x[B, T, D].

    `layer`, its number, decides whether experts take the place of the MLP.
    """

    def __init__(self, config: GPTConfig, layer: int = 0) -> None:
        super().__init__()
        self.norm1 = _norm(config)
        self.attention = Attention(config)
        self.norm2 = _norm(config)
        self.mlp = _mixture(config) if config.has_experts(layer) else MLP(config)
        self.recompute = None  # or `recomputed` of lib/recompute.py: backward runs `_add` again

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.recompute(self, self._add, x_BTD) if self.recompute else self._add(x_BTD)

    def _add(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
        return x_BTD + self.mlp(self.norm2(x_BTD))


class Head(nn.Module):
    """Final norm and projection to the vocabulary, without bias. x[B, T, D] → logits[B, T, V]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = _norm(config)
        self.linear = nn.Linear(config.d_model, config.vocab_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.linear(self.norm(x_BTD))


class GPT(nn.Module):
    """The serial model. tokens[B, T] → logits[B, T, V].

    The seed of its weights is drawn from the global generator of torch, so `torch.manual_seed(s); GPT(config)` is the
    same model each time: normal(0, 0.02), the two projections that write to the residual stream divided by √(2·l),
    biases 0. dtype and device are those of the parameters: `GPT(config).to(torch.float64)`.
    """

    sequence_slices = 1  # shards of the activations between the layers, over tensor-parallel ranks
    finds_documents = True  # or they are set before forward, because these tokens are not all

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config, self.seed = config, int(torch.randint(2**62, (), device="cpu"))
        self.embed = Embed(config)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.head = Head(config)
        if config.tied:
            self.head.linear.weight = self.embed.token.weight
        for name, parameter in self.named_parameters():  # a tied weight once
            self.initialise(name, parameter)

    @torch.no_grad()
    def initialise(self, name: str, parameter: Tensor) -> None:
        """Draw the initial values of one full parameter.

        They depend only on the seed of the model and the name, not on the rank, the order or the device.
        """
        if parameter.is_meta:
            return
        if parameter.dim() >= 2:
            residual = name.endswith(
                ("attention.out.weight", "mlp.down.weight", "experts.down", "shared.down.weight")
            )
            std = 0.02 / math.sqrt(2 * self.config.num_layers) if residual else 0.02
            generator = torch.Generator().manual_seed((self.seed + zlib.crc32(name.encode()) * 2**31) % 2**63)
            parameter.copy_(torch.empty(parameter.shape, dtype=torch.float32).normal_(std=std, generator=generator))
        elif name.endswith(".bias"):
            nn.init.zeros_(parameter)
        else:
            nn.init.ones_(parameter)  # the weight of a norm

    def forward(self, tokens_BT: Tensor) -> Tensor:
        if self.finds_documents and self.config.document_end is not None:
            ends_BT = (tokens_BT == self.config.document_end).long()
            for heads in (module for module in self.modules() if isinstance(module, Heads)):
                heads.documents = ends_BT.cumsum(-1) - ends_BT  # an end is in its document
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(x_BTD)
