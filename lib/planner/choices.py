"""The layouts among which a search chooses: all that split heads, layers, tokens and sequences evenly.

The problem: a reader who forgets a choice, or whose library lacks one, compares the wrong layouts. The idea: the
choices are data. `usual_choices` has those of a library, and is the default of the command and of the page *Will it
fit?*; `ALL_OPEN` has all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from lib.cost.sizes import PLANNED_RECOMPUTE, heads_of_rank, shares_heads
from lib.layout import divisors
from lib.planner.libraries import LIBRARIES
from lib.planner.margin import HEADROOM
from lib.planner.seconds import has_even_stages
from lib.planner.training import Layout4D, Training

MOST_ROWS, MOST_STAGES_PER_RANK, MOST_NODES_OF_TP = 8, 12, 2
FEWEST_TOKENS = 2048  # of a sequence, on a context-parallel rank
CP_RANKS = [2**k for k in range(10)]  # that are planned
DEFERRED = "zb-h1", "zb-v"  # schedules that defer weight gradients


@dataclass(frozen=True)
class Choices:
    """The choices of the search.

    Args:
        zero: stages of ZeRO; 3 only without a pipeline. 2 is off by default, because it reduces the gradients of each
            microbatch.
        recompute: kinds of recomputation.
        every: with `full`, recompute one block in so many.
        loss_chunks: pieces of the loss.
        headroom: fraction of a GPU's memory; layouts that leave less are tight, and come after all others.
        hybrid: whether ZeRO-3 may be with tp, or over the GPUs of a node only (HSDP); our own library and DeepSpeed
            have neither.
        context_parallel: whether a sequence may be split.
        attention: its way over context-parallel ranks (`Layout4D.attention`).
        pipeline: whether layers may be split.
        interleaved: whether a rank may have several stages.
        zero_bubble: whether weight gradients may be deferred, with the schedules `deferred`.
    """

    zero: tuple[int, ...] = (0, 1, 3)
    recompute: tuple[str, ...] = ("none", "full")
    every: tuple[int, ...] = (1,)
    loss_chunks: tuple[int, ...] = (1,)
    context_parallel: bool = False
    attention: str = ""
    interleaved: bool = True
    zero_bubble: bool = False
    hybrid: bool = False
    pipeline: bool = True
    headroom: float = HEADROOM
    deferred: tuple[str, ...] = DEFERRED


ALL_OPEN = Choices((0, 1, 3), PLANNED_RECOMPUTE, (1, 2), (1, 8), context_parallel=True, zero_bubble=True, hybrid=True)


def usual_choices(library: str) -> Choices:
    """Those that a library has (a key of `LIBRARIES`): what a search considers unless it is told otherwise."""
    has = LIBRARIES[library]
    deferred = tuple(schedule for schedule in DEFERRED if schedule in has.schedules)
    return Choices(
        recompute=has.recompute,
        every=has.every,
        loss_chunks=has.loss_chunks,
        context_parallel=has.context_parallel,
        interleaved="interleaved" in has.schedules,
        zero_bubble=bool(deferred),
        hybrid=has.hybrid,
        pipeline=bool(has.schedules),
        deferred=deferred or DEFERRED,
    )


def beyond(choices: Choices, layout: Layout4D) -> list[str]:
    """The parts of a layout that are not among the choices, in words."""
    schedule, is_sharded = layout.schedule, layout.zero == 3
    parts = {
        "a pipeline": layout.pp > 1 and not choices.pipeline,
        "context parallelism": layout.cp > 1 and not choices.context_parallel,
        "several stages per rank": layout.stages_per_rank > 1 and schedule == "1f1b" and not choices.interleaved,
        schedule.upper(): schedule != "1f1b" and not (choices.zero_bubble and schedule in choices.deferred),
        "ZeRO-3 with tp": is_sharded and layout.tp > 1 and not choices.hybrid,
        "HSDP": layout.replicas > 1 and not choices.hybrid,
        f"ZeRO-{layout.zero}": layout.zero not in choices.zero,
        f"recomputation {layout.recompute}": layout.recompute not in choices.recompute,
        f"recomputation of one block in {layout.every}": layout.recompute == "full"
        and layout.every not in choices.every,
        f"a loss in {layout.loss_chunks} pieces": layout.loss_chunks not in choices.loss_chunks,
    }
    return [words for words, is_beyond in parts.items() if is_beyond]


def possible_tp(training: Training) -> list[int]:
    """Tensor-parallel ranks that share the heads evenly, on at most two nodes."""
    model, most = training.model, MOST_NODES_OF_TP * training.cluster.per_node
    keys = model.num_kv_heads or model.num_heads
    return [n for n in divisors(model.num_heads) if n <= most and (keys % n == 0 or n % keys == 0)]


def possible_cp(training: Training) -> list[int]:
    """Context-parallel ranks that share the tokens of a sequence evenly, and have enough of them."""
    tokens = training.model.context
    return [n for n in CP_RANKS if n == 1 or (tokens % n == 0 and tokens // n >= FEWEST_TOKENS)]


def all_layouts(training: Training, choices: Choices) -> Iterator[Layout4D]:
    """Every layout on exactly the GPUs of the cluster that splits heads, layers, tokens and sequences evenly."""
    for plain in plain_layouts(training, choices):
        yield from layouts_on(training, choices, plain)


def plain_layouts(training: Training, choices: Choices) -> Iterator[Layout4D]:
    """All ranks, microbatch sizes and stages per rank; without ZeRO or recomputation, and with 1F1B."""
    model, gpus = training.model, training.cluster.gpus
    shared, cuts = possible_tp(training), possible_cp(training) if choices.context_parallel else [1]
    depths, way = divisors(gpus) if choices.pipeline else [1], choices.attention or training.stack.cp_attention
    for tp, cp, pp in product(shared, cuts, depths):
        dp, rest = divmod(gpus, tp * cp * pp)
        if cp > 1 and way == "ulysses" and not shares_heads(*heads_of_rank(model, tp), cp):
            continue
        if rest or pp > model.num_layers + 2 or training.global_batch % dp:
            continue
        for rows in (2**k for k in range(MOST_ROWS.bit_length()) if training.global_batch // dp % 2**k == 0):
            for v in _stages_per_rank(training, choices, pp, training.global_batch // dp // rows):
                one = Layout4D(tp, cp, pp, dp, rows, v, zero=0, sequence_parallel=tp > 1)
                yield one._replace(attention=choices.attention) if cp > 1 else one


def _stages_per_rank(training: Training, choices: Choices, pp: int, m: int) -> list[int]:
    """Those that layers and microbatches allow."""
    most = MOST_STAGES_PER_RANK if choices.interleaved and pp > 1 and m % pp == 0 else 1
    return [v for v in range(1, most + 1) if has_even_stages(training.model.num_layers, pp * v)]


def layouts_on(training: Training, choices: Choices, plain: Layout4D) -> Iterator[Layout4D]:
    """All kinds of recomputation, stages of ZeRO, schedules and pieces of the loss on these ranks."""
    zeros = possible_zero(training, choices, plain)
    for layout, (zero, replicas) in product(with_recomputation(training, choices, plain), zeros):
        for schedule, chunks in product(possible_schedules(training, choices, layout), choices.loss_chunks):
            yield layout._replace(zero=zero, replicas=replicas, schedule=schedule, loss_chunks=chunks)


def with_recomputation(training: Training, choices: Choices, plain: Layout4D) -> list[Layout4D]:
    """The layout with each kind of recomputation."""
    is_fused = training.stack.fused_attention  # it recomputes its matrix in any case
    kinds = [kind for kind in choices.recompute if not (is_fused and kind == "selective")]
    ways = [(kind, n) for kind in kinds for n in (choices.every if kind == "full" else (1,))]
    return [plain._replace(recompute=kind, every=n) for kind, n in ways]


def possible_schedules(training: Training, choices: Choices, layout: Layout4D) -> list[str]:
    """1F1B, and the one that defers weight gradients, if stages and microbatches fill it and nothing is recomputed."""
    pp, v, m = layout.pp, layout.stages_per_rank, layout.microbatches(training.global_batch)
    found = ["1f1b"]
    if choices.zero_bubble and pp > 1 and layout.recompute == "none":
        fills = {"zb-h1": v == 1 and m >= pp, "zb-v": v == 2 and m >= 2 * pp - 1}
        found += [schedule for schedule in choices.deferred if fills[schedule]]
    return found


def possible_zero(training: Training, choices: Choices, plain: Layout4D) -> list[tuple[int, int]]:
    """Stages of ZeRO on these ranks, each with its copies of the model."""
    tp, ranks = plain.tp, plain.dp * plain.cp
    alone = plain.pp == 1 and (tp == 1 or choices.hybrid)
    zeros = [(zero, 1) for zero in choices.zero if (zero < 3 or alone) and (zero == 0 or ranks > 1)]
    copies, rest = divmod(ranks, max(1, training.cluster.per_node // tp))
    if choices.hybrid and alone and 3 in choices.zero and 1 < copies < ranks and rest == 0:
        zeros.append((3, copies))
    return zeros


def layout_text(layout: Layout4D) -> str:
    """A layout in a line: `tp 8 · pp 4 · dp 2, b 1, v 2, ZeRO-1, sp`."""
    x = layout
    split = f" · cp {x.cp}" + f" {x.attention}" * bool(x.attention)
    options = {
        f"tp {x.tp}" + split * (x.cp > 1) + f" · pp {x.pp} · dp {x.dp}, b {x.rows}": True,
        f"v {x.stages_per_rank}": x.stages_per_rank > 1,
        f"ZeRO-{x.zero}": x.zero > 0,
        "sp": x.sequence_parallel,
        f"{x.replicas} copies": x.replicas > 1,
        f"recompute {x.recompute}" + f", 1 in {x.every}" * (x.every > 1): x.recompute != "none",
        f"loss in {x.loss_chunks}": x.loss_chunks > 1,
        x.schedule: x.schedule != "1f1b",
    }
    return ", ".join(words for words, holds in options.items() if holds)
