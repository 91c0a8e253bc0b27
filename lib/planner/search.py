"""All possible layouts that fit into memory, in order of their predicted seconds; and why the next is slower.

The problem: a cluster of 16,384 GPUs has thousands of layouts, and a person compares three. The idea: list them all,
drop those that do not fit, and sort. A layout takes microseconds, because the costs of a block are computed once for
each (tp, cp, microbatch, recomputation).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from lib.cost.sizes import PLANNED_RECOMPUTE
from lib.layout import divisors, one_of
from lib.planner.margin import HEADROOM, TIGHT, TOO_LARGE
from lib.planner.memory import Bytes, bytes_of_rank, fits, memory_bytes, share_of_rank  # noqa: F401 their old place
from lib.planner.seconds import Seconds, has_even_stages, step_s
from lib.planner.training import Layout4D, Training

MOST_ROWS, MOST_STAGES_PER_RANK, MOST_NODES_OF_TP = 8, 12, 2
FEWEST_TOKENS = 2048  # of a sequence, on a context-parallel rank


class Planned(NamedTuple):
    """A layout, with its seconds and its memory."""

    layout: Layout4D
    seconds: Seconds
    memory: Bytes


@dataclass(frozen=True)
class Choices:
    """The choices of the search.

    Args:
        zero: stages of ZeRO; 3 only without a pipeline. 2 is off by default, because it reduces the gradients of each
            microbatch.
        recompute: kinds of recomputation; only `none` is tried where it fits with headroom.
        every: with `full`, recompute one block in so many.
        loss_chunks: pieces of the loss, from the fewest; more only where it does not fit.
        headroom: fraction of a GPU's memory; layouts that leave less are tight, and come after all others.
        hybrid: whether ZeRO-3 may be with tp, or over the GPUs of a node only (HSDP); our own library and DeepSpeed
            have neither.
        context_parallel: whether a sequence may be split.
        interleaved: whether a rank may have several stages.
        zero_bubble: whether weight gradients may be deferred (ZB-H1, ZB-V).
    """

    zero: tuple[int, ...] = (0, 1, 3)
    recompute: tuple[str, ...] = ("none", "full")
    every: tuple[int, ...] = (1,)
    loss_chunks: tuple[int, ...] = (1,)
    context_parallel: bool = False
    interleaved: bool = True
    zero_bubble: bool = False
    hybrid: bool = False
    headroom: float = HEADROOM


ALL_OPEN = Choices((0, 1, 3), PLANNED_RECOMPUTE, (1, 2), (1, 8), context_parallel=True, zero_bubble=True, hybrid=True)


def possible_tp(training: Training) -> list[int]:
    """Tensor-parallel ranks that share the heads evenly, on at most two nodes."""
    model, most = training.model, MOST_NODES_OF_TP * training.cluster.per_node
    keys = model.num_kv_heads or model.num_heads
    return [n for n in divisors(model.num_heads) if n <= most and (keys % n == 0 or n % keys == 0)]


def possible_cp(training: Training) -> list[int]:
    """Context-parallel ranks that have tokens enough."""
    return [n for n in (2**k for k in range(10)) if n == 1 or training.model.context // n >= FEWEST_TOKENS]


def all_layouts(training: Training, choices: Choices) -> Iterator[Layout4D]:
    """Every layout on exactly the GPUs of the cluster that splits heads, layers, tokens and sequences evenly."""
    model, gpus = training.model, training.cluster.gpus
    shared, cuts = possible_tp(training), possible_cp(training) if choices.context_parallel else [1]
    for tp, cp, pp in product(shared, cuts, divisors(gpus)):
        dp, rest = divmod(gpus, tp * cp * pp)
        if rest == 0 and pp <= model.num_layers + 2 and training.global_batch % dp == 0:
            yield from _with(training, choices, tp, cp, pp, dp)


def _with(training: Training, choices: Choices, tp: int, cp: int, pp: int, dp: int) -> Iterator[Layout4D]:
    """All microbatch sizes, stages per rank, stages of ZeRO and kinds of recomputation on these ranks."""
    mine = training.global_batch // dp
    alone = pp == 1 and (tp == 1 or choices.hybrid)
    zeros = [(zero, 1) for zero in choices.zero if (zero < 3 or alone) and (zero == 0 or dp * cp > 1)]
    copies, rest = divmod(dp * cp, max(1, training.cluster.per_node // tp))
    if choices.hybrid and alone and 3 in choices.zero and 1 < copies < dp * cp and rest == 0:
        zeros.append((3, copies))
    ways = [(how, n) for how in choices.recompute for n in (choices.every if how == "full" else (1,))]
    if training.stack.fused_attention:  # which recomputes its matrix in any case
        ways = [way for way in ways if way[0] != "selective"]
    for rows in (2**k for k in range(MOST_ROWS.bit_length()) if mine % 2**k == 0):
        m = mine // rows
        most = MOST_STAGES_PER_RANK if choices.interleaved and pp > 1 and m % pp == 0 else 1
        even = [v for v in range(1, most + 1) if has_even_stages(training.model.num_layers, pp * v)]
        for v, (recompute, every), (zero, replicas) in product(even, ways, zeros):
            schedules = ["1f1b"]
            if choices.zero_bubble and pp > 1 and recompute == "none":
                schedules += ["zb-h1"] if v == 1 and m >= pp else ["zb-v"] if v == 2 and m >= 2 * pp - 1 else []
            for schedule, chunks in product(schedules, choices.loss_chunks):
                yield Layout4D(
                    tp,
                    cp,
                    pp,
                    dp,
                    rows=rows,
                    stages_per_rank=v,
                    zero=zero,
                    sequence_parallel=tp > 1,
                    recompute=recompute,
                    schedule=schedule,
                    replicas=replicas,
                    every=every,
                    loss_chunks=chunks,
                )


def best_layouts(training: Training, choices: Choices | None = None, best: int = 3) -> list[Planned]:
    """The fastest layouts that fit, the fastest first; tight ones only after all that leave the headroom.

    Raises:
        ValueError: no layout splits evenly, or none fits: by how much the smallest is too large, and a way out.
    """
    if training.no_seconds:
        raise ValueError(f"{training.no_seconds}; layouts_by_memory lists layouts without them")
    choices, room = choices or Choices(), training.room_bytes
    easy = (1 - choices.headroom) * room
    held, enough = {}, set()
    for layout in all_layouts(training, choices):
        plain = layout._replace(recompute="none", every=1, loss_chunks=1)
        if (layout.recompute != "none" or layout.loss_chunks > 1) and plain in enough:  # it fits without
            continue
        held[layout] = memory_bytes(training, layout)
        if layout.recompute == "none" and held[layout].total <= easy:
            enough.add(plain)
    fitting = [(layout, memory) for layout, memory in held.items() if memory.total <= room]
    if not fitting:
        raise ValueError(_nothing(training, choices, held))
    roomy = [one for one in fitting if one[1].total <= easy]
    if len(roomy) >= best:  # then no tight layout is among the best
        fitting = roomy
    planned = [Planned(layout, step_s(training, layout), memory) for layout, memory in fitting]
    return sorted(planned, key=lambda plan: (plan.memory.total > easy, plan.seconds.total, plan.memory.total))[:best]


def layouts_by_memory(
    training: Training, choices: Choices | None = None, best: int = 3
) -> list[tuple[Layout4D, Bytes]]:
    """Layouts that fit, without seconds: tight ones last, then the least split and the least sharded first.

    Raises:
        ValueError: as `best_layouts`.
    """
    choices, room = choices or Choices(), training.room_bytes
    held = {
        one: memory_bytes(training, one)
        for one in all_layouts(training, choices)
        if training.offload != "parameters" or one.zero == 3
    }

    def order(one: Layout4D) -> tuple[float, ...]:
        is_tight = held[one].total > (1 - choices.headroom) * room
        again = PLANNED_RECOMPUTE.index(one.recompute)
        return is_tight, one.tp * one.cp * one.pp, one.loss_chunks, again, one.zero, -one.rows, held[one].total

    fitting = sorted((one for one, memory in held.items() if memory.total <= room), key=order)
    if not fitting:
        raise ValueError(_nothing(training, choices, held))
    return [(one, held[one]) for one in fitting[:best]]


def _nothing(training: Training, choices: Choices, held: dict[Layout4D, Bytes]) -> str:
    """Why there is no layout, and ways out, each of them tried."""
    model, gpus, batch, dps = training.model, training.cluster.gpus, training.global_batch, []
    if held:
        layout = min(held, key=lambda layout: held[layout].total)
        size, more = held[layout].total / 1e9, (held[layout].total - training.room_bytes) / 1e9
        needs = f"needs {size:.1f} GB on a GPU, {more:.1f} GB more than available"
        why = f"nothing fits: the smallest layout ({layout_text(layout)}) {needs}"
    elif dps := sorted({layout.dp for layout in all_layouts(replace(training, global_batch=gpus), choices)}):
        shared = f"{model.num_layers} layers and {model.num_heads} heads on {gpus:,} GPUs need dp {one_of(dps)}"
        why = f"the batch is the reason: {shared}, and a batch of {batch:,} divides by none of them"
    else:
        why = f"no layout cuts {model.num_layers} layers and {model.num_heads} heads evenly over {gpus:,} GPUs"
    ways, more = [], {"context parallelism": {"context_parallel": True}, "a loss in pieces": {"loss_chunks": (1, 8)}}
    if held or not dps:
        many = {2**k for k in range(21)} | {training.cluster.per_node * k for k in range(1, 65)}  # up to 64 nodes
        larger = [replace(training, cluster=replace(training.cluster, gpus=n)) for n in sorted(many) if n > gpus]
        ways = [f"{fitting.cluster.gpus:,} GPUs" for fitting in _first_that_fits(larger, choices)]
        wider = {name: replace(choices, **changes) for name, changes in more.items()}
        ways += [name for name, wide in wider.items() if wide != choices and _first_that_fits([training], wide)]
        if not ways:
            first = _first_that_fits(larger, replace(choices, context_parallel=True, loss_chunks=(1, 8)))
            ways = [f"{fitting.cluster.gpus:,} GPUs, with {' and '.join(more)}" for fitting in first]
    if not ways:  # the batch that fits the most layouts, but not twice as large if there is a smaller one
        batches = sorted({-(-batch // n) * n for n in divisors(gpus)}, key=lambda n: n if n >= 2 * batch else -n)
        first = _first_that_fits((replace(training, global_batch=n) for n in batches), choices)
        ways = [f"a batch of {fitting.global_batch:,} sequences" for fitting in first]
    if not ways:
        shorter = (replace(training, model=replace(model, context=model.context >> k)) for k in range(1, 30))
        ways = [f"sequences of {fitting.model.context:,} tokens" for fitting in _first_that_fits(shorter, choices)]
    return f"{why}; use {' or '.join(ways) or 'a GPU with more memory'}"


def _first_that_fits(trainings: Iterable[Training], choices: Choices) -> list[Training]:
    """The first that has a layout; empty if none has."""
    for training in trainings:
        if any(fits(training, layout) for layout in all_layouts(training, choices)):
            return [training]
    return []


def why_slower(one: Planned, other: Planned) -> str:
    """Why the second layout is slower, in a clause: the kind with the largest difference from the first."""
    differences = {kind: b - a for kind, a, b in zip(Seconds._fields, one.seconds, other.seconds, strict=True)}
    kind = max(differences, key=lambda kind: differences[kind])
    return f"{other.seconds.total / one.seconds.total - 1:.1%} slower: {differences[kind]:.3g} s more for {kind}"


def compared(best: Planned, mine: Planned, word: str) -> str:
    """How much slower a layout that is asked for is than the best of a search; `word` is the verdict on its memory."""
    if word == TOO_LARGE:
        return "yours does not fit, so its seconds are compared with none"
    if mine.seconds.total > best.seconds.total:
        return f"yours is {why_slower(best, mine)}"
    if word == TIGHT and mine.seconds.total < best.seconds.total:
        return f"yours is {best.seconds.total / mine.seconds.total - 1:.1%} faster, and tight"
    return "yours is as fast as the fastest that was found"


def layout_text(layout: Layout4D) -> str:
    """A layout in a line: `tp 8 · pp 4 · dp 2, b 1, v 2, ZeRO-1, sp`."""
    x = layout
    options = {
        f"tp {x.tp}" + f" · cp {x.cp}" * (x.cp > 1) + f" · pp {x.pp} · dp {x.dp}, b {x.rows}": True,
        f"v {x.stages_per_rank}": x.stages_per_rank > 1,
        f"ZeRO-{x.zero}": x.zero > 0,
        "sp": x.sequence_parallel,
        f"{x.replicas} copies": x.replicas > 1,
        f"recompute {x.recompute}" + f", 1 in {x.every}" * (x.every > 1): x.recompute != "none",
        f"loss in {x.loss_chunks}": x.loss_chunks > 1,
        x.schedule: x.schedule != "1f1b",
    }
    return ", ".join(words for words, holds in options.items() if holds)
