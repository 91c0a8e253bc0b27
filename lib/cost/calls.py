"""The collectives of tensor-parallel ranks for one microbatch, with their bytes.

Layers with sharded matrices all-reduce, all-gather or reduce-scatter x[b, s, h] (`lib/tensor_parallel/`). Letters:
t tensor-parallel ranks; a payload is the bytes of the full array, b·s·h times `itemsize` for x.
"""

from __future__ import annotations

from collections import Counter

from lib.cost.sizes import ModelShape

Calls = Counter[tuple[str, int]]  # (kind, payload bytes) → how often


def block_calls(
    shape: ModelShape,
    rows: int,
    itemsize: int,
    tp: int,
    *,
    sequence_parallel: bool = False,
    regather: bool = True,
    recompute: str = "none",
) -> Calls:
    """A block, forward and backward: 4 all-reduces of x, that is 8(t−1)/t·bsh elements on the wire.

    With sequence parallelism 4 all-gathers and 4 reduce-scatters, the same elements; 2 all-gathers more where column
    layers keep shards and gather again in backward, 10(t−1)/t·bsh. `full` recomputation repeats the communication of
    forward before the last matrix.

    If keys and values have fewer heads than ranks, the gradients of their copies are all-reduced: weights, and biases
    if there are any.

    Source: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2.
    """
    x, again = rows * shape.context * shape.d_model * itemsize, recompute == "full"
    if sequence_parallel:
        calls = Counter({("all_gather", x): 4 + 2 * regather + 2 * again, ("reduce_scatter", x): 4 + again})
    else:
        calls = Counter({("all_reduce", x): 4 + again})
    heads = shape.num_kv_heads or shape.num_heads
    if heads < tp:
        of_heads = 2 * heads * (shape.d_model // shape.num_heads) * itemsize
        calls += Counter({("all_reduce", of_heads * shape.d_model): 1})
        calls += Counter({("all_reduce", of_heads): int(not shape.llama)})
    return calls


def embed_calls(shape: ModelShape, rows: int, itemsize: int, *, sequence_parallel: bool = False) -> Calls:
    """The embedding: an all-reduce of x forward; or a reduce-scatter, and an all-gather backward."""
    x = rows * shape.context * shape.d_model * itemsize
    return Counter([("reduce_scatter", x), ("all_gather", x)] if sequence_parallel else [("all_reduce", x)])


def head_calls(
    shape: ModelShape, rows: int, itemsize: int, *, sequence_parallel: bool = False, regather: bool = True
) -> Calls:
    """The head and the loss: an all-reduce of the gradient of x; or a gather forward, a reduce-scatter backward.

    The loss never gathers logits: it all-reduces a maximum per token, then two sums, in float32 at least.
    """
    tokens, wide = rows * shape.context, max(itemsize, 4)
    x = tokens * shape.d_model * itemsize
    calls = Counter([("all_reduce", tokens * wide), ("all_reduce", 2 * tokens * wide)])
    if sequence_parallel:
        return calls + Counter({("all_gather", x): 1 + regather, ("reduce_scatter", x): 1})
    return calls + Counter([("all_reduce", x)])
