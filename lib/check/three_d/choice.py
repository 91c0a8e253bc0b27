"""Chapter 13, a layout for 70B parameters on 64 GPUs: exercise 13.6."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from lib.check.exercise import SEEN, Data, Exercise, Mistake, but
from lib.cost import activation_bytes, state_bytes, zero_wire_bytes
from lib.cost.bubble import bubble, kept_by
from lib.cost.hardware import DEVICES
from lib.cost.sizes import MODELS, RECIPES
from lib.layout import Layout
from lib.mesh import Group

_NAME = "choose_layout"
_MODEL, _RECIPE, _TRAVELS = MODELS["70B"], RECIPES["mixed Adam"], 2  # bytes of an element that is sent
_AS_GPT = replace(_MODEL, llama=False, num_kv_heads=None, d_mlp=None)  # as the task says that activations are counted
_GPUS, _PER_NODE, _SEQUENCES = 64, 8, 64
_MOST_BYTES, _MOST_BUBBLE, _MOST_SENT_BYTES = 0.9 * DEVICES["H100 80 GB"].memory_bytes, 0.1, 12e9
_KEPT = {  # microbatches that the first rank keeps; only schedules that have closed forms
    "1f1b": lambda layout: kept_by(0, layout.pp, layout.microbatches),
    "interleaved": lambda layout: kept_by(0, layout.pp, layout.microbatches, layout.stages_per_rank),
    "gpipe": lambda layout: layout.microbatches,
}
_FOUND, _HOLDS = "what the bill says", "all conditions hold"
_NO_LAYOUT, _OTHER_GPUS, _UNCUT, _UNKNOWN = "no layout", "another number of GPUs", "cannot be cut", "no closed form"
_ACROSS, _OPTIMIZER, _STATES, _ACTIVATIONS = "tp across nodes", "optimizer state", "model states", "activations"
_BUBBLE, _EACH, _GRADIENTS, _BOUNDARIES = "bubble", "gradients of each microbatch", "gradients", "stage boundaries"


class _Costs(NamedTuple):
    """Bytes on the rank that has most of each, and the part of a step in which a rank waits."""

    state: dict[str, float]
    activations: float
    bubble: float
    over_dp: float  # bytes to other nodes
    over_pp: float

    @property
    def memory_bytes(self) -> float:
        return sum(self.state.values()) + self.activations

    @property
    def sent_bytes(self) -> float:
        return self.over_dp + self.over_pp


def _costs(layout: Layout) -> _Costs:
    dp, pp, tp, m, per_rank = layout.dp, layout.pp, layout.tp, layout.microbatches, layout.stages_per_rank
    rows, slices = _SEQUENCES // (dp * m), layout.sequence_parallel
    layer = activation_bytes(_AS_GPT, rows, layout.recompute, tp=tp, sequence_parallel=slices)
    message = _TRAVELS * rows * _MODEL.context * _MODEL.d_model / (tp if slices else 1)
    ways = min(2, pp * per_rank - 1)  # forward and back, unless there are only two stages
    gradients = zero_wire_bytes(layout.zero, _TRAVELS * _MODEL.num_parameters / (tp * pp), dp, microbatches=m)
    return _Costs(
        state=state_bytes(_MODEL.num_parameters, _RECIPE, zero=layout.zero, dp=dp, tp=tp, pp=pp),
        activations=layer * _MODEL.num_layers / pp * _KEPT[layout.schedule](layout),
        bubble=bubble(pp, m, per_rank),
        over_dp=gradients if layout.crosses_nodes("dp", _PER_NODE) else 0.0,
        over_pp=m * per_rank * ways * message if layout.crosses_nodes("pp", _PER_NODE) else 0.0,
    )


def _refused(layout: Layout) -> tuple[str, str]:
    """Which condition keeps it from having a bill at all, with its sentence; _HOLDS if none does."""
    if layout.num_ranks != _GPUS:
        return _OTHER_GPUS, f"dp · pp · tp = {layout.num_ranks}, and there are {_GPUS} GPUs."
    shares = {
        "sequences": (_SEQUENCES, layout.dp * layout.microbatches),
        "layers": (_MODEL.num_layers, layout.num_stages),
        "heads": (_MODEL.num_heads, layout.tp),
    }
    for what, (count, by) in shares.items():
        if count % by:
            return _UNCUT, f"{count} {what} cannot be shared out evenly among {by}."
    try:
        layout.make_schedule()
    except ValueError as error:
        return _UNCUT, str(error)
    if layout.schedule not in _KEPT:
        return _UNKNOWN, f"schedule={layout.schedule} is not one of {', '.join(_KEPT)}."
    return _HOLDS, ""


def _verdict(layout: Layout) -> str:
    """The first condition that does not hold."""
    refused, _ = _refused(layout)
    if refused != _HOLDS:
        return refused
    costs = _costs(layout)
    too_much = {
        _ACROSS: layout.crosses_nodes("tp", _PER_NODE),
        _OPTIMIZER: costs.state["optimizer"] > _MOST_BYTES,
        _STATES: sum(costs.state.values()) > _MOST_BYTES,
        _ACTIVATIONS: costs.memory_bytes > _MOST_BYTES,
        _BUBBLE: costs.bubble > _MOST_BUBBLE,
    }
    each = layout.zero == 2 and layout.microbatches > 1
    heaviest = _BOUNDARIES if costs.over_pp > costs.over_dp else _EACH if each else _GRADIENTS
    too_much[heaviest] = costs.sent_bytes > _MOST_SENT_BYTES
    return next((condition for condition, fails in too_much.items() if fails), _HOLDS)


def bill(layout: Layout) -> str:
    """What a layout costs the 70B model of exercise 13.6, by the formulas of `lib.cost`: a text, ✗ where too much."""
    title = " x ".join(f"{axis}={n}" for axis, n in layout.sizes.items())
    refused, sentence = _refused(layout)
    if refused != _HOLDS:
        return f"{title}: {sentence}"
    costs = _costs(layout)
    rows = [
        *((what, bytes_ / 1e9, "GB", None) for what, bytes_ in costs.state.items()),
        ("activations", costs.activations / 1e9, "GB", None),
        ("memory of the fullest GPU", costs.memory_bytes / 1e9, "GB", _MOST_BYTES / 1e9),
        ("bubble", 100 * costs.bubble, "%", 100 * _MOST_BUBBLE),
        ("gradients to other nodes, a step", costs.over_dp / 1e9, "GB", None),
        ("activations to other nodes, a step", costs.over_pp / 1e9, "GB", None),
        ("both", costs.sent_bytes / 1e9, "GB", _MOST_SENT_BYTES / 1e9),
    ]
    lines = [f"{title}, {layout.microbatches} microbatches, b={_SEQUENCES // (layout.dp * layout.microbatches)}"]
    for what, value, unit, most in rows:
        bound = "" if most is None else f"   at most {most:g} {'✗' if value > most else '✓'}"
        lines.append(f"  {what:<36}{value:>7.1f} {unit:<2}{bound}".rstrip())
    if layout.crosses_nodes("tp", _PER_NODE):
        lines.append(f"  ✗ a tp group has ranks on several nodes of {_PER_NODE} GPUs")
    return "\n".join(lines)


def _no_inputs(generator: torch.Generator, n: int) -> list[Data]:
    return [{}]


def _choose(answer: Callable, group: Group, given: Data) -> Data:
    layout = answer()
    if not isinstance(layout, Layout):
        return {_FOUND: _NO_LAYOUT}
    return {_FOUND: _verdict(layout), SEEN: bill(layout)}


def _says(hint: str, *conditions: str) -> list[Mistake]:
    return [Mistake(hint, but(**{_FOUND: condition})) for condition in conditions]


CHOOSE_LAYOUT = Exercise(
    id="13.6",
    title=_NAME,
    points=3,
    body=_choose,
    inputs=_no_inputs,
    reference=lambda given: [{_FOUND: _HOLDS}],
    ranks=(1,),
    mistakes=(
        *_says("You did not return a Layout. Return one, such as Layout(dp=2, pp=2, tp=2, zero=1).", _NO_LAYOUT),
        *_says("The degrees do not multiply to the cluster. Every GPU has one place on each axis.", _OTHER_GPUS),
        *_says(
            "Something cannot be shared out evenly. Stages take whole layers, tp ranks whole heads, and dp ranks equal "
            "numbers of microbatches of equal size.",
            _UNCUT,
        ),
        *_says(
            "The bill has closed forms for 1f1b, interleaved and gpipe only. Choose one of them.",
            _UNKNOWN,
        ),
        *_says(
            "A tensor-parallel group reaches over several nodes. It sends activations four times or more per layer and "
            "microbatch, and waits for each: that needs the links inside a node. Make tp smaller, or put it last in "
            "`order`.",
            _ACROSS,
        ),
        *_says(
            "The optimizer state alone does not fit: 12 of the 16 bytes per parameter. tp and pp divide it; dp does "
            "not, unless ZeRO shards it.",
            _OPTIMIZER,
        ),
        *_says(
            "Parameters, gradients and optimizer state do not fit, before there is any activation. tp and pp divide "
            "all three; ZeRO-1 divides the optimizer state over dp as well.",
            _STATES,
        ),
        *_says(
            "Model states fit, activations do not. Under 1F1B a rank keeps up to p microbatches, so more stages do "
            "not help the first. Sequence parallelism, selective recomputation, a smaller microbatch or a larger "
            "tp do; GPipe keeps all microbatches.",
            _ACTIVATIONS,
        ),
        *_says(
            "It fits, but the GPUs wait too long: (p-1)/v of m + (p-1)/v units. Take fewer stages, more microbatches, "
            "or several stages per rank. dp and m share 64 sequences: fewer replicas leave more microbatches to each.",
            _BUBBLE,
        ),
        *_says(
            "Too much is sent between nodes: ZeRO-2 reduce-scatters the gradients of every microbatch. With a pipeline "
            "there are many of them; zero=1 sends them once per step.",
            _EACH,
        ),
        *_says(
            "Too many bytes of gradients are sent between nodes. What a dp rank sends is about 2(d-1)/d of its "
            "gradients: more stages, or a larger tp, leave it fewer parameters, and fewer replicas a smaller factor.",
            _GRADIENTS,
        ),
        *_says(
            "Too many bytes of activations are sent between stages. Each of v stages per rank sends every microbatch, "
            "and without sequence parallelism each tp rank sends the same whole tensor.",
            _BOUNDARIES,
        ),
    ),
)

EXERCISES = (CHOOSE_LAYOUT,)
