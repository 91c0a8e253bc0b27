"""The parameters of `lib/model.py`'s GPT one by one, as a tensor-parallel rank holds them.

The problem: sums such as 12h² + 13h do for a report, but buckets of gradients, shards of an optimizer's state and the
largest gradient in flight depend on each tensor. The idea: a list, in the order of `named_parameters()`, and everything
else is arithmetic on it. Letters: h width, s tokens of a sequence, V vocabulary, t tensor-parallel ranks.
"""

from __future__ import annotations

from typing import NamedTuple

from lib.cost.sizes import ModelShape


class Weight(NamedTuple):
    """One parameter.

    Args:
        name: in the serial model.
        size: elements on one tensor-parallel rank.
        whole: every tensor-parallel rank holds all of it. With sequence parallelism its gradient is a partial sum.
    """

    name: str
    size: int
    whole: bool = False


def embed_weights(shape: ModelShape, tp: int = 1) -> list[Weight]:
    """V/t · h tokens, cut by vocabulary entries; s · h positions."""
    h = shape.d_model
    return [
        Weight("embed.token.weight", shape.vocab_size // tp * h),
        Weight("embed.position.weight", shape.context * h, True),
    ]


def block_weights(shape: ModelShape, layer: int, tp: int = 1) -> list[Weight]:
    """Of one block: 12h²/t + 13h less what t divides of the biases, where keys and values have as many heads."""
    h, qkv, mlp = shape.d_model, qkv_width(shape, tp), (shape.d_mlp or 4 * shape.d_model) // tp
    sizes = [
        *(("norm1.weight", h, True), ("norm1.bias", h, True)),
        *(("attention.qkv.weight", qkv * h, False), ("attention.qkv.bias", qkv, False)),
        *(("attention.out.weight", h * h // tp, False), ("attention.out.bias", h, True)),
        *(("norm2.weight", h, True), ("norm2.bias", h, True)),
        *(("mlp.up.weight", mlp * h, False), ("mlp.up.bias", mlp, False)),
        *(("mlp.down.weight", h * mlp, False), ("mlp.down.bias", h, True)),
    ]
    return [Weight(f"blocks.{layer}.{name}", size, whole) for name, size, whole in sizes]


def head_weights(shape: ModelShape, tp: int = 1) -> list[Weight]:
    """The last norm, 2h, and V/t · h, which is the token embedding again where the two are tied."""
    h = shape.d_model
    linear = "embed.token.weight" if shape.tied else "head.linear.weight"
    norm = [Weight("head.norm.weight", h, True), Weight("head.norm.bias", h, True)]
    return [*norm, Weight(linear, shape.vocab_size // tp * h)]


def qkv_width(shape: ModelShape, tp: int = 1) -> int:
    """Queries, keys and values of a rank's heads, side by side: 3h/t; of grouped keys and values at least one head."""
    return shape.d_model // tp + 2 * max(shape.d_kv // tp, shape.d_model // shape.num_heads)


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
