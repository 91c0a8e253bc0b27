"""Why a layout cannot be: one sentence with the numbers, and what would make it possible.

`book/static/planner_layouts.js` says the same in the same words, and `lib.planner.search` proposes exactly the layouts
that nothing here refuses; tests compare the three.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from lib.cost.sizes import heads_of_rank, shares_heads
from lib.layout import divisors, one_of
from lib.planner.choices import CP_RANKS, FEWEST_TOKENS, MOST_ROWS, MOST_STAGES_PER_RANK, possible_cp, possible_tp
from lib.planner.context import way_of
from lib.planner.seconds import has_even_stages
from lib.planner.training import Layout4D, Training

# No search proposes these, and some software has them.
COPIES, SHARDED_PIPELINE = "copies of any shape", "ZeRO-3 in a pipeline"


def refusal(training: Training, layout: Layout4D, able: frozenset[str] = frozenset()) -> str | None:
    """The first reason why a layout is impossible, or None.

    Args:
        able: what the software of the run can that no search proposes: `COPIES`, `SHARDED_PIPELINE`.
    """
    return next(_refusals(training, layout, able), None)


def _refusals(training: Training, layout: Layout4D, able: frozenset[str]) -> Iterator[str]:
    """Each may rely on those before it."""
    tp, cp, pp, dp, rows, v = layout.tp, layout.cp, layout.pp, layout.dp, layout.rows, layout.stages_per_rank
    zero, recompute, schedule, replicas = layout.zero, layout.recompute, layout.schedule, layout.replicas
    model, gpus, batch, ranks = training.model, training.cluster.gpus, training.global_batch, tp * cp * pp
    heads, keys, layers = model.num_heads, model.num_kv_heads or model.num_heads, model.num_layers
    even = partial(has_even_stages, layers)
    if tp not in possible_tp(training):
        ways = one_of(n for n in possible_tp(training) if gpus % n == 0)
        shared = f", {keys} of keys and values," if keys < heads else ""
        yield f"{heads} heads{shared} cannot be shared by {tp} tensor-parallel ranks: choose tp {ways}."
    if cp not in (possible := possible_cp(training)):
        tokens, needs, fewer = model.context, cp * FEWEST_TOKENS, one_of(possible)
        if cp not in CP_RANKS:
            yield f"Context parallelism is planned over powers of two, {CP_RANKS[-1]} at most: choose cp {fewer}."
        ways = f"choose cp {fewer}, or sequences of {max(needs, -(-tokens // cp) * cp):,} tokens"
        if tokens < needs:
            yield f"A context-parallel rank needs {FEWEST_TOKENS:,} tokens of a sequence or more: {ways}."
        yield f"{tokens:,} tokens of a sequence cannot be shared evenly by {cp} context-parallel ranks: {ways}."
    if layout.attention and cp == 1:
        yield f"There are no ranks over which attention goes by {layout.attention}: choose cp 2 or more."
    own, of_keys = heads_of_rank(model, tp)
    if cp > 1 and way_of(training, layout) == "ulysses" and not shares_heads(own, of_keys, cp):
        ways = [n for n in possible_cp(training) if n > 1 and shares_heads(own, of_keys, n)]
        yield (
            f"{own} heads of a tensor-parallel rank, {of_keys} of keys and values, cannot be shared by {cp} ranks of "
            f"Ulysses: choose {f'cp {one_of(ways)}, or a ring' if ways else 'a ring'}."
        )
    if gpus % ranks:
        yield f"{gpus:,} GPUs do not divide by tp × cp × pp = {ranks:,}: choose less, or {ranks:,} GPUs."
    if gpus != ranks * dp:
        yield f"tp × cp × pp × dp = {ranks * dp:,}, and there are {gpus:,} GPUs: choose dp {gpus // ranks:,}."
    if not even(pp * v) or v > MOST_STAGES_PER_RANK:
        fewer = one_of(n for n in divisors(gpus) if n < pp and even(n)) if not even(pp) else ""
        most = "" if fewer else one_of(n for n in range(1, MOST_STAGES_PER_RANK + 1) if even(pp * n))
        ways = f"v 1 and pp {fewer}" if fewer else f"v {most}"
        yield f"{layers} layers do not cut evenly into {pp * v} stages: choose {ways}."
    if v > 1 and pp == 1:
        yield "Several stages per rank need a pipeline: choose pp 2 or more, or v 1."
    if batch % dp:
        yield (
            f"{batch:,} sequences do not divide among {dp:,} data-parallel ranks: choose a batch of "
            f"{-(-batch // dp) * dp:,}, or more ranks for tp, cp or pp."
        )
    each = batch // dp
    if each % rows:
        ways = one_of(2**k for k in range(MOST_ROWS.bit_length()) if each % 2**k == 0)
        yield f"The {each:,} sequences of a data-parallel rank do not divide by {rows}: choose b {ways}."
    m = each // rows
    if v > 1 and m % pp:
        yield f"{m:,} microbatches do not divide by pp {pp}: choose v 1, or batch {-(-m // pp) * pp * rows * dp:,}."
    if zero == 3 and pp > 1 and SHARDED_PIPELINE not in able:
        yield "ZeRO-3 is planned without pipeline parallelism: choose pp 1, or ZeRO stage 1."
    node = max(1, training.cluster.per_node // tp)
    if COPIES in able:
        if dp * cp % replicas or (replicas > 1 and not zero):
            yield f"{replicas} copies cannot share {dp * cp:,} data-parallel ranks with ZeRO-{zero}: choose 1."
    elif replicas > 1 and (zero < 3 or dp * cp == replicas or dp * cp != replicas * node):
        yield f"Copies are planned with ZeRO-3 over the {node} data-parallel ranks of a node: choose 1."
    if v > 1 and schedule == "zb-h1":
        yield "ZB-H1 has one stage per rank: choose v 1, or ZB-V."
    if v != 2 and schedule == "zb-v":
        yield "ZB-V has two stages per rank: choose v 2, or ZB-H1."
    if pp == 1 and schedule != "1f1b":
        yield "A schedule needs a pipeline: choose pp 2 or more, or 1F1B."
    if m < {"1f1b": 1, "zb-h1": pp, "zb-v": 2 * pp - 1}[schedule]:
        enough = (pp if schedule == "zb-h1" else 2 * pp) * rows * dp
        yield f"{m:,} microbatches cannot fill {schedule.upper()} on {pp} stages: choose 1F1B, or batch {enough:,}."
    if recompute != "none" and schedule != "1f1b":
        yield "A backward in halves is planned without recomputation: choose none, or 1F1B."
    if zero and dp * cp == 1:
        yield f"ZeRO shards over data-parallel ranks, and there is one: choose ZeRO stage 0, or {2 * gpus:,} GPUs."
