"""The costs of a layout for a model of 70B parameters, by the formulas of `lib.cost`: for exercise 13.6."""

from __future__ import annotations

from typing import NamedTuple

from lib.cost import activation_bytes, state_bytes, zero_wire_bytes
from lib.cost.bubble import bubble, kept_by
from lib.cost.hardware import DEVICES
from lib.cost.sizes import MODELS, RECIPES, ModelShape
from lib.layout import Layout

ALL_HOLD = "all conditions hold"
_MODEL, _RECIPE, _SENT_AS = MODELS["70B"], RECIPES["mixed Adam"], 2  # bytes of an element that is sent
_AS_GPT = ModelShape(
    _MODEL.d_model, _MODEL.num_layers, _MODEL.num_heads, _MODEL.vocab_size, _MODEL.context
)  # for the activations of the task
_PER_NODE = 8
_MOST_BYTES, _MOST_BUBBLE, _MOST_SENT_BYTES = 0.9 * DEVICES["H100 80 GB"].memory_bytes, 0.1, 12e9
_KEPT = {  # microbatches that the first rank keeps; only schedules with closed forms
    "1f1b": lambda layout: kept_by(0, layout.pp, layout.microbatches),
    "interleaved": lambda layout: kept_by(0, layout.pp, layout.microbatches, layout.stages_per_rank),
    "gpipe": lambda layout: layout.microbatches,
}


class Costs70B(NamedTuple):
    """Bytes on the rank that holds most of each, and the fraction of a step in which a rank waits."""

    state: dict[str, float]
    activations: float
    bubble: float
    over_dp: float  # bytes between nodes
    over_pp: float

    @property
    def memory_bytes(self) -> float:
        return sum(self.state.values()) + self.activations

    @property
    def sent_bytes(self) -> float:
        return self.over_dp + self.over_pp


class Task(NamedTuple):
    """What the layout is for: 64 GPUs and the sequences of a step in the book, others in a row."""

    gpus: int = 64
    sequences: int = 64


BOOK = Task()


def costs_of(layout: Layout, task: Task = BOOK) -> Costs70B:
    dp, pp, tp, m, per_rank = layout.dp, layout.pp, layout.tp, layout.microbatches, layout.stages_per_rank
    rows, slices = task.sequences // (dp * m), layout.sequence_parallel
    layer = activation_bytes(_AS_GPT, rows, layout.recompute, tp=tp, sequence_parallel=slices)
    message = _SENT_AS * rows * _MODEL.context * _MODEL.d_model / (tp if slices else 1)
    ways = min(2, pp * per_rank - 1)  # forward and backward, unless there are only two stages
    gradients = zero_wire_bytes(layout.zero, _SENT_AS * _MODEL.num_parameters / (tp * pp), dp, microbatches=m)
    return Costs70B(
        state=state_bytes(_MODEL.num_parameters, _RECIPE, zero=layout.zero, dp=dp, tp=tp, pp=pp),
        activations=layer * _MODEL.num_layers / pp * _KEPT[layout.schedule](layout),
        bubble=bubble(pp, m, per_rank),
        over_dp=gradients if layout.crosses_nodes("dp", _PER_NODE) else 0.0,
        over_pp=m * per_rank * ways * message if layout.crosses_nodes("pp", _PER_NODE) else 0.0,
    )


def _refused(layout: Layout, task: Task) -> tuple[str, str]:
    """Why it has no bill at all, in a word and a sentence; ALL_HOLD if it has one."""
    if layout.num_ranks != task.gpus:
        return "a different number of GPUs", f"dp · pp · tp = {layout.num_ranks}, and there are {task.gpus} GPUs."
    shares = {
        "sequences": (task.sequences, layout.dp * layout.microbatches),
        "layers": (_MODEL.num_layers, layout.num_stages),
        "heads": (_MODEL.num_heads, layout.tp),
    }
    for what, (count, by) in shares.items():
        if count % by:
            return "cannot be cut", f"{count} {what} cannot be shared out evenly among {by}."
    try:
        layout.make_schedule()
    except ValueError as error:
        return "cannot be cut", str(error)
    if layout.schedule not in _KEPT:
        return "no closed form", f"schedule={layout.schedule} is not one of {', '.join(_KEPT)}."
    return ALL_HOLD, ""


def exceeded(layout: Layout, task: Task = BOOK) -> str:
    """The first condition that does not hold, or ALL_HOLD."""
    refused, _ = _refused(layout, task)
    if refused != ALL_HOLD:
        return refused
    costs = costs_of(layout, task)
    each = layout.zero == 2 and layout.microbatches > 1
    heaviest = "gradients of each microbatch" if each else "gradients"
    too_much = {
        "tp across nodes": layout.crosses_nodes("tp", _PER_NODE),
        "optimizer state": costs.state["optimizer"] > _MOST_BYTES,
        "model states": sum(costs.state.values()) > _MOST_BYTES,
        "activations": costs.memory_bytes > _MOST_BYTES,
        "bubble": costs.bubble > _MOST_BUBBLE,
        "stage boundaries" if costs.over_pp > costs.over_dp else heaviest: costs.sent_bytes > _MOST_SENT_BYTES,
    }
    return next((condition for condition, fails in too_much.items() if fails), ALL_HOLD)


def bill(layout: Layout, task: Task = BOOK) -> str:
    """A text, ✗ where a condition of the exercise does not hold."""
    title = " x ".join(f"{axis}={n}" for axis, n in layout.sizes.items())
    refused, sentence = _refused(layout, task)
    if refused != ALL_HOLD:
        return f"{title}: {sentence}"
    costs = costs_of(layout, task)
    rows = [
        *((what, bytes_ / 1e9, "GB", None) for what, bytes_ in costs.state.items()),
        ("activations", costs.activations / 1e9, "GB", None),
        ("memory of the fullest GPU", costs.memory_bytes / 1e9, "GB", _MOST_BYTES / 1e9),
        ("bubble", 100 * costs.bubble, "%", 100 * _MOST_BUBBLE),
        ("gradients to other nodes, a step", costs.over_dp / 1e9, "GB", None),
        ("activations to other nodes, a step", costs.over_pp / 1e9, "GB", None),
        ("both", costs.sent_bytes / 1e9, "GB", _MOST_SENT_BYTES / 1e9),
    ]
    lines = [f"{title}, {layout.microbatches} microbatches, b={task.sequences // (layout.dp * layout.microbatches)}"]
    for what, value, unit, most in rows:
        bound = "" if most is None else f"   at most {most:g} {'✗' if value > most else '✓'}"
        lines.append(f"  {what:<36}{value:>7.1f} {unit:<2}{bound}".rstrip())
    if layout.crosses_nodes("tp", _PER_NODE):
        lines.append(f"  ✗ a tp group has ranks on several nodes of {_PER_NODE} GPUs")
    return "\n".join(lines)
