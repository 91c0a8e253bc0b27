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


def _states(name: str, bytes_of: Callable[[Layout4D], float] | None = None, ends: int = 1) -> float:
    """GB of model states with so many bytes per parameter, and so many of embedding and head on the rank."""
    layout, training = _LAYOUTS[name][0], _training(name)
    held = _SHAPE.num_layers // layout.pp * training.block_parameters + ends * training.end_parameters
    each = bytes_of(layout) if bytes_of else 6 + 12 / (layout.dp if layout.zero else 1)
    return held / layout.tp * each / 1e9


def _times(name: str, what: str, factor: float) -> float:
    return _right(name)[what] * factor


_BLOCK_INSIDE = 1.3 * 34 * 2 * 4096 * 8192 / 4 / 1e9  # GB, of layout C
_NARROW = (
    "Layout {}: your gradients have 2 bytes per parameter. This stack sums them in float32: 4 bytes, so 18 in all.",
    lambda layout: 4 + 12 / (layout.dp if layout.zero else 1),
)
_ALL_OVER_DP = lambda layout: 18 / layout.dp  # noqa: E731
_NO_ENDS = "Layout {}: the first rank also holds the embedding, the last rank the head: V·h parameters, divided by t."
_WRONG: tuple[tuple[str, str, float, str], ...] = (
    *((name, _STATES, _states(name, _NARROW[1]), _NARROW[0].format(name)) for name in _LAYOUTS),
    *((name, _STATES, _states(name, ends=0), _NO_ENDS.format(name)) for name in _LAYOUTS),
    (
        "A",
        _STATES,
        _states("A", _ALL_OVER_DP),
        "Layout A: without ZeRO every replica keeps all model states of its stage. dp divides nothing there.",
    ),
    *(
        (
            name,
            _STATES,
            _states(name, _ALL_OVER_DP),
            f"Layout {name}: ZeRO-1 divides the optimizer state over dp, 12 of 18 bytes. Parameters and gradients stay "
            "whole on every replica.",
        )
        for name in ("B", "C")
    ),
    (
        "B",
        _STATES,
        _states("B", lambda layout: 18),
        "Layout B: you left ZeRO-1 out. It divides the 12 bytes of optimizer state over dp.",
    ),
    (
        "A",
        _ACTIVATIONS,
        _times("A", _ACTIVATIONS, 2),
        "Layout A: you count p = 8 microbatches in flight. There are only 4 of them: min(m, p) on the first rank.",
    ),
    (
        "B",
        _ACTIVATIONS,
        _times("B", _ACTIVATIONS, 4 / 4.75),
        "Layout B: p microbatches in flight is right with one stage per rank. Interleaving keeps more: "
        "1 + (p-1)/(p·v) times that, on the first rank.",
    ),
    (
        "B",
        _ACTIVATIONS,
        _times("B", _ACTIVATIONS, 32 / 4.75),
        "Layout B: you keep all 32 microbatches, as GPipe does. Under interleaved 1F1B the first rank keeps "
        "p·(1 + (p-1)/(p·v)).",
    ),
    *(
        (
            name,
            _ACTIVATIONS,
            _times(name, _ACTIVATIONS, 1 / _LAYOUTS[name][0].tp),
            f"Layout {name}: activations are divided by t twice. 34·s·b·h/t is the whole of a block on one rank.",
        )
        for name in _LAYOUTS
    ),
    *(
        (
            name,
            _ACTIVATIONS,
            _times(name, _ACTIVATIONS, 1 / 1.3),
            f"Layout {name}: the factor 1.3 is missing, for the allocator and temporary tensors.",
        )
        for name in _LAYOUTS
    ),
    (
        "C",
        _ACTIVATIONS,
        _times("C", _ACTIVATIONS, 1) - _BLOCK_INSIDE,
        "Layout C: full recomputation keeps the inputs of all blocks. While one block runs backward, its inside is "
        "there as well.",
    ),
    (
        "C",
        _ACTIVATIONS,
        3.5295166464,
        "Layout C: these are the activations of the first rank, with four microbatches in flight. The last rank has "
        "one, and is the fuller rank because of its logits.",
    ),
    (
        "C",
        _LOGITS,
        _times("C", _LOGITS, 4),
        "Layout C: your logits are those of the whole vocabulary. It is cut over tp.",
    ),
    (
        "C",
        _LOGITS,
        _times("C", _LOGITS, 1 / 7),
        "Layout C: 2 bytes per logit are what the head computes. The loss makes it 14 at its peak: float32, their "
        "logarithms, a gradient.",
    ),
    *(
        (
            name,
            _LOGITS,
            _times("C", _LOGITS, 1 / 4),
            f"Layout {name}: the first rank is the fullest, and has no logits. They are on the last rank.",
        )
        for name in ("A", "B")
    ),
)


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
            "is 2 GB more; compare it with the logits, which only the last rank has.",
            _at("C", _END, "first"),
        ),
        *(Mistake(hint, _at(name, what, number)) for name, what, number, hint in _WRONG),
    ),
)

EXERCISES = (FULLEST_RANKS,)
