"""The fastest layouts that fit into memory, in order of their predicted seconds; and why the next is slower.

The problem: a cluster of 16,384 GPUs has a hundred thousand layouts, and a person compares three. The idea: each
choice of ranks has a least number of seconds, for its computation alone. From the least on, all layouts on these ranks
are tried, until no choice that is left can be faster than the layouts that were found.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from lib.cost.sizes import PLANNED_RECOMPUTE
from lib.planner.choices import (  # noqa: F401 the old place of most of them
    ALL_OPEN,
    FEWEST_TOKENS,
    MOST_NODES_OF_TP,
    MOST_ROWS,
    MOST_STAGES_PER_RANK,
    Choices,
    all_layouts,
    beyond,
    layout_text,
    layouts_on,
    plain_layouts,
    possible_cp,
    possible_schedules,
    possible_tp,
    possible_zero,
    usual_choices,
    with_recomputation,
)
from lib.planner.least import least_step_s
from lib.planner.margin import TIGHT, TOO_LARGE, memory_verdict
from lib.planner.memory import (  # noqa: F401 the old place of most of them
    Bytes,
    bytes_of_rank,
    fits,
    least_bytes,
    memory_bytes,
    share_of_rank,
)
from lib.planner.seconds import Seconds, step_s
from lib.planner.training import Layout4D, Training
from lib.planner.ways_out import nothing_fits

SAME = 0.0005  # chosen: a difference of less is printed as 0.0 %
WORTH = 1.05  # chosen: a choice that the library lacks is named if it is faster by so much


class Planned(NamedTuple):
    """A layout, with its seconds and its memory."""

    layout: Layout4D
    seconds: Seconds
    memory: Bytes


def choices_of(training: Training, choices: Choices | None = None) -> Choices:
    """The given choices, or by default the choices of the library that the stack names."""
    return choices or usual_choices(training.stack.library)


def best_layouts(training: Training, choices: Choices | None = None, best: int = 3) -> list[Planned]:
    """The fastest layouts that fit, the fastest first; tight ones only after all that leave the headroom.

    There is one for each choice of ranks, ZeRO and schedule: of kinds of recomputation, and of pieces of the loss, the
    fastest.

    Args:
        choices: by default `usual_choices` of the library that the stack names.

    Raises:
        ValueError: no layout splits evenly, or none fits: by how much the smallest is too large, and a way out.
    """
    choices = choices_of(training, choices)
    if found := _fastest(training, choices, best):
        return found
    sizes = {layout: memory_bytes(training, layout).total for layout in all_layouts(training, choices)}
    raise ValueError(nothing_fits(training, choices, sizes))


def _fastest(training: Training, choices: Choices, best: int) -> list[Planned]:
    """In order; none if none fits."""
    if training.no_seconds:
        raise ValueError(f"{training.no_seconds}; layouts_by_memory lists layouts without them")
    found: dict[bool, list[tuple[float, float, Planned]]] = {False: [], True: []}  # whether they are tight
    for least_s, plain in _in_order(training, choices):
        enough_s = (
            found[False][-1][0] if len(found[False]) == best else math.inf
        )  # a slower one is not among the best
        if least_s > enough_s:
            break
        for planned in fastest_on(training, choices, plain, enough_s):
            of_kind = found[_is_tight(training, choices, planned.memory)]
            insort(of_kind, (planned.seconds.total, planned.memory.total, planned))
            del of_kind[best:]
    return [planned for *_, planned in found[False] + found[True]][:best]


def _is_tight(training: Training, choices: Choices, memory: Bytes) -> bool:
    return memory_verdict(memory.total, training.room_bytes, choices.headroom) == TIGHT


def recommended(training: Training, choices: Choices | None = None, best: int = 3) -> tuple[list[Planned], Choices]:
    """The fastest layouts, and the choices among which they are: all choices where the given ones have no layout.

    Raises:
        ValueError: as in `best_layouts`, with all choices.
    """
    choices = choices_of(training, choices)
    if found := _fastest(training, choices, best):
        return found, choices
    choices = _all_of(choices)
    return best_layouts(training, choices, best), choices


def _all_of(choices: Choices) -> Choices:
    """All choices, with the headroom and the way of attention of these."""
    return replace(ALL_OPEN, headroom=choices.headroom, attention=choices.attention)


def lacking(training: Training, best: Planned, headroom: float) -> tuple[list[str], Planned] | None:
    """The fastest layout of all choices, and the parts of it that the library lacks, if it is worth a change.

    Args:
        best: the fastest layout that the library has.
    """
    usual = choices_of(training)
    fastest, *_ = best_layouts(training, replace(ALL_OPEN, loss_chunks=usual.loss_chunks, headroom=headroom), 1)
    parts = beyond(usual, fastest.layout)
    return (parts, fastest) if parts and best.seconds.total >= WORTH * fastest.seconds.total else None


def _in_order(training: Training, choices: Choices) -> list[tuple[float, Layout4D]]:
    """All choices of ranks, with the seconds that a step takes at least, from the least on."""
    found = [(_least_s(training, choices, plain), plain) for plain in plain_layouts(training, choices)]
    return sorted(found, key=lambda one: one[0])


def _least_s(training: Training, choices: Choices, layout: Layout4D) -> float:
    """With each schedule that the choices have; one that defers weight gradients may have no bubble."""
    return least_step_s(training, layout, is_1f1b=not choices.zero_bubble)


def fastest_on(
    training: Training, choices: Choices, plain: Layout4D, enough_s: float = math.inf
) -> Iterator[Planned]:
    """Of each stage of ZeRO and schedule on these ranks, the fastest layout that fits, if it can be fast enough."""
    layouts = [
        one for one in with_recomputation(training, choices, plain) if _least_s(training, choices, one) <= enough_s
    ]
    for zero, replicas in possible_zero(training, choices, plain) if layouts else ():
        if least_bytes(training, plain._replace(zero=zero, replicas=replicas)) > training.room_bytes:
            continue
        for schedule in possible_schedules(training, choices, plain):
            same = [one._replace(zero=zero, replicas=replicas, schedule=schedule) for one in layouts]
            if schedule != "1f1b":
                same = [one for one in same if one.recompute == "none"]
            yield from _fastest_that_fits(training, choices, same)


def _fastest_that_fits(training: Training, choices: Choices, layouts: list[Layout4D]) -> list[Planned]:
    """Of layouts that differ in recomputation, each with as few pieces of the loss as fit; nothing if none fits."""
    fitting: list[Planned] = []
    for layout, chunks in product(layouts, choices.loss_chunks):
        one = layout._replace(loss_chunks=chunks)
        if bytes_of_rank(training, one, 0).total > training.room_bytes:  # the first rank often has the highest peak
            continue
        memory = memory_bytes(training, one)
        if memory.total <= training.room_bytes:
            fitting.append(Planned(one, step_s(training, one), memory))
            if one.recompute == "none" and not _is_tight(training, choices, memory):  # recomputation only adds to it
                break

    def order(planned: Planned) -> tuple[bool, float]:
        return _is_tight(training, choices, planned.memory), planned.seconds.total

    return sorted(fitting, key=order)[:1]


def layouts_by_memory(
    training: Training, choices: Choices | None = None, best: int = 3
) -> list[tuple[Layout4D, Bytes]]:
    """Layouts that fit, without seconds: tight ones last, then the least split and the least sharded first.

    Raises:
        ValueError: as `best_layouts`.
    """
    choices = choices_of(training, choices)
    held = _held_by(training, choices)
    if found := _by_memory(training, choices, held):
        return found[:best]
    raise ValueError(nothing_fits(training, choices, {one: memory.total for one, memory in held.items()}))


def recommended_by_memory(
    training: Training, choices: Choices | None = None, best: int = 3
) -> list[tuple[Layout4D, Bytes]]:
    """As `layouts_by_memory`; of all choices where the given ones have no layout.

    Raises:
        ValueError: as `best_layouts`, with all choices.
    """
    choices = choices_of(training, choices)
    found = _by_memory(training, choices, _held_by(training, choices))
    return found[:best] or layouts_by_memory(training, _all_of(choices), best)


def _held_by(training: Training, choices: Choices) -> dict[Layout4D, Bytes]:
    return {
        one: memory_bytes(training, one)
        for one in all_layouts(training, choices)
        if training.offload != "parameters" or one.zero == 3
    }


def _by_memory(training: Training, choices: Choices, held: dict[Layout4D, Bytes]) -> list[tuple[Layout4D, Bytes]]:
    """Those that fit, in order."""

    def order(one: Layout4D) -> tuple[float, ...]:
        again = PLANNED_RECOMPUTE.index(one.recompute)
        split = one.tp * one.cp * one.pp
        is_tight = _is_tight(training, choices, held[one])
        return is_tight, split, one.loss_chunks, again, one.zero, -one.rows, held[one].total

    fitting = [one for one, memory in held.items() if memory.total <= training.room_bytes]
    return [(one, held[one]) for one in sorted(fitting, key=order)]


def why_slower(one: Planned, other: Planned) -> str:
    """Why the second layout is slower, in a clause: the kind with the largest difference from the first."""
    differences = {kind: b - a for kind, a, b in zip(Seconds._fields, one.seconds, other.seconds, strict=True)}
    kind = max(differences, key=lambda kind: differences[kind])
    return f"{other.seconds.total / one.seconds.total - 1:.1%} slower: {differences[kind]:.3g} s more for {kind}"


def faster_or_slower(one: Planned, other: Planned) -> str:
    """How much faster the second layout is, or why it is slower, in a clause: a tight one may be faster."""
    faster = one.seconds.total / other.seconds.total - 1
    if abs(faster) < SAME:
        return "as fast"
    return f"{faster:.1%} faster" if faster > 0 else why_slower(one, other)


def compared(best: Planned, mine: Planned, word: str) -> str:
    """How much slower a layout that is asked for is than the best of a search; `word` is the verdict on its memory.

    It may be faster: the search tries no tight layout while one has the headroom, and microbatches of 1, 2, 4 or 8.
    """
    if word == TOO_LARGE:
        return "yours does not fit, so its seconds are compared with none"
    said = f"yours is {faster_or_slower(best, mine)}"
    if said.endswith("faster"):
        return f"{said}, and {'tight' if word == TIGHT else 'the search does not try it'}"
    return f"{said} as the fastest that was found" if said.endswith("as fast") else said
