"""All possible layouts, in order of their predicted seconds; and why the next layout is slower.

The problem: a cluster of 16,384 GPUs has thousands of layouts, and a person compares three. The idea: list them all,
drop those that do not fit into memory, and sort. A layout takes microseconds, because the costs of a block are computed
once for each (tp, cp, microbatch, recomputation).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from lib.layout import divisors
from lib.planner.fits import Bytes, memory_bytes
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
        zero: stages of ZeRO; 3 only without a pipeline, and with tp=1, as in our own library and DeepSpeed. 2 is off by
            default, because it reduces the gradients of each microbatch.
        recompute: kinds of recomputation.
        context_parallel: whether a sequence may be split.
        interleaved: whether a rank may have several stages.
        zero_bubble: whether weight gradients may be deferred (ZB-H1, ZB-V).
    """

    zero: tuple[int, ...] = (0, 1, 3)
    recompute: tuple[str, ...] = ("none", "full")
    context_parallel: bool = False
    interleaved: bool = True
    zero_bubble: bool = False


def all_layouts(training: Training, choices: Choices) -> Iterator[Layout4D]:
    """Every layout on exactly the GPUs of the cluster that splits heads, layers, tokens and sequences evenly."""
    model, gpus = training.model, training.cluster.gpus
    most_tp = min(model.num_heads, MOST_NODES_OF_TP * training.cluster.per_node)
    keys = model.num_kv_heads or model.num_heads
    shared = (n for n in divisors(model.num_heads) if keys % n == 0 or n % keys == 0)
    for tp in (n for n in shared if n <= most_tp and gpus % n == 0):
        cuts = _context_ranks(training) if choices.context_parallel else (1,)
        for cp in (n for n in cuts if gpus // tp % n == 0):
            for pp in divisors(gpus // tp // cp):
                dp = gpus // tp // cp // pp
                if pp <= model.num_layers + 2 and training.global_batch % dp == 0:
                    yield from _with(training, choices, tp, cp, pp, dp)


def _with(training: Training, choices: Choices, tp: int, cp: int, pp: int, dp: int) -> Iterator[Layout4D]:
    """All microbatch sizes, stages per rank, stages of ZeRO and kinds of recomputation on these ranks."""
    mine = training.global_batch // dp
    zeros = [zero for zero in choices.zero if not (zero == 3 and (pp > 1 or tp > 1) or zero and dp * cp == 1)]
    for rows in (2**k for k in range(MOST_ROWS.bit_length()) if mine % 2**k == 0):
        m = mine // rows
        for v in _stages_per_rank(training.model.num_layers, pp, m, choices.interleaved):
            for recompute, zero in product(choices.recompute, zeros):
                layout = Layout4D(tp, cp, pp, dp, rows, v, zero, tp > 1, recompute)
                yield layout
                if choices.zero_bubble and pp > 1 and recompute == "none":
                    if v == 1 and m >= pp:
                        yield layout._replace(schedule="zb-h1")
                    if v == 2 and m >= 2 * pp - 1:
                        yield layout._replace(schedule="zb-v")


def _stages_per_rank(layers: int, pp: int, m: int, interleaved: bool) -> list[int]:
    """v that split the layers evenly; above 1 only in a pipeline where m is a multiple of the ranks."""
    most = MOST_STAGES_PER_RANK if interleaved and pp > 1 and m % pp == 0 else 1
    return [v for v in range(1, most + 1) if has_even_stages(layers, pp * v)]


def _context_ranks(training: Training) -> list[int]:
    """Numbers of ranks that can split a sequence: each has at least `FEWEST_TOKENS`."""
    return [2**k for k in range(10) if training.model.context // 2**k >= FEWEST_TOKENS or k == 0]


def best_layouts(training: Training, choices: Choices | None = None, best: int = 3) -> list[Planned]:
    """The fastest layouts that fit, the fastest first.

    Raises:
        ValueError: no layout splits evenly, or none fits: by how much the smallest is too large, and a way out.
    """
    room = training.room_bytes
    found: list[Planned] = []
    smallest: tuple[float, Layout4D] | None = None
    for layout in all_layouts(training, choices or Choices()):
        memory = memory_bytes(training, layout)
        if memory.total <= room:
            found.append(Planned(layout, step_s(training, layout), memory))
        elif smallest is None or memory.total < smallest[0]:
            smallest = memory.total, layout
    if not found:
        raise ValueError(_nothing(training, smallest, room))
    found.sort(key=lambda one: (one.seconds.total, one.memory.total))
    return found[:best]


def _nothing(training: Training, smallest: tuple[float, Layout4D] | None, room: float) -> str:
    """Why there is no layout, and the way out."""
    model, gpus = training.model, training.cluster.gpus
    if smallest is None:
        return (
            f"no layout cuts {model.num_layers} layers, {model.num_heads} heads and {training.global_batch} sequences "
            f"evenly over {gpus} GPUs; use powers of two, such as {2 ** (gpus.bit_length() - 1)} GPUs and "
            f"{2 ** (training.global_batch - 1).bit_length()} sequences"
        )
    size, layout = smallest
    many = gpus
    while many < 2**20 and model.num_parameters * 16 / many > room / 2:
        many *= 2
    help_ = f"use {many} GPUs" if many > gpus else "use shorter sequences, or context parallelism"
    return (
        f"nothing fits: the smallest layout ({layout_text(layout)}) needs {size / 1e9:.1f} GB on a GPU, "
        f"{(size - room) / 1e9:.1f} GB more than available; {help_}, or a GPU with more memory"
    )


def why_slower(one: Planned, other: Planned) -> str:
    """Why the second layout is slower, in a clause: the kind with the largest difference from the first."""
    differences = {kind: b - a for kind, a, b in zip(Seconds._fields, one.seconds, other.seconds, strict=True)}
    kind = max(differences, key=lambda kind: differences[kind])
    whole = other.seconds.total / one.seconds.total - 1
    return f"{whole:.1%} slower: {differences[kind]:.3g} s more for {kind}"


def layout_text(layout: Layout4D) -> str:
    """A layout in a line: `tp 8 · pp 4 · dp 2, b 1, v 2, ZeRO-1, sp`."""
    sizes = zip(("tp", "cp", "pp", "dp"), layout[:4], strict=True)
    axes = [f"{axis} {n}" for axis, n in sizes if n > 1 or axis != "cp"]
    parts = [" · ".join(axes), f"b {layout.rows}"]
    parts += [f"v {layout.stages_per_rank}"] if layout.stages_per_rank > 1 else []
    parts += [f"ZeRO-{layout.zero}"] if layout.zero else []
    parts += ["sp"] if layout.sequence_parallel else []
    parts += [f"recompute {layout.recompute}"] if layout.recompute != "none" else []
    parts += [layout.schedule] if layout.schedule != "1f1b" else []
    return ", ".join(parts)
