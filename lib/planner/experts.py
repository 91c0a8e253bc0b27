"""Memory and messages of a model with experts, on each rank of a layout.

The problem: experts are cut by ranks that hold the same attention, so that one parameter has dp copies and the next
has dp/ep. The idea: two groups. Everything except the experts is a dense model, replicated (or sharded by ZeRO) over
dp; the experts of a block are divided over ep of these dp ranks, and edp = dp/ep ranks hold the same experts.

There are no seconds: `NO_SECONDS_OF_EXPERTS` says why. Both groups are also divided over tp and pp. Vectors and small
matrices that software replicates along tp (norms, routers, low-rank projections) are divided as well: below 1 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from lib.cost.bubble import kept_by
from lib.cost.experts import ExpertShape, any_of_experts, attention_kept_bytes, dispatch_bytes, routed_kept_bytes
from lib.layout import divisors, one_of
from lib.planner.margin import FITS, HEADROOM, TOO_LARGE, memory_verdict
from lib.planner.memory import HeldParameters, held_parameters, state_of_held
from lib.planner.seconds import stay_whole
from lib.planner.training import Training

# Runs in `book/published/experts.json`, and the lowest and the highest error of their seconds as a dense model of the
# active parameters, with all-to-alls by formula: `python -m book.published.experts` measures them, and a test compares.
MISSES = (6, -0.2, 0.51)
NO_SECONDS_OF_EXPERTS = (
    "no seconds: with the active parameters as a dense model, and the all-to-alls by formula, the planner misses {} "
    "published runs by {:+.0%} to {:+.0%}"
).format(*MISSES)
RECOMPUTED = ("none", "full")


class ExpertLayout(NamedTuple):
    """A layout: pp · dp · tp ranks; ep neighbours along dp share the experts of a block.

    Args:
        rows: sequences of a microbatch.
        zero: stage of ZeRO; it shards over dp, and experts over edp.
        recompute: `none` or `full`.

    With tp, sequences are split between the parallel layers, and each expert is cut along tp.
    """

    tp: int
    pp: int
    dp: int
    ep: int
    rows: int = 1
    zero: int = 1
    recompute: str = "none"

    @property
    def edp(self) -> int:
        """Ranks that hold the same experts."""
        return self.dp // self.ep


class ExpertBytes(NamedTuple):
    """On one rank, at the peak of a step."""

    replicated: float  # model states of all parameters except routed experts
    experts: float  # model states of routed experts
    activations: float  # of attention, dense MLPs and shared experts
    routed: float  # activations of the copies of tokens in experts
    logits: float
    gathered: float  # two blocks that ZeRO-3 unsharded, or the head if that is larger; and their gradients

    @property
    def total(self) -> float:
        return sum(self)


@dataclass(frozen=True, eq=False)
class ExpertTraining:
    """A model with experts, and a training of its `base`, which has cluster, stack and batch."""

    shape: ExpertShape
    training: Training

    @property
    def sequence(self) -> int:
        """Tokens of a sequence."""
        return self.training.model.context


class AllToAll(NamedTuple):
    """Bytes that a rank sends in a step for a block with experts: inside its node, and across nodes.

    Of ranks that do not all have as many of their group on their node, the rank that sends most across.
    """

    inside: float
    across: float
    across_once: float  # across nodes, if each token goes to each node at most once

    @property
    def total(self) -> float:
        return self.inside + self.across


def stage_blocks(layers: int, pp: int) -> list[range]:
    """The blocks of each stage, in order: equal; or one less where embedding and head are; or as even as possible."""
    if layers % pp and (layers + 2) % pp == 0:
        most = (layers + 2) // pp
        cuts = [0, *(most * place - 1 for place in range(1, pp)), layers]
    else:
        cuts = [layers * place // pp for place in range(pp + 1)]
    return [range(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]


def rank_bytes(of: ExpertTraining, layout: ExpertLayout, place: int) -> ExpertBytes:
    """By kind, on a rank at this place in the pipeline."""
    shape, stack, tp = of.shape, of.training.stack, layout.tp
    blocks, is_last = stage_blocks(shape.base.num_layers, layout.pp)[place], place == layout.pp - 1
    m, logits = microbatches(of, layout), 0.0
    states = [
        sum(state_of_held(of.training, held, layout.zero, ranks, stay_whole(of.training, layout.zero, ranks, m)))
        for held, ranks in zip(_held(of, layout, place, blocks), (layout.dp, layout.edp), strict=True)
    ]
    kept = _kept(of, layout, blocks, kept_by(place, layout.pp, m))
    if is_last:
        tp_of_words = tp if stack.splits_vocabulary else 1
        logits = stack.logits_bytes * layout.rows * of.sequence * shape.base.vocab_size / tp_of_words
    gathered = _gathered(of, layout, blocks, is_last)
    return ExpertBytes(*states, *(stack.spare_activations * n for n in kept), logits, gathered)


def _held(
    of: ExpertTraining, layout: ExpertLayout, place: int, blocks: range
) -> tuple[HeldParameters, HeldParameters]:
    """Parameters of a rank before data-parallel ranks shard them: all except routed experts, and these."""
    shape, tp, is_last = of.shape, layout.tp, place == layout.pp - 1
    ends = held_parameters(of.training, tp, place == 0, is_last, 0)
    rest = shape.replicated_parameters(blocks) + is_last * shape.base.d_model
    routed = shape.routed_parameters(blocks) / (tp * layout.ep)
    return ends._replace(blocks=rest / tp), HeldParameters(routed, 0, 0, 0)


def rank_bytes_most(of: ExpertTraining, layout: ExpertLayout) -> ExpertBytes:
    """By kind, on the rank with the highest peak."""
    return max((rank_bytes(of, layout, place) for place in range(layout.pp)), key=sum)


def microbatches(of: ExpertTraining, layout: ExpertLayout) -> int:
    """m of a step."""
    return max(1, of.training.global_batch // (layout.dp * layout.rows))


def _kept(of: ExpertTraining, layout: ExpertLayout, blocks: range, in_flight: float) -> tuple[float, float]:
    """Activations that a rank keeps: of every token, and of routed copies.

    With `full`, blocks keep their input, and the largest block is recomputed at a time.
    """
    shape, tp, fused = of.shape, layout.tp, of.training.stack.fused_swiglu
    tokens, without = layout.rows * of.sequence, shape.num_dense(blocks)
    each = 6 if fused else 8
    attention, routed = attention_kept_bytes(shape, tp), routed_kept_bytes(shape, tp, fused_swiglu=fused)
    shared, dense = each * shape.d_shared / tp, each * shape.base.mlp_width / tp
    if layout.recompute == "none":
        every = len(blocks) * attention + (len(blocks) - without) * shared + without * dense
        return in_flight * tokens * every, in_flight * tokens * (len(blocks) - without) * routed
    inputs = in_flight * len(blocks) * 2 * shape.base.d_model / tp
    largest = max((shared, routed) if len(blocks) > without else (0.0, 0.0), (dense * bool(without), 0.0), key=sum)
    return tokens * (inputs + attention + largest[0]), tokens * largest[1]


def _gathered(of: ExpertTraining, layout: ExpertLayout, blocks: range, has_head: bool) -> float:
    """Bytes of units that ZeRO-3 gathers, and of their gradients: two neighbouring blocks, or the head.

    Experts with one copy are never gathered.
    """
    if layout.zero < 3:
        return 0.0
    shape, each = of.shape, of.training.stack.recipe.weight_bytes + 2
    routed = layout.ep if layout.edp > 1 else math.inf
    units = [shape.replicated_parameters(b) + shape.routed_parameters(b) / routed for b in map(_alone, blocks)]
    most = max(map(sum, zip(units, units[1:], strict=False)), default=2 * units[0])
    return each * max(most, has_head * shape.end_parameters) / layout.tp


def _alone(place: int) -> range:
    return range(place, place + 1)


def exchanged_bytes(of: ExpertTraining, layout: ExpertLayout) -> AllToAll:
    """Bytes that a rank sends in a step for each of its blocks with experts.

    Ranks of a group are neighbours along dp, tp ranks apart, and each sends to all with even routing; with `full`
    recomputation dispatch and combine run again.
    """
    shape, cluster, n = of.shape, of.training.cluster, layout.ep
    tokens = of.training.global_batch * of.sequence / layout.dp / layout.tp
    sends = 6 if layout.recompute == "full" else 4
    total = dispatch_bytes(shape, tokens, n, sends=sends)
    others = _on_nodes(n, max(1, cluster.per_node // layout.tp), layout.pp * layout.dp)[1:]
    away = sum(others)
    across = total * away / (n - 1) if n > 1 else 0.0
    # Of a token's k copies k · away/n leave the node; once, one to each node that has any of its experts.
    once = sum(any_of_experts(shape.num_experts, shape.top_k, part / n) for part in others)
    return AllToAll(total - across, across, across * once * n / (shape.top_k * away) if away else 0.0)


def _on_nodes(n: int, room: int, ranks: int) -> list[int]:
    """Of n neighbours that are a group, how many are on each node: first on that of the rank with the fewest beside it.

    Args:
        room: neighbours that a node has room for.
        ranks: all, in groups one after the other, so that with n = 64 and room 72 the second group is on two nodes.
    """
    groups = []
    for start in range(0, min(ranks, math.lcm(n, room)), n):
        first = min(n, room - start % room)
        nodes, rest = divmod(n - first, room)
        groups.append(sorted([first, *[room] * nodes, *[rest] * bool(rest)]))
    return min(groups, key=lambda parts: parts[0])


# ---- layouts --------------------------------------------------------------------------------------------------------


def possible_expert_tp(of: ExpertTraining) -> list[int]:
    """Tensor-parallel ranks of a node that share heads and the widths of all MLPs evenly."""
    shape = of.shape
    keys = shape.base.num_kv_heads or shape.base.num_heads
    widths = math.gcd(shape.d_expert, shape.d_shared, shape.base.mlp_width if shape.dense else 0)
    common = divisors(math.gcd(shape.base.num_heads, widths))
    return [n for n in common if n <= of.training.cluster.per_node and (keys % n == 0 or n % keys == 0)]


def expert_refusal(of: ExpertTraining, layout: ExpertLayout) -> str | None:
    """The first reason why a layout is impossible, or None."""
    return next(_refusals(of, layout), None)


def _refusals(of: ExpertTraining, layout: ExpertLayout) -> Iterator[str]:
    """Each may rely on those before it."""
    shape, gpus, batch = of.shape, of.training.cluster.gpus, of.training.global_batch
    tp, pp, dp, ep, rows, zero, recompute = layout
    ranks, layers = tp * pp, shape.base.num_layers
    if not of.training.stack.fused_attention:
        yield "Experts are counted with fused attention, and this stack keeps the scores: choose the stack megatron."
    if recompute not in RECOMPUTED:
        yield f"Recomputation {recompute} is not counted with experts: choose none or full."
    if tp not in (possible := possible_expert_tp(of)):
        yield f"Heads and experts cannot be shared by {tp} ranks of a node along tp: choose tp {one_of(possible)}."
    if pp > layers:
        yield f"{layers} blocks do not fill {pp} stages: choose pp {layers} or less."
    if gpus % ranks:
        yield f"{gpus:,} GPUs do not divide by tp × pp = {ranks:,}: choose less, or {ranks:,} GPUs."
    if gpus != ranks * dp:
        yield f"tp × pp × dp = {ranks * dp:,}, and there are {gpus:,} GPUs: choose dp {gpus // ranks:,}."
    if ep not in (possible := possible_ep(of, dp)):
        yield f"{shape.num_experts} experts and dp {dp:,} do not both divide by ep {ep}: choose ep {one_of(possible)}."
    if batch % dp:
        yield f"{batch:,} sequences do not divide among dp {dp:,}: choose a batch of {-(-batch // dp) * dp:,}."
    if batch // dp % rows:
        ways = one_of(n for n in divisors(batch // dp) if n <= 8)
        yield f"The {batch // dp:,} sequences of a data-parallel rank do not divide by {rows}: choose b {ways}."
    if zero == 3 and pp > 1:
        yield "ZeRO-3 is planned without pipeline parallelism: choose pp 1, or ZeRO stage 1."
    if zero and dp == 1:
        yield f"ZeRO shards over data-parallel ranks, and there is one: choose ZeRO stage 0, or {2 * gpus:,} GPUs."


def possible_ep(of: ExpertTraining, dp: int) -> list[int]:
    """Ranks that can share the experts: divisors of both dp and E."""
    return divisors(math.gcd(dp, of.shape.num_experts))


def layouts_by_ep(
    of: ExpertTraining, rows: int, zero: int | None, recompute: str, headroom: float = HEADROOM
) -> list[ExpertLayout]:
    """One for each ep: of the layouts that fit, the one with the fewest tp · pp ranks, then the fewest stages.

    A tight one, which leaves less than the headroom, counts only if all are tight. Where none fits, the one with the
    least memory. `zero` None is stage 1, or 0 on one data-parallel rank.

    Raises:
        ValueError: no layout is possible; the reason for the plainest.
    """
    gpus, by_ep = of.training.cluster.gpus, {}
    for tp, pp in product(divisors(gpus), divisors(gpus)):
        dp = gpus // (tp * pp)
        stage = int(dp > 1) if zero is None else zero
        for ep in possible_ep(of, dp) if dp else []:
            layout = ExpertLayout(tp, pp, dp, ep, rows, stage, recompute)
            if expert_refusal(of, layout) is None:
                by_ep.setdefault(ep, []).append((rank_bytes_most(of, layout).total, layout))
    if not by_ep:
        plain = ExpertLayout(1, 1, gpus, 1, rows, int(gpus > 1) if zero is None else zero, recompute)
        raise ValueError(
            expert_refusal(of, plain) or "no layout is possible: choose more GPUs, or a batch of 1,024 sequences"
        )
    room, found = of.training.room_bytes, []
    for _, tried in sorted(by_ep.items()):
        verdicts = [(memory_verdict(held, room, headroom), layout) for held, layout in tried]
        easy = [layout for verdict, layout in verdicts if verdict == FITS]
        fitting = easy or [layout for verdict, layout in verdicts if verdict != TOO_LARGE]
        least = min(tried)[1]
        found.append(min(fitting, key=lambda one: (one.tp * one.pp, one.pp)) if fitting else least)
    return found
