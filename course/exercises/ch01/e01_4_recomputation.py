"""01.4: the cheapest recomputation with which the activations of all layers fit."""

from course.check.edits import exercise
from course.check.exercise import whole


def inputs(generator, n):
    cases = []
    for fraction, how in (
        (1.0, "none"),
        (0.99, "none"),
        (1.0, "selective"),
        (0.99, "selective"),
        (1.0, "full"),
        (0.99, "full"),
    ):
        a = 4 * whole(generator, 2, 9)
        b, s, h, layers = whole(generator, 2, 6), 128 * whole(generator, 4, 17), 64 * a, whole(generator, 20, 65)
        kept = layers * s * b * {"none": 34 * h + 5 * a * s, "selective": 34 * h, "full": 2 * h}[how]
        cases.append((b, s, h, a, layers, int(fraction * kept)))
    return [{"cases": cases}]


def recomputation(rows, tokens, width, heads, layers, memory_bytes):
    sbh = tokens * rows * width
    kept = {
        "none": sbh * 34 + 5 * heads * tokens**2 * rows,
        "selective": sbh * 34,
        "full": sbh * 2,
    }
    for choice, a_layer_bytes in kept.items():
        if layers * a_layer_bytes <= memory_bytes:
            return choice
    return None


def unrolled(rows, tokens, width, heads, layers, memory_bytes):
    a_layer_bytes, sbh = memory_bytes / layers, tokens * rows * width
    if sbh * (34 + 5 * heads * tokens / width) <= a_layer_bytes:
        return "none"
    if 34 * sbh <= a_layer_bytes:
        return "selective"
    return "full" if 2 * sbh <= a_layer_bytes else None


MISTAKES = """
layers * a_layer_bytes => a_layer_bytes
    You count the activations of one layer. All layers keep theirs until backward reaches them.
        Multiply by `layers`.
sbh * 34 + 5 * heads * tokens**2 * rows => sbh * 34
    You left out the attention probabilities, 5as/h.
        Without them there would be nothing to gain from "selective".
tokens * rows * width => tokens * width
tokens**2 * rows => tokens**2
    You counted one sequence.
        A microbatch of b sequences keeps b times as much.
kept.items() => reversed(kept.items())
    You choose the way that keeps least. Recomputing costs time.
        Take the first that fits: "none", "selective", "full".
sbh * 2 => 0
    You take "full" for free.
        It still keeps the input of each layer, 2sbh bytes, which may not fit.
"""

EXERCISE = exercise(globals(), points=2, right=(recomputation, unrolled))
