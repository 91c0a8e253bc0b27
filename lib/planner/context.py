"""Attention over context-parallel ranks, in three ways: their messages, their overlap and their memory.

The problem: "context parallelism costs the keys and values" is true of one way. The idea, for n ranks, x bytes of the
queries of all tokens and g·x of their keys, or of their values:

               sent in a block       hides                               kept, beside what a rank has of its tokens
    ring       6g(n − 1)/n · x       each hop, during one block          nothing
    gather     as much, or 4g        only what the software can          nothing, or keys and values of all tokens
    ulysses    4(1 + g)(n − 1)/n²·x  nothing                             the result of attention, by heads

A ring sends keys and values in forward and in backward, and their gradients. A gather has them again in backward, or
keeps them. Ulysses swaps tokens for heads before attention, and back; with fewer heads of keys than ranks it copies
them. A block that is recomputed repeats the messages of forward. A block of attention has a rank's queries
to the keys of one rank: of the causal half 1/n, if all ranks have the same, and its hops take the rest of their time.

Sources: Liu et al. 2023 (arXiv 2310.01889), table 2; Jacobs et al. 2023 (arXiv 2309.14509), section 3.2; chapter 17.
"""

from __future__ import annotations

from lib.cost.sizes import ModelShape, heads_of_rank
from lib.planner.messages import NONE, AxisWait, Messages, between_stages, hide, of_collective, of_exchange
from lib.planner.training import Layout4D, Training


def way_of(training: Training, layout: Layout4D) -> str:
    """`gather`, `ring` or `ulysses`: the way of the layout, or else of the software."""
    return layout.attention or training.stack.cp_attention


def _copies(model: ModelShape, tp: int, cp: int) -> float:
    """Of each head of keys and values, that Ulysses sends."""
    return max(1.0, cp / heads_of_rank(model, tp)[1])


def _bytes_of(training: Training, tp: int, cp: int, rows: int) -> tuple[float, float]:
    """Of the queries of a rank's tokens, and of their keys."""
    model, tokens = training.model, rows * training.model.context / cp
    return 2 * tokens * model.d_q / tp, 2 * tokens * max(model.d_kv / tp, model.d_head)


def more_kept_bytes(training: Training, way: str, tp: int, cp: int, rows: int, recompute: str) -> float:
    """What a block keeps for backward beside its share of what a rank without context parallelism keeps."""
    if cp == 1 or recompute == "full":
        return 0.0
    queries, keys = _bytes_of(training, tp, cp, rows)
    kept = keys if recompute == "ops" else 2 * keys  # values; or keys and values
    if way == "ulysses":  # attention has its result by heads, and the matrix behind it by tokens
        return queries + kept * (_copies(training.model, tp, cp) - 1)
    return kept * (cp - 1) if way == "gather" and training.stack.keeps_gathered else 0.0


def over_cp(
    training: Training, way: str, tp: int, cp: int, rows: int, attention_s: float, passes: float, again: bool
) -> AxisWait:
    """The messages of a block and microbatch, and the part that attention hides.

    Args:
        attention_s: seconds of attention, forward and backward, in so many `passes`: a pass is that of forward.
        again: whether backward begins with the whole forward.
    """
    if cp == 1:
        return hide(NONE, 0.0)
    stack, (queries, keys) = training.stack, _bytes_of(training, tp, cp, rows)
    if way == "ulysses":  # queries, keys, values and the result, each in a call
        swap = of_exchange(training, queries, cp, tp)
        swap += of_exchange(training, keys * _copies(training.model, tp, cp), cp, tp)
        return hide(swap.times(2 * (3 if again else 2)), 0.0)
    forwards = 2 if again else 1
    if way == "gather":
        gather = of_collective(training, "all_gather", 2 * keys * cp, cp, tp)
        sent = gather.times(forwards + (1 if stack.keeps_gathered else 2))
        return hide(sent, attention_s * (cp - 1) / cp, stack.exposed_cp)
    hop, _ = between_stages(training, 2 * keys, cp, tp)
    forward_s = attention_s * forwards / passes
    backward = _around(hop.times(2), cp, attention_s - forward_s, stack.balanced_cp)
    return _around(hop.times(forwards), cp, forward_s, stack.balanced_cp) + backward


def _around(hop: Messages, cp: int, attention_s: float, is_balanced: bool) -> AxisWait:
    """The n − 1 hops of a ring, each behind the block before it, on the rank that computes most.

    Of a rank's own tokens causal attention has half a block; shares that are balanced halve the rest as well.
    """
    own = 1.0 if is_balanced else 0.5
    block_s = attention_s / (own + cp - 1)
    return hide(hop, own * block_s) + hide(hop.times(cp - 2), (cp - 2) * block_s)
