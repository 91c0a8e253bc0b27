"""The parameters of `lib/model.py`'s GPT one by one, as a tensor-parallel rank holds them.

The problem: sums such as 12h² + 13h do for a report, but buckets of gradients, shards of optimizer states and the
largest gradient in flight depend on each tensor. The idea: a list, in the order of `named_parameters()`, and everything
else is arithmetic on it. Letters: h width, s tokens of a sequence, V vocabulary, t tensor-parallel ranks.
"""

from __future__ import annotations

from typing import NamedTuple

from lib.cost.sizes import ModelShape

BUCKET_BYTES = 4 * 2**20  # of gradients, unless a run asks for another size


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
    """V/t · h of the tokens (vocabulary-parallel); s · h of the positions of a GPT-2."""
    h = shape.d_model
    positions = [] if shape.llama else [Weight("embed.position.weight", shape.context * h, True)]
    return [Weight("embed.token.weight", shape.vocab_size // tp * h), *positions]


def block_layers(shape: ModelShape, layer: int, tp: int = 1) -> list[list[Weight]]:
    """Weights of one block, by layers. Without grouped keys: 12h²/t + 13h, less for the biases that t divides."""
    h, qkv, mlp = shape.d_model, qkv_width(shape, tp), shape.mlp_width // tp
    up = 2 * mlp if shape.llama else mlp  # with the gate
    attention = ("attention.qkv", qkv * h, qkv, "weight, bias"), ("attention.out", h * h // tp, h, "weight")
    mlp = ("mlp.up", up * h, up, "weight, bias"), ("mlp.down", h * mlp, h, "weight")
    sizes = ("norm1", h, h), *attention, ("norm2", h, h), *mlp
    return [_layer(shape, f"blocks.{layer}.{name}", *rest) for name, *rest in sizes]


def _layer(shape: ModelShape, name: str, weight: int, bias: int, cut: str = "") -> list[Weight]:
    """The weight of a layer, and its bias in a GPT-2; `cut` names the sharded tensors."""
    both = [Weight(f"{name}.{what}", size, what not in cut) for what, size in (("weight", weight), ("bias", bias))]
    return both[:1] if shape.llama else both


def head_weights(shape: ModelShape, tp: int = 1) -> list[Weight]:
    """The last norm, and V/t · h of the head: the token embedding itself if the two are tied."""
    linear = "embed.token.weight" if shape.tied else "head.linear.weight"
    norm = _layer(shape, "head.norm", shape.d_model, shape.d_model)
    return [*norm, Weight(linear, shape.vocab_size // tp * shape.d_model)]


def qkv_width(shape: ModelShape, tp: int = 1) -> int:
    """Width of queries, keys and values of the heads of a rank: 3h/t; grouped keys and values have at least one."""
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
