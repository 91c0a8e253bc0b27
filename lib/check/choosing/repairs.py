"""Chapter 14, six layouts that cannot be, and the one change that each needs: exercise 14.3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from lib.check.choosing.refusals import (
    BATCH,
    HEADS,
    KEPT,
    LAYERS,
    MODEL_STATES,
    NODE,
    NOTHING_BINDS,
    binds,
    layout_of,
)
from lib.check.exercise import SEEN, Data, Exercise, Mistake, but, kind, several
from lib.cost.sizes import ModelShape
from lib.mesh import Group
from lib.planner import Cluster, Layout4D, Training, step_s
from lib.planner.presets import GPUS, PRESET_MODELS, stack_for
from lib.planner.search import layout_text

_NAME = "repairs"
_SLOWER = 0.03
_MODELS = {  # Touvron et al. 2023 (Llama), table 2; Llama 2's 70B with shorter sequences
    "30B": ModelShape(6656, 60, 52, 32_000, 2048, d_mlp=17_920, llama=True, tied=False),
    "70B": replace(PRESET_MODELS["llama-70b"], context=2048),
}
_GPUS = 64
_BROKEN: tuple[tuple[str, int, Layout4D], ...] = (  # model, sequences of a step, layout
    ("30B", 512, Layout4D(8, 1, 2, 4, 1, 1, 1, True)),
    ("30B", 512, Layout4D(4, 1, 8, 2, 1, 1, 1, True)),
    ("30B", 496, Layout4D(2, 1, 2, 16, 4, 1, 1, True)),
    ("70B", 512, Layout4D(16, 1, 2, 2, 1, 1, 1, True)),
    ("70B", 512, Layout4D(8, 1, 1, 8, 2, 1, 0, True)),
    ("70B", 512, Layout4D(2, 1, 8, 4, 4, 1, 1, True)),
)
_CHANGES: dict[str, tuple] = {
    "tp": (1, 2, 4, 8, 16),
    "pp": (1, 2, 4, 8, 16, 32),
    "rows": (1, 2, 4, 8),
    "stages_per_rank": tuple(range(1, 13)),
    "zero": (0, 1, 3),
    "recompute": ("none", "full"),
}
_COUNTS = (HEADS, LAYERS, BATCH, NODE)
_FOUND, _HOLDS = "what the planner says", "each is found and repaired"
_NO_PAIRS, _NO_LAYOUT, _UNKNOWN = "no pairs", "no layout", "no such condition"
_EARLIER, _NOT_MEMORY, _OTHER_COUNT, _OTHER_MEMORY = (
    "memory too early",
    "a count too early",
    "another count",
    "a kind",
)
_SEVERAL, _SAME, _STILL, _FULL, _LATE = "several changes", "no change", "still refused", "still too large", "slower"


def _training(model: str, global_batch: int) -> Training:
    return Training(_MODELS[model], Cluster(GPUS["h100"], _GPUS), stack_for("megatron", "h100"), global_batch)


def broken_layouts() -> list[tuple[Training, Layout4D]]:
    """The six of exercise 14.3: what is trained, and a layout that cannot be."""
    return [(_training(model, global_batch), layout) for model, global_batch, layout in _BROKEN]


def _followed(layout: Layout4D) -> Layout4D:
    """With what follows from the other fields: the replicas, and sequence parallelism wherever there is tp."""
    return layout._replace(dp=max(1, _GPUS // (layout.tp * layout.pp)), sequence_parallel=layout.tp > 1)


def _singles(layout: Layout4D) -> Iterator[Layout4D]:
    """All layouts that differ in one field, and in what follows from it."""
    for field, values in _CHANGES.items():
        for value in values:
            if value != getattr(layout, field):
                yield _followed(layout._replace(**{field: value}))


def _fastest_s(training: Training, layout: Layout4D) -> float:
    """Of a step, with the best single change."""
    able = (one for one in _singles(layout) if binds(training, one)[0] == NOTHING_BINDS)
    return min(step_s(training, one).total for one in able)


def _told(training: Training, layout: Layout4D, said: Any) -> tuple[str, str]:
    """What is to be said of one pair, and the figures that show it."""
    word, repaired = several(said, 2)
    right, figures = binds(training, layout)
    if not isinstance(word, str):
        return _NO_PAIRS, f"got {kind(said)}"
    if word.lower() not in (*_COUNTS, MODEL_STATES, KEPT):
        return _UNKNOWN, f"{word!r} is none of {', '.join((*_COUNTS, MODEL_STATES, KEPT))}."
    if word.lower() != right:
        counts = word.lower() in _COUNTS, right in _COUNTS
        which = {(False, True): _EARLIER, (True, False): _NOT_MEMORY, (True, True): _OTHER_COUNT}
        return which.get(counts, _OTHER_MEMORY), figures if right not in _COUNTS else ""
    new = layout_of(repaired)
    if new is None:
        return _NO_LAYOUT, f"got {kind(repaired)}"
    changed = [field for field in _CHANGES if getattr(new, field) != getattr(layout, field)]
    if len(changed) != 1:
        return (_SEVERAL if changed else _SAME), f"changed: {', '.join(changed) or 'nothing'}"
    still, why = binds(training, _followed(new))
    if still != NOTHING_BINDS:
        return (_FULL if still in (MODEL_STATES, KEPT) else _STILL), why
    late = step_s(training, _followed(new)).total / _fastest_s(training, layout) - 1
    if late > _SLOWER:
        return _LATE, f"{layout_text(_followed(new))}: {late:.0%} more seconds than with the best single change"
    return _HOLDS, ""


def _repairs(answer: Callable, group: Group, given: Data) -> Data:
    pairs = several(answer(), len(_BROKEN))
    if all(pair is None for pair in pairs):
        return {_FOUND: _NO_PAIRS}
    for number, ((training, layout), said) in enumerate(zip(broken_layouts(), pairs, strict=True), 1):
        told, figures = _told(training, layout, said)
        if told != _HOLDS:
            return {_FOUND: told, SEEN: f"Layout {number}: {figures}" if figures else f"Layout {number}."}
    return {_FOUND: _HOLDS}


def _says(told: str, hint: str) -> Mistake:
    return Mistake(hint, but(**{_FOUND: told}))


REPAIRS = Exercise(
    id="14.3",
    title=_NAME,
    points=3,
    body=_repairs,
    inputs=lambda generator, n: [{}],
    reference=lambda given: [{_FOUND: _HOLDS}],
    ranks=(1,),
    mistakes=(
        _says(_NO_PAIRS, "Return six pairs, one for each layout: the word for what binds, and the repaired layout."),
        _says(_UNKNOWN, "That is none of the six words of the task."),
        _says(
            _EARLIER,
            "You say that memory binds. This layout is refused before it has any: something cannot be shared out "
            "evenly, or a group reaches too far. First divide, then add up bytes.",
        ),
        _says(
            _NOT_MEMORY,
            "Everything divides here, and tp stays on its node. Add up the bytes of the fullest rank.",
        ),
        _says(
            _OTHER_COUNT,
            "It is another count that cannot be shared out. tp divides heads, and reaches over ranks of a node; p "
            "times v divides layers, or layers and two more; dp times b divides the sequences of a step.",
        ),
        _says(
            _OTHER_MEMORY,
            "Memory it is, but the other kind. Model states bind if they alone are more than a GPU has; activations "
            "bind if the states fit without them.",
        ),
        _says(_NO_LAYOUT, "The second of a pair is a Layout4D, such as `layout._replace(tp=2)`."),
        _says(_SAME, "The layout is as it was. dp follows from the rest, so a change of dp alone changes nothing."),
        _says(
            _SEVERAL, "You changed several things. One of tp, pp, rows, stages_per_rank, zero or recompute will do."
        ),
        _says(_STILL, "With your change a count still cannot be shared out."),
        _says(_FULL, "Your change leaves everything divided evenly, but it does not fit into memory."),
        _says(
            _LATE,
            "It can be, and it fits. But another single change costs less time. Full recomputation costs a third of "
            "the blocks; a smaller tp sends fewer sums and a smaller b makes the bubble shorter: take the mildest "
            "change that fits.",
        ),
    ),
)

EXERCISES = (REPAIRS,)
