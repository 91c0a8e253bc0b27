"""Why a layout is refused, in a word and a sentence, and six that are: for exercises 14.3 and 14.6."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

from lib.cost.sizes import LLAMA, ModelShape
from lib.planner import Cluster, Layout4D, Training, fits, memory_bytes
from lib.planner.search import layout_text
from lib.planner.training import GPUS, PRESET_MODELS, stack_for

COUNTS = "tp", "cp", "pp", "dp", "rows", "stages_per_rank"
NOTHING_BINDS = "all conditions hold"
GPU_COUNT, HEADS, LAYERS, BATCH, ROUNDS = "gpus", "heads", "layers", "batch", "rounds"
PIPELINE_ZERO3, NODE, MODEL_STATES, KEPT = "zero-3", "node", "states", "activations"


def layout_of(result: Any) -> Layout4D | None:
    """The layout that an answer returned, if it is one."""
    try:
        layout = Layout4D(*result)
        counts = {name: operator.index(getattr(layout, name)) for name in COUNTS}
        zero = operator.index(layout.zero)
    except TypeError:
        return None
    layout = layout._replace(**counts, zero=zero, sequence_parallel=bool(layout.sequence_parallel))
    offered = layout.cp == 1 and zero in (0, 1, 3) and layout.recompute in ("none", "full")
    return layout if offered and layout.schedule == "1f1b" and min(counts.values()) > 0 else None


def binds(training: Training, layout: Layout4D) -> tuple[str, str]:
    """The first condition that does not hold, and a sentence with its numbers; divisions come before memory."""
    tp, pp, dp, rows, v = layout.tp, layout.pp, layout.dp, layout.rows, layout.stages_per_rank
    model, gpus, per_node = training.model, training.cluster.gpus, training.cluster.per_node
    stages, m = pp * v, training.global_batch / (dp * rows)
    if layout.gpus != gpus:
        return GPU_COUNT, f"tp · pp · dp = {layout.gpus}, and there are {gpus} GPUs."
    if tp > per_node:
        return NODE, f"tp = {tp} reaches over nodes of {per_node} GPUs."
    if model.num_heads % tp:
        return HEADS, f"{model.num_heads} heads cannot be shared out evenly among tp = {tp}."
    if model.num_layers % stages and (model.num_layers + 2) % stages:
        return LAYERS, f"{model.num_layers} layers cannot be shared out evenly among {stages} stages."
    if m != int(m):
        return BATCH, f"{training.global_batch} sequences cannot be shared out among dp · b = {dp} · {rows}."
    if v > 1 and (pp == 1 or m % pp):
        return ROUNDS, f"v = {v} needs a multiple of p = {pp} microbatches, and there are {int(m)}."
    if layout.zero == 3 and (pp > 1 or tp > 1):
        return PIPELINE_ZERO3, "ZeRO-3 goes with neither a pipeline nor tensor parallelism here."
    if not fits(training, layout):
        found = memory_bytes(training, layout)
        states = found.parameters + found.gradients + found.optimizer
        room = training.room_bytes
        text = f"{layout_text(layout)} needs {found.total / 1e9:.1f} GB, and a GPU has {room / 1e9:.1f}"
        word = MODEL_STATES if states > room else KEPT
        return word, f"{text}: {states / 1e9:.1f} for model states, {found.activations / 1e9:.1f} for activations."
    return NOTHING_BINDS, ""


BROKEN = {  # row of exercise 14.3 -> its layouts: model, sequences of a step, tp, pp, rows of a microbatch, ZeRO
    "": (
        ("30B", 512, 8, 2, 1, 1),
        ("30B", 512, 4, 8, 1, 1),
        ("30B", 496, 2, 2, 4, 1),
        ("70B", 512, 16, 2, 1, 1),
        ("70B", 512, 8, 1, 2, 0),
        ("70B", 512, 2, 8, 4, 1),
    ),
    "A": (
        ("70B", 448, 8, 1, 2, 0),
        ("30B", 432, 4, 2, 4, 1),
        ("30B", 448, 8, 2, 1, 1),
        ("70B", 480, 2, 8, 2, 1),
        ("30B", 448, 4, 8, 1, 1),
        ("70B", 448, 16, 4, 1, 1),
    ),
    "B": (
        ("70B", 384, 16, 4, 2, 1),
        ("30B", 480, 2, 4, 4, 1),
        ("70B", 512, 8, 1, 1, 0),
        ("30B", 384, 4, 8, 1, 1),
        ("30B", 384, 8, 2, 1, 1),
        ("70B", 496, 4, 2, 4, 1),
    ),
}


def broken_layouts(row: str = "") -> list[tuple[Training, Layout4D]]:
    """The six of exercise 14.3, in the book or in a row: a training, and a layout of 64 GPUs that is refused."""
    models = {  # Touvron et al. 2023 (Llama), table 2; Llama 2's 70B with shorter sequences
        "30B": ModelShape(6656, 60, 52, 32_000, 2048, d_mlp=17_920, tied=False, **LLAMA),
        "70B": replace(PRESET_MODELS["llama-70b"], context=2048),
    }
    cluster, stack = Cluster(GPUS["h100"], 64), stack_for("megatron-lm", "h100")
    return [
        (
            Training(models[model], cluster, stack, sequences),
            Layout4D(tp, 1, pp, 64 // (tp * pp), rows, 1, zero, True),
        )
        for model, sequences, tp, pp, rows, zero in BROKEN[row]
    ]
