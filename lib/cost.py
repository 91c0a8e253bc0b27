"""What training costs: bytes on the wire and seconds on a link; bytes of memory and FLOPs of a model.

The problem: published figures disagree by factors of two and eight, mostly because one of them counts both directions
of a link, the whole array where the other counts a shard, or leaves out a copy of the weights. The idea: one function
per quantity, with the unit in its name, and a claim in the chapter beside it that compares it with what was counted.

Letters: `S` bytes of the whole array, `n` ranks, `alpha_s` seconds until the first byte of a message arrives,
`bandwidth_Bps` bytes a second in one direction of one rank's link.
"""

from __future__ import annotations

from lib.sizes import ModelShape, Recipe

# For n ranks, as multiples of the whole array: bytes that a rank sends, the mean over all ranks; bytes that the busiest
# link carries. Then messages that follow one another.
_RING = {
    "all_reduce": (lambda n: 2 * (n - 1) / n, lambda n: 2 * (n - 1) / n, lambda n: 2 * (n - 1)),
    "reduce_scatter": (lambda n: (n - 1) / n, lambda n: (n - 1) / n, lambda n: n - 1),
    "all_gather": (lambda n: (n - 1) / n, lambda n: (n - 1) / n, lambda n: n - 1),
    "all_to_all": (lambda n: (n - 1) / n, lambda n: (n - 1) / n, lambda n: n - 1),
    # A chain of n ranks has n - 1 links, and each carries the whole array.
    "broadcast": (lambda n: (n - 1) / n, lambda n: 1.0, lambda n: n - 1),
    "reduce": (lambda n: (n - 1) / n, lambda n: 1.0, lambda n: n - 1),
    "send": (lambda n: 1.0, lambda n: 1.0, lambda n: 1),
    "recv": (lambda n: 0.0, lambda n: 1.0, lambda n: 1),
    "barrier": (lambda n: 0.0, lambda n: 0.0, lambda n: 2 * (n - 1)),
}


def _ring(kind: str) -> tuple:
    if kind not in _RING:
        raise ValueError(f"unknown collective {kind!r}; known are {', '.join(_RING)}")
    return _RING[kind]


def wire_bytes(kind: str, payload_bytes: float, n: int) -> float:
    """Bytes that one rank sends when `n` ranks do a collective as an ideal ring, or chain: the mean over the ranks.

    `all_reduce` is a reduce-scatter and an all-gather, hence its factor 2(n-1)/n; it receives as much again.

    Args:
        kind: one of the names of `comm`.
        payload_bytes: bytes of the whole array (not of a shard).
        n: ranks in the group.

    Source: Patarasuk & Yuan, JPDC 69(2), 2009; NCCL tests, PERFORMANCE.md.
    """
    return _ring(kind)[0](n) * payload_bytes


def comm_s(kind: str, payload_bytes: float, n: int, alpha_s: float, bandwidth_Bps: float) -> float:
    """Seconds of a collective in the alpha-beta model: messages in a row, and bytes over one direction's bandwidth.

    `all_reduce`: 2(n-1)·alpha + 2(n-1)/n · S / bandwidth.

    Args:
        payload_bytes: bytes of the whole array.
        alpha_s: latency of one message in seconds.
        bandwidth_Bps: bytes a second, one direction.

    Source: Thakur, Rabenseifner & Gropp, IJHPCA 19(1), 2005.
    """
    if bandwidth_Bps <= 0:
        raise ValueError(f"bandwidth_Bps={bandwidth_Bps} must be above 0")
    if n == 1:
        return 0.0
    _, busiest, messages = _ring(kind)
    return messages(n) * alpha_s + busiest(n) * payload_bytes / bandwidth_Bps


def overlap(ready_s: list[float], lasts_s: list[float]) -> list[tuple[float, float]]:
    """When each bucket travels: not before its gradients exist, and not before the bucket ahead of it has arrived.

    Args:
        ready_s: when backward has made the last gradient of each bucket, in the order of sending.
        lasts_s: how long each bucket's all-reduce takes.

    Returns:
        (start, end) of each, in seconds. Whatever lies after the end of backward is exposed.

    Raises:
        ValueError: the two lists differ in length.
    """
    times, free_s = [], 0.0
    for ready, lasts in zip(ready_s, lasts_s, strict=True):
        start = max(ready, free_s)
        free_s = start + lasts
        times.append((start, free_s))
    return times


def zero_wire_bytes(
    stage: int, payload_bytes: float, n: int, *, microbatches: int = 1, reduce_each: bool = True, reshard: bool = True
) -> float:
    """Bytes that one rank sends for gradients and parameters in a step: 2(n-1)/n·S up to ZeRO-2, 3(n-1)/n·S at ZeRO-3.

    Stage 0, plain data parallelism, is one all-reduce of the gradients; stage 1 its two halves, with the step in
    between; stage 3 gathers all parameters for forward and again for backward.

    Args:
        payload_bytes: of all parameters, as they travel (gradients have the same size), padding included.
        microbatches: of a step. Stage 3 collects the parameters for each.
        reduce_each: stages 2 and 3 reduce after each microbatch; False keeps full gradients and reduces once.
        reshard: after forward. False: stage 3 keeps what it has gathered until backward.

    Source: Rajbhandari et al. 2020 (ZeRO), section 7.
    """
    gather, reduce = wire_bytes("all_gather", payload_bytes, n), wire_bytes("reduce_scatter", payload_bytes, n)
    reductions = microbatches if reduce_each and _stage(stage) >= 2 else 1
    gathers = microbatches * (2 if reshard else 1) if stage == 3 else 1
    return reductions * reduce + gathers * gather


def block_wire_bytes(
    payload_bytes: float,
    n: int,
    recompute: str = "none",
    *,
    sequence_parallel: bool = False,
    regather: bool = True,
    early_stop: bool = False,
) -> float:
    """Bytes that one rank sends for a tensor-parallel block and microbatch: 8(n-1)/n · x, four all-reduces of x.

    With sequence parallelism the same in four gathers and four scatters, and 10(n-1)/n · x if column layers keep their
    slice and collect the rest again in backward.

    Args:
        payload_bytes: of x[B, T, D], whole, as it travels.
        recompute: `full` sends again what forward sent; `none` and `selective` send nothing again.
        early_stop: of a `full` checkpoint: without the last sum, as nobody needs it again (torch's default).

    Source: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2.
    """
    halves = 10 if sequence_parallel and regather else 8  # of an all-reduce
    last = 1 if sequence_parallel else 2
    halves += _choice(recompute, {"none": 0, "selective": 0, "full": 4 - last * early_stop})
    return halves * wire_bytes("all_gather", payload_bytes, n)


def sharded_step(
    forward_s: list[float],
    backward_s: list[float],
    gather_s: list[float],
    reduce_s: list[float],
    prefetch: bool = True,
) -> list[tuple[str, int, float, float]]:
    """When ZeRO-3 computes and sends in a step, if the link carries one message after another.

    A unit computes when its parameters have arrived. They are asked for when it would compute, or with `prefetch`
    when the unit before it begins to; and its gradients leave when its backward ends, if those before are through.

    Args:
        forward_s, backward_s: what each unit computes, in the order of forward.
        gather_s, reduce_s: how long its all-gather and its reduce-scatter take.

    Returns:
        (what, unit, start_s, end_s), what being `forward`, `backward`, `gather` or `reduce`. All gradients have
        arrived at the last end.
    """
    times: list[tuple[str, int, float, float]] = []
    now_s = link_free_s = 0.0
    arrives_s: dict[int, float] = {}

    def send(what: str, unit: int, lasts_s: float) -> float:
        nonlocal link_free_s
        start_s = max(now_s, link_free_s)
        link_free_s = start_s + lasts_s
        times.append((what, unit, start_s, link_free_s))
        return link_free_s

    order = range(len(forward_s))
    for what, units, lasts_s in (("forward", order, forward_s), ("backward", order[::-1], backward_s)):
        reduced_s = 0.0
        for place, unit in enumerate(units):
            if unit not in arrives_s:
                arrives_s[unit] = send("gather", unit, gather_s[unit])
            now_s = max(now_s, arrives_s.pop(unit))
            for ahead in units[place + 1 : place + 2] if prefetch else ():
                arrives_s[ahead] = send("gather", ahead, gather_s[ahead])
            times.append((what, unit, now_s, now_s + lasts_s[unit]))
            now_s += lasts_s[unit]
            if what == "backward":
                now_s = max(now_s, reduced_s)  # memory for one unit's gradients on their way
                reduced_s = send("reduce", unit, reduce_s[unit])
    return times


# ---- a model's sums: bytes, FLOPs ------------------------------------------------------------------------------------
# Letters of Korthikanti et al.: b rows of a microbatch, s tokens of a row, h width, a heads, L layers, v vocabulary.


def state_bytes(
    num_parameters: float, recipe: Recipe, *, zero: int = 0, dp: int = 1, tp: int = 1, pp: int = 1
) -> dict[str, float]:
    """Bytes of parameters, gradients and optimizer state (master copy included) that one rank keeps.

    Tensor and pipeline parallelism divide all three by tp·pp; data parallelism divides nothing by itself. ZeRO
    divides over dp what it shards: stage 1 the optimizer's state, stage 2 the gradients too, stage 3 all three.
    An even split is taken for granted; what ZeRO-3 gathers for a moment is not in it.

    Raises:
        ValueError: no such stage, or a degree that is no positive whole number.

    Source: Rajbhandari et al. 2020 (ZeRO), section 5.
    """
    _stage(zero)
    for name, degree in (("dp", dp), ("tp", tp), ("pp", pp)):
        if degree < 1 or degree != int(degree):
            raise ValueError(f"{name}={degree} cannot be a number of ranks; use 1 or more")
    held = num_parameters / (tp * pp)
    return {
        "parameter": held * recipe.weight_bytes / (dp if zero >= 3 else 1),
        "gradient": held * recipe.gradient_bytes / (dp if zero >= 2 else 1),
        "optimizer": held * (recipe.master_bytes + recipe.state_bytes) / (dp if zero >= 1 else 1),
    }


def activation_bytes(
    shape: ModelShape, rows: int, recompute: str = "none", *, tp: int = 1, sequence_parallel: bool = False
) -> float:
    """Bytes that one layer of a GPT keeps for backward, in 16 bit with dropout: sbh(34 + 5as/h) on one rank.

    `selective` recomputes the attention matrix, and the second term goes; `full` keeps the layer's input only, 2sbh.
    Tensor parallelism leaves 10sbh on every rank unless the sequence is split too.

    Source: Korthikanti et al. 2022, table 2.
    """
    sbh, matrix = rows * shape.context * shape.d_model, 5 * shape.num_heads * shape.context / shape.d_model
    whole, divided = (0, 34) if sequence_parallel else (10, 24)
    kept = {"none": whole + (divided + matrix) / tp, "selective": whole + divided / tp, "full": 2}
    return sbh * _choice(recompute, kept)


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
    norms_and_masks = mine * (2 * h + 4 + (2 * h if dropout else 0))
    into_columns, into_rows = (mine if regather else tokens) * 2 * h, tokens * (h + 2 * (shape.d_mlp or 4 * h)) // tp
    kept = itemsize * (norms_and_masks + into_columns + into_rows)
    qkv = itemsize * tokens * (h // tp + 2 * max(shape.d_kv // tp, h // heads))
    if dropout or not fused:
        copies = 5 * h if heads == tp and itemsize == wide else 3 * h
        attention = wide * tokens * (copies + (3 if dropout else 1) * heads * shape.context) // tp
    else:
        attention = qkv + wide * tokens * heads // tp
    return _choice(recompute, {"none": kept + attention, "selective": kept + qkv, "full": itemsize * mine * h})


def gpt_saved_bytes(shape: ModelShape, rows: int, *, fused: bool = True, recompute: bool = False) -> int:
    """Bytes alive between forward and backward of `lib/model.py`'s GPT in float32, without its parameters or dropout.

    Its blocks (`block_saved_bytes`; `recompute` keeps each block's input only), and its head.

    Source: measured with `lib/memory.py`; Korthikanti et al. 2022, section 4.1, counts the same in bytes.
    """
    tokens = rows * shape.context
    blocks = shape.num_layers * block_saved_bytes(shape, rows, "full" if recompute else "none", fused=fused)
    head = tokens * (2 * shape.d_model + 2 + shape.vocab_size) + 2  # a norm's, log-probabilities, loss and its weight
    return blocks + 4 * head + 8 * (2 * tokens + shape.context + 1)  # tokens, targets, positions, count of tokens


def forward_flops(shape: ModelShape, rows: int) -> int:
    """FLOPs of one forward's matrix products; a multiply-add counts as two.

    24sbh²L(1 + s/6h + v/12hL) for a GPT: each token goes through each weight once, and attention multiplies
    s × s scores twice. The part above the diagonal is counted, as the papers and PyTorch's counter do.

    Source: Korthikanti et al. 2022, appendix A.
    """
    block = shape.num_block_weights + 2 * shape.context * shape.d_model
    head = shape.vocab_size * shape.d_model
    return 2 * rows * shape.context * (shape.num_layers * block + head)


def train_flops(shape: ModelShape, rows: int, recompute: str = "none") -> int:
    """Operations of one step: forward, a backward of twice that, and what is computed again.

    Without recomputation that is what the *model* needs (for MFU); with it, what the *hardware* does (for HFU).

    Source: Korthikanti et al. 2022, appendix A (which for `selective` counts a backward again, too; nobody runs it);
    Narayanan et al. 2021, section 5.1.
    """
    tokens, forward = rows * shape.context, forward_flops(shape, rows)
    again = {
        "none": 0,
        "selective": 4 * tokens * shape.context * shape.d_model * shape.num_layers,  # both products of attention
        "full": forward - 2 * tokens * shape.vocab_size * shape.d_model,  # the layers, not the head
    }
    return 3 * forward + _choice(recompute, again)


def _choice(recompute: str, choices: dict[str, float]) -> float:
    if recompute not in choices:
        raise ValueError(f"recompute={recompute!r} must be one of {', '.join(choices)}")
    return choices[recompute]


def train_s(flops: float, peak_flops: float, utilisation: float, n: int = 1) -> float:
    """Seconds that `n` devices need for `flops` operations, about 6·parameters·tokens (Kaplan et al. 2020).

    Args:
        peak_flops: of one device, per second, dense.
        utilisation: the part of the peak that is reached (MFU), above 0 and at most 1.
    """
    if not 0 < utilisation <= 1:
        raise ValueError(f"utilisation={utilisation} must be above 0 and at most 1, such as 0.4")
    return flops / (peak_flops * utilisation * n)


def _stage(zero: int) -> int:
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"zero={zero} is no stage of ZeRO; use 0 (plain data parallelism), 1, 2 or 3")
    return zero
