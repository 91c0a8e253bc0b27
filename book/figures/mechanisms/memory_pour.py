"""A training step poured into a GPU: the bytes that each part of it adds and frees, and the bytes that do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from book.figures.canvas import Canvas
from book.figures.player import NARROW, Beat, Player, Scene, Thing
from book.figures.svg import SMALLEST_PX, color, text_width
from lib.cost import activation_bytes, state_bytes
from lib.cost.sizes import MODELS, RECIPES

GB, RECIPE = 1e9, RECIPES["mixed Adam"]
GROUPS = 4  # of layers; after them comes the loss
NAMES = ("At rest", "Forward", "Loss", "Backward", "Adam", "At rest again", "Next forward")
KINDS = {  # from the bottom up, with their inks
    "parameters": "param",
    "master copy": "opt",
    "gradients": "gradient",
    "Adam moments": "opt",
    "activations": "activation",
}
TOP, LEAST = 24, SMALLEST_PX + 1  # pixels: above the GPU; of a box that can carry words, with its gap
Held = dict[tuple[str, int], float]  # (kind, group of layers) → bytes


class _Instant(NamedTuple):
    """An instant of the step: its name, the groups at work and their ink, all bytes alive, and its event."""

    phase: str
    busy: range
    ink: str
    held: Held
    sentence: str

    @property
    def total(self) -> float:
        return sum(self.held.values())


def play_memory_pour(name: str, device_bytes: float, *, rows: int = 1, recompute: str = "selective") -> Player:
    """The first training step of a model, and the second forward, by Adam in mixed precision.

    Args:
        name: of a model of `lib.cost.sizes.MODELS`.
        device_bytes: of the GPU; bytes that do not fit are drawn to the right of it.
        rows: sequences of the batch.
        recompute: as `activation_bytes` takes it. `selective` counts the tensors of a fused attention.
    """
    instants = list(_instants(name, device_bytes, rows, recompute))
    title = f"Training {name} on a GPU with {device_bytes / GB:g} GB"
    beats = [  # of several moments of a phase the last is told
        Beat(NAMES[k], instants[until].sentence, until) for k, until in enumerate(_ends(instants))
    ]
    return Player(title, lambda width: _scene(name, instants, device_bytes, width), beats)


def _ends(instants: list[_Instant]) -> list[int]:
    """The last moment of each phase."""
    last = len(instants) - 1
    return [i for i in range(last + 1) if i == last or instants[i].phase != instants[i + 1].phase]


def _layers(name: str) -> list[range]:
    """Of each group."""
    n = MODELS[name].num_layers
    return [range(i * n // GROUPS, (i + 1) * n // GROUPS) for i in range(GROUPS)]


def _span(layers: range) -> str:
    return f"{layers.start}–{layers.stop - 1}"


def _instants(name: str, room: float, rows: int, recompute: str) -> Iterator[_Instant]:
    shape, layers = MODELS[name], _layers(name)
    states, a_layer = state_bytes(shape.num_parameters, RECIPE), activation_bytes(shape, rows, recompute)
    master = RECIPE.master_bytes * shape.num_parameters
    logits = 3 * 4 * rows * shape.context * shape.vocab_size  # float32: as saved, and two gradients
    numbers = [len(group) * shape.num_block_parameters for group in layers]
    numbers[-1] += 0 if shape.tied else shape.vocab_size * shape.d_model  # the head
    numbers[0] += shape.num_parameters - sum(numbers)
    parts = [of_group / shape.num_parameters for of_group in numbers]
    activations = [*(len(group) * a_layer for group in layers), logits]
    held: Held = {("parameters", 0): states["parameter"], ("master copy", 0): master}

    def now(phase: str, busy: range, ink: str, said: str) -> _Instant:
        total, over = sum(held.values()) / GB, (sum(held.values()) - room) / GB
        verdict = f"{total:.1f} GB: {over:.1f} GB do not fit" if over > 0 else f"{total:.1f} of {room / GB:g} GB"
        return _Instant(phase, busy, ink, dict(held), f"{said}. {verdict}.")

    said = f"Parameters, {RECIPE.weight_bytes} bytes each, and a master copy, {RECIPE.master_bytes} bytes each"
    first = now("at rest", range(0), "idle", said)
    yield first._replace(sentence=f"{first.sentence} Does a training step fit?")
    for i in range(GROUPS):
        held["activations", i] = activations[i]
        said = f"Forward: each layer keeps {a_layer / GB:.2f} GB of activations for backward"
        yield now("forward", range(i, i + 1), "forward", said)
    held["activations", GROUPS] = logits
    said = f"Backward begins with three tensors of logits, {logits / GB:.1f} GB"
    yield now("loss", range(GROUPS, GROUPS + 1), "backward", said)
    del held["activations", GROUPS]
    gone = come = 0.0
    for i in reversed(range(GROUPS)):
        freed, new = held.pop(("activations", i)), states["gradient"] * parts[i]
        held["gradients", i] = new
        gone, come = gone + freed, come + new
        said = f"Backward, layer by layer: {gone / GB:.1f} GB of activations go, {come / GB:.1f} GB of gradients come"
        yield now("backward", range(i, i + 1), "backward", said)
    held |= {("Adam moments", i): (states["optimizer"] - master) * part for i, part in enumerate(parts)}
    said = f"The first optimizer step makes the two moments of Adam, {RECIPE.state_bytes} bytes per parameter"
    yield now("optimizer", range(GROUPS), "opt", said)
    held = {chunk: n_bytes for chunk, n_bytes in held.items() if chunk[0] != "gradients"}
    yield now("at rest", range(0), "idle", "Gradients are freed, moments stay")
    held |= {("activations", i): n_bytes for i, n_bytes in enumerate(activations)}
    said = "The second forward adds its activations and logits to all that stayed"
    yield now("forward", range(GROUPS + 1), "forward", said)


def _scene(name: str, instants: list[_Instant], room: float, width: float) -> Scene:
    wide = width > NARROW
    # On a phone the drawing is low, so that the answers to the question on it are on the first screen.
    high, side, left, across = (410.0, 110.0, 140.0, 250.0) if wide else (286.0, 38.0, 44.0, 144.0)
    spill, bottom = left + across + (30 if wide else 6), high - 8
    scale = (bottom - TOP) / max(room, max(instant.total for instant in instants) - room)
    rim = bottom - room * scale
    canvas = Canvas(f"memory {name} {width}")
    paint = {"fill": color("panel"), "stroke": color("text"), "stroke_width": 2}
    canvas.rect(left, rim, across, bottom - rim + 4, radius=4, **paint)
    canvas.text(left + across + 8, rim + 5, f"GPU: {room / GB:g} GB", font_weight=650)
    each = (bottom - TOP) / (GROUPS + 1)
    boxes = [(0.0, TOP + i * each, side, each - 6) for i in range(GROUPS + 1)]
    names = [*(f"layers {_span(group)}" if wide else _span(group) for group in _layers(name)), "loss"]
    chunks = list(dict.fromkeys(chunk for instant in instants for chunk in instant.held))

    def things(instant: _Instant) -> Iterator[tuple[str, Thing]]:
        yield "phase", Thing(0, TOP - 22, max(side, 70), 18, "plain", instant.phase)
        for i, words in enumerate(names):
            yield f"group {i}", Thing(*boxes[i], instant.ink if i in instant.busy else "idle", words)
        below = 0.0  # bytes under the next chunk
        for kind, ink in KINDS.items():
            floor_of_kind = below
            mine = {group: instant.held.get((kind, group), 0.0) for of, group in chunks if of == kind}
            words = dict.fromkeys(("inside", "outside"), f"{kind} {sum(mine.values()) / GB:.1f}{' GB' * wide}")
            for group, n_bytes in mine.items():
                above = below + n_bytes
                inside, outside = (min(below, room), min(above, room)), (max(below, room), max(above, room))
                places = ("inside", left, bottom, inside), ("outside", spill, bottom + room * scale, outside)
                for place, x, floor, (start, end) in places:
                    tall = (end - start) * scale
                    gap = min(1, tall / 3)  # between two boxes
                    there = x + 4, floor - end * scale, across - 8, tall - gap
                    said = words[place] if tall > LEAST else ""
                    thing = Thing(*there, ink, said) if tall > 0 else Thing(*boxes[group], ink, seen=0.0)
                    yield f"{kind} {group} {place}", thing
                    if said:  # once at each place, and the bytes of all once
                        words = {"inside": "", "outside": kind if place == "inside" else ""}
                below = above
            ceiling = min(below, room)
            if words["inside"] and ceiling > floor_of_kind:  # no box inside can carry them
                middle = bottom - (floor_of_kind + ceiling) / 2 * scale
                long = text_width(words["inside"], SMALLEST_PX)
                yield f"{kind} in words", Thing(left + across + 8, middle - 9, long, 18, "plain", words["inside"])
        top = bottom - min(instant.total, room) * scale
        yield "total", Thing(left, top - 22, across, 18, "plain", f"{instant.total / GB:.1f} GB")
        over = max(0.0, instant.total - room)
        x, y, seen = spill, bottom - over * scale - 4, float(over > 0)
        yield "frame", Thing(x, y, across, over * scale + 8, "bad", seen=seen)
        yield "over", Thing(x, y - 20, across, 18, "plain", f"{over / GB:.1f} GB do not fit", seen)

    return Scene(canvas, high, [dict(things(instant)) for instant in instants])
