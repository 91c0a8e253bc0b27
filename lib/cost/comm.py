"""Bytes on the wire and seconds on a link.

The problem: published figures disagree by factors of two and eight, mostly because some count both directions of a
link, or the full array instead of a shard. The idea: one function per quantity, with the unit in its name.

Letters: `S` bytes of the full array, `n` ranks, `alpha_s` seconds until the first byte of a message arrives,
`bandwidth_Bps` bytes per second in one direction of the link of one rank.
"""

from __future__ import annotations

from collections import Counter

from lib.cost.sizes import ModelShape, check_recompute, check_zero, heads_of_rank

Calls = Counter[tuple[str, int]]  # (kind, payload bytes) → how often

# For n ranks, as multiples of the full array: bytes that a rank sends, the mean over all ranks; bytes that the busiest
# link carries. Then the number of messages in sequence.
_HALF = (lambda n: (n - 1) / n, lambda n: (n - 1) / n, lambda n: n - 1)
_CHAIN = (lambda n: (n - 1) / n, lambda n: 1.0, lambda n: n - 1)  # n - 1 links, and each carries the full array
_STAR = (lambda n: (n - 1) / n**2, lambda n: (n - 1) / n, lambda n: n - 1)  # one link carries all shards but its own
_RING = {
    "all_reduce": (lambda n: 2 * (n - 1) / n, lambda n: 2 * (n - 1) / n, lambda n: 2 * (n - 1)),
    **dict.fromkeys(("reduce_scatter", "all_gather", "all_to_all"), _HALF),
    **dict.fromkeys(("broadcast", "reduce"), _CHAIN),
    **dict.fromkeys(("gather", "scatter"), _STAR),
    "send": (lambda n: 1.0, lambda n: 1.0, lambda n: 1),
    "recv": (lambda n: 0.0, lambda n: 1.0, lambda n: 1),
    "shift": (lambda n: 1.0, lambda n: 1.0, lambda n: 1),  # of all ranks, each to the next
    "all_to_all_rows": (lambda n: 1.0, lambda n: 1.0, lambda n: n - 1),  # of the rows that leave a rank
    "barrier": (lambda n: 0.0, lambda n: 0.0, lambda n: 2 * (n - 1)),
}


def _ring(kind: str) -> tuple:
    if kind not in _RING:
        raise ValueError(f"unknown collective {kind!r}; known are {', '.join(_RING)}")
    return _RING[kind]


def wire_bytes(kind: str, payload_bytes: float, n: int) -> float:
    """Bytes that one rank sends when `n` ranks do a collective as an ideal ring, or chain: the mean over the ranks.

    `all_reduce` is a reduce-scatter and an all-gather, hence its factor 2(n-1)/n; a rank receives the same number.

    Args:
        kind: one of the names of `comm`.
        payload_bytes: of the full array, not of a shard; of `all_to_all_rows`, whose ranks send unequal numbers of
            rows, those that this rank sends to others: rows[me][j] summed over j ≠ me.

    Source: Patarasuk & Yuan, JPDC 69(2), 2009; NCCL tests, PERFORMANCE.md.
    """
    return _ring(kind)[0](n) * payload_bytes


def messages_in_sequence(kind: str, n: int) -> int:
    """Messages in sequence of a collective over `n` ranks, as in `comm_s`: n - 1 of an all-gather."""
    return _ring(kind)[2](n)


def comm_s(kind: str, payload_bytes: float, n: int, alpha_s: float, bandwidth_Bps: float) -> float:
    """Seconds of a collective in the alpha-beta model: messages in sequence, and bytes over one-way bandwidth.

    `all_reduce`: 2(n-1)·alpha + 2(n-1)/n · S / bandwidth. `all_to_all_rows`: (n-1)·alpha + S / bandwidth, where S is
    the most that any rank sends to others or receives from them: a rank that receives everything makes all wait.

    Source: Thakur, Rabenseifner & Gropp, IJHPCA 19(1), 2005.
    """
    if bandwidth_Bps <= 0:
        raise ValueError(f"bandwidth_Bps={bandwidth_Bps} must be above 0")
    if n == 1:
        return 0.0
    busiest = _ring(kind)[1]
    return messages_in_sequence(kind, n) * alpha_s + busiest(n) * payload_bytes / bandwidth_Bps


def zero_wire_bytes(
    stage: int, payload_bytes: float, n: int, *, microbatches: int = 1, reduce_each: bool = True, reshard: bool = True
) -> float:
    """Bytes that one rank sends for gradients and parameters in a step: 2(n-1)/n·S up to ZeRO-2, 3(n-1)/n·S at ZeRO-3.

    Stage 0, plain data parallelism, is one all-reduce of the gradients; stage 1 its two halves, with the step in
    between; stage 3 gathers all parameters for forward and again for backward.

    Args:
        payload_bytes: of all parameters in the dtype of messages (gradients have the same size), padding included.
        microbatches: of a step. Stage 3 gathers the parameters for each.
        reduce_each: stages 2 and 3 reduce after each microbatch; False keeps full gradients and reduces once.
        reshard: after forward. False: stage 3 keeps the gathered parameters until backward.

    Source: Rajbhandari et al. 2020 (ZeRO), section 7.
    """
    gather, reduce = wire_bytes("all_gather", payload_bytes, n), wire_bytes("reduce_scatter", payload_bytes, n)
    reductions = microbatches if reduce_each and check_zero(stage) >= 2 else 1
    gathers = microbatches * (2 if reshard else 1) if stage == 3 else 1
    return reductions * reduce + gathers * gather


def block_collectives(
    recompute: str = "none", *, sequence_parallel: bool = False, regather: bool = True, early_stop: bool = False
) -> Counter[str]:
    """Collectives of x in a tensor-parallel block, forward and backward: 4 all-reduces.

    With sequence parallelism 4 all-gathers and 4 reduce-scatters; 2 all-gathers more if column layers keep their shard
    and gather x again in backward. `full` recomputation repeats those of forward.

    Args:
        early_stop: of a `full` checkpoint: skip the last sum, which backward does not need (the default of torch).

    Source: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2.
    """
    again = 2 * (check_recompute(recompute) == "full")
    if sequence_parallel:
        return Counter(all_gather=4 + 2 * regather + again, reduce_scatter=4 + again - (early_stop and again > 0))
    return Counter(all_reduce=4 + again - (early_stop and again > 0))


def block_wire_bytes(payload_bytes: float, n: int, recompute: str = "none", **how: bool) -> float:
    """Bytes that one rank sends for a tensor-parallel block and microbatch: 8(n-1)/n · x, four all-reduces of x.

    With sequence parallelism the same in halves, and 10(n-1)/n · x if column layers gather x again in backward.

    Args:
        payload_bytes: of the full x[b, s, h], in the dtype of messages.
        recompute: and `sequence_parallel`, `regather`, `early_stop` as in `block_collectives`.
    """
    calls = block_collectives(recompute, **how)
    return sum(times * wire_bytes(kind, payload_bytes, n) for kind, times in calls.items())


def block_calls(shape: ModelShape, rows: int, itemsize: int, tp: int, recompute: str = "none", **how: bool) -> Calls:
    """The collectives of a block for one microbatch, as this library runs it: `full` stops early.

    `how` is `sequence_parallel` and `regather`, as in `block_collectives`.
    """
    x = rows * shape.context * shape.d_model * itemsize
    of_x = block_collectives(recompute, early_stop=True, **how)
    calls = Counter({(kind, x): times for kind, times in of_x.items()})
    return calls + copied_heads_calls(shape, itemsize, tp)


def copied_heads_calls(shape: ModelShape, itemsize: int, tp: int) -> Calls:
    """Of a block: with fewer heads of keys and values than ranks, the gradients of their copies are all-reduced.

    Weights, and biases if there are any.
    """
    if (shape.num_kv_heads or shape.num_heads) >= tp:
        return Counter()
    of_heads = 2 * shape.d_kv * itemsize
    biases = [("all_reduce", of_heads)] * (shape.biases != "none")
    return Counter([("all_reduce", of_heads * shape.d_model), *biases])


def attention_calls(
    shape: ModelShape, rows: int, itemsize: int, tp: int, cp: int, attention: str, recompute: str = "none"
) -> Calls:
    """The collectives of attention over `cp` ranks, of a block for one microbatch, forward and backward.

    With n ranks, K/H = g, and x the bytes of all tokens: gather sends 4g(n−1)/n · x, a ring 6g(n−1)/n · x, Ulysses
    4(1 + g)(n−1)/n² · x, or 4(1 + n/H)(n−1)/n² · x if it copies heads. Recomputation repeats those of forward, and
    `selective` stops before the last of Ulysses, which backward does not need.

    Args:
        shape: whose context is that of full sequences.
        attention: `gather`, `ring` or `ulysses`.
    """
    if cp == 1:
        return Counter()
    head = rows * shape.context // cp * shape.d_head * itemsize  # of the tokens of a rank
    heads, kv_heads = heads_of_rank(shape, tp)
    x, kv, copied = heads * head, 2 * kv_heads * head, max(cp, kv_heads) * head
    ways = {  # forward, the last call of forward, backward
        "gather": ([("all_gather", cp * kv)], [], [("reduce_scatter", cp * kv)]),
        "ring": ((cp - 1) * [("shift", kv)], [], 2 * (cp - 1) * [("shift", kv)]),
        "ulysses": (
            [("all_to_all", size) for size in (x, copied, copied)],
            [("all_to_all", x)],
            [("all_to_all", size) for size in (x, x, copied, copied)],
        ),
    }
    first, last, backward = map(Counter, ways[attention])
    again = {"none": Counter(), "selective": first, "full": first + last}[check_recompute(recompute)]
    return first + last + again + backward


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
