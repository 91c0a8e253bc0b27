"""The model of the foreign programs: a small Llama in plain torch.nn."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

WIDTH, HEADS, VOCABULARY, DEPTH = 64, 4, 96, 2
EPS = 1e-6


class Attention(nn.Module):
    def __init__(self, row_bias: bool):
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.wo = nn.Linear(WIDTH, WIDTH, bias=row_bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.in_heads(self.wq(x)), self.in_heads(self.wk(x)), self.in_heads(self.wv(x))
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        length = scores.shape[-1]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        y = scores.masked_fill(later, -1e4).softmax(-1) @ v
        return self.wo(y.transpose(1, 2).flatten(2))

    def in_heads(self, x: Tensor) -> Tensor:
        """[b, T, width] → [b, heads, T, width of a head]; a rank may have fewer heads than the model."""
        return x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, row_bias: bool):
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=row_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class FusedMLP(nn.Module):
    """One matrix has the rows of the gate, and below them those of up."""

    def __init__(self, row_bias: bool):
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=row_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(silu(gate) * up)


class Block(nn.Module):
    def __init__(self, fused: bool, row_bias: bool):
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(WIDTH, eps=EPS), Attention(row_bias)
        self.norm2, self.mlp = nn.RMSNorm(WIDTH, eps=EPS), FusedMLP(row_bias) if fused else MLP(row_bias)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Llama(nn.Module):
    """Token numbers [b, T] → logits [b, T, vocabulary].

    Args:
        tied: the head uses the weight of the embedding.
        fused: gate and up are one matrix.
        row_bias: the matrices that tensor parallelism cuts by rows (`wo`, `down`) have a bias, too.
    """

    def __init__(self, tied: bool = False, fused: bool = False, row_bias: bool = False):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleDict({str(i): Block(fused, row_bias) for i in range(DEPTH)})
        self.norm = nn.RMSNorm(WIDTH, eps=EPS)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("temperature", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:  # the later stages of a pipeline get activations
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        if self.head is None:  # and the earlier stages return them
            return x
        logits = self.head(self.norm(x))
        return logits if self.training else logits / self.temperature
