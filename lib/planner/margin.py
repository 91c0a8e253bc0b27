"""Fits, tight, or does not fit: a verdict of three values, and the published layouts that ran as full as this one.

The problem: the formulas miss gaps of the allocator and buffers of libraries, so a plan of 77.6 GB on 80 GB is no
promise. The idea: next to the limit is a zone that the search avoids; and of hundreds of measured layouts, among them
those that ran out of memory, a table says how many ran at each fill.
"""

from __future__ import annotations

from dataclasses import replace

from lib.cost.adapters import BASES
from lib.cost.sizes import Recipe, recipe_of_optimizer
from lib.planner.memory import host_bytes, memory_bytes
from lib.planner.stacks import STACKS, Stack, stack_name
from lib.planner.training import Layout4D, Training

HEADROOM = 0.1  # of a GPU's memory, chosen: at 90 % and above half of the published layouts ran out of memory
# From so many percent of the memory by plan → layouts that ran, of all that were tried: Aleph Alpha's tables on A100
# (`book/published/layouts_a100.json`), counted again by tests/lib/test_planner_margin.py.
RAN_AT_FILL = {0: (228, 245), 80: (30, 46), 90: (15, 31), 100: (12, 399)}

COMPARED = "kempner-forge", "megatron", "fsdp", "megatron-lm"  # stacks with 8, 14, 16 and 18 bytes per parameter
FITS, TIGHT, TOO_LARGE = "fits", "tight", "does not fit"


def memory_verdict(need_bytes: float, room_bytes: float, headroom: float = HEADROOM) -> str:
    """`fits`; `tight`, with less than the headroom left; or `does not fit`."""
    if need_bytes > room_bytes:
        return TOO_LARGE
    return TIGHT if need_bytes > (1 - headroom) * room_bytes else FITS


def ran_text(need_bytes: float, room_bytes: float) -> str:
    """How many published layouts ran that were planned as full as this one."""
    percent = 100 * need_bytes / room_bytes
    least = max(start for start in RAN_AT_FILL if start == 0 or percent >= start)
    (ran, tried), starts = RAN_AT_FILL[least], sorted(RAN_AT_FILL)
    end = next((start for start in starts if start > least), None)
    where = f"above {least}%" if end is None else f"below {end}%" if least == 0 else f"at {least} to {end}%"
    return f"of {tried} published layouts planned {where} of the memory (A100), {ran} ran: {ran / tried:.0%}"


def verdict_text(training: Training, layout: Layout4D, headroom: float = HEADROOM) -> str:
    """The verdict with the bytes per parameter on which it rests, and those of a stack that would turn it.

    Of adapters: the precision of the base instead, and the training of all parameters.
    """
    room = training.room_bytes

    def held(one: Training) -> tuple[str, float]:
        need = memory_bytes(one, layout).total
        return memory_verdict(need, room, headroom), need / 1e9

    word, need = held(training)
    said = f"{word}: {need:.1f} of {room / 1e9:.1f} GB with {_rests_on(training)}"
    turning = []
    for place, (words, other) in enumerate(_alternatives(training)):
        turned, there = held(other)
        if turned != word:
            turning.append((TOO_LARGE not in (turned, word), place, f"{words} {there:.1f}: {turned}"))
    if not turning:
        return f"{said}; the same {_whichever(training)}"
    return f"{said}; with {min(turning)[-1]}"


def _rests_on(training: Training) -> str:
    """The bytes behind a verdict, in words."""
    if training.adapters:
        return f"adapters of rank {training.adapters.rank} on a base in {training.adapters.base[:-3]} bit"
    name = stack_name(training.stack) if training.optimizer == "adam" else training.optimizer
    return f"{training.stack.recipe.bytes_per_parameter:.4g} bytes per parameter" + (f" ({name})" if name else "")


def _alternatives(training: Training) -> list[tuple[str, Training]]:
    """The same training with the bytes of each stack, the nearest first, in words; or with a base of each precision."""
    if adapters := training.adapters:
        others = [replace(adapters, base=base) for base in BASES if base != adapters.base]
        bases = [(f"a base in {one.base[:-3]} bit", one) for one in others]
        return [(words, replace(training, adapters=one)) for words, one in [*bases, ("all parameters trained", None)]]
    mine = training.stack.recipe.bytes_per_parameter
    found = []
    for name, recipe in compared_recipes().items():
        recipe = recipe if training.optimizer == "adam" else recipe_of_optimizer(recipe, training.optimizer)
        count = recipe.bytes_per_parameter
        other = replace(training, stack=replace(training.stack, recipe=recipe))
        found.append((abs(count - mine), count, f"{count:.4g} ({name})", other))
    return [(words, other) for *_, words, other in sorted(found, key=lambda one: one[:2])]


def _whichever(training: Training) -> str:
    if training.adapters:
        return "with a base in 4 or 16 bit, and with all parameters trained"
    counts = [other.stack.recipe.bytes_per_parameter for _, other in _alternatives(training)]
    return f"with {min(counts):.4g} to {max(counts):.4g}, which the stacks keep"


def compared_recipes() -> dict[str, Recipe]:
    """Stacks with different bytes per parameter."""
    return {name: STACKS[name].get("recipe", Stack.recipe) for name in COMPARED}


def without_seconds(training: Training, layout: Layout4D) -> list[str]:
    """Bytes in the memory of the host, and why there are no seconds."""
    host = f"the host holds {host_bytes(training, layout) / 1e9:.1f} GB for each GPU"
    return [host] * bool(training.offload) + [training.no_seconds]
