"""ZeRO, stage by stage: the parameters, gradients and optimizer states that each rank keeps, and those that it frees.

Each rank is a column, each kind of model state a row; heights are bytes. The shard of rank r is the r-th n-th of its
row, so all shards together make the full row.
"""

from __future__ import annotations

from collections.abc import Iterator

from book.figures.canvas import Canvas
from book.figures.player import NARROW, Beat, Player, Scene, Thing
from book.figures.svg import SMALLEST_PX, text_width
from lib.cost import state_bytes
from lib.cost.sizes import RECIPES, ZERO_STAGES, Recipe

KINDS = {  # of model states, as `state_bytes` names them: words, ink
    "parameter": ("parameters", "param"),
    "gradient": ("gradients", "gradient"),
    "optimizer": ("optimizer states", "opt"),
}
MARKED = {  # the sentence on a kind before it is sharded
    "optimizer": "Every rank keeps the same optimizer states. To update one shard, it needs one shard of them.",
    "gradient": "To update its shard, a rank needs one shard of the reduced gradients: a reduce-scatter is enough.",
    "parameter": "A layer needs its parameters only while it computes: an all-gather can deliver them each time.",
}
STAGES = ("plain", "ZeRO-1", "ZeRO-2", "ZeRO-3")
HEIGHT, NARROW_HEIGHT = 272, 176  # pixels: of all states of a rank
GAP, LINE = 6, 18  # pixels: between rows, of a line of words
BAR = 84  # pixels across the bar of the sum

Frame = tuple[int, str]  # a stage, and the kind that the next stage will shard, where that is marked


def play_zero_stages(n: int = 4, recipe: Recipe = RECIPES["mixed Adam"]) -> Player:
    """Stages 0 to 3 on n ranks, at least two; a step before each stage marks the copies that it will free.

    Args:
        recipe: bytes of each kind; its optimizer has states.
    """
    title = f"What each of {n} ranks keeps for Ψ parameters"
    names = ("Before", "The same", "ZeRO-1", "A shard", "ZeRO-2", "In time", "ZeRO-3")
    told = (_sentence(n, recipe, *frame) for frame in _frames(n, recipe))
    beats = [Beat(name, sentence, i) for i, (name, sentence) in enumerate(zip(names, told, strict=True))]
    return Player(title, lambda width: _scene(n, recipe, width), beats)


def _frames(n: int, recipe: Recipe) -> Iterator[Frame]:
    yield 0, ""
    for stage in ZERO_STAGES[1:]:
        before, held = (state_bytes(1, recipe, zero=zero, dp=n) for zero in (stage - 1, stage))
        yield stage - 1, next(kind for kind in KINDS if held[kind] < before[kind])
        yield stage, ""


def _scene(n: int, recipe: Recipe, width: float) -> Scene:
    narrow = width == NARROW
    left, right, bar = (1, 235, width - BAR - 1) if narrow else (132, 540, 566)
    head, above = (34, LINE + 2) if narrow else (14, 0)  # the line of the ranks; pixels of a row's words above it
    whole, pitch = state_bytes(1, recipe), (right - left) / n
    height = NARROW_HEIGHT if narrow else HEIGHT
    scale = height / sum(whole.values())
    rows, bottom = {}, 40.0 - GAP
    for kind in KINDS:
        rows[kind] = bottom + GAP + above
        bottom = rows[kind] + scale * whole[kind]

    canvas = Canvas(f"ZeRO stages {n} {width}")
    short = text_width("rank 0") > pitch
    for rank in range(n):
        words = f"{rank}" if short else f"rank {rank}"
        canvas.text(left + pitch * (rank + 0.5) - GAP / 2, head, words, "middle", font_weight=650)
    canvas.text(bar + BAR / 2, head, "each rank", "middle", font_weight=650)
    for kind, (words, _) in KINDS.items():
        canvas.text(0, rows[kind] + (-6 if narrow else 13), words)

    def plain(x: float, y: float, words: str) -> Thing:
        return Thing(x, y, text_width(words, SMALLEST_PX), LINE, "plain", words)

    def things(stage: int, marked: str) -> Iterator[tuple[str, Thing]]:
        held = state_bytes(1, recipe, zero=stage, dp=n)
        yield "stage", plain(0, 1, STAGES[stage])
        for kind, (_, ink) in KINDS.items():
            high, is_sharded = scale * whole[kind], held[kind] < whole[kind]
            parts = n if is_sharded or kind == marked else 1
            for rank in range(n):
                x, y = left + pitch * rank, rows[kind]
                behind = Thing(x, y, pitch - GAP, high, "outline" if is_sharded else ink, seen=float(is_sharded))
                yield f"whole {rank} {kind}", behind._replace(seen=0.3) if kind == marked else behind
                y += high / n * rank if parts > 1 else 0
                yield f"kept {rank} {kind}", _box(x, y, pitch - GAP, high / parts, ink, whole[kind] / parts)
            words = _psi(whole[kind]) + "/n" * is_sharded
            y = rows[kind] + (-LINE - 1 if narrow else LINE)
            yield f"each {kind}", plain(right - GAP - text_width(words, SMALLEST_PX) if narrow else 0, y, words)
        yield "freed", Thing(bar, bottom - height, BAR, height, "outline", seen=float(stage > 0))
        end = bottom
        for kind, (_, ink) in reversed(KINDS.items()):
            end -= scale * held[kind]
            yield f"sum {kind}", _box(bar, end, BAR, scale * held[kind], ink, held[kind])
        yield "sum", Thing(bar, end - LINE, BAR, LINE, "plain", f"{_psi(sum(held.values()))} bytes")

    return Scene(canvas, bottom + 4, [dict(things(*frame)) for frame in _frames(n, recipe)])


def _box(x: float, y: float, across: float, high: float, ink: str, bytes_each: float) -> Thing:
    """Its words are the bytes, if they fit."""
    fits = high > LINE - 3 and across > text_width(_psi(bytes_each), SMALLEST_PX) + 4
    return Thing(x, y, across, high, ink, _psi(bytes_each) if fits else "")


def _psi(bytes_each: float) -> str:
    """Bytes for Ψ parameters."""
    return f"{bytes_each:.3g}Ψ"


def _formula(n: int, recipe: Recipe, stage: int) -> str:
    """Such as `4Ψ + 12Ψ/n = 7Ψ`."""
    whole, held = state_bytes(1, recipe), state_bytes(1, recipe, zero=stage, dp=n)
    sharded = sum(whole[kind] for kind in KINDS if held[kind] < whole[kind])
    kept = sum(whole.values()) - sharded
    terms = [_psi(kept)] * (kept > 0) + [f"{_psi(sharded)}/n"] * (sharded > 0)
    return " + ".join(terms) + f" = {_psi(sum(held.values()))}" * (sharded > 0)


def _sentence(n: int, recipe: Recipe, stage: int, marked: str) -> str:
    if marked:
        return MARKED[marked]
    formula = _formula(n, recipe, stage)
    return (
        f"Plain data parallelism: each rank keeps everything, {formula} bytes. Must it?",
        f"ZeRO-1 shards the optimizer states: {formula} bytes on each rank. Dashed boxes are freed.",
        f"ZeRO-2 shards the gradients as well: {formula} bytes on each rank.",
        f"ZeRO-3 shards the parameters as well: {formula} bytes on each rank. Together the {n} keep everything once.",
    )[stage]
