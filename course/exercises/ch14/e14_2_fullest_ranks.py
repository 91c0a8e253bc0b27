"""14.2: the memory of the rank with the highest peak in three layouts, in gigabytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from course.check.exercise import Data, Exercise, Mistake, kind, known_number, several, word
from lib.cost.sizes import ModelShape
from lib.mesh import Group
from lib.planner import Cluster, Layout4D, Training, memory_bytes
from lib.planner.presets import GPUS, stack_for

LAYOUTS = {  # with the sequences of a step
    "A": (Layout4D(8, 1, 8, 2, 1, 1, 0, True), 8),
    "B": (Layout4D(8, 1, 4, 4, 1, 4, 1, True), 128),
    "C": (Layout4D(4, 1, 4, 4, 2, 1, 1, True, "full"), 256),
}
WHATS = END, STATES, ACTIVATIONS, LOGITS = ("the rank", "model states", "activations", "logits")


def body(answer: Callable, group: Group, given: Data) -> Data:
    """A rounded number is taken for the right number, or the number of a mistake, that it is near."""
    result = answer()
    found: Data = {"what was returned": kind(result)}
    programs = [EXERCISE.right[0](), *(mistake.wrong() for mistake in EXERCISE.mistakes)]
    for i, (name, row) in enumerate(zip(LAYOUTS, several(result, len(LAYOUTS)), strict=True)):
        for j, (what, value) in enumerate(zip(WHATS, several(row, len(WHATS)), strict=True)):
            known_ones = [rows[i][j] for rows in programs]
            found[f"layout {name}: {what}"] = known_number(value, known_ones) if j else word(value)
    return found


# ---- right programs -------------------------------------------------------------------------------------------------

H, S, V = 8192, 4096, 2**17
BLOCK, HEAD = 12 * H**2, V * H  # parameters


def by_the_planner():
    """Only a last rank has logits."""
    rows, model, stack = [], ModelShape(H, 64, 64, V, S, tied=False), stack_for("megatron", "h100")
    for layout, sequences in LAYOUTS.values():
        found = memory_bytes(Training(model, Cluster(GPUS["h100"], layout.gpus), stack, sequences), layout)
        states = found.parameters + found.gradients + found.optimizer
        end = "last" if found.logits else "first"
        rows.append([end, states / 1e9, found.activations / 1e9, found.logits / 1e9])
    return rows


def states(name, per_parameter=lambda layout: 6 + 12 / (layout.dp if layout.zero else 1), heads=1):
    layout, _ = LAYOUTS[name]
    return per_parameter(layout) * (64 / layout.pp * BLOCK + heads * HEAD) / layout.tp / 1e9


def insides(name, blocks):
    """What so many blocks keep of a microbatch, without recomputation."""
    layout, _ = LAYOUTS[name]
    return 34 * S * layout.rows * H / layout.tp * blocks / 1e9


def recomputed(microbatches=1, blocks=1):
    """Of C: the inputs of all blocks of so many microbatches, and the insides of so many blocks."""
    return microbatches * 16 * 2 * S * 2 * H / 4 / 1e9 + insides("C", blocks)


LOGITS_OF_C = 14 * 2 * S * V / 4 / 1e9
ON_PAPER = {
    "A": ("first", states("A"), 4 * insides("A", 8), 0),
    "B": ("first", states("B"), 4 * (1 + 3 / 16) * insides("B", 16), 0),
    "C": ("last", states("C"), recomputed(), LOGITS_OF_C),
}


def on_paper(**wrong):
    """`C=(3, x)` replaces the last number of layout C."""
    rows = {name: [*row] for name, row in ON_PAPER.items()}
    for name, (i, value) in wrong.items():
        rows[name][i] = value
    return tuple(rows.values())


def rounded():
    return ("First", 16.9, 4.56, 0), ("first", 15.7, 10.8, 0), ("last", 31.4, 1.11, 3.76)


# ---- wrong programs -------------------------------------------------------------------------------------------------


def times(factor):
    """The right activations, times so much."""
    return lambda name: ON_PAPER[name][2] * factor


MORE_ON_THE_FIRST = recomputed(microbatches=4) - recomputed()
ONE_MICROBATCH = "these are the activations of one microbatch. "
WRONG = (  # layouts, entry, the wrong result, hint
    (
        "AB",
        END,
        lambda name: "last",
        "the last rank has the logits, less than 1 GB, but the first rank keeps more microbatches in flight, and their "
        "activations weigh more.",
    ),
    (
        "C",
        END,
        lambda name: "first",
        "the first rank keeps four times the microbatches of the last rank. With full recomputation that is "
        f"{MORE_ON_THE_FIRST:.1f} GB more; compare it with the logits, which only the last rank has.",
    ),
    (
        "ABC",
        STATES,
        partial(states, per_parameter=lambda layout: 4 + 12 / (layout.dp if layout.zero else 1)),
        "your gradients have 2 bytes per parameter. This stack sums them in float32: 4 bytes, so 18 in all.",
    ),
    (
        "ABC",
        STATES,
        partial(states, heads=0),
        "the first rank also holds the embedding, the last rank the head: V·h parameters, divided by t.",
    ),
    (
        "A",
        STATES,
        partial(states, per_parameter=lambda layout: 18 / layout.dp),
        "without ZeRO every replica keeps all model states of its stage. dp divides nothing there.",
    ),
    (
        "BC",
        STATES,
        partial(states, per_parameter=lambda layout: 18 / layout.dp),
        "ZeRO-1 divides the optimizer state over dp, 12 of 18 bytes. Every replica keeps all parameters and gradients "
        "of its stage.",
    ),
    (
        "BC",
        STATES,
        partial(states, per_parameter=lambda layout: 18),
        "you left ZeRO-1 out. It divides the 12 bytes of optimizer state over dp.",
    ),
    (
        "A",
        ACTIVATIONS,
        times(8 / 4),
        "you count p = 8 microbatches in flight. A step has only 4: the first rank keeps min(m, p).",
    ),
    (
        "B",
        ACTIVATIONS,
        times(4 / 4.75),
        "p microbatches in flight is right with one stage per rank. With v of them the first rank keeps "
        "1 + (p-1)/(p·v) times as much.",
    ),
    (
        "B",
        ACTIVATIONS,
        times(32 / 4.75),
        "you keep all 32 microbatches, as GPipe does. Under interleaved 1F1B the first rank keeps p·(1 + (p-1)/(p·v)).",
    ),
    (
        "ABC",
        ACTIVATIONS,
        lambda name: ON_PAPER[name][2] / LAYOUTS[name][0].tp,
        "activations are divided by t twice. The task gives the bytes of a block on one rank.",
    ),
    ("A", ACTIVATIONS, times(1 / 4), ONE_MICROBATCH + "The first rank keeps min(m, p) of them."),
    (
        "B",
        ACTIVATIONS,
        times(1 / 4.75),
        ONE_MICROBATCH + "Under interleaved 1F1B the first rank keeps p·(1 + (p-1)/(p·v)) of them.",
    ),
    (
        "C",
        ACTIVATIONS,
        lambda name: insides(name, 16),
        "you keep the insides of all blocks. With full recomputation a rank keeps their inputs, and the insides of "
        "one.",
    ),
    (
        "C",
        ACTIVATIONS,
        lambda name: recomputed(blocks=0),
        "full recomputation keeps the inputs of all blocks. While a block runs backward, its inside is kept as well.",
    ),
    (
        "C",
        ACTIVATIONS,
        lambda name: recomputed(microbatches=4),
        "these are the activations of the first rank, with four microbatches in flight. The last rank has one.",
    ),
    (
        "C",
        LOGITS,
        lambda name: LOGITS_OF_C * 4,
        "your logits cover the full vocabulary. It is cut over tp.",
    ),
    (
        "C",
        LOGITS,
        lambda name: LOGITS_OF_C / 7,
        "the head computes 2 bytes per logit. The loss makes it 14 at its peak.",
    ),
    (
        "AB",
        LOGITS,
        lambda name: LOGITS_OF_C / 4,
        "the first rank has the highest peak, and it has no logits. They are on the last rank.",
    ),
)


EXERCISE = Exercise(
    id="14.2",
    title="fullest_ranks",
    points=3,
    body=body,
    inputs=lambda generator, n: [{}],
    ranks=(1,),
    right=(by_the_planner, on_paper, rounded),
    mistakes=tuple(
        Mistake(
            f"Layout {name}: {hint}",
            partial(on_paper, **{name: (WHATS.index(what), returned(name))}),
            about=(f"layout {name}: {what}",),
        )
        for names, what, returned, hint in WRONG
        for name in names
    ),
)
