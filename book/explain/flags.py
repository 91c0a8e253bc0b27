"""What each flag costs and saves: a paragraph for each, with the same run without it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from book.explain.tables import FOREIGN, FRAMEWORKS
from book.explain.values import Asked
from lib.cost.sizes import Recipe
from lib.planner.report import wrapped
from lib.planner.search import Planned, memory_bytes
from lib.planner.seconds import step_s
from lib.planner.training import STACKS, Layout4D, Training

MOMENTS = ("average_bytes", "square_bytes")


def recipe_kept(recipe: Recipe, bytes_of: dict[str, Any]) -> Recipe:
    """The bytes of a parameter in a recipe, with those of these names in place; a moment is half of the state."""
    moments = [bytes_of.get(name, recipe.state_bytes // 2) for name in MOMENTS]
    rest = {name: bytes_of[name] for name in ("weight_bytes", "gradient_bytes", "master_bytes") if name in bytes_of}
    return replace(recipe, **rest, state_bytes=sum(moments))


def flags_text(asked: Asked, training: Training, planned: Planned) -> str:
    """A paragraph for each flag: what a rank holds, sends and waits for by it, and the same run without it."""
    layout = planned.layout
    about = f"{asked.framework}, flag by flag ({FRAMEWORKS[asked.framework]['source']})"
    lines = ["; ".join([about, *asked.remarks])]
    does = FOREIGN["explain"]["does"] | FOREIGN["explain"]["keeps"]
    for field, words in does.items():
        value = getattr(layout, field, asked.found.get(field))
        other, without = training, layout
        if field in ("tp", "cp", "pp"):
            without = layout._replace(**{field: 1, "dp": layout.dp * value})
        elif field in Layout4D._fields:
            without = layout._replace(**{field: (Layout4D._field_defaults | {"zero": 0})[field]})
        elif field in FOREIGN["explain"]["keeps"]:
            other = _with_usual_bytes(asked, training, field)
        elif field == "fp8":
            other = replace(training, stack=replace(training.stack, fp8_speedup=1.0))
        elif value:
            other = replace(training, stack=replace(training.stack, **{field: False}))
        if (without, other.stack) != (layout, training.stack):
            lines += [asked.by.get(field, f"{field} {value}, by default"), f"  {words.format(value)}"]
            if training.global_batch % (without.dp * without.rows) == 0:
                lines.append(f"  without it {_change(training, layout, other, without)}")
    return wrapped(lines)


def _with_usual_bytes(asked: Asked, training: Training, field: str) -> Training:
    """The same run with as many bytes of this kind as its stack keeps."""
    others = {
        name: asked.found[name] for name in FOREIGN["explain"]["keeps"] if name in asked.found and name != field
    }
    usual = STACKS[asked.found["stack"]]["recipe"]
    return replace(training, stack=replace(training.stack, recipe=recipe_kept(usual, others)))


def _change(training: Training, layout: Layout4D, other: Training, without: Layout4D) -> str:
    """How bytes and seconds differ in another layout, and which kind of each differs most."""
    said = []
    for of, unit, scale in ((memory_bytes, "GB", 1e9), (step_s, "s", 1)):
        a, b = of(training, layout), of(other, without)
        by = {kind: (y - x) / scale for kind, x, y in zip(a._fields, a, b, strict=True)}
        most = max(by, key=lambda kind: abs(by[kind]))
        said.append(f"{b.total / scale:.2f} {unit} ({(b.total - a.total) / scale:+.2f}; {most} {by[most]:+.2f})")
    return ", ".join(said)
