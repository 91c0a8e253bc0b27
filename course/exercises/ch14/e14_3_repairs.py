"""14.3: why six layouts are refused, and the one change that each needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from course.check.exercise import SEEN, Data, Exercise, Mistake, kind, several, word
from course.check.refusals import (
    BATCH,
    HEADS,
    KEPT,
    LAYERS,
    MODEL_STATES,
    NODE,
    NOTHING_BINDS,
    binds,
    broken_layouts,
    layout_of,
)
from lib.mesh import Group
from lib.planner import Layout4D, step_s
from lib.planner.search import layout_text

SLOWER = 0.03  # a repair may take so much longer than the best one
FIELDS: dict[str, tuple] = {
    "tp": (1, 2, 4, 8, 16),
    "pp": (1, 2, 4, 8, 16, 32),
    "rows": (1, 2, 4, 8),
    "stages_per_rank": tuple(range(1, 13)),
    "zero": (0, 1, 3),
    "recompute": ("none", "full"),
}
COUNTS, MEMORY = (HEADS, LAYERS, BATCH, NODE), (MODEL_STATES, KEPT)
FOUND, HOLDS, NO_PAIRS = "what the planner says", "each is found and repaired", "no pairs"


def body(answer: Callable, group: Group, given: Data) -> Data:
    pairs = several(answer(), len(broken_layouts()))
    if all(pair is None for pair in pairs):
        return {FOUND: NO_PAIRS}
    for i, pair in enumerate(pairs):
        found, figures = judged(i, pair)
        if found != HOLDS:
            return {FOUND: found, SEEN: f"Layout {i + 1}: {figures}" if figures else f"Layout {i + 1}."}
    return {FOUND: HOLDS}


def judged(i: int, pair: Any) -> tuple[str, str]:
    """What is to be said of the pair for this layout, and the figures that show it."""
    said, repaired = several(pair, 2)
    training, layout = broken_layouts()[i]
    right, figures = binds(training, layout)
    if not isinstance(said, str):
        return NO_PAIRS, f"got {kind(pair)}"
    if word(said) not in COUNTS + MEMORY:
        return "no such word", f"{said!r} is none of {', '.join(COUNTS + MEMORY)}."
    if word(said) != right:
        kinds = ["a count" if w in COUNTS else "memory" for w in (word(said), right)]
        return f"{kinds[0]} in place of {kinds[1]}", "" if right in COUNTS else figures
    new = layout_of(repaired)
    if new is None:
        return "no layout", f"got {kind(repaired)}"
    changed = [field for field in FIELDS if getattr(new, field) != getattr(layout, field)]
    if len(changed) != 1:
        return "several changes" if changed else "no change", f"changed: {', '.join(changed) or 'nothing'}"
    still, why = binds(training, followed(new))
    if still != NOTHING_BINDS:
        return "still too large" if still in MEMORY else "still refused", why
    late = step_s(training, followed(new)).total / fastest_s(i) - 1
    if late > SLOWER:
        return "slower", f"{layout_text(followed(new))}: {late:.0%} more seconds than with the best single change"
    return HOLDS, ""


def followed(layout: Layout4D) -> Layout4D:
    """With the fields that depend on the rest: the replicas, and sequence parallelism wherever there is tp."""
    return layout._replace(dp=max(1, 64 // (layout.tp * layout.pp)), sequence_parallel=layout.tp > 1)


def singles(layout: Layout4D) -> Iterator[Layout4D]:
    """All layouts that differ in one field, and in the fields that depend on it."""
    for field, values in FIELDS.items():
        yield from (followed(layout._replace(**{field: x})) for x in values if x != getattr(layout, field))


@cache
def fastest_s(i: int) -> float:
    """Of a step, with the best single change."""
    training, layout = broken_layouts()[i]
    able = (one for one in singles(layout) if binds(training, one)[0] == NOTHING_BINDS)
    return min(step_s(training, one).total for one in able)


# ---- programs -------------------------------------------------------------------------------------------------------

WORDS = ["heads", "layers", "batch", "node", "states", "activations"]
CHANGES = [{"tp": 2}, {"pp": 2}, {"rows": 1}, {"tp": 4}, {"zero": 1}, {"rows": 1}]


def repairs(words=None, changes=None):
    """With these words or changes at these places."""
    words = [(words or {}).get(i, word) for i, word in enumerate(WORDS)]
    changes = [(changes or {}).get(i, change) for i, change in enumerate(CHANGES)]
    triples = zip(words, broken_layouts(), changes, strict=True)
    return [(word, layout._replace(**change)) for word, (_, layout), change in triples]


def with_stages():
    """Different changes; dp as it follows; plain tuples."""
    pairs = repairs(changes={4: {"pp": 4, "dp": 2}, 1: {"pp": 4, "dp": 4}})
    return tuple((word.upper(), tuple(layout)) for word, layout in pairs)


def words(hint: str, i: int, word: str) -> Mistake:
    return Mistake(hint, lambda: repairs(words={i: word}))


def changes(hint: str, i: int, **change: Any) -> Mistake:
    return Mistake(hint, lambda: repairs(changes={i: change}))


EXERCISE = Exercise(
    id="14.3",
    title="repairs",
    points=3,
    body=body,
    inputs=lambda generator, n: [{}],
    ranks=(1,),
    right=(repairs, with_stages),
    mistakes=(
        Mistake(
            "Return six pairs, one for each layout: the word for the limit, and the repaired layout.", lambda: WORDS
        ),
        words("That is none of the six words of the task.", 2, "sequences"),
        words(
            "You say that memory binds. This layout is refused before it has any: something cannot be shared out "
            "evenly, or a group reaches too far. First divide, then add up bytes.",
            0,
            "states",
        ),
        words(
            "Everything divides here, and tp stays on its node. Add up the bytes of the rank with the highest peak.",
            5,
            "batch",
        ),
        words(
            "A different count cannot be shared out. tp divides heads, and reaches over ranks of a node; p times v "
            "divides layers, or layers and two more; dp times b divides the sequences of a step.",
            1,
            "heads",
        ),
        words(
            "Memory binds, but not this kind. Model states bind if they alone are more than a GPU has; activations "
            "bind if the states fit without them.",
            4,
            "activations",
        ),
        Mistake(
            "The second of a pair is a Layout4D, such as `layout._replace(tp=2)`.",
            lambda: list(zip(WORDS, CHANGES, strict=True)),
        ),
        changes(
            "The layout is as it was. dp follows from the rest, so a change of dp alone changes nothing.", 0, dp=8
        ),
        changes(
            "You changed several things. One of tp, pp, rows, stages_per_rank, zero or recompute will do.",
            4,
            zero=1,
            recompute="full",
        ),
        changes("With your change a count still cannot be shared out.", 1, pp=16),
        changes("Your change leaves everything divided evenly, but it does not fit into memory.", 3, tp=2),
        changes(
            "Your layout is possible, and it fits. But a different single change costs less time. Full recomputation "
            "costs a third of the blocks; a smaller tp sends fewer sums and a smaller b makes the bubble shorter: take "
            "the mildest change that fits.",
            5,
            recompute="full",
        ),
    ),
)
