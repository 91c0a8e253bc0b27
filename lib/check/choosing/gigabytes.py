"""Chapter 14, three layouts and what their fullest ranks keep: exercise 14.2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lib.check.exercise import Data, Exercise, Mistake, kind, several
from lib.cost.sizes import ModelShape
from lib.mesh import Group
from lib.planner import Cluster, Layout4D, Training, memory_bytes
from lib.planner.presets import GPUS, stack_for

_NAME = "fullest_ranks"
_NEAR = 0.01  # what rounding may do
_SHAPE = ModelShape(8192, 64, 64, 2**17, 4096, tied=False)
_LAYOUTS = {  # with the sequences of a step
    "A": (Layout4D(8, 1, 8, 2, 1, 1, 0, True), 8),
    "B": (Layout4D(8, 1, 4, 4, 1, 4, 1, True), 128),
    "C": (Layout4D(4, 1, 4, 4, 2, 1, 1, True, "full"), 256),
}
_WHATS = _END, _STATES, _ACTIVATIONS, _LOGITS = ("the rank", "model states", "activations", "logits")


def _training(name: str) -> Training:
    layout, global_batch = _LAYOUTS[name]
    return Training(_SHAPE, Cluster(GPUS["h100"], layout.gpus), stack_for("megatron", "h100"), global_batch)


def _right(name: str) -> dict[str, Any]:
    """Only a last rank has logits."""
    found = memory_bytes(_training(name), _LAYOUTS[name][0])
    states = (found.parameters + found.gradients + found.optimizer) / 1e9
    end = "last" if found.logits else "first"
    return {_END: end, _STATES: states, _ACTIVATIONS: found.activations / 1e9, _LOGITS: found.logits / 1e9}


def _states(bytes_of: Callable[[Layout4D], float], ends: int = 1) -> Callable[[str], float]:
    """GB of model states with so many bytes per parameter, and so many of embedding and head on the rank."""

    def gigabytes(name: str) -> float:
        layout, training = _LAYOUTS[name][0], _training(name)
        held = _SHAPE.num_layers // layout.pp * training.block_parameters + ends * training.end_parameters
        return held / layout.tp * bytes_of(layout) / 1e9

    return gigabytes


def _optimizer(layout: Layout4D) -> float:
    """Its bytes per parameter."""
    return 12 / (layout.dp if layout.zero else 1)


def _times(what: str, factor: Callable[[Layout4D], float]) -> Callable[[str], float]:
    return lambda name: _right(name)[what] * factor(_LAYOUTS[name][0])


def _inputs_of_c(times: int, inside: int) -> Callable[[str], float]:
    """GB of the inputs of a rank's blocks, so many times, and of the insides of so many blocks."""
    of_block = 2 * _SHAPE.context * _SHAPE.d_model / 4 / 1e9
    return lambda name: _training(name).stack.spare_activations * of_block * (2 * 16 * times + 34 * inside)


_WRONG = [  # layout, entry, number, hint
    (name, what, number_of(name), f"Layout {name}: {hint}")
    for names, what, number_of, hint in (
        (
            "ABC",
            _STATES,
            _states(lambda layout: 4 + _optimizer(layout)),
            "your gradients have 2 bytes per parameter. This stack sums them in float32: 4 bytes, so 18 in all.",
        ),
        (
            "ABC",
            _STATES,
            _states(lambda layout: 6 + _optimizer(layout), ends=0),
            "the first rank also holds the embedding, the last rank the head: V·h parameters, divided by t.",
        ),
        (
            "A",
            _STATES,
            _states(lambda layout: 18 / layout.dp),
            "without ZeRO every replica keeps all model states of its stage. dp divides nothing there.",
        ),
        (
            "BC",
            _STATES,
            _states(lambda layout: 18 / layout.dp),
            "ZeRO-1 divides the optimizer state over dp, 12 of 18 bytes. Parameters and gradients stay whole on every "
            "replica.",
        ),
        (
            "BC",
            _STATES,
            _states(lambda layout: 18),
            "you left ZeRO-1 out. It divides the 12 bytes of optimizer state over dp.",
        ),
        (
            "A",
            _ACTIVATIONS,
            _times(_ACTIVATIONS, lambda layout: 8 / 4),
            "you count p = 8 microbatches in flight. A step has only 4: the first rank keeps min(m, p).",
        ),
        (
            "B",
            _ACTIVATIONS,
            _times(_ACTIVATIONS, lambda layout: 4 / 4.75),
            "p microbatches in flight is right with one stage per rank. With v of them the first rank keeps "
            "1 + (p-1)/(p·v) times as much.",
        ),
        (
            "B",
            _ACTIVATIONS,
            _times(_ACTIVATIONS, lambda layout: 32 / 4.75),
            "you keep all 32 microbatches, as GPipe does. Under interleaved 1F1B the first rank keeps "
            "p·(1 + (p-1)/(p·v)).",
        ),
        (
            "ABC",
            _ACTIVATIONS,
            _times(_ACTIVATIONS, lambda layout: 1 / layout.tp),
            "activations are divided by t twice. The bytes of a block in the task are already those of one rank.",
        ),
        (
            "A",
            _ACTIVATIONS,
            _times(_ACTIVATIONS, lambda layout: 1 / 4),
            "these are the activations of one microbatch. The first rank keeps min(m, p) of them.",
        ),
        (
            "B",
            _ACTIVATIONS,
            _times(_ACTIVATIONS, lambda layout: 1 / 4.75),
            "these are the activations of one microbatch. Under interleaved 1F1B the first rank keeps "
            "p·(1 + (p-1)/(p·v)) of them.",
        ),
        (
            "C",
            _ACTIVATIONS,
            _inputs_of_c(0, inside=16),
            "you keep the insides of all blocks. With full recomputation a rank keeps their inputs, and the inside of "
            "one.",
        ),
        (
            "C",
            _ACTIVATIONS,
            _inputs_of_c(1, inside=0),
            "full recomputation keeps the inputs of all blocks. While a block runs backward, its inside is kept as "
            "well.",
        ),
        (
            "C",
            _ACTIVATIONS,
            _inputs_of_c(4, inside=1),
            "these are the activations of the first rank, with four microbatches in flight. The last rank has one.",
        ),
        (
            "C",
            _LOGITS,
            _times(_LOGITS, lambda layout: layout.tp),
            "your logits are those of the whole vocabulary. It is cut over tp.",
        ),
        (
            "C",
            _LOGITS,
            _times(_LOGITS, lambda layout: 1 / 7),
            "2 bytes per logit are what the head computes. The loss makes it 14 at its peak.",
        ),
        (
            "AB",
            _LOGITS,
            lambda name: _right("C")[_LOGITS] / 4,
            "the first rank is the fullest, and it has no logits. They are on the last rank.",
        ),
    )
    for name in names
]
_MORE_ON_THE_FIRST = _inputs_of_c(4, inside=1)("C") - _inputs_of_c(1, inside=1)("C")  # GB of three microbatches


def _nothing(generator: torch.Generator, n: int) -> list[Data]:
    return [{}]


def _snapped(name: str, what: str, found: Any) -> Any:
    """The right number, or that of a mistake, if this is the same rounded."""
    numbers = [_right(name)[what], *(number for at, of, number, _ in _WRONG if (at, of) == (name, what))]
    try:
        return next((x for x in numbers if abs(float(found) - x) <= _NEAR * x), float(found))
    except (TypeError, ValueError):
        return found


def _fullest_ranks(answer: Callable, group: Group, given: Data) -> Data:
    result = answer()
    found: Data = {"what was returned": kind(result)}
    for name, row in zip(_LAYOUTS, several(result, len(_LAYOUTS)), strict=True):
        end, *numbers = several(row, len(_WHATS))
        found[_entry(name, _END)] = end.lower() if isinstance(end, str) else end
        found |= {_entry(name, what): _snapped(name, what, x) for what, x in zip(_WHATS[1:], numbers, strict=True)}
    return found


def _entry(name: str, what: str) -> str:
    return f"layout {name}: {what}"


def _reference(given: list[Data]) -> list[Data]:
    rows = ({_entry(name, what): x for what, x in _right(name).items()} for name in _LAYOUTS)
    found: Data = {"what was returned": f"{len(_LAYOUTS)} results"}
    for row in rows:
        found |= row
    return [found]


def _at(name: str, what: str, value: Any) -> Callable:
    return lambda given, want: [{_entry(name, what): value}]


FULLEST_RANKS = Exercise(
    id="14.2",
    title=_NAME,
    points=3,
    body=_fullest_ranks,
    inputs=_nothing,
    reference=_reference,
    ranks=(1,),
    mistakes=(
        *(
            Mistake(
                f"Layout {name}: the last rank has the logits, less than 1 GB, but the first rank keeps more "
                "microbatches in flight, and their activations weigh more.",
                _at(name, _END, "last"),
            )
            for name in ("A", "B")
        ),
        Mistake(
            "Layout C: the first rank keeps four times the microbatches of the last one. With full recomputation that "
            f"is {_MORE_ON_THE_FIRST:.1f} GB more; compare it with the logits, which only the last rank has.",
            _at("C", _END, "first"),
        ),
        *(Mistake(hint, _at(name, what, number)) for name, what, number, hint in _WRONG),
    ),
)

EXERCISES = (FULLEST_RANKS,)
