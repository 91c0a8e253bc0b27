"""Fits, tight, or does not fit: a verdict of three values, and the published layouts that ran as full as this one.

The problem: the formulas miss gaps of the allocator and buffers of libraries, so a plan of 77.6 GB on 80 GB is no
promise. The idea: next to the limit is a zone that the search avoids; and of hundreds of measured layouts, among them
those that ran out of memory, a table says how many ran at each fill.
"""

from __future__ import annotations

from dataclasses import replace

from lib.cost.sizes import Recipe
from lib.planner.memory import memory_bytes
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
    """The verdict with the bytes per parameter on which it rests, and those of a stack that would turn it."""
    room, recipe = training.room_bytes, training.stack.recipe
    word, need = _held_with(training, layout, recipe, headroom)
    name = stack_name(training.stack)
    said = f"{word}: {need:.1f} of {room / 1e9:.1f} GB with {recipe.bytes_per_parameter:g} bytes per parameter"
    said += f" ({name})" if name else ""
    usual = compared_recipes()
    turning = []
    for of, other in usual.items():
        turned, there = _held_with(training, layout, other, headroom)
        if turned != word:
            apart = abs(other.bytes_per_parameter - recipe.bytes_per_parameter)
            turning.append(((TOO_LARGE not in (turned, word), apart), other.bytes_per_parameter, of, there, turned))
    if not turning:
        counts = [one.bytes_per_parameter for one in usual.values()]
        return f"{said}; the same with {min(counts):g} to {max(counts):g}, which the stacks keep"
    _, count, of, there, turned = min(turning)
    return f"{said}; with {count:g} ({of}) {there:.1f}: {turned}"


def compared_recipes() -> dict[str, Recipe]:
    """Stacks with different bytes per parameter."""
    return {name: STACKS[name].get("recipe", Stack.recipe) for name in COMPARED}


def _held_with(training: Training, layout: Layout4D, recipe: Recipe, headroom: float) -> tuple[str, float]:
    """The verdict with a recipe in place of the stack's, and GB."""
    other = replace(training, stack=replace(training.stack, recipe=recipe))
    need = memory_bytes(other, layout).total
    return memory_verdict(need, training.room_bytes, headroom), need / 1e9
